"""Relations that predictions must keep whatever the constants are, on random models, clusters and setups.

    python -m benchmarks.planner.metamorphic --count 500

Each relation changes one thing whose direction is known: more bandwidth is never slower, more recompute never keeps more, twice
the batch is never faster. It prints every case that breaks one. Exit status 1 where there is any.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import itertools
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

from meshwright.hardware import ClusterSpec, load_cluster
from meshwright.plan.costs.setup import Setup
from meshwright.plan.costs.step_cost import StepCost
from meshwright.plan.costs.step_costs import StepCosts
from meshwright.spec.model import ModelSpec

ROUNDED = 1e-9
"""By how much what is equal may differ [ratio]."""

RECUT = 0.15
"""By how much a step of a pipeline may move against a relation: stages are cut anew, by computing time alone, so that a rank
may get more parameters to exchange [ratio]."""

JUMP = 1.3
"""Most that a step may grow from one width to the next, 128 elements more, beside what its arithmetic grows [ratio]."""

_DEVICES = (
    "v100-sxm2-32gb",
    "a100-sxm-40gb",
    "a100-sxm-80gb",
    "h100-sxm",
    "h200-sxm",
    "b200",
    "mi300x",
    "l40s@roce-200",
)

_FASTER = ("v100-sxm2-32gb", "a100-sxm-80gb", "h100-sxm", "h200-sxm", "b200")
"""Devices of which each is faster than the one before."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A model on a cluster, and how it is trained."""

    sizes: dict[str, Any]
    cluster: ClusterSpec
    setup: Setup

    def cost(self, setup: Setup | None = None, cluster: ClusterSpec | None = None, **sizes: Any) -> StepCost:
        """Return the cost, with another setup, cluster or sizes where they are given."""
        model = ModelSpec.transformer(**(self.sizes | sizes))
        return StepCosts(model, cluster or self.cluster).cost(setup or self.setup)

    def __str__(self) -> str:
        return f"{self.sizes} on {self.cluster.name} under {self.setup}"


def drawn(seed: int) -> Case:
    """Return a case."""
    draw = random.Random(seed)
    head = draw.choice((64, 128, 80, 256))
    heads = draw.choice((8, 16, 32, 40, 64))
    tp, pp, dp = draw.choice((1, 1, 2, 4, 8)), draw.choice((1, 1, 2, 3, 4, 8)), draw.choice((1, 2, 4, 8, 32))
    layers = draw.randint(max(2, pp), 60)
    gated = draw.random() < 0.5
    zero = draw.choice((0, 1, 2, 3))
    half = draw.random() < 0.8
    schedule = draw.choice(("1f1b", "gpipe", "interleaved", "zb-h1", "zbv"))
    virtual = {"interleaved": 2, "zbv": 2}.get(schedule, 1)
    if pp == 1 or pp * virtual > layers:
        schedule, virtual = "1f1b", 1
    sizes = {
        "layers": layers, "hidden": head * heads, "heads": heads, "kv_heads": draw.choice((heads, 8)), "gated": gated,
        "head_size": head, "vocab": draw.choice((32000, 50257, 128256, 250880)), "tied": draw.random() < 0.4,
        "sequence": draw.choice((512, 1000, 2048, 4096, 8192)), "element_bytes": 2 if half else 4,
        "fused_attention": draw.random() < 0.8,
    }  # fmt: skip
    setup = Setup(
        dp=dp, tp=tp, pp=pp, zero=zero, shard=dp if zero else 1, virtual=virtual, schedule=schedule,
        micro_batches=draw.choice((1, 2, pp, 4 * pp)), micro_batch_size=float(draw.choice((1, 2, 4))),
        sequence_parallel=tp > 1 and draw.random() < 0.5, recompute=draw.choice(("none", "selective", "full")),
        dtype="bf16" if half else "fp32", element_bytes=2.0 if half else 4.0, overlap=draw.random() < 0.7,
        is_eager=draw.random() < 0.5, per_step=zero > 0 and draw.random() < 0.3,
    )  # fmt: skip
    name, _, network = draw.choice(_DEVICES).partition("@")
    hosts = max(1, -(-setup.num_devices // 8))
    suffix = f"@{network or 'ndr-400'}" if hosts > 1 else ""
    return Case(sizes, load_cluster(f"{hosts}x8x{name}{suffix}"), setup)


def _slower(one: StepCost, other: StepCost, *, recut: bool = False) -> str | None:
    """Return how much slower the other one is; None where it is not. ``recut``: stages may have been cut anew."""
    if other.step_s > one.step_s * (1 + (RECUT if recut else ROUNDED)):
        return f"{one.step_s:.6g} s becomes {other.step_s:.6g} s"
    return None


def _larger(one: float, other: float) -> str | None:
    return f"{one:.6g} bytes become {other:.6g}" if other > one * (1 + ROUNDED) else None


def _whole(setup: Setup) -> Setup:
    """Return a setup without stages: what the fullest rank keeps does not depend on where they are cut, and on which it is."""
    return dataclasses.replace(setup, pp=1, virtual=1, schedule="1f1b")


def faster_links(case: Case) -> Iterator[str | None]:
    """More bandwidth is never slower: inside a host, between hosts, to the memory."""
    cluster = case.cluster
    for name in ("link", "network"):
        link = getattr(cluster, name)
        if link is not None:
            faster = dataclasses.replace(link, bytes_per_s=2 * link.bytes_per_s)
            other = case.cost(cluster=dataclasses.replace(cluster, **{name: faster}))
            yield _slower(case.cost(), other, recut=case.setup.pp > 1)
    device = dataclasses.replace(cluster.device, memory_bytes_per_s=2 * (cluster.device.memory_bytes_per_s or 1e12))
    yield _slower(case.cost(), case.cost(cluster=dataclasses.replace(cluster, device=device)), recut=case.setup.pp > 1)


def faster_arithmetic(case: Case) -> Iterator[str | None]:
    """A higher peak is never slower."""
    device = case.cluster.device
    peaks = {dtype: 1.5 * peak for dtype, peak in device.peak_flops_per_s.items()}
    faster = dataclasses.replace(device, peak_flops_per_s=peaks)
    yield _slower(
        case.cost(), case.cost(cluster=dataclasses.replace(case.cluster, device=faster)), recut=case.setup.pp > 1
    )


def newer_devices(case: Case) -> Iterator[str | None]:
    """A newer device of a data centre is never slower on the same network."""
    hosts = case.cluster.num_hosts
    suffix = "@ndr-400" if hosts > 1 else ""
    costs = [case.cost(cluster=load_cluster(f"{hosts}x8x{name}{suffix}")) for name in _FASTER]
    for old, new in itertools.pairwise(costs):
        yield _slower(old, new, recut=case.setup.pp > 1)


def larger_batches(case: Case) -> Iterator[str | None]:
    """Twice the micro-batches, or twice the samples of each, are never faster, and never keep less."""
    setup = case.setup
    for other in (
        dataclasses.replace(setup, micro_batches=2 * setup.micro_batches),
        dataclasses.replace(setup, micro_batch_size=2 * setup.micro_batch_size),
    ):
        yield _slower(case.cost(other), case.cost(), recut=setup.pp > 1)
        yield _larger(case.cost(_whole(other)).memory.activations, case.cost(_whole(setup)).memory.activations)


def more_layers(case: Case) -> Iterator[str | None]:
    """A layer less, or a shorter sequence, is never slower and never larger."""
    sizes, whole = case.sizes, _whole(case.setup)
    for less in ({"layers": sizes["layers"] - 1}, {"sequence": sizes["sequence"] // 2}):
        if less.get("layers", sizes["layers"]) >= case.setup.pp * case.setup.virtual:
            yield _slower(case.cost(), case.cost(**less), recut=case.setup.pp > 1)
        yield _larger(case.cost(whole).memory.peak, case.cost(whole, **less).memory.peak)


def recompute_keeps_less(case: Case) -> Iterator[str | None]:
    """What runs again is not kept, and takes time."""
    kinds = ("none", "all_but_products", "full")
    none, some, full = (case.cost(dataclasses.replace(_whole(case.setup), recompute=kind)) for kind in kinds)
    yield _larger(none.memory.activations, some.memory.activations)
    yield _larger(some.memory.activations, full.memory.activations)
    none, _, full = (case.cost(dataclasses.replace(case.setup, recompute=kind)) for kind in kinds)
    yield _slower(full, none, recut=case.setup.pp > 1)


def zero_keeps_less(case: Case) -> Iterator[str | None]:
    """A higher stage of ZeRO keeps no more of the states, where it exchanges as the one below."""
    states: list[float] = []
    for zero in (0, 1, 2, 3):
        setup = dataclasses.replace(_whole(case.setup), zero=zero, shard=case.setup.dp if zero else 1, per_step=False)
        memory = case.cost(setup).memory
        states.append(memory.parameters + memory.gradients + memory.optimizer)
    for below, above in itertools.pairwise(states):
        yield _larger(below, above)


def one_rank_is_none(case: Case) -> Iterator[str | None]:
    """With tp=1 nothing of tensor parallelism matters, with dp=1 nothing of ZeRO but its own order."""
    plain = dataclasses.replace(case.setup, tp=1, sequence_parallel=False)
    for other in (
        dataclasses.replace(plain, sequence_parallel=True),
        dataclasses.replace(plain, overlaps_tp=True),
        dataclasses.replace(plain, sends_slices=True),
    ):
        one, two = case.cost(plain), case.cost(other)
        yield None if abs(one.step_s / two.step_s - 1) <= ROUNDED else f"{one.step_s} s and {two.step_s} s"
    alone = dataclasses.replace(case.setup, dp=1, zero=0, shard=1, per_step=False)
    shared = case.cost(dataclasses.replace(alone, zero=2))
    yield None if abs(case.cost(alone).step_s / shared.step_s - 1) <= ROUNDED else "zero=2 over one rank costs time"


def no_jumps(case: Case) -> Iterator[str | None]:
    """From one width to the next a step does not jump."""
    head = case.sizes["head_size"]
    wide = case.sizes["hidden"] + 128
    if wide % head == 0:
        one, other = case.cost(), case.cost(hidden=wide)
        grown = (wide / case.sizes["hidden"]) ** 2
        ratio = other.step_s / one.step_s
        yield f"{ratio:.3f} times as long" if not 1 / JUMP < ratio < JUMP * grown else None


def parts_are_sane(case: Case) -> Iterator[str | None]:
    """Times and bytes are positive, and no step reaches more than its devices' peak."""
    cost = case.cost()
    parts = [cost.forward_s, cost.backward_s, cost.recompute_s, cost.bubble_s, cost.exposed_comm_s, cost.optimizer_s]
    memory = cost.memory
    parts += [memory.parameters, memory.gradients, memory.optimizer, memory.activations, memory.buffers]
    yield None if min(parts) >= 0 and cost.forward_s > 0 and cost.backward_s > 0 else f"parts {parts}"


RELATIONS: tuple[Callable[[Case], Iterator[str | None]], ...] = (
    faster_links, faster_arithmetic, newer_devices, larger_batches, more_layers, recompute_keeps_less, zero_keeps_less,
    one_rank_is_none, no_jumps, parts_are_sane,
)  # fmt: skip


def broken(seeds: range) -> list[tuple[str, int, str]]:
    """Return relation, seed and what came out, of every case that breaks a relation."""
    return [
        (relation.__name__, seed, problem)
        for seed in seeds
        for relation in RELATIONS
        for problem in relation(drawn(seed))
        if problem is not None
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    found = broken(range(options.first, options.first + options.count))
    for name, seed, problem in found:
        print(f"{name}, seed {seed}: {problem}\n    {drawn(seed)}")
    print(f"{options.count} cases, {len(RELATIONS)} relations: {len(found)} broken")
    print(dict(collections.Counter(name for name, *_ in found)))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
