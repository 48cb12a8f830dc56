"""Numbers of one sample, from those of a run with several."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable
from typing import Final

from meshwright.describe.product_sizes import Sizes

__all__: list[str] = []

_CANDIDATES: Final = (61, 67, 71, 73, 79, 83, 89, 97, 101, 103, 107, 109, 113)
_ORDER: Final = ("rows", "count", "columns", "inner")


def pick_samples(sizes: Collection[int]) -> int:
    """Return a number of samples that tells itself in a product of sizes: a prime that divides none of them [samples]."""
    for prime in _CANDIDATES:
        if not any(size % prime == 0 for size in sizes):
            return prime
    return _CANDIDATES[-1]


@dataclasses.dataclass(kw_only=True)
class Samples:
    """The samples of a run, and what of it does not grow with them.

    Args:
        count: Samples [count].
        own: Samples of the example batch, for what grows with the square of the samples [count].
        tells: Whether a size that is no multiple of the samples does not grow with them; not so where sizes depend on values.
    """

    count: int
    own: int
    tells: bool
    grows_faster: bool = False
    """Whether samples met samples, as in a contrastive loss."""
    fixed_bytes: int = 0
    """Kept for backward, whatever the samples [bytes]."""
    fixed_flops: int = 0
    """Arithmetic, whatever the samples [FLOPs]."""

    def of_bytes(self, sizes: Iterable[int]) -> float:
        """Return the bytes of one sample, of memories that grow with the samples [bytes]."""
        return sum(size / self.count / self._faster(size) for size in sizes if self._grows(size))

    def _faster(self, size: int) -> float:
        """Return by what a size is to be divided once more: it has the samples twice."""
        if not self.tells or size == 0 or size % self.count**2:
            return 1.0
        self.grows_faster = True
        return self.count / self.own

    def fixed_of(self, sizes: Iterable[int]) -> int:
        """Return the bytes of the other memories [bytes]."""
        return sum(size for size in sizes if not self._grows(size))

    def _grows(self, size: int) -> bool:
        return not self.tells or size % self.count == 0

    def of_product(self, product: Sizes, *, weight_factor: int | None) -> Sizes | None:
        """Return one sample's sizes of a product, with the arithmetic of all; None where it does not grow with the samples."""
        sizes = {name: int(getattr(product, name)) for name in _ORDER}
        if weight_factor == 0:  # its columns are the data's rows
            sizes["rows"], sizes["columns"] = sizes["columns"], sizes["rows"]
        order = _ORDER if weight_factor is not None else ("count", "rows", "columns", "inner")
        growing = [name for name in order if sizes[name] % self.count == 0]
        if not growing:
            if self.tells:
                return None
            growing = ["rows"]
        sizes[growing[0]] = -(-sizes[growing[0]] // self.count)
        for name in growing[1:] if self.tells else ():
            sizes[name] = sizes[name] // self.count * self.own
            self.grows_faster = True
        if weight_factor == 0 and growing[0] == "count":  # a weight that is repeated for each sample
            sizes["rows"], sizes["count"] = sizes["rows"] * sizes["count"], 1
        flops = product.flops
        for _ in growing[1:] if self.tells else ():
            flops = flops * self.own // self.count
        return dataclasses.replace(
            product,
            **sizes,
            flops=flops,
            num_keys=product.num_keys // self.count,
            input_size=product.input_size // self.count,
        )

    def shape_of(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return rows and columns of one sample's part of a tensor [elements]."""
        columns = shape[-1] if shape else 1
        return math.prod(shape[:-1]) // self.count, columns
