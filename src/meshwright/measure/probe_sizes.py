"""Sizes of what a probe measures, and what two of its measurements say together. Free of torch."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Sequence
from typing import Any, Final

__all__: list[str] = []

STAGES: Final = (
    "process",
    "products",
    "products by size",
    "products alone",
    "recurrence",
    "memory",
    "memory by size",
    "memory far away",
    "functions",
    "operators",
    "attention",
    "optimizer",
    "collectives",
    "steps of plans",
)
"""What is measured, in order."""

VISITS: Final = (*STAGES, *STAGES[1:-1])
"""Most of it a second time, since a virtual machine's cores are slower by a third for seconds at a time."""

FEW_LAYERS: Final = 4
MANY_LAYERS: Final = 16
FEW_BLOCKS: Final = 2
MANY_BLOCKS: Final = 6
"""Of models under tensor parallelism, whose search for a layout takes its time [count]."""
RUNTIME_STEPS: Final = 16
"""Of each plan, within the usual budget [count]."""
BUDGET_S: Final = 0.22
"""How long a measurement is usually repeated [s]."""
RUNTIME_MICRO_BATCHES: Final = 2
"""For each stage of a pipeline [count]."""


@dataclasses.dataclass(frozen=True, slots=True)
class LargeSizes:
    """Sizes at which a kind of device is at its full rate, and no longer waits for the host."""

    product: tuple[int, int, int]
    """Rows, inner, columns."""
    memory_elements: int
    """Of each of three tensors in float32 [count]."""
    attention: tuple[int, int, int]
    """Samples, heads, length."""
    attention_dtype: str
    head_sizes: tuple[int, int]
    adam_elements: int
    """Of one parameter [count]."""


LARGE: Final = {
    "cpu": LargeSizes((512, 1024, 1024), 8 * 2**20, (2, 8, 256), "float32", (32, 128), 4 * 2**20),
    "cuda": LargeSizes((8192, 8192, 8192), 256 * 2**20, (4, 16, 2048), "bfloat16", (64, 128), 128 * 2**20),
}
NUM_BLOCKS: Final = 16
RECURRENCE: Final = (64, 16, 192)
"""Steps, samples and size of an LSTM."""
MORE_TENSORS: Final = 31
COLLECTIVE_BYTES: Final = (1024, 64 * 1024, 2**20, 16 * 2**20)
EXCHANGE_ROUNDS: Final = 12
PRODUCT_SIZES: Final = (16, 32, 64, 128, 256)
TRAFFIC_ELEMENTS: Final = (2**12, 2**15, 2**18, 2**21, 2**23)
RUNS: Final = (16, 128, 4, 32)
"""Samples, positions, heads and their size, of which half is taken, as rotary embeddings do [count]."""
RUNS_SET_BYTES: Final = 16 * 2**20
"""Of tensors taken in turn: more than a core's own cache holds, as between a product and what follows [bytes]."""
FUNCTION_SHAPE: Final = (16, 32, 32, 32)
"""Of what elementwise functions are measured on: samples, channels, rows and columns of an image."""
FUNCTION_SHARE: Final = 0.15
"""Of the budget, for each function and pass [ratio]."""
SET_BYTES: Final = 64 * 2**20
"""Of tensors that are taken in turn: more than caches hold [bytes]."""
MOST_SETS: Final = 2000
AT_LEAST: Final = 5
"""Repetitions, however long they take [count]."""
CURVE_SHARE: Final = 0.4
"""Of the budget, for each point of a curve [ratio]."""


def exchange_name(kind: str, ranks: int, num_bytes: int) -> str:
    """Return under which name a rank tells the time of an exchange."""
    return f"exchange_{kind}_{ranks}_{num_bytes}"


def expected(samples: Sequence[float]) -> float:
    """Return the mean of all but the slowest twentieth, in the samples' unit.

    A step is a sum of many calls, so it takes the sum of their means: on a virtual machine whose cores are slower at times, a
    sum of medians was 10 to 16 % less. The slowest are those in which another program had the core.
    """
    return statistics.fmean(sorted(samples)[: len(samples) - len(samples) // 20])


def added(differences: Iterable[float]) -> float:
    """Return the mean of differences between two things that were timed in turn, 0 at least, in their unit.

    The largest and the smallest eighth are left out: the mean of sixteen would have a sixteenth of a core's longest pause in it,
    which may be more than all that is added.
    """
    ordered = sorted(differences)
    eighth = len(ordered) // 8
    return max(0.0, statistics.fmean(ordered[eighth : len(ordered) - eighth]))


def attention_rates(rank: dict[str, Any], name: str, sizes: LargeSizes) -> tuple[float, float]:
    """Return the arithmetic that attention reaches [FLOP/s], and what each score takes beside it [s], from two sizes of heads.

    Args:
        rank: What a rank measured.
        name: "forward", or "backward", which has 2.5 times the arithmetic.
        sizes: What was measured.
    """
    batch, heads, length = sizes.attention
    scores = batch * heads * length * length / 2  # half of them are masked
    small, large = sizes.head_sizes
    quick, slow = (rank[f"attention_{name}_{size}"][0] for size in sizes.head_sizes)
    flops = 4.0 * scores * (2.5 if name == "backward" else 1.0)
    rate = flops * (large - small) / max(slow - quick, 0.2 * slow)
    return rate, max(0.0, quick - flops * small / rate) / scores
