"""Trials of the first batch by which sample dims of draws are found and tried, on one rank.

The batch is run whole and in parts, without a trace. Then both are run again with draws by place: where the outputs of parts are
those of the whole, the numbers do not depend on how a batch is cut. A model whose layers are cut runs once more, cut.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from meshwright.apply.randomness.names import LOSS, called, draw_called
from meshwright.apply.randomness.python_calls import (
    Counts,
    Site,
    Turns,
    are_in_turn,
    has_loop,
    turns_for_all,
    varies_with_samples,
    ways_in_turn,
)
from meshwright.apply.randomness.sample_dims import Call, SiteDims
from meshwright.describe.batches import BatchSplitter
from meshwright.run.draw_orders import beside, draws_inside, few, following, in_order, of_unknown_order, orders, turned
from meshwright.run.draw_owners import find_by_owners, find_hidden, zeros_in
from meshwright.run.draw_parts import are_alike, are_parts, draw_alike, is_mean_of
from meshwright.run.draw_slopes import try_drawn_slopes
from meshwright.run.draws_found import DrawsFound
from meshwright.run.losses.drawn import doubtful_gap, losses_of
from meshwright.run.losses.trial_forward import TrialForward, TrialOutcome
from meshwright.run.losses.trial_parts import join_samples
from meshwright.run.losses.trials import Evidence
from meshwright.run.trial_draws import ENDS, MakeStep, TrialDraws

__all__: list[str] = []

_NUM_PARTS = 3
_FEW = 2
"""Samples by which a model that draws nothing is known [count]."""
_NUM_CHANCES = 5
"""Runs of a model whose numbers may decide which of its calls are made, each with other numbers; see `ENDS` [count]."""

Weigh = Callable[[Any], float] | None
Trials = Generator[list[TrialForward], list[TrialOutcome], Evidence]


class DrawTrials:
    """Trials of one rank's share.

    Args:
        module: The model.
        splitter: Counts and cuts batches.
        make_step: Gives the context of a step that draws with these dims, and numbers that belong to a number.
        decides: Whether the model's code may decide by random numbers of Python or NumPy which calls it makes.
        with_graph: As for `TrialDraws`.
        weigh: Gives the weight of a part's mean, where gradients of parts are to give the whole's; else None.
        turns: As for `TrialDraws`.
        may_probe: Whether the samples of drawn elements may be looked for by gradients, with all parameters whole.
    """

    def __init__(
        self,
        module: nn.Module,
        splitter: BatchSplitter,
        make_step: MakeStep,
        *,
        decides: bool = False,
        with_graph: bool = False,
        weigh: Weigh = None,
        turns: Mapping[Site, Turns] | None = None,
        may_probe: bool = False,
    ) -> None:
        self._weigh, self._may_probe = weigh, may_probe
        self._turns = turns
        self._module = module
        self._splitter = splitter
        self._make_step = make_step
        self._decides = decides
        self._with_graph = with_graph
        self._proven: list[TrialDraws] = []
        """The whole, and its parts that have given it."""
        self._by_owners: list[dict[Call, SiteDims]] | None = None
        """Dims of calls by what these have influence on, once that was looked for."""
        self._chances: Sequence[int] = (0,)
        """The sets of random numbers with which parts have to give the whole."""

    def examine(self, found: DrawsFound, *, finds_dims: bool = True) -> Trials:
        """Find whether a forward draws; then the sample dims of a share, unless they are of no use, and try them."""
        share, count = found.share, self._splitter.count
        if not self._decides and self._splitter.splits_by_row and count(share) >= 2 * _FEW:  # most models draw nothing
            few = self._splitter.cut(share, count(share) // _FEW)[0]
            if not found.noted((yield from self._run([(few, 0)], {})))[0].notes and not found.uses_python:
                return Evidence()
        whole = found.noted((yield from self._run([(share, 0)], {})))
        found.notes = whole[0].notes
        found.draws = bool(found.notes)
        decides = self._decides or found.uses_python or any(math.prod(note.shape) == 1 for note in found.notes.values())
        for chance in range(1, _NUM_CHANCES if decides and not finds_dims and not found.draws else 1):
            found.draws = found.draws or bool((yield from self._run([(share, 0)], {}, chance))[0].notes)
        if not (found.draws or decides) or not finds_dims:
            return Evidence()
        parts = self._splitter.cut(share, min(_NUM_PARTS, count(share)))
        firsts = [sum(map(count, parts[:place])) for place in range(len(parts))]
        placed = list(zip(parts, firsts, strict=True))
        counts = yield from self._find_dims(found, whole, placed, _NUM_CHANCES if decides else 1)
        if not found.draws and not found.uses_python:
            return Evidence()
        if found.uses_python or any(math.prod(note.shape) == 1 for note in found.notes.values()):
            self._chances = range(_NUM_CHANCES)
        found.is_proven = yield from self._prove(found, placed, found.dims)
        loops = [call for call, dims in found.dims.items() if dims.loop]
        merged = yield from self._try_orders(found, placed, loops)
        found.turns = turns_for_all(counts)
        if found.uses_python and (not found.is_proven or varies_with_samples(counts)):
            merged = yield from self._try_turns(found, placed, loops, merged)
        if found.is_proven and self._weigh is not None:
            run = functools.partial(self._run, dims=found.dims)
            coarse = any(p.is_cuda or p.dtype in (torch.float16, torch.bfloat16) for p in self._module.parameters())
            options = {"is_coarse": coarse, "gap": doubtful_gap(found.losses)}
            found.apart = yield from try_drawn_slopes(run, share, placed, self._weigh, **options)
        if found.is_proven:
            yield from self._look_for_unseen_rows(found, placed)
            yield from self._look_for_unseen_orders(found, merged, loops)
            found.unclear += yield from find_hidden(self._run, share, self._proven, found.dims, probes=self._may_probe)
        found.by_sample = found.uses_python and not found.is_proven
        return Evidence()

    def _find_dims(
        self, found: DrawsFound, whole: list[TrialDraws], placed: Sequence[tuple[Any, int]], num_chances: int
    ) -> Generator[list[TrialForward], list[TrialOutcome], list[list[Counts]]]:
        """Find the sample dims of draws; return the calls of Python's and NumPy's generators, of each set of numbers."""
        counts = list[list[Counts]]()
        for chance in range(num_chances):
            whole = (yield from self._run([(found.share, 0)], {}, chance)) if chance else whole
            if chance in ENDS and not whole[0].is_sound:
                continue
            found.uses_python |= whole[0].uses_python
            if not (whole[0].notes or found.uses_python):
                continue
            pieces = yield from self._run(placed, {}, chance)
            counts.append([one.python_counts for one in (*whole, *pieces)])
            if not whole[0].notes:
                continue
            found.draws = True
            if not whole[0].notes.keys() <= found.notes.keys():
                found.chances.append(chance)
                found.notes = whole[0].notes | found.notes
            found.inside = draws_inside(whole[0].notes) | found.inside
            found.seeds |= any(whole[0].marks & piece.marks for piece in pieces)
            found.note_dims(whole[0], pieces)
            loops = found.note_loops(whole[0], pieces)
            found.inside = {
                call: {n: k for n, k in own.items() if n not in loops} for call, own in found.inside.items()
            }
        return counts

    def _try_orders(
        self, found: DrawsFound, placed: Sequence[tuple[Any, int]], loops: Sequence[Call]
    ) -> Generator[list[TrialForward], list[TrialOutcome], list[Call]]:
        """Try other orders of samples, then rows of an index, until parts give the whole; return the calls with two orders."""
        merged = [call for call, dims in found.dims.items() if dims.is_merged]
        for calls in orders(merged, [call for call in loops if found.dims[call].loop > 1]):
            if found.is_proven:
                break
            dims = turned(found.dims, calls)
            found.is_proven = yield from self._prove(found, placed, dims)
            if found.is_proven:
                found.dims.update(dims)
        if not found.is_proven:
            merged = yield from self._follow_rows(found, placed)
        return merged if found.is_proven else (yield from self._try_blocks(found, placed))

    def _try_turns(
        self, found: DrawsFound, placed: Sequence[tuple[Any, int]], loops: Sequence[Call], merged: list[Call]
    ) -> Generator[list[TrialForward], list[TrialOutcome], list[Call]]:
        """Try Python's and NumPy's generators as those of loops over samples; return the calls with two orders of samples."""
        runs, is_proven = list[list[Counts]](), found.is_proven
        self._turns = {}
        for chance in self._chances:
            tried = yield from self._run([(found.share, 0), *placed], found.dims, chance)
            runs.append([one.python_counts for one in tried])
        ways = ways_in_turn(runs)
        for place, turns in enumerate(ways):
            self._turns = turns
            found.is_proven = yield from self._prove(found, placed, found.dims)
            merged = yield from self._try_orders(found, placed, loops)
            if found.is_proven:
                found.turns, found.draws = turns, True
                yield from self._try_other_turns(found, placed, ways[place + 1 :])
                return merged
        self._turns = None
        if is_proven and not has_loop(runs):
            # Steps of a sequence that a part cuts shorter, or numbers that changed nothing.
            found.is_proven = yield from self._prove(found, placed, found.dims)
            found.varies = True
        return merged

    def _try_other_turns(
        self, found: DrawsFound, placed: Sequence[tuple[Any, int]], others: Sequence[Mapping[Site, Turns]]
    ) -> Generator[list[TrialForward], list[TrialOutcome], None]:
        """Note that the order of the samples is unknown where another one gives the whole, too: numbers that changed nothing."""
        before = found.outputs, found.losses, self._turns
        for turns in others:
            self._turns = turns
            if (yield from self._prove(found, placed, found.dims)):
                names = dict.fromkeys(called(name) for (name, _), own in turns.items() if own.is_minor)
                found.unclear += [f"Python's or NumPy's generator in {name}" for name in names]
        found.outputs, found.losses, self._turns = before

    def _follow_rows(
        self, found: DrawsFound, placed: Sequence[tuple[Any, int]]
    ) -> Generator[list[TrialForward], list[TrialOutcome], list[Call]]:
        """Try draws on rows that an index has chosen as draws of these rows; return the calls with two orders of samples."""
        (whole,) = yield from self._run([(found.share, 0)], {})
        pieces = yield from self._run(placed, {})
        for dims in following(found.dims, whole.notes, [piece.notes for piece in pieces]):
            merged = [call for call, own in dims.items() if own.is_merged]
            for calls in ([], *orders(merged)):
                tried = turned(dims, calls)
                found.is_proven = yield from self._prove(found, placed, tried)
                if found.is_proven:
                    found.dims = tried
                    return merged
        return []

    def _try_blocks(
        self, found: DrawsFound, placed: Sequence[tuple[Any, int]]
    ) -> Generator[list[TrialForward], list[TrialOutcome], list[Call]]:
        """Try draws as blocks of the samples that they have influence on; return the calls with two orders of samples."""
        if self._by_owners is None and self._may_probe:
            self._by_owners = yield from find_by_owners(self._run, found.share, placed, found.dims)
        for blocks in self._by_owners or []:
            dims = {**found.dims, **blocks}
            found.is_proven = yield from self._prove(found, placed, dims)
            if found.is_proven:
                found.dims = dims
                return [call for call, own in dims.items() if own.is_merged and own.blocks is None]
        return []

    def _look_for_unseen_rows(
        self, found: DrawsFound, placed: Sequence[tuple[Any, int]]
    ) -> Generator[list[TrialForward], list[TrialOutcome], None]:
        """Have draws follow rows that an index has chosen, though it chose all, in their order: samples without padding."""
        merged = [call for call, own in found.dims.items() if own.has_merged_rows]
        if not merged:
            return
        (whole,) = yield from self._run([(found.share, 0)], found.dims)
        chosen = {call: whole.notes[call] for call in merged if call in whole.notes and whole.notes[call].chosen}
        if not chosen:
            return
        pieces = yield from self._run(placed, found.dims)
        before = found.outputs, found.losses
        tried = in_order(found.dims, chosen, [piece.notes for piece in pieces])
        if tried != found.dims and (yield from self._prove(found, placed, tried)):
            found.dims = tried
        else:
            found.outputs, found.losses = before
        found.dims = beside(found.dims, chosen)

    def _holds_in_reverse(self, found: DrawsFound) -> Generator[list[TrialForward], list[TrialOutcome], bool]:
        """Tell whether parts give the whole with the samples in reverse order, too: code may sort them by a value (a length)."""
        count = self._splitter.count
        num_samples = count(found.share)
        rows = self._splitter.cut(found.share, num_samples)[::-1] if self._splitter.splits_by_row else []
        share = join_samples(rows) if rows else None
        if share is None:
            return True
        parts = self._splitter.cut(share, min(_NUM_PARTS, num_samples))
        firsts = [sum(map(count, parts[:place])) for place in range(len(parts))]
        whole = yield from self._run([(share, 0)], found.dims)
        return are_parts(whole[0], (yield from self._run(list(zip(parts, firsts, strict=True)), found.dims)))

    def _look_for_unseen_orders(
        self, found: DrawsFound, merged: Sequence[Call], loops: Sequence[Call]
    ) -> Generator[list[TrialForward], list[TrialOutcome], None]:
        """Try samples in reverse; note the calls whose order changes nothing now: noise that a weight of zero scales."""
        found.is_proven = yield from self._holds_in_reverse(found)
        if not (found.is_proven and (merged or loops)):
            return
        (whole,) = yield from self._run([(found.share, 0)], found.dims)
        turns = [[call for call in loops if call[0] == name] for name in dict.fromkeys(name for name, _ in loops)]
        for group in (few(of_unknown_order(found.dims, merged, whole.notes)), few(turns)):
            for calls in group:
                other = turned(found.dims, calls)
                if calls[0] in loops:  # a loop over samples may have any order: other numbers have to change something
                    other = {call: dims for call, dims in found.dims.items() if call not in calls}
                (run,) = yield from self._run([(found.share, 0)], other)
                if not (are_alike(whole.outputs, run.outputs) and whole.loss == run.loss):
                    continue
                own = yield from self._run_moved([(found.share, 0)], found.dims)
                moved = yield from self._run_moved([(found.share, 0)], other)
                if not draw_alike([whole, whole], [*own, *moved]) or are_alike(own[0].outputs, moved[0].outputs):
                    found.unclear += map(draw_called, calls)

    def try_again(self, found: DrawsFound, dims: Mapping[Call, SiteDims], chance: int) -> Trials:
        """Find by known sample dims what losses the share and its parts have; none where their outputs are not the whole's.

        Args:
            found: What is learned.
            dims: Of the first batch.
            chance: The number to which the random numbers belong: new ones may show what those of the first batch did not.
        """
        self._chances = (_NUM_CHANCES + chance,)
        share, count = found.share, self._splitter.count
        parts = self._splitter.cut(share, min(_NUM_PARTS, count(share)))
        firsts = [sum(map(count, parts[:place])) for place in range(len(parts))]
        found.is_proven = yield from self._prove(found, list(zip(parts, firsts, strict=True)), dims)
        return Evidence()

    def note_cut(self, found: DrawsFound, dims: Mapping[Call, SiteDims]) -> Trials:
        """Note what the cut model draws; found.notes and found.outputs become those of it."""
        cut = yield from self._run([(found.share, 0)], dims)
        found.notes, found.outputs = cut[0].notes, cut[0].outputs
        for chance in found.chances:
            (more,) = yield from self._run([(found.share, 0)], dims, chance)
            found.notes = more.notes | found.notes
        return Evidence()

    def _run(
        self,
        batches: Sequence[tuple[Any, int]],
        dims: Mapping[Call, SiteDims],
        chance: int = 0,
        factors: Sequence[float] = (),
        **looks: Any,
    ) -> Generator[list[TrialForward], list[TrialOutcome], list[TrialDraws]]:
        with_graph = self._with_graph or bool(factors)
        draws = [
            TrialDraws(
                *(self._module, self._make_step, first, self._splitter.count(batch)),
                dims=dims,
                chance=chance,
                with_graph=with_graph,
                turns=self._turns,
                **looks,
            )
            for batch, first in batches
        ]
        slopes = factors or [0.0] * len(batches)
        outcomes = yield [
            TrialForward(batch, False, draws=own, slopes=factor)
            for (batch, _), own, factor in zip(batches, draws, slopes, strict=True)
        ]
        for own, outcome in zip(draws, outcomes, strict=True):
            own.loss, own.outcome = outcome.value, outcome
        return draws

    def _run_moved(
        self, batches: Sequence[tuple[Any, int]], dims: Mapping[Call, SiteDims], chance: int = 0
    ) -> Generator[list[TrialForward], list[TrialOutcome], list[TrialDraws]]:
        """Run with other numbers in place of zeros; nothing where there are none, or parameters cannot be whole."""
        if not self._may_probe or (self._with_graph and not zeros_in(self._module)):
            return []
        factors = () if self._with_graph else [1.0] * len(batches)
        return (yield from self._run(batches, dims, chance, factors, moves_zeros=True))

    def _prove(
        self, found: DrawsFound, placed: Sequence[tuple[Any, int]], dims: Mapping[Call, SiteDims]
    ) -> Generator[list[TrialForward], list[TrialOutcome], bool]:
        for chance in self._chances:
            whole, *pieces = yield from self._run([(found.share, 0), *placed], dims, chance)
            if chance in ENDS and not whole.is_sound:
                continue
            is_first = chance == self._chances[0]
            found.outputs = whole.outputs if is_first else found.outputs
            holds = self._are_parts(whole, pieces, dims)
            if holds and is_first and any(own.is_merged and own.follows is None for own in dims.values()):
                moved = yield from self._run_moved([(found.share, 0), *placed], dims, chance)
                holds = not draw_alike((whole, *pieces), moved) or self._are_parts(moved[0], moved[1:], dims)
            if not holds:
                found.losses = None
                return False
            if is_first:
                self._proven = [whole, *pieces]
                weights = [
                    own.num_samples if self._weigh is None else self._weigh(part)
                    for own, (part, _) in zip(pieces, placed, strict=True)
                ]
                found.losses = losses_of(whole, pieces, weights)
        return True

    def _are_parts(self, whole: TrialDraws, pieces: Sequence[TrialDraws], dims: Mapping[Call, SiteDims]) -> bool:
        """Tell whether parts gave the whole, and what draws in turn did so."""
        if any(name == LOSS and own.is_merged for (name, _), own in dims.items()) and not is_mean_of(whole, pieces):
            return False
        if self._turns and not are_in_turn(self._turns, [one.python_counts for one in (whole, *pieces)]):
            return False
        mixes = any(own.kind == "randperm" and own.dim is not None for own in dims.values())
        # Samples in a drawn order may change nothing this time, and so may numbers of which parts draw fewer.
        return not mixes and all(map(whole.draws_as_often_as, pieces)) and are_parts(whole, pieces)
