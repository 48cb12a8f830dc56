"""Search for a region that is right: proposals are tried one after the other, and each scope is proven for itself.

The region found for one block is the first candidate for the next block of the same structure. It is proven there too, since
blocks of one class may hold different activations, or use their own index; unless the two are twins (`passed_on.py`).
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable
from typing import Any

from torch import nn

from meshwright.apply.tensor.guards.described import digest
from meshwright.apply.tensor.guards.signatures import describe_likeness, places_of
from meshwright.apply.tensor.proof.conditions import Conditions
from meshwright.apply.tensor.proof.place_reads import PlaceReads
from meshwright.apply.tensor.proof.proof import Experiment
from meshwright.apply.tensor.proof.scope_values import LastDrawn, ScopeValues
from meshwright.apply.tensor.proof.shards_against_whole import Difference, Disproof, DisprovedError, in_words
from meshwright.apply.tensor.search.deadline import Deadline
from meshwright.apply.tensor.search.failed_work import FailedWork
from meshwright.apply.tensor.search.fewer_rows import experiment_with_fewer_rows
from meshwright.apply.tensor.search.narrowing import Narrowed, narrow
from meshwright.apply.tensor.search.other_sizes import ALWAYS_TRIED, OtherSizes
from meshwright.apply.tensor.search.passed_on import PassedOn
from meshwright.apply.tensor.search.surroundings import SurroundedError, Surroundings
from meshwright.apply.tensor.search.trace import Call, Trace
from meshwright.apply.tensor.tensor_layout import Region, TensorLayout, is_inside

__all__: list[str] = []

MAX_TRIALS = 120
"""Proofs of one region before it is given up [count]."""

MAX_TRIALS_AGAIN = 12
"""The same where all failed for a scope that differs in nothing but where it stands [count]."""

MAX_TRIALS_AROUND = 30
"""The same for a scope with many layers that the pair is no part of, each of which every proof runs, or a mixed pair [count]."""

MOST_ALIKE = 30
"""Proofs of one region that fail for reasons that were there before, one after the other, before it is given up [count]."""

MOST_ALIKE_AROUND = 12
"""The same for such a scope [count]."""

MANY_BESIDE = 12
"""More layers than these are many [count]."""

MAX_ALL_TRIALS = 4000
"""Proofs of all regions; what is not proven by then stays whole, on a slow machine as on a quick one [count]."""


class _ScopeTrial:
    """One scope, prepared for experiments, which are made when they are asked for."""

    def __init__(self, scope: str, module: nn.Module, calls: list[Call], num_tp_ranks: int, drawn: LastDrawn) -> None:
        self.scope = scope
        self.reads = PlaceReads(module)
        self.narrowed = narrow(module, calls, num_tp_ranks)
        self._module, self._calls = module, calls
        self._num_tp_ranks, self._drawn = num_tp_ranks, drawn
        self._made: dict[bool, Conditions] = {}
        self._values: ScopeValues | None = None
        self._quick: list[Experiment | None] = []

    def try_quickly(self, region: Region) -> None:
        """Try a region on a part of the first call's rows, where it has many.

        Raises:
            DisprovedError: It is wrong there already.
        """
        if not self._quick:
            args = self._module, self._calls[0], self._num_tp_ranks, self._shared_values()
            self._quick = [experiment_with_fewer_rows(*args)]
        if self._quick[0] is not None and not region.inputs:
            self._quick[0].prove(region)

    def _shared_values(self) -> ScopeValues:
        if self._values is None:
            self._values = ScopeValues(self._module, self._drawn)
        return self._values

    def conditions(self) -> Conditions:
        """Return the conditions of the scope as it is."""
        return self._of(self._module, self._calls, is_narrow=False)

    def narrow_conditions(self, narrowed: Narrowed) -> Conditions:
        """Return those of the narrowed scope."""
        return self._of(narrowed.module, narrowed.calls, is_narrow=True)

    def _of(self, module: nn.Module, calls: list[Call], *, is_narrow: bool) -> Conditions:
        if is_narrow not in self._made:
            try:
                values = ScopeValues(module, self._drawn) if is_narrow else self._shared_values()
                made = Conditions(module, calls, self._num_tp_ranks, values)
            except DisprovedError:
                raise
            except Exception as error:  # any exception of user code that runs alone
                raise DisprovedError(
                    f"'{self.scope}' cannot be run by itself, which a proof needs: {in_words(error)}"
                ) from error
            self._made[is_narrow] = made
        return self._made[is_narrow]


_NUMBER = re.compile(r"\d[\d.e+-]*")


class Reasons:
    """Reasons why ways to cut a pair, or to enter a layer on slices, failed: changes that alter none do not address it.

    Args:
        most_alike: Failures for reasons that were there before, one after the other, which are borne [count].
    """

    def __init__(self, most_alike: int) -> None:
        self._most_alike, self._num_alike = most_alike, 0
        self._known: set[tuple[Disproof, str]] = set()

    def are_new_enough(self, difference: Difference | None) -> bool:
        """Take the reason of a failure, if there was one, and tell whether more ways are worth a try."""
        before = len(self._known)
        if difference is not None:
            self._known.add((difference.kind, _NUMBER.sub("", difference.text)))
        self._num_alike = self._num_alike + 1 if len(self._known) == before else 0
        return self._num_alike <= self._most_alike


class Proving:
    """Proves regions of one model.

    Args:
        trace: The trace.
        regions: The regions found so far; other code adds to them.
        num_tp_ranks: Ranks [count].
        drawn: Values of the scope that was tried last.
        deadline: When the search ends.
    """

    def __init__(
        self, trace: Trace, regions: list[Region], num_tp_ranks: int, drawn: LastDrawn, deadline: Deadline
    ) -> None:
        self._model = trace.module
        self._trace = trace
        self._num_tp_ranks = num_tp_ranks
        self._drawn = drawn
        self._deadline = deadline
        self._num_trials = 0
        self.work = FailedWork(trace)
        """What failed proofs have run."""
        self._found: dict[str, list[tuple[str, Region]]] = {}  # regions found for earlier scopes of the same structure
        self._failed: dict[str, dict[str, str]] = {}  # by structure, and by the modules' position
        self._last: _ScopeTrial | None = None
        self._tensors = {name for names in trace.names.values() for name in names}
        self._tensors |= {name for name, _ in self._model.named_buffers()}
        self._other_sizes = OtherSizes(trace, num_tp_ranks)
        self._surroundings = Surroundings(trace, regions)
        self.passed_on = PassedOn(trace)
        """What was proven, for scopes that are the same."""

    def find(
        self,
        scope: str,
        tries: Iterable[Region],
        keys: set[int],
        kind: str,
        accept: Region | None,
        *,
        is_mixed: bool = False,
    ) -> tuple[Region | None, str]:
        """Return the first proven region, or the reason why there is none.

        Args:
            scope: The module in which they lie.
            tries: The regions, likelier ones first.
            keys: The parameters that they cut.
            kind: The way in which they were proposed.
            accept: Checks a region of several that hold the same tensors: all of them together.
            is_mixed: Whether they are a pair of which the row takes other layers' results, too: hardly ever right.
        """
        shape = digest((kind, self._shape_of(scope, keys)))
        places = digest(places_of(self._model.get_submodule(scope)))
        failed = self._failed.setdefault(shape, {})
        if places in failed:
            return None, failed[places]
        error = ""
        try:
            self._surroundings.refuse_entered(scope)
            proven = self._proven_as_another(scope, shape, accept)
            if proven is None:
                is_around = is_mixed or self._is_around(scope, keys)
                most = MAX_TRIALS_AGAIN if failed else MAX_TRIALS_AROUND if is_around else MAX_TRIALS
                if kind == "pair":
                    if self.work.is_spent:
                        return None, self.work.why_spent()
                    most = min(most, self.work.most_trials(scope))
                proven, error = self._first_proven(scope, tries, accept, most)
                if proven is not None:
                    self._found.setdefault(shape, []).append((scope, proven))
                else:
                    failed[places] = error
        except SurroundedError as surrounded:
            return None, surrounded.message  # which says nothing about others of this structure
        return proven, error

    def _is_around(self, scope: str, keys: set[int]) -> bool:
        """Tell whether many other layers lie in a scope beside a pair."""
        owners = (self._trace.owner(calls[0]) for key, calls in self._trace.products.items() if key not in keys)
        return sum(is_inside(name, scope) for name in owners) > MANY_BESIDE

    def _proven_as_another(self, scope: str, shape: str, accept: Region | None) -> Region | None:
        """Return the cut of another scope of this structure, if it is right here too."""
        for other, region in self._found.get(shape, ()):
            here = region.below(other).above(scope)
            if not self._fits(here):
                continue
            try:
                return self._prove_apart(scope, here, accept)
            except DisprovedError:
                continue
        return None

    def _first_proven(
        self, scope: str, tries: Iterable[Region], accept: Region | None, most: int
    ) -> tuple[Region | None, str]:
        """Return the first proven region, or the reason to report: why the likeliest one failed.

        Raises:
            SurroundedError: None is proven, and one failed because of its surroundings.
        """
        first = ""
        difference: Difference | None = None
        surrounded: SurroundedError | None = None
        source = iter(tries)
        failed: list[tuple[Region, Difference]] = []
        reasons = Reasons(MOST_ALIKE if most > MAX_TRIALS_AROUND else MOST_ALIKE_AROUND)
        for number in range(most):
            if not reasons.are_new_enough(difference):
                break
            if self._num_trials >= MAX_ALL_TRIALS:
                return None, f"the search had made its {MAX_ALL_TRIALS} trials before this was proven"
            try:
                # A generator learns why its last one failed.
                region = source.send(difference) if difference and isinstance(source, Generator) else next(source)
            except StopIteration:
                break
            except Exception as error:  # noqa: BLE001 - a proposal that cannot be made is none
                return None, first or f"no way to cut it was found: looked at by itself, {in_words(error)}"
            known = self._other_sizes.why_failed(scope, region) if number >= ALWAYS_TRIED else None
            if known is not None:
                difference = known
                continue
            try:
                return self._prove_apart(scope, region, accept), ""
            except SurroundedError as error:
                difference, surrounded = error.difference, surrounded or error
            except DisprovedError as disproved:
                difference = disproved.difference
                failed.append((region, difference))
            first = first or difference.text
            if difference.kind is Disproof.ROUNDING:
                break
        self._other_sizes.keep(scope, failed)
        if surrounded is not None:
            raise surrounded
        return None, first or "it offers nothing that could be cut"

    def _prove_apart(self, scope: str, region: Region, accept: Region | None) -> Region:
        """Prove a region that takes nothing from regions found before."""
        self._surroundings.refuse_others_inside(region)
        proven = self.prove(scope, region)
        self._surroundings.refuse_others_inside(proven)
        if accept is None:
            self._surroundings.refuse_uses_elsewhere(proven)
        else:
            self.prove_each(accept)
        return proven

    def prove(self, scope: str, region: Region) -> Region:
        """Return a region of this scope as proven, under all calls and modes.

        Raises:
            DisprovedError: It is wrong, or cannot be tried.
            ApplyError: The search has taken too long.
        """
        self._num_trials += 1
        self.check_deadline()
        try:
            return self._prove_once(scope, region.below(scope)).above(scope)
        except DisprovedError:
            self.work.add_failed(scope)
            raise
        except Exception as error:  # a trial that fails proves nothing
            self.work.add_failed(scope)
            raise DisprovedError(
                f"a cut was tried, and could not be compared with the whole: {in_words(error)}"
            ) from error

    def _prove_once(self, scope: str, region: Region) -> Region:
        """Return a region as proven, in names relative to its scope, by experiments with it or with a twin."""
        tried = ("region", repr(region))
        known = self.passed_on.find(tried, scope)
        if known is not None:
            return known
        trial = self._trial(scope)
        narrowed = trial.narrowed
        smaller = None if narrowed is None else narrowed.region(region)
        with trial.reads.watched():
            if narrowed is None or smaller is None:
                trial.try_quickly(region)
                proven = trial.conditions().prove(region)
            else:
                found = trial.narrow_conditions(narrowed).prove(smaller)
                proven = region.replace(partial=found.partial, results=found.results)
        self.passed_on.keep(tried, scope, proven, trial.reads)
        return proven

    def prove_together(self, scope: str, regions: list[Region]) -> bool:
        """Prove regions of a scope in one experiment; each is then known to be right. Tell whether it is.

        Where gradients of whole parameters are terms of a sum, that does not show which region makes them so.

        Raises:
            DisprovedError: One of them is wrong, or cannot be tried.
            ApplyError: The search has taken too long.
        """
        self._num_trials += 1
        self.check_deadline()
        trial, own = self._trial(scope), [region.below(scope) for region in regions]
        try:
            with trial.reads.watched():
                partial = trial.conditions().check(TensorLayout(regions=tuple(own)))
        except DisprovedError:
            raise
        except Exception as error:  # a trial that fails proves nothing
            raise DisprovedError(in_words(error)) from error
        for region in own if not partial else ():
            self.passed_on.keep(("region", repr(region)), scope, region, trial.reads)
        return not partial

    def forget(self) -> None:
        """Let go of the experiments of the last scope."""
        self._last = None

    def check_deadline(self) -> None:
        """Raise ApplyError where the search has taken too long."""
        self._deadline.check(self._num_trials)

    def _trial(self, scope: str) -> _ScopeTrial:
        if self._last is None or self._last.scope != scope:
            self._last = None  # first of all: its experiments are as large as a few copies of the scope
            calls = list(self._trace.distinct.get(scope, {}).values())
            if not calls:
                raise DisprovedError(f"'{scope}' was not called with the first batch")
            self._last = _ScopeTrial(scope, self._model.get_submodule(scope), calls, self._num_tp_ranks, self._drawn)
        return self._last

    def _shape_of(self, scope: str, keys: set[int]) -> Any:
        """Return a key that scopes which are likely to be cut alike share: structure, calls, position. Each is still proven."""
        prefix = len(scope) + 1 if scope else 0
        own = sorted(name[prefix:] for key in keys for name in self._trace.names[key])
        return describe_likeness(self._model.get_submodule(scope)), own, list(self._trace.distinct[scope])

    def _fits(self, region: Region) -> bool:
        return self._tensors >= region.cuts.keys()

    def held(self, region: Region) -> set[str]:
        """Return the whole parameters inside a region of whose gradient each rank has a term."""
        return self._surroundings.held(region)

    def prove_each(self, region: Region) -> None:
        """Prove each of several separate modules that hold the same tensors."""
        for name, own in region.by_module():
            if name in self._trace.calls:
                self.prove(name, own)
        self._surroundings.refuse_uses_elsewhere(region)
