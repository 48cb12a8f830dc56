"""Pairs of one large module, proven in one experiment: each proof of a pair around a whole model runs all of it.

As in group testing: where the shards of all pairs together give what the whole gives, each is right. Where they do not, halves
are tried, and what is left is proven one by one, as if nothing had been tried before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence

from meshwright.apply.tensor.proof.shards_against_whole import DisprovedError
from meshwright.apply.tensor.search.candidates import Options, candidates
from meshwright.apply.tensor.search.pairs import Pair, meets_whole, pair_of
from meshwright.apply.tensor.search.surroundings import SurroundedError, Surroundings
from meshwright.apply.tensor.search.trace import Trace
from meshwright.apply.tensor.tensor_layout import Region

__all__: list[str] = []


LARGE_WORK = 100
"""Functions of a module from which several pairs in it are proven together [count]."""


class Together:
    """Regions that were proven together.

    Args:
        prove: Proves regions of a scope in one experiment, and tells whether that shows each to be right; or raises
            DisprovedError.
    """

    def __init__(self, prove: Callable[[str, list[Region]], bool]) -> None:
        self._prove = prove
        self._groups: list[list[Region]] = []

    def prove(self, scope: str, regions: list[Region]) -> None:
        """Prove regions of a scope together where they are right, else those of each half of them."""
        if len(regions) < 2:
            return  # what is alone is proven in its turn
        try:
            is_known = self._prove(scope, regions)
        except DisprovedError:
            half = len(regions) // 2
            self.prove(scope, regions[:half])
            self.prove(scope, regions[half:])
            return
        if is_known:
            self._groups.append(regions)

    def disproved(self, accepted: Sequence[Region]) -> list[tuple[Region, str]]:
        """Return accepted regions that are not right without others that they were proven with, which are not cut; and why."""
        found: list[tuple[Region, str]] = []
        for group in self._groups:
            kept = [region for region in accepted if region in group]
            if kept and len(kept) < len(group):
                found += self._wrong_ones(kept)
        return found

    def _wrong_ones(self, kept: list[Region]) -> list[tuple[Region, str]]:
        try:
            if self._prove(kept[0].scope, kept):
                return []
            reason = "it was proven with others, which are not cut"
        except DisprovedError as error:
            reason = error.message
        return [(kept[0], reason)] if len(kept) == 1 else [one for region in kept for one in self._wrong_ones([region])]


def likely_regions(
    trace: Trace, order: Sequence[int], num_tp_ranks: int, *, taken: Collection[int], is_wanted: Callable[[Pair], bool]
) -> dict[str, list[Region]]:
    """Return the likeliest regions of pairs in large modules, by their module, of modules that hold several of them.

    Args:
        trace: The trace.
        order: Keys of products, in the order in which their pairs are cut.
        num_tp_ranks: Ranks [count].
        taken: Keys of parameters that are cut or stay whole.
        is_wanted: Tells whether a pair may be cut.
    """
    pairs = [pair for key in order if (pair := pair_of(key, trace, set(taken))) is not None]
    places = Counter(scope for pair in pairs if trace.work_of(scope := pair.scope(trace)) >= LARGE_WORK)
    if max(places.values(), default=0) < 2:
        return {}
    found: dict[str, list[Region]] = {}
    assumed: list[Region] = []  # as if each pair was right
    around, used = Surroundings(trace, assumed), set(taken)
    for key in order:
        pair = pair_of(key, trace, used)
        if pair is None or not is_wanted(pair):
            continue
        options = Options(pair, trace, num_tp_ranks)
        is_open = options.scope in trace.calls and not meets_whole(pair, trace)
        region = next(candidates(options), None) if is_open else None
        if region is None or not _is_in_place(region, around):
            continue
        assumed.append(region)
        used |= {product.parameter for product in (*pair.rows, *pair.columns)}
        if places[options.scope] > 1:
            found.setdefault(options.scope, []).append(region)
    return found


def _is_in_place(region: Region, around: Surroundings) -> bool:
    try:
        around.refuse_entered(region.scope)
        around.refuse_others_inside(region)
        around.refuse_uses_elsewhere(region)
    except SurroundedError:
        return False
    return True
