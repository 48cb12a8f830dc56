"""Draws of a model that do not know the layout: found at the first batch by all ranks, then given to each step (ADR 0025)."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from meshwright.apply.engine import Engine
from meshwright.apply.randomness.draw_cuts import cuts_to_rows, find_cuts, take_cuts
from meshwright.apply.randomness.dropouts import watch_attention
from meshwright.apply.randomness.forward_draws import ForwardDraws
from meshwright.apply.randomness.names import Names
from meshwright.apply.randomness.operators import install_operators
from meshwright.apply.randomness.philox import key_of
from meshwright.apply.randomness.python_calls import PythonCalls, Site, Turns, lengths_in, turns_of_all, turns_to_rows
from meshwright.apply.randomness.python_seeding import python_draws, with_calls_seeded
from meshwright.apply.randomness.row_choices import watch_choices
from meshwright.apply.randomness.sample_dims import Call, SiteDims, from_rows, of_all_ranks, to_rows
from meshwright.apply.randomness.sites import StepDraws, in_forward, in_step
from meshwright.apply.state.outside import Outside
from meshwright.apply.tensor.guards.part_guard import denials_kept
from meshwright.describe.batches import BatchSplitter
from meshwright.run import draw_texts
from meshwright.run.draw_parts import are_alike
from meshwright.run.draw_trials import DrawTrials, Trials, Weigh
from meshwright.run.draws_found import DrawsFound
from meshwright.run.draws_of_torch import why_torch_draws
from meshwright.run.losses.loss import LossTerm
from meshwright.run.losses.settle import has_room
from meshwright.run.losses.trial_runs import run_alone, run_together

__all__: list[str] = []

_MOST_TOLD = 16

Term = Callable[[Any, Any], LossTerm]


class GlobalDraws:
    """The draws of a model.

    Args:
        engine: The strategy.
        module: The model.
        seed: Of the run.
        sharers: The ranks that share layers with this one (tp), by their places among all; this rank alone without tp.
    """

    def __init__(self, engine: Engine, module: nn.Module, seed: int, sharers: Sequence[int] = ()) -> None:
        self.module = module
        self.names = Names(module)
        self.seed = seed
        self.step = 0
        """Steps taken before this one, earlier processes' too [count]."""
        self.num_evaluations = 0
        """Evaluations since the last step [count]."""
        self.is_known = False
        """Whether the first batch has been tried."""
        self.has_draws = False
        """Whether a forward draws, on any rank."""
        self.is_off = False
        """Whether torch's generators are left to draw; the reasons say why."""
        self.dims: dict[Call, SiteDims] = {}
        self._inside: dict[Call, Mapping[str, int]] = {}
        self._engine = engine
        self._sharers = list(sharers)
        self._found: DrawsFound | None = None
        self._told: dict[str, None] = {}
        self._num_shared, self._has_shared = 0, False
        self.losses: list[Any] = []
        self.apart = ""  # why gradients of parts of the first batch are not the whole's, on any rank
        self.is_unproven = False
        """Whether parts of the first batch did not give what the whole gives with the same random numbers."""
        self._python: bool | None = None
        self._python_apart = False
        """Whether Python's and NumPy's generators differ for each share and micro-batch."""
        self._turns: dict[Site, Turns] | None = None
        """How often code draws by them, by its place; None: nobody has looked."""
        self._lengths: list[list[int]] | None = None  # of the share that was tried
        install_operators()
        self._why_torch = why_torch_draws(
            module, num_replicas=engine.num_replicas, shares_layers=len(self._sharers) > 1
        )
        self.is_off = self._why_torch is not None

    @property
    def reasons(self) -> tuple[str, ...]:
        """What depends on the layout even so."""
        return tuple(self._told)

    def tell(self, text: str) -> None:
        """Add a reason, once."""
        if len(self._told) < _MOST_TOLD:
            self._told[text if text.startswith("rng: ") else f"rng: {text}"] = None

    def forget(self) -> None:
        """Forget the first batch, which is learned anew."""
        self.is_known, self.is_off, self.apart = False, self._why_torch is not None, ""
        self.is_unproven = False
        self._told, self._num_shared, self._turns = {}, 0, None

    @property
    def has_news(self) -> bool:
        """Whether this rank has reasons that the others may not know."""
        return len(self._told) > self._num_shared

    def share_reasons(self, *, is_wanted: bool) -> None:
        """Take the reasons of all ranks after the first step, and whenever any has new ones; every rank calls it.

        A pipeline's stages draw for themselves, so that a reason is known where the layer is.

        Args:
            is_wanted: Whether any rank had news when the step began; the same on every rank.
        """
        group = self._engine.everyone
        if group.size == 1 or (self._has_shared and not is_wanted):
            return
        self._has_shared = True
        with group.ledger.of_checks():
            told = group.all_gather_json(list(self._told)[self._num_shared :], device=self._engine.device)
        known = list(self._told)[: self._num_shared]
        self._told = dict.fromkeys([*known, *(text for texts in told for text in texts)])
        self._num_shared = len(self._told)

    def leave_to_torch(self, why: str) -> None:
        """Let torch's generators draw from now on, as with rng="torch", and tell why; alike on every rank."""
        self.is_off = self.is_known = True
        self.tell(f"{why}, so that torch's generators draw")

    # -- running --------------------------------------------------------------------------------------------------

    def running(self, kind: str) -> contextlib.AbstractContextManager[None]:
        """Return the context of the forwards and backwards of a step or an evaluation.

        Args:
            kind: "step" or "evaluate".
        """
        if self.is_off:
            return contextlib.nullcontext()
        if not self.has_draws:
            return self.left(draw_texts.LATE)
        running = in_step(self.new_step(kind))
        return with_calls_seeded(running) if self._has_loops else running

    def new_step(self, kind: str) -> StepDraws:
        """Return the draws of a step, of an evaluation, or of one forward of an own loop."""
        return StepDraws(
            self._text_of(kind),
            self.names,
            self.dims,
            inside=self._inside,
            share=self.share,
            part=f"part {self._place}" if len(self._sharers) > 1 else "",
            on_unknown=self.tell,
        )

    def left(self, why: str = draw_texts.LATE) -> contextlib.AbstractContextManager[None]:
        """Return a context in which torch's generators draw, and that they do is told."""
        if self.is_off:
            return contextlib.nullcontext()
        return in_step(StepDraws("", self.names, {}, on_unknown=self.tell, left=why))

    @property
    def has_places(self) -> bool:
        """Whether ranks need the places of their samples."""
        return self.has_draws and not self.is_off and self._engine.num_shares > 1

    @property
    def share(self) -> str:
        """The name of this rank's share of the batch."""
        return f"share {self._engine.share}"

    def forward(
        self, kind: str, first: int, num_samples: int, number: int = 0, *, batch: Any = None
    ) -> contextlib.AbstractContextManager[None]:
        """Return the context of one forward.

        Args:
            kind: As for `running`.
            first: The place of its first sample in the global batch.
            num_samples: Its samples [count].
            number: Forwards of an own loop before it in this step [count].
            batch: What it takes.
        """
        if self.is_off:
            return contextlib.nullcontext()
        forward = ForwardDraws(first, num_samples)
        if not self._draws_by_python:
            return in_forward(forward)
        if self._turns is not None and num_samples and (self._has_loops or not self._python_apart):
            text = f"{self._text_of(kind)}/{number or ''}"
            forward.python = PythonCalls(
                *(text, self.names, first, num_samples),
                turns=self._turns,
                is_seeded=self._has_loops,
                has_lengths=self._lengths in (None, lengths_in(batch, num_samples)),
                on_unknown=self.tell,
            )
        is_apart = self._python_apart or (self._has_loops and not num_samples)
        apart = f"/{self.share}/{first}" if is_apart else ""
        return python_draws(key_of(f"{self._text_of(kind)}/python{number or ''}{apart}"), forward)

    def _text_of(self, kind: str) -> str:
        place = {"trial": "", "step": f"/{self.step}", "evaluate": f"/{self.step}/{self.num_evaluations}"}[kind]
        return f"{self.seed}/{kind}{place}"

    @property
    def _has_loops(self) -> bool:
        """Whether loops over samples draw by Python's or NumPy's generator."""
        return self._turns is not None and any(turns.each for turns in self._turns.values())

    @property
    def _draws_by_python(self) -> bool:
        if self._python is None:
            self._python = Outside(self.module).draws
        return self._python

    @property
    def _place(self) -> int:
        own = self._engine.everyone.group_rank
        return self._sharers.index(own) if own in self._sharers else 0

    # -- the first batch ------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _trial(self, dims: Mapping[Call, SiteDims], chance: int) -> Iterator[StepDraws]:
        text = self._text_of("trial")
        with python_draws(key_of(f"{text}/python{chance or ''}")):
            text = f"{text}{chance or ''}"
            yield StepDraws(text, self.names, dims, inside=self._inside)

    def _trials(self, splitter: BatchSplitter, weigh: Weigh = None) -> DrawTrials:
        # Where forwards gather parameters, gradients would have each rank keep them for a backward.
        with_graph = not (self._engine.is_prepared and self._engine.needs_lockstep)
        decides = self._draws_by_python
        options = {"decides": decides, "with_graph": with_graph, "weigh": weigh}
        options["may_probe"] = with_graph or has_room(self._engine)
        options["turns"] = self._turns if self._has_loops else None
        return DrawTrials(self.module, splitter, self._trial, **options)

    def learn(self, share: Any, splitter: BatchSplitter, term: Term, weigh: Weigh = None) -> None:
        """Find the sample dims of all draws by trials of the first batch; every rank calls it.

        Args:
            share: At least two samples of this rank's share; None where it has none, or they cannot be cut.
            splitter: Counts and cuts batches.
            term: (outputs, batch) -> loss, which may draw, too.
            weigh: As for `DrawTrials`.
        """
        if self._engine.is_prepared and len(self._sharers) > 1:
            self.leave_to_torch("the model was called before its first step, which has cut its layers")
            return
        watch_choices()
        found, trials = None if share is None else DrawsFound(share), self._trials(splitter, weigh)
        self._lengths = None if share is None else lengths_in(share, splitter.count(share))
        with self._engine.group.ledger.of_checks():
            self._run(None if found is None else trials.examine(found, finds_dims=not self.is_off), term)
            self._agree(found)
        self.is_known = True
        self._found = found if len(self._sharers) > 1 and self.has_draws else None

    def try_again(self, share: Any, splitter: BatchSplitter, term: Term, weigh: Weigh) -> Any:
        """Return the losses of a later share and of its parts, drawn by the known sample dims; None where nothing is shown.

        Args as for `learn`; every rank calls it where a forward takes several.
        """
        if not self.has_draws or self.is_off or self.is_unproven:
            return None
        found, trials = None if share is None else DrawsFound(share), self._trials(splitter, weigh)
        self._run(None if found is None else trials.try_again(found, self.dims, self.step), term)
        if found is None:
            return None
        # Elsewhere other ranks may have the outputs.
        has_outputs = not (self._engine.needs_lockstep or len(self._sharers) > 1)
        if has_outputs and not found.is_proven:
            self.tell(draw_texts.UNPROVEN.replace("the first batch", "a later batch"))
        return found.losses

    def look_alone(self, batch: Any, splitter: BatchSplitter, term: Term) -> bool:
        """Tell whether a forward draws, by a trial of this rank alone; where it does not, no rank needs the others' places.

        Args:
            batch: What the model takes.
            splitter: Counts samples.
            term: As for `learn`.
        """
        found = DrawsFound(batch)
        trials = self._trials(splitter)
        run_alone(self._engine, self.module, trials.examine(found, finds_dims=False), term)
        self.is_known = not found.draws
        return found.draws

    def learn_cut(self, splitter: BatchSplitter, term: Term) -> None:
        """Find which part of a full tensor each rank of a cut layer draws, once layers are cut; every rank calls it.

        Args:
            splitter: Counts batches.
            term: As for `learn`.
        """
        if len(self._sharers) < 2 or not self.has_draws or self.is_off:
            return
        if any(not parameter.numel() for parameter in self.module.parameters()):
            watch_attention()
        whole, self._found = self._found, None
        trials = self._trials(splitter)
        cut = None if whole is None else DrawsFound(whole.share, chances=whole.chances)
        with self._engine.group.ledger.of_checks():
            with denials_kept(self.module):
                self._run(None if cut is None else trials.note_cut(cut, self.dims), term)
            notes = {} if cut is None else cut.notes
            told = self._gather([[*call, list(note.shape)] for call, note in notes.items()])
            found: dict[Call, SiteDims] = {}
            if whole is not None:
                shapes = [{(name, number): shape for name, number, shape in told[rank]} for rank in self._sharers]
                count = splitter.count(whole.share)
                found = find_cuts(self.dims, whole.notes, notes, shapes, self._place, num_samples=count)
            cuts = itertools.chain.from_iterable(self._gather(cuts_to_rows(found)))
            self.dims = take_cuts(self.dims, found, cuts, self._place)
            self._run(None if cut is None else trials.note_cut(cut, self.dims), term)
            is_alike = True
            if cut is not None and whole is not None and len(cut.outputs) == len(whole.outputs):  # or on another stage
                is_alike = are_alike(whole.outputs, cut.outputs)
            if not all(self._gather(is_alike)):
                self.tell(draw_texts.UNPROVEN_CUT)

    def _gather(self, value: Any) -> list[Any]:
        """Return each rank's value."""
        return self._engine.everyone.all_gather_json(value, device=self._engine.device)

    def _run(self, trials: Trials | None, term: Term) -> None:
        engine = self._engine
        if engine.is_prepared and (engine.needs_lockstep or engine.copies > 1):
            run_together(engine, self.module, trials, term)
        else:
            run_alone(engine, self.module, trials, term)

    def _agree(self, found: DrawsFound | None) -> None:
        """Take what all ranks have found."""
        own = None
        if found is not None:
            inside = [[*call, counts] for call, counts in found.inside.items()]
            loose, uses_python = found.loose[:1], found.uses_python
            beside: list[Any] = [found.losses, found.apart, found.uses_own, found.is_unseen, found.unclear, loose]
            own = [found.draws, found.is_proven, to_rows(found.dims), inside, found.seeds, found.by_sample, beside]
            own += [turns_to_rows(found.turns), found.varies, uses_python]
        told = self._gather([self._why_torch, own])
        self._why_torch = next((why for why, _ in told if why is not None), None)
        rows = [row for _, row in told if row]
        self.losses = [row[6].pop(0) for row in rows]
        self.apart = next(filter(None, [row[6].pop(0) for row in rows]), "")
        self.has_draws = any(row[0] for row in rows) or not rows
        self.dims = of_all_ranks([from_rows(row[2]) for row in rows])
        self._inside.update({(name, number): counts for row in rows for name, number, counts in row[3]})
        if self._why_torch is not None:
            if self.has_draws:
                self.leave_to_torch(self._why_torch)
            return
        self._turns, are_alike = turns_of_all([row[7] for row in rows])
        if are_alike and rows:
            self._turns = self._turns or {}
        if self.has_draws and not (are_alike and all(row[1] for row in rows)):
            self.is_unproven = True
            self.tell(draw_texts.UNPROVEN)
        self._python = any(row[9] for row in rows) or self._python  # in code that was not followed
        self._tell_beside([row[6] for row in rows])
        if any(row[8] for row in rows):
            self.tell(draw_texts.VARIES)
        self._python_apart = any(row[5] for row in rows)
        if self._python_apart:
            self.tell("Python's or NumPy's generator may draw a number for each sample: each rank draws for itself")
        if any(row[4] for row in rows) or not rows:
            untried = "the first batch could not be tried in parts, so that sample dims are unknown"
            self.leave_to_torch("a forward seeds torch's generator by itself" if rows else untried)

    def _tell_beside(self, found: Sequence[Sequence[Any]]) -> None:
        """Tell what draws by no place, and what could not be tried: of each rank with samples."""
        if any(uses_own for uses_own, *_ in found):
            self.tell(draw_texts.OWN_GENERATOR)
        if any(is_unseen for _, is_unseen, *_ in found):
            self.tell(draw_texts.UNSEEN)
        for call in dict.fromkeys(call for *_, loose in found for call in loose):
            self.tell(f"torch.utils.checkpoint(preserve_rng_state=False) repeats {call} in backward {draw_texts.LOOSE}")
        for call in dict.fromkeys(call for _, _, unclear, _ in found for call in unclear):
            self.tell(
                f"the first batch does not show in what order {call} holds the samples; it may depend on the layout"
            )
