"""Sizes of what a probe measures, and what two of its measurements say together. Free of torch."""

from __future__ import annotations

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
    "functions",
    "operators",
    "attention",
    "optimizer",
    "collectives",
    "steps of plans",
)
"""What is measured, in order."""

FEW_LAYERS: Final = 4
MANY_LAYERS: Final = 20
RUNTIME_STEPS: Final = 25
"""Of each plan, within the usual budget [count]."""
BUDGET_S: Final = 0.3
"""How long a measurement is usually repeated [s]."""
RUNTIME_MICRO_BATCHES: Final = 2
"""For each stage of a pipeline [count]."""

PRODUCT: Final = (512, 1024, 1024)
"""Sizes of a large product on a CPU: rows, inner, columns."""
LARGE_PRODUCT: Final = (8192, 8192, 8192)
MEMORY_ELEMENTS: Final = 8 * 2**20
NUM_BLOCKS: Final = 16
ATTENTION: Final = (2, 8, 256)
RECURRENCE: Final = (64, 16, 192)
"""Steps, samples and size of an LSTM."""
HEAD_SIZES: Final = (32, 128)
ADAM_ELEMENTS: Final = 4 * 2**20
MORE_TENSORS: Final = 31
COLLECTIVE_BYTES: Final = (1024, 64 * 1024, 2**20, 16 * 2**20)
EXCHANGE_ROUNDS: Final = 20
PRODUCT_SIZES: Final = (16, 32, 64, 128, 256)
TRAFFIC_ELEMENTS: Final = (2**12, 2**15, 2**18, 2**21, 2**23)
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


def attention_rates(rank: dict[str, Any], name: str) -> tuple[float, float]:
    """Return the arithmetic that attention reaches [FLOP/s], and what each score takes beside it [s], from two sizes of heads.

    Args:
        rank: What a rank measured.
        name: "forward", or "backward", which has 2.5 times the arithmetic.
    """
    batch, heads, length = ATTENTION
    scores = batch * heads * length * length / 2  # half of them are masked
    small, large = HEAD_SIZES
    quick, slow = (rank[f"attention_{name}_{size}"][0] for size in HEAD_SIZES)
    flops = 4.0 * scores * (2.5 if name == "backward" else 1.0)
    rate = flops * (large - small) / max(slow - quick, 0.2 * slow)
    return rate, max(0.0, quick - flops * small / rate) / scores
