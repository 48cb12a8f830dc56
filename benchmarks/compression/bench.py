"""Compressed gradients on a slow link: two emulated hosts, ours and DistributedDataParallel with its hooks, alternating.

    python benchmarks/compression/bench.py --out benchmarks/compression/results/NAME.json

Two network namespaces joined by a veth pair, a token bucket at each end. One rank in each, one thread, gloo. All sides live in
the same two processes and take turns, a block of steps each; a step lasts as long as on the slower rank. A round during which
the rest of the machine took more than `--quiet` cores does not count and is taken again, for `--patience-s` seconds. Before that
every side trains `--loss-steps` steps from the same weights on the same batches, without the token bucket: it changes no number.
Needs root, `ip` and `tc`; where namespaces are not permitted it says so and ends with status 0.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import platform
import secrets
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))

HIDDEN, LAYERS, SEQUENCES, TOKENS, VOCABULARY = 384, 6, 2, 32, 256
# Losses are of a smaller model on more samples: after 200 steps on four sequences the large one is in the middle of its descent,
# and all sides are some percent apart, int4 below the uncompressed one.
LOSS_SIZES = (128, 3, 16)
OURS = {f"ours {kind}": kind for kind in ("none", "bf16", "int8", "int4", "powersgd")}
PEERS = ("ddp", "ddp fp16", "ddp powersgd 4", "ddp powersgd 1")
SIDES = (*OURS, *PEERS)
PORT = 29_531


# -- what a rank does -----------------------------------------------------------------------------------------------------


def build():
    from gpt import build_gpt

    return build_gpt(
        hidden_size=HIDDEN, num_layers=LAYERS, num_heads=HIDDEN // 64, vocabulary_size=VOCABULARY, max_length=TOKENS
    )


def loss_fn(outputs, batch):
    import torch.nn.functional as F

    return F.cross_entropy(outputs.flatten(0, 1), batch[1].flatten())


def make_batch(rank: int, step: int):
    """Return sequences that count upwards by a step of their own, a fifth of whose tokens are noise."""
    import torch

    generator = torch.Generator().manual_seed(10_000 * rank + step)
    start = torch.randint(VOCABULARY, (SEQUENCES, 1), generator=generator)
    stride = torch.randint(1, 4, (SEQUENCES, 1), generator=generator)
    ids = (start + stride * torch.arange(TOKENS + 1)) % VOCABULARY
    noise = torch.rand(ids.shape, generator=generator) < 0.2
    ids = torch.where(noise, torch.randint(VOCABULARY, ids.shape, generator=generator), ids)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def make_side(name: str, state: dict):
    """Return batch -> this rank's loss, and how to count the bytes that a step sends (None: not ours)."""
    import torch

    import meshwright as mw

    make_optimizer = functools.partial(torch.optim.AdamW, lr=1e-3, fused=True)
    model = build()
    model.load_state_dict(state)
    if name in OURS:
        ours = mw.apply_plan(model, mw.Plan(dp=2, compress=OURS[name]), loss_fn=loss_fn, optimizer=make_optimizer)
        return lambda batch: ours.step(batch).loss, lambda: ours.ledger.sent_bytes
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
    from torch.nn.parallel import DistributedDataParallel

    # Its PowerSGD hook starts a bucket's second exchange when the first is over. With several buckets gloo's two threads end them
    # in another order on each rank, and the run dies of mismatched messages. With one bucket it works.
    theirs = DistributedDataParallel(model, **({"bucket_cap_mb": 1024} if "powersgd" in name else {}))
    if name == "ddp fp16":
        theirs.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif name != "ddp":
        rank = int(name.rsplit(maxsplit=1)[-1])
        # Two is the earliest start that it allows.
        state_ = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
        theirs.register_comm_hook(state_, powerSGD_hook.powerSGD_hook)
    optimizer = make_optimizer(theirs.parameters())

    def step(batch):
        optimizer.zero_grad()
        loss = loss_fn(theirs(batch[0]), batch)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step, None


def rank_main(options: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    import meshwright as mw

    global HIDDEN, LAYERS, SEQUENCES
    if options.phase == "loss":
        HIDDEN, LAYERS, SEQUENCES = LOSS_SIZES
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    world = mw.join_world("cpu", timeout_s=300)
    torch.manual_seed(0)
    state = build().state_dict()
    numbers = {"parameters": sum(value.numel() for value in build().parameters())}
    if options.phase == "time":
        numbers |= measure_times(options, rank, state, dist)
    else:
        numbers |= measure_losses(options, rank, state, world.default_group)
    Path(options.result).write_text(json.dumps(numbers))


def measure_times(options: argparse.Namespace, rank: int, state: dict, dist) -> dict:
    sides = {name: make_side(name, state) for name in options.sides}
    counts = dict.fromkeys(sides, 0)
    samples: dict[str, list[list[float]]] = {name: [] for name in sides}
    sent: dict[str, float] = {}

    def block(name: str, num_steps: int) -> list[float]:
        step, ledger = sides[name]
        times = []
        for _ in range(num_steps):
            batch = make_batch(rank, counts[name])
            counts[name] += 1
            dist.barrier()
            before = ledger() if ledger else 0.0
            start = time.perf_counter()
            step(batch)
            times.append(time.perf_counter() - start)
            if ledger:
                sent[name] = ledger() - before
        return times

    for name in sides:
        block(name, options.warmup)
    group = mw_world().default_group
    others: list[float] = []
    counts_as: list[bool] = []
    begin = time.perf_counter()
    while sum(counts_as) < options.rounds:
        names, turn = list(sides), len(counts_as) % len(sides)
        before, start = busy_s(group), time.perf_counter()
        for name in names[turn:] + names[:turn]:
            samples[name].append(block(name, options.steps))
        others.append((busy_s(group) - before) / (time.perf_counter() - start))
        counts_as.append(agreed(group, others[-1] <= options.quiet))
        if agreed(group, time.perf_counter() - begin > options.patience_s):
            break
    return {"samples_s": samples, "sent_bytes": sent, "other_cores": others, "counts": counts_as}


def mw_world():
    import meshwright as mw

    return mw.current_world()


def busy_s(group) -> float:
    """Return the processor time that everything but the two ranks has taken since the machine started [s]."""
    import torch

    user, nice, system = map(int, Path("/proc/stat").read_text().split()[1:4])
    own = torch.tensor([sum(os.times()[:2])], dtype=torch.float64)
    group.all_reduce(own)
    # Soft interrupts are left out: those are the traffic between the namespaces.
    return (user + nice + system) / os.sysconf("SC_CLK_TCK") - float(own)


def agreed(group, mine: bool) -> bool:
    """Return what the first rank says."""
    import torch

    word = torch.tensor([float(mine)])
    group.broadcast(word)
    return bool(word)


def measure_losses(options: argparse.Namespace, rank: int, state: dict, group) -> dict:
    import torch

    found = {}
    for name in options.sides:
        step, is_ours = make_side(name, state)
        losses = torch.tensor([step(make_batch(rank, 1_000 + number)) for number in range(options.loss_steps)])
        if not is_ours:  # ours is the whole batch's already
            group.all_reduce(losses)
            losses /= 2
        found[name] = losses.tolist()
    return {"losses": found}


# -- two hosts ------------------------------------------------------------------------------------------------------------


def run(*words: str, check: bool = True) -> subprocess.CompletedProcess:
    return subprocess.run(words, check=check, capture_output=True, text=True)


@contextlib.contextmanager
def two_hosts():
    """Join two network namespaces by a veth pair; yields (namespace, device) of both."""
    tag = secrets.token_hex(2)
    hosts = [(f"mw{tag}{end}", f"v{tag}{end}") for end in "ab"]
    made = []
    try:
        for namespace, _ in hosts:
            run("ip", "netns", "add", namespace)
            made.append(namespace)
        run("ip", "link", "add", hosts[0][1], "type", "veth", "peer", "name", hosts[1][1])
        for index, (namespace, device) in enumerate(hosts):
            run("ip", "link", "set", device, "netns", namespace)
            run("ip", "-n", namespace, "addr", "add", f"10.213.77.{index + 1}/24", "dev", device)
            run("ip", "-n", namespace, "link", "set", device, "up")
            run("ip", "-n", namespace, "link", "set", "lo", "up")
        yield hosts
    finally:
        for namespace in made:
            run("ip", "netns", "del", namespace, check=False)


def shape(hosts, rate: str) -> None:
    """Put a token bucket at each end: 256 KiB may pass at once, then the rate holds."""
    for namespace, device in hosts:
        bucket = ["tbf", "rate", rate, "burst", "256kb", "latency", "200ms"]
        run("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", *bucket)


def run_ranks(hosts, options: argparse.Namespace, phase: str, port: int) -> list[dict]:
    """Run one rank in each namespace and return what each measured."""
    results = [Path(f"{options.scratch}/{phase}{rank}.json") for rank in range(2)]
    processes = []
    for rank, (namespace, device) in enumerate(hosts):
        env = os.environ | {
            "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "10.213.77.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": device,
            "OMP_NUM_THREADS": "1", "MESHWRIGHT_TRANSPORT": "gloo",
        }  # fmt: skip
        words = [sys.executable, __file__, "--phase", phase, "--result", str(results[rank]), "--sides", *options.sides]
        for name in ("rounds", "steps", "warmup", "loss_steps", "quiet", "patience_s"):
            words += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
        processes.append(subprocess.Popen(["ip", "netns", "exec", namespace, *words], env=env))
    codes = [process.wait() for process in processes]
    if any(codes):
        raise SystemExit(f"a rank ended with status {codes}")
    return [json.loads(path.read_text()) for path in results]


def summary(times: list[dict], losses: list[dict]) -> dict:
    """Return medians of the slower rank's steps, ratios to the sides that matter, taken round by round, and losses."""
    if not times:
        means = {name: statistics.fmean(values[-20:]) for name, values in losses[0]["losses"].items()}
        return {
            name: {"last_loss": value, "loss_difference": value / means["ours none"] - 1}
            for name, value in means.items()
        }
    counting = times[0]["counts"] if any(times[0]["counts"]) else [True] * len(times[0]["counts"])
    slower = {
        name: [
            statistics.median(max(pair) for pair in zip(*blocks, strict=True))
            for counts, *blocks in zip(counting, *(rank["samples_s"][name] for rank in times), strict=True)
            if counts
        ]
        for name in times[0]["samples_s"]
    }
    best_hook = min(
        (name for name in PEERS[1:] if name in slower), key=lambda name: statistics.median(slower[name]), default=None
    )
    found = {}
    for name, blocks in slower.items():
        row = {"ms": 1e3 * statistics.median(blocks), "sent_bytes": times[0]["sent_bytes"].get(name)}
        for key, other in (
            ("none_over_this", "ours none"),
            ("fp16_over_this", "ddp fp16"),
            ("best_hook_over_this", best_hook),
        ):
            if other in slower:
                ratios = sorted(theirs / own for theirs, own in zip(slower[other], blocks, strict=True))
                quarter = len(ratios) // 4
                row[key] = [statistics.median(ratios), ratios[quarter], ratios[-1 - quarter]]
        found[name] = row
    means = {name: statistics.fmean(values[-20:]) for name, values in losses[0]["losses"].items()} if losses else {}
    for name, value in means.items():
        base = means["ours none"]
        found.setdefault(name, {}).update(last_loss=value, loss_difference=value / base - 1)
    return {"best_hook": best_hook, "quiet_rounds": sum(times[0]["counts"]), "rounds": len(counting), "sides": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sides", nargs="*", default=list(SIDES), choices=SIDES)
    parser.add_argument("--rate", default="200mbit")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--loss-steps", type=int, default=200)
    parser.add_argument("--quiet", type=float, default=0.15)
    parser.add_argument("--patience-s", type=float, default=600.0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--scratch", default="/tmp")
    parser.add_argument("--phase", choices=["time", "loss"], help=argparse.SUPPRESS)
    parser.add_argument("--result", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.phase:
        rank_main(options)
        return
    import torch

    try:
        with two_hosts() as hosts:
            losses = run_ranks(hosts, options, "loss", PORT) if options.loss_steps else []
            shape(hosts, options.rate)
            load = os.getloadavg()[0]
            times = run_ranks(hosts, options, "time", PORT + 1) if options.rounds else []
    except (subprocess.CalledProcessError, FileNotFoundError) as error:
        print(f"skipped: network namespaces are not permitted here ({getattr(error, 'stderr', error)})")
        return
    result = {
        "question": "a data-parallel step bound by the link, with and without compression",
        "rate": options.rate,
        "model": {"hidden": HIDDEN, "layers": LAYERS, "sequences": SEQUENCES, "tokens": TOKENS},
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "load_before": load,
        "summary": summary(times, losses),
        "ranks": times,
        "losses": losses,
    }
    if options.out:
        options.out.write_text(json.dumps(result, indent=1))
    print(json.dumps(result["summary"], indent=1))


if __name__ == "__main__":
    main()
