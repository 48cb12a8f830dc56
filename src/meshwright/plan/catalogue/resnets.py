"""Residual networks of bottlenecks or basic blocks, from their sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from meshwright.errors import ConfigError
from meshwright.spec.layer_operators import LayerOperators, require_sizes
from meshwright.spec.model import ModelSpec
from meshwright.spec.operator import Split

__all__: list[str] = []

_STEM = 64
"""Channels of the first convolution, which halves the image as the pooling after it does [elements]."""


def resnet(
    *,
    name: str,
    depths: Sequence[int],
    block: Literal["basic", "bottleneck"],
    image: int,
    classes: int,
    channels: int = 3,
    element_bytes: int = 4,
) -> ModelSpec:
    """Return a ResNet for square images, with strides in the second convolution of a bottleneck ("v1.5").

    A convolution is a product of each place's neighbourhood by the kernel. Batch statistics are those of a rank's own samples.

    Args:
        name: What to call it.
        depths: Blocks of each stage; a stage has twice the channels of the one before at half the image's size [count].
        block: "basic" has two convolutions of 3 x 3; "bottleneck" one of them between two of 1 x 1, the last four times as wide.
        image: Width and height [pixels].
        classes: What is told apart [count].
        channels: Of the image [count].
        element_bytes: Size of a parameter and of an activation [bytes].

    Source:
        He et al. 2015, arXiv:1512.03385, table 1; parameters as torchvision's and `ResNetForImageClassification` of transformers.
    """
    sizes = {"image": image, "classes": classes, "channels": channels, "element_bytes": element_bytes}
    require_sizes(name, sizes | {f"depths[{index}]": depth for index, depth in enumerate(depths)})
    require_sizes(name, {"layers": sum(depths)})
    if block not in ("basic", "bottleneck"):
        raise ConfigError(f"{name}: block={block!r} (rule: 'basic' or 'bottleneck')", fix="block='bottleneck'")
    size = -(-image // 2)
    stem = _Convolutions(size, _STEM, element_bytes)
    stem.add("conv", channels, _STEM, 7)
    pooled = -(-size // 2)
    stem.operators.elementwise("pool", 2 * _STEM, saved=_STEM)
    layers = [stem.operators.layer("stem", output_bytes=pooled**2 * _STEM * element_bytes)]
    width, size = _STEM, pooled
    for stage, depth in enumerate(depths):
        inner = _STEM * 2**stage
        for index in range(depth):
            stride = 2 if stage and not index else 1
            made, width, size = _block(block, width, inner=inner, size=size, stride=stride, element_bytes=element_bytes)
            layers.append(made.operators.layer(f"stages.{stage}.{index}"))
    head = LayerOperators(rows=1, width=width, element_bytes=element_bytes)
    head.elementwise("pool", size**2 * width)
    head.product("classifier", width, classes, bias=True, saved=width)
    head.loss(classes)
    layers.append(head.layer("head", output_bytes=classes * element_bytes))
    return ModelSpec(name=name, layers=tuple(layers))


def _block(
    kind: str, width: int, *, inner: int, size: int, stride: int, element_bytes: int
) -> tuple[_Convolutions, int, int]:
    """Return a block, the channels that it hands on, and their size."""
    smaller = -(-size // stride)
    wide = 4 * inner if kind == "bottleneck" else inner
    block = _Convolutions(smaller, wide, element_bytes)
    if kind == "bottleneck":
        # 1 x 1 at the size before, then the stride; tensor parallelism divides the channels between the two.
        block.add("conv1", width, inner, 1, size=size, split="columns")
        block.add("conv2", inner, inner, 3, split="inner")
        block.add("conv3", inner, wide, 1, has_activation=False)
    else:
        block.add("conv1", width, inner, 3, split="columns", input_size=width * size**2)
        block.add("conv2", inner, inner, 3, split="inner", has_activation=False)
    if stride > 1 or width != wide:
        block.add("shortcut", width, wide, 1, has_activation=False)
    block.operators.elementwise("residual", 3 * wide)
    block.operators.elementwise("activation", 2 * wide, saved=wide)
    return block, wide, smaller


class _Convolutions:
    """Convolutions with their norms and activations."""

    def __init__(self, size: int, width: int, element_bytes: int) -> None:
        self._size = size
        self.operators = LayerOperators(rows=size**2, width=width, element_bytes=element_bytes)

    def add(
        self,
        name: str,
        before: int,
        after: int,
        kernel: int,
        *,
        size: int | None = None,
        split: Split = "whole",
        input_size: int = 0,
        has_activation: bool = True,
    ) -> None:
        """Add a convolution to ``after`` channels, whose results are kept for its norm."""
        rows = (self._size if size is None else size) ** 2
        self.operators.product(name, before * kernel**2, after, split, rows=rows, saved=after, input_size=input_size)
        between: Split = "inside" if split == "columns" else "whole"
        self.operators.elementwise(f"{name}_norm", 2 * after, between, rows=rows, saved=after, num_params=2 * after)
        if has_activation:
            self.operators.elementwise(f"{name}_activation", 2 * after, between, rows=rows)
