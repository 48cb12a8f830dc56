"""Builder of a layer's operators from sizes: products, attention, experts and passes over elements, with what each keeps."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Final

from meshwright.spec.layer import LayerSpec
from meshwright.spec.operator import OperatorSpec, Split
from meshwright.values import Problems

__all__: list[str] = []

LOSS_BYTES: Final = 16
"""Traffic of cross-entropy's forward for each logit in PyTorch: a 16-bit logit is read and written in fp32 (6), and the logarithm
of the softmax reads that twice and writes once, of which a cache holds a part (10) [bytes]. Source: aten's SoftMax.cu, read
2026-11-27. What other software moves, `Setup.loss_traffic` says."""


MOST_LAYERS: Final = 10_000
"""Layers of a model that is made from sizes: ten times more than anybody has trained [count]."""


def require_sizes(model: str, sizes: Mapping[str, object]) -> None:
    """Raise ConfigError where a size is no whole number of at least 1, or there are more layers than `MOST_LAYERS`.

    Args:
        model: Its name, for the message.
        sizes: Name -> size.
    """
    problems = Problems(model)
    for name, size in sizes.items():
        holds = isinstance(size, int) and not isinstance(size, bool) and size >= 1
        problems.require(holds, f"{name}={size!r} (rule: a whole number, at least 1)")
        if isinstance(size, int) and name == "layers":
            rule = f"layers={size} (rule: at most {MOST_LAYERS:,})"
            problems.require(size <= MOST_LAYERS, rule, fix=f"layers={MOST_LAYERS}")
    problems.check()


def numbered(layer: LayerSpec, count: int) -> list[LayerSpec]:
    """Return as many equal layers, numbered from 0.

    >>> [one.name for one in numbered(LayerSpec(name="blocks"), 2)]
    ['blocks.0', 'blocks.1']
    """
    return [dataclasses.replace(layer, name=f"{layer.name}.{index}") for index in range(count)]


class LayerOperators:
    """Operators of one layer in the order in which they are added, with their parameters and what they keep.

    Numbers of elements are for one row, a token or a place of an image; ``saved`` is what backward needs and nobody before keeps.

    Args:
        rows: Rows of one sample, where an operator is not given others [count].
        width: Elements that the layer hands on for a row [elements].
        element_bytes: Size of a parameter and of an activation [bytes].
    """

    def __init__(self, *, rows: int, width: int, element_bytes: int) -> None:
        self.rows = rows
        self.width = width
        self.element_bytes = element_bytes
        self.found: list[OperatorSpec] = []

    def product(
        self,
        name: str,
        inner: int,
        columns: int,
        split: Split = "whole",
        *,
        saved: int = 0,
        bias: bool = False,
        rows: int | None = None,
        num_params: int | None = None,
        input_size: int = 0,
    ) -> None:
        """Add a product with a weight; a weight that another layer counts has 0 parameters here.

        ``input_size`` is that of its input where rows overlap, as in a convolution [elements].
        """
        rows = self.rows if rows is None else rows
        self.found.append(
            OperatorSpec(
                kind="matmul",
                name=name,
                rows=rows,
                inner=inner,
                columns=columns,
                input_size=input_size,
                split=split,
                saved_bytes=rows * saved * self.element_bytes,
                num_params=columns * (inner + bias) if num_params is None else num_params,
            )
        )

    def experts(
        self, name: str, inner: int, columns: int, split: Split, *, saved: int, experts: int, passes: int, bias: bool
    ) -> None:
        """Add a product with a weight of each expert; ``passes`` of them see a row, and share the rows evenly."""
        self.found.append(
            OperatorSpec(
                kind="matmul",
                name=name,
                rows=-(-self.rows * passes // experts),
                inner=inner,
                columns=columns,
                count=experts,
                split=split,
                saved_bytes=self.rows * passes * saved * self.element_bytes,
                num_params=experts * columns * (inner + bias),
            )
        )

    def elementwise(
        self,
        name: str,
        traffic: int,
        split: Split = "whole",
        *,
        saved: int = 0,
        num_params: int = 0,
        rows: int | None = None,
        saved_bytes: int = 0,
    ) -> None:
        """Add an operator that moves ``traffic`` elements of a row and keeps ``saved`` of them, or ``saved_bytes`` in all."""
        rows = self.rows if rows is None else rows
        self.found.append(
            OperatorSpec(
                kind="elementwise",
                name=name,
                rows=rows,
                columns=self.width,
                traffic_bytes=rows * self.element_bytes * traffic,
                saved_bytes=rows * self.element_bytes * saved + saved_bytes,
                num_params=num_params,
                split=split,
            )
        )

    def attention(
        self, head_size: int, heads: int, *, causal: bool, keys: int | None = None, name: str = "attention"
    ) -> None:
        """Add one kernel that keeps no scores."""
        self.found.append(
            OperatorSpec(
                kind="attention",
                name=name,
                rows=self.rows,
                inner=head_size,
                columns=self.rows if keys is None else keys,
                count=heads,
                causal=causal,
                split="inside",
                is_core=True,
            )
        )

    def scores(
        self, head_size: int, heads: int, *, keys: int | None = None, dropout: bool = False, prefix: str = ""
    ) -> None:
        """Add attention as two products with a softmax between them, which keeps the scores."""
        keys = self.rows if keys is None else keys
        self._core(f"{prefix}scores", head_size, keys, heads)
        self._pass_over_scores(f"{prefix}softmax", heads * keys, 2 * self.element_bytes, self.element_bytes)
        if dropout:  # reads and writes, and a mask of one byte
            mask = self.element_bytes + 1
            self._pass_over_scores(f"{prefix}attention_dropout", heads * keys, 2 * self.element_bytes + 1, mask)
        self._core(f"{prefix}values", keys, head_size, heads)

    def loss(self, classes: int, *, rows: int | None = None) -> None:
        """Add a cross-entropy."""
        rows = self.rows if rows is None else rows
        self.found.append(
            OperatorSpec(
                kind="elementwise",
                name="loss",
                rows=rows,
                columns=1,
                traffic_bytes=LOSS_BYTES * rows * classes,
                split="inside",
            )
        )

    def _core(self, name: str, inner: int, columns: int, heads: int) -> None:
        self.found.append(
            OperatorSpec(
                kind="batched_matmul",
                name=name,
                rows=self.rows,
                inner=inner,
                columns=columns,
                count=heads,
                split="inside",
                is_core=True,
            )
        )

    def _pass_over_scores(self, name: str, scores_of_row: int, traffic: int, saved: int) -> None:
        self.found.append(
            OperatorSpec(
                kind="elementwise",
                name=name,
                rows=self.rows,
                columns=self.width,
                traffic_bytes=self.rows * scores_of_row * traffic,
                saved_bytes=self.rows * scores_of_row * saved,
                split="inside",
                is_core=True,
            )
        )

    @property
    def forward_flops(self) -> float:
        """Arithmetic of one sample's forward, with the half of attention that a causal mask hides [FLOPs]."""
        halves = (2 if operator.causal else 1 for operator in self.found)
        return sum(operator.forward_flops * half for operator, half in zip(self.found, halves, strict=True))

    def layer(self, name: str, *, output_bytes: int | None = None, forward_flops: float | None = None) -> LayerSpec:
        """Return the layer of these operators; it hands on ``rows`` times ``width`` elements where nothing else is said."""
        num_params = sum(operator.num_params for operator in self.found)
        return LayerSpec(
            name=name,
            num_params=num_params,
            params_bytes=num_params * self.element_bytes,
            forward_flops=self.forward_flops if forward_flops is None else forward_flops,
            output_bytes=self.rows * self.width * self.element_bytes if output_bytes is None else output_bytes,
            activation_bytes=sum(operator.saved_bytes for operator in self.found),
            operators=tuple(self.found),
        )
