"""Our `distributed` against torch's DistributedDataParallel: same ranks, same model, same data, alternating in one run.

    python benchmarks/data_parallel/bench.py --out benchmarks/data_parallel/results/NAME.json

Every pair of blocks (ours, theirs) runs on the same two processes, one thread each, over the same gloo group; which of the two
goes first alternates. A block's figure is the median of its steps; the ratio is taken pair by pair.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "peers"), str(HERE.parent)]

from cases import CASES, build_gpt, loss_fn, make_batch, optimizer_of  # noqa: E402

from surroundings import environment  # noqa: E402


def compare_on_rank(
    case: str, optimizer: str, pairs: int, steps: int, warmup: int, peer: dict, bucket_bytes: int | None
):
    """Run on each rank; returns the samples of rank 0."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import meshwright as mw

    world = mw.join_world()
    make_optimizer = optimizer_of(optimizer)
    torch.manual_seed(0)
    plain = build_gpt(case)
    plan = mw.Plan(dp=world.world_size, bucket_bytes=bucket_bytes)
    ours = mw.apply_plan(copy.deepcopy(plain), plan, loss_fn=loss_fn, optimizer=make_optimizer)
    theirs = DistributedDataParallel(plain, **peer)
    their_optimizer = make_optimizer(theirs.parameters())
    num_parameters = sum(parameter.numel() for parameter in plain.parameters())

    def our_step(batch) -> float:
        return ours.step(batch).loss

    def their_step(batch) -> float:
        their_optimizer.zero_grad()
        loss = loss_fn(theirs(batch[0]), batch)
        loss.backward()
        their_optimizer.step()
        return loss.item()

    sides = {"ours": our_step, "theirs": their_step}
    losses: dict[str, list[float]] = {"ours": [], "theirs": []}
    counts = {"ours": 0, "theirs": 0}

    def block(side: str, num_steps: int) -> float:
        times = []
        for _ in range(num_steps):
            batch = make_batch(case, world.rank, counts[side])
            counts[side] += 1
            dist.barrier()
            start = time.perf_counter()
            loss = sides[side](batch)
            times.append(time.perf_counter() - start)
            losses[side].append(loss)
        return statistics.median(times)

    for side in sides:
        block(side, warmup)
    samples = []
    for pair in range(pairs):
        order = ("ours", "theirs") if pair % 2 == 0 else ("theirs", "ours")
        figures = {side: block(side, steps) for side in order}
        samples.append(figures)
    mean_theirs = torch.tensor(losses["theirs"], dtype=torch.float64)
    dist.all_reduce(mean_theirs)
    mean_theirs /= world.world_size
    difference = (mean_theirs - torch.tensor(losses["ours"], dtype=torch.float64)).abs() / mean_theirs
    return {
        "num_parameters": num_parameters,
        "samples_s": samples,
        "max_loss_difference": float(difference.max()),
        "last_loss": losses["ours"][-1],
    }


def summary(samples: list[dict]) -> dict:
    ratios = sorted(sample["ours"] / sample["theirs"] for sample in samples)
    quartile = max(len(ratios) // 4, 0)
    return {
        "ours_ms": 1e3 * statistics.median(sample["ours"] for sample in samples),
        "theirs_ms": 1e3 * statistics.median(sample["theirs"] for sample in samples),
        "ratio": statistics.median(ratios),
        "ratio_quartiles": [ratios[quartile], ratios[-1 - quartile]],
    }


def main() -> None:

    import meshwright as mw

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="*", default=list(CASES))
    parser.add_argument("--optimizer", choices=["adamw", "adamw-fused", "sgd"], default="adamw")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--bucket-mib", type=float, default=None)
    parser.add_argument("--bucket-view", action="store_true", help="give the peer gradient_as_bucket_view=True")
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    bucket_bytes = None if arguments.bucket_mib is None else int(arguments.bucket_mib * 2**20)
    peer = {"gradient_as_bucket_view": True} if arguments.bucket_view else {}
    results = {}
    for case in arguments.cases:
        run = (case, arguments.optimizer, arguments.pairs, arguments.steps, arguments.warmup, peer, bucket_bytes)
        ranks = mw.launch(compare_on_rank, arguments.ranks, *run, threads_per_rank=1)
        results[case] = {**ranks[0], **summary(ranks[0]["samples_s"])}
        row = results[case]
        print(
            f"{case:16s} {row['num_parameters'] / 1e6:5.1f}M  ours {row['ours_ms']:7.1f} ms  DDP {row['theirs_ms']:7.1f} ms  "
            f"ratio {row['ratio']:.3f} [{row['ratio_quartiles'][0]:.3f}, {row['ratio_quartiles'][1]:.3f}]  "
            f"loss difference {row['max_loss_difference']:.1e}",
            flush=True,
        )
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        options = {**vars(arguments), "out": None}
        arguments.out.write_text(
            json.dumps({"options": options, "environment": environment(), "results": results}, indent=1)
        )


if __name__ == "__main__":
    main()
