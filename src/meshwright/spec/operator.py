"""Operators of a layer as the planner sees them: shapes for matrix products, bytes for everything else."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Final, Literal

from meshwright.values import Problems, Value

__all__: list[str] = []

OperatorKind = Literal["matmul", "batched_matmul", "attention", "elementwise"]
Split = Literal["whole", "columns", "inner", "inside", "rows"]
Dtype = Literal["", "fp32", "bf16", "fp16"]

CAST: Final = "_to_copy"
"""The `function` of a cast: its name in ATen."""

CONVOLUTION: Final = "convolution"
"""The `function` of a product that is a convolution's."""

_NOT_NEGATIVE: Final = (
    "rows", "inner", "columns", "count", "input_size", "traffic_bytes", "num_runs", "saved_bytes", "num_params",
    "num_casts", "cast_params", "cast_saved_bytes",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OperatorSpec(Value):
    """One operator of a layer's forward, for one sample, before anything is split.

    A "matmul" multiplies rows by a weight: more samples are more rows. A "batched_matmul" multiplies two activations, and a
    fused "attention" does so twice without keeping the scores: more samples are more products. Everything else is
    "elementwise": it costs the bytes that it reads and writes.

    Args:
        kind: What it does.
        name: Where it is in the layer, such as "attn.c_proj"; the layer itself where empty.
        rows: Rows of the first factor; queries of attention; of an elementwise operator the rows of its result [elements].
        inner: The size that is summed over; the head's size in attention [elements].
        columns: Columns of the second factor; keys of attention; of an elementwise operator those of its result [elements].
        count: Products, such as heads or calls of a recurrent cell [count].
        input_size: Elements of its input where rows of the first factor overlap, as in a convolution; 0 where that is
            rows x inner x count [elements].
        causal: Attention that skips what a causal mask hides, about half of the arithmetic.
        function: The operation of an "elementwise" operator, by its name in ATen, such as "silu"; of a product "convolution"
            alone; empty where it is not known.
        traffic_bytes: What forward reads and writes, for an "elementwise" operator [bytes].
        num_runs: Runs of memory that an "elementwise" operator walks, one where all its tensors lie in one piece; 0 where that is
            not known [count].
        saved_bytes: What backward needs and nobody before it keeps [bytes].
        num_params: Elements of its weights, the bias included [count].
        split: What tensor parallelism can divide over its ranks. "whole": nothing. "columns": those of a weight. "inner": the
            summed size of a weight, whose results all ranks then add up. "inside": it lies between those two, and each rank
            has its heads or features. "rows": it lies outside, and is divided where sequences are split too.
        is_core: Part of the attention core: scores, softmax, dropout and values, which selective recompute runs again.
        dtype: What its result was in when it was seen to run, "fp32", "bf16" or "fp16"; empty where it is not known.
        num_casts: Weights that autocast casts for it in each forward, whose gradients backward casts back [count].
        cast_params: Elements of these weights [count].
        cast_saved_bytes: What backward keeps of their copies, whatever the samples [bytes].

    Raises:
        ConfigError: A number is negative, a product has no size, or the split does not fit the kind.
    """

    FORMAT: ClassVar[str] = "operator"

    kind: OperatorKind
    name: str = ""
    rows: int = 0
    inner: int = 0
    columns: int = 0
    count: int = 1
    input_size: int = 0
    function: str = ""
    causal: bool = False
    traffic_bytes: int = 0
    num_runs: int = 0
    saved_bytes: int = 0
    num_params: int = 0
    split: Split = "whole"
    is_core: bool = False
    dtype: Dtype = ""
    num_casts: int = 0
    cast_params: int = 0
    cast_saved_bytes: int = 0

    def __post_init__(self) -> None:
        self._check_types()
        problems = Problems(f"operator '{self.name}'")
        for name in _NOT_NEGATIVE:
            number = getattr(self, name)
            problems.require(number >= 0, f"{name}={number} (rule: it is not negative)")
        is_product = self.kind != "elementwise"
        if is_product:
            for name in ("rows", "inner", "columns", "count"):
                number = getattr(self, name)
                problems.require(number >= 1, f"{name}={number} in a {self.kind} (rule: a product has sizes)")
        problems.require(
            self.split not in ("columns", "inner") or self.kind == "matmul" or self.num_params > 0,
            f"split='{self.split}' in a {self.kind} without weights (rule: only weights have columns and an inner size)",
        )
        problems.check()

    @property
    def input_elements(self) -> int:
        """Elements of one sample's input, the first factor of a product [elements]."""
        return self.input_size or self.rows * self.inner * self.count

    @property
    def forward_flops(self) -> float:
        """Arithmetic of one sample's forward; a multiply-add is 2, and a causal mask leaves half [FLOPs]."""
        if self.kind == "elementwise":
            return 0.0
        product = 2.0 * self.rows * self.inner * self.columns * self.count
        if self.kind == "attention":
            return product if self.causal else 2 * product
        return product
