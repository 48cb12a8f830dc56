"""Regions that were tried for a pair, and why each failed: what is the same for these ranks is not tried again."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator
from typing import Any

from meshwright.apply.tensor.proof.shards_against_whole import Difference, Disproof
from meshwright.apply.tensor.tensor_layout import Region
from meshwright.layout import even_ranges

__all__: list[str] = []

_OTHER_FIELDS = tuple(field.name for field in dataclasses.fields(Region) if field.name not in ("cuts", "num_units"))


class Tried:
    """Tried regions and why each failed.

    Args:
        num_parts: Ranks [count].
    """

    def __init__(self, num_parts: int) -> None:
        self._num_parts = num_parts
        self._reasons: dict[Any, Difference] = {}

    def run(self, region: Region) -> Generator[Region, Difference, Difference]:
        """Yield a region, and keep and return why it failed."""
        reason = yield region
        self._reasons[self._key(region)] = reason
        if reason.kind is Disproof.UNFIT_SIZES:
            self._reasons[self._key_of_sizes(region)] = reason
        return reason

    def known(self, region: Region) -> Difference | None:
        """Return why a region failed that for these ranks is the same, or whose tensors have the same sizes; or nothing."""
        return self._reasons.get(self._key(region)) or self._reasons.get(self._key_of_sizes(region))

    def _key(self, region: Region) -> Any:
        return self._shares_of(region), region.cuts, *(getattr(region, name) for name in _OTHER_FIELDS)

    def _key_of_sizes(self, region: Region) -> Any:
        sizes = tuple([(name, cut.dim, sum(cut.groups)) for name, cut in region.cuts.items()])
        return self._shares_of(region), sizes, *(getattr(region, name) for name in _OTHER_FIELDS)

    def _shares_of(self, region: Region) -> Any:
        """Return what of the number of units counts: what the ranks have of them, where that is all."""
        if region.resizes or region.shared or region.inputs:
            return region.num_units
        return tuple(
            [(last - first) / region.num_units for first, last in even_ranges(region.num_units, self._num_parts)]
        )
