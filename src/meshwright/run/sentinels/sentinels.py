"""Sentinels: comparison, during training, of what ranks must have alike, and of parts of a strategy with one device.

    every step, in the agreement that the ranks make anyway     the batch of ranks that share layers, their generators,
                                                                learning rates, the last step's loss and norm, and which
                                                                parameters were written to since
    every `sentinel_every` steps, before forward                digests of all that several ranks hold whole: parameters,
                                                                buffers, optimizer state; all settings; and what one rank
                                                                holds, against its state at the end of the last step
    ... around forward and backward                             one part of the strategy, in turn, beside one device
    ... before the optimizer                                    the loss and the norm of this very step

A difference is a finding: on every rank it raises before the optimizer, or is logged and returned in the step's result.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from meshwright.apply.engine import Engine
from meshwright.apply.finding import Finding
from meshwright.apply.recompute.checkpointing import Recompute
from meshwright.apply.state.outside import Outside
from meshwright.errors import CorruptionError
from meshwright.mesh import MeshSpec
from meshwright.python_state import PythonState
from meshwright.run.agreement import Saying
from meshwright.run.diagnose import RandomState
from meshwright.run.sentinels import settings
from meshwright.run.sentinels.apart import ApartWatch, refuse_written_apart
from meshwright.run.sentinels.batch_check import raise_different_batches, refuse_other_forms, warn_of_equal_shares
from meshwright.run.sentinels.batch_forms import FormWatch
from meshwright.run.sentinels.between import SettingsWatch
from meshwright.run.sentinels.circles import Circle
from meshwright.run.sentinels.common_draws import CommonDraws
from meshwright.run.sentinels.copies_check import compare_copies
from meshwright.run.sentinels.copies_in_turn import CopiesInTurn
from meshwright.run.sentinels.digest import digest_batch, digest_of, digest_rng, digest_text
from meshwright.run.sentinels.outcome import compare_outcome, digest_outcome
from meshwright.run.sentinels.shared_batches import SharedBatches
from meshwright.run.sentinels.writes import StateWatch

__all__: list[str] = []

_LOG = logging.getLogger("meshwright")


class Sentinels:
    """The sentinels of one applied model.

    Args:
        engine: The engine.
        optimizer: The optimizer, or None.
        place: The ranks' mesh, and this rank.
        every: Steps between two sentinels; at 0 only the generators of ranks that share layers are compared [count].
        on_finding: "stop" raises CorruptionError, "warn" logs a line for each finding and goes on.
        rows: Returns the settings that may change between steps.
        loss_fn: The loss, or None.
    """

    def __init__(
        self,
        engine: Engine,
        optimizer: torch.optim.Optimizer | None,
        *,
        place: tuple[MeshSpec, int],
        every: int,
        on_finding: Literal["stop", "warn"],
        rows: Callable[[], settings.Rows],
        loss_fn: Callable[..., Any] | None = None,
    ) -> None:
        self._engine = engine
        self._optimizer = optimizer
        self._every = every
        self._on_finding = on_finding
        self._rows = rows
        self._mesh, self._rank = mesh, rank = place
        self._holding = Circle.over(mesh, rank, "dp", "cp", "tp")
        self._copying = Circle.over(mesh, rank, "dp", "cp")
        self._everyone = Circle.over(mesh, rank, "pp", "dp", "cp", "tp")
        self._watch = StateWatch(engine, optimizer)
        self._settings = SettingsWatch(engine, loss_fn)
        self._forms = FormWatch()
        self._options = settings.OptionsDigest(optimizer)
        self._apart = ApartWatch(engine)
        self.shared_batches = SharedBatches()
        self.shared_batches.is_watching = self.is_watching and not self._copying.is_alone
        self._step, self._num_inspections = -1, 0
        self._part: str | None = None
        self._outcome = (math.nan, math.nan)
        self._compares_outcome = True
        self._found, self._early = list[str](), list[str]()
        self._batch, self._autocast, self._default_dtype = None, "", ""
        self._share_out()
        self.recompute: Recompute | None = None
        """The layers that run again in backward, which are inspected as well."""
        self.first_step = 0
        """Number of the first step of this process in texts."""

    def _share_out(self) -> None:
        """Note which ranks have the same batch: of dp those that take it whole."""
        engine, whole = self._engine, ("dp",) if self._engine.takes_whole_batch else ()
        self._batch_axes = ("pp", "cp", "tp", *whole)
        self._sharing = Circle.over(self._mesh, self._rank, *self._batch_axes)
        self._drawing = Circle.over(self._mesh, self._rank, "tp", *whole)
        self._in_turn = CopiesInTurn(engine, self._copying, self._drawing)
        self._common = CommonDraws(engine, self._drawing, self._sharing)
        # Reading their states takes longer than torch's, so only where the model's code can draw from them.
        self._draws_python = not self._sharing.is_alone and Outside(engine.module).draws

    def take_whole_batches(self, share: Any) -> None:
        """Take note that dp ranks take whole batches, and draw with the first one's generators until `give_back_draws`.

        Args:
            share: What this rank was given of the first one.
        """
        if self.is_watching:
            warn_of_equal_shares(self._engine.everyone, self._mesh, share, self._engine.device)
        self._share_out()
        self._common.draw_together(0)

    @property
    def is_enabled(self) -> bool:
        """Whether anything is looked at beside what steps need (`sentinel_every=0` turns it off)."""
        return self._every > 0

    @property
    def is_watching(self) -> bool:
        """Whether there are other ranks to compare with, and comparison is enabled."""
        return self.is_enabled and not self._everyone.is_alone

    @property
    def is_due(self) -> bool:
        """Whether everything is compared in the present step."""
        return self.is_watching and self._step % self._every == 0

    @property
    def is_turn(self) -> bool:
        """Whether the present step repeats an inspection, with other ranks or without."""
        return self.is_enabled and self._step % self._every == 0

    @property
    def needs_agreement_first(self) -> bool:
        """Whether ranks must agree before forward begins: with different batches they would wait for each other inside it."""
        return not self._sharing.is_alone or self.is_due

    # -- the agreement ----------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Begin a step."""
        self._step += 1
        self._part = None
        self._found, self._early = self._early, []

    def sayings(self, batch: Any, autocast: torch.dtype | None = None) -> list[Saying]:
        """Return the values of a batch and of the rank that ranks must have alike; topics in one order on every rank.

        Args:
            batch: This rank's share.
            autocast: The dtype of forwards; None for the model's own.
        """
        self._autocast = f"{autocast!r}, gradients {'on' if torch.is_grad_enabled() else 'off'}"
        self._default_dtype = repr(torch.get_default_dtype())
        found: list[Saying] = []
        if (calls := self._engine.everyone.calls) is not None and not self._everyone.is_alone:
            found.append(Saying("call", self._everyone, calls.kind))
        if not self._drawing.is_alone:
            state = RandomState.read(self._engine.device)
            found.append(Saying("draws", self._drawing, digest_rng(state.cpu, state.cuda)))
        if self._draws_python:
            found.append(Saying("python", self._sharing, digest_text(repr(PythonState().to_json()))))
        if not self.is_watching:
            return found
        self._batch = batch
        if not self._sharing.is_alone:
            found.append(Saying("batch", self._sharing, digest_batch(batch, whole=self.is_due)))
        if not self._copying.is_alone:
            found.append(Saying("forms", self._everyone, self._forms.digest(batch) & 2**63 - 1))
            found.append(Saying("shared batches", self._everyone, self.shared_batches.digest()))
        written = self._watch.written()
        if not self._holding.is_alone:
            names = [*written, *self._watch.changed()]
            found.append(Saying("written", self._holding, digest_text(",".join(names))))
        else:  # a script, too, changes state without copies on one rank only: `compare` decides
            found.append(Saying("written", self._everyone, digest_text(",".join(self._watch.changed()))))
        if not self._copying.is_alone:
            values = [parameter for _, parameter in self._watch.written_parameters()] if written else []
            found.append(Saying("values", self._copying, digest_of(values) if values else 0))
        modes = self._settings.modes()
        common = digest_text(settings.learning_rates(self._optimizer) + self._autocast + self._default_dtype + modes)
        common += self._options.value()
        if self._compares_outcome:
            common += digest_outcome(*self._outcome)
        found.append(Saying("common", self._everyone, common & 2**63 - 1))
        found.append(Saying("settings", self._everyone, self._settings.digest()))
        return [*found, *self._in_turn.sayings()]

    def explain(self, topics: Sequence[str]) -> None:
        """Find the difference between the ranks and raise; called on every rank.

        Raises:
            ApplyError: Batches or settings differ.
            CorruptionError: Something else differs.
        """
        engine = self._engine
        if "call" in topics and (calls := engine.everyone.calls) is not None:
            raise calls.different(dict(enumerate(engine.everyone.all_gather_json(calls.current, device=engine.device))))
        if "batch" in topics:
            raise_different_batches(engine.everyone, self._mesh, self._batch_axes, self._batch, engine.device)
        if "shared batches" in topics and self.shared_batches.raise_different(engine.everyone, engine.device):
            self.shared_batches.is_watching = False  # ranks that compute their batches round differently
        if "common" in topics:
            mode = ("whether the model is in training mode", repr(engine.module.training))
            rows = [("the dtype of torch.autocast, and torch.set_grad_enabled", self._autocast), mode]
            rows += [("torch's default dtype", self._default_dtype)]
            rows += settings.of_options(self._optimizer)
            rows += settings.of_modes(engine.module)
            settings.raise_different(engine.everyone, rows, engine.device)
            findings = compare_outcome(engine, *self._outcome, step=self._step + self.first_step - 1)
            self._report([*compare_copies(engine, self._optimizer), *findings])  # the loss function's settings say more
            # Compared only at sentinels from here on: it differs by the order of additions, or was reported.
            self._compares_outcome = False
        if "written" in topics:
            self._report(self._watch.compare(engine.everyone, self._mesh))
        elif "values" in topics:
            refuse_written_apart(engine, self._mesh, self._watch.written_parameters())
        if "forms" in topics:
            self._found += self._forms.explain(engine.everyone, engine.device)
        if "settings" in topics:
            self._found += self._settings.explain()
        if self._in_turn.is_topic(topics):
            self._in_turn.stop()  # with on_finding="warn" sentinels alone compare from here on
            self._report(compare_copies(engine, self._optimizer))
        if "draws" in topics:
            self._common.draw_together(self._step)
        if "python" in topics:
            self._common.draw_python_together(self._step)

    # -- a sentinel -------------------------------------------------------------------------------------------------

    def begin_forward(self) -> None:
        """Compare settings and state if a sentinel is due, and start the inspection of a part in the next forward.

        Raises:
            ApplyError: Settings differ.
            CorruptionError: State differs.
        """
        if not self.is_due:
            return
        self.compare_if_due()
        engine = self._engine
        self._part = engine.begin_inspection(self._num_inspections)
        if self.recompute is not None:
            self.recompute.begin_inspection(self._num_inspections)
        self._num_inspections += 1

    def compare_if_due(self) -> None:
        """Compare settings and state if a sentinel is due.

        Raises:
            ApplyError: Settings differ.
            CorruptionError: State differs.
        """
        if not self.is_due:
            return
        engine = self._engine
        if self._step == 0 and engine.num_shares * self._mesh.cp > 1:
            warn_of_equal_shares(engine.everyone, self._mesh, self._batch, engine.device)
        settings.require_equal_settings(engine.everyone, self._rows(), engine.device)
        self._report(
            [*compare_copies(engine, self._optimizer), *self._watch.compare_imprint(engine.everyone, self._mesh)]
        )

    def end_backward(self, loss: float, norm: float) -> None:
        """Report the inspection's findings before the optimizer, and compare this step's loss and norm.

        Raises:
            CorruptionError: There is a finding.
        """
        if not self.is_due:
            return
        findings = list(self._engine.end_inspection()) if self._part is not None else []
        findings += [] if self.recompute is None else self.recompute.end_inspection()
        self._report([*findings, *compare_outcome(self._engine, loss, norm, step=self._step + self.first_step)])

    def end_step(self, loss: float, norm: float) -> list[str]:
        """Record the end of a step; return its findings as texts."""
        self.end_draws()
        if self.is_watching:
            self._outcome = (loss, norm)
            self._in_turn.note()
            self._watch.note(keeps_imprint=(self._step + 1) % self._every == 0)
        self._batch = None
        return self._found

    def end_draws(self) -> None:
        """Give this rank its generator back, where it drew with those of another model's ranks; modules have run."""
        self.give_back_draws()
        if self.is_watching:
            self._settings.note()

    def give_back_draws(self) -> None:
        """Give this rank its generators back, where it drew with those of another rank, which has another share."""
        self._common.give_back()

    def compare_early(self) -> None:
        """Compare what a script has set since the plan was applied; every rank calls it, before a first batch is looked at."""
        if self.is_watching:
            self._early += self._settings.compare_early()

    def compare_first(self, batch: Any) -> None:
        """Refuse a first batch that has another form on ranks that must take the same; every rank calls it."""
        if self.is_watching and not self._sharing.is_alone:
            refuse_other_forms(self._engine.everyone, self._mesh, self._batch_axes, batch, self._engine.device)

    def begin_own_forward(self) -> None:
        """Remember what a script has set on modules, which a forward of its own may set, too."""
        if self.is_watching:
            self._settings.look()

    def forget_state(self) -> None:
        """Forget what this rank held at the end of the last step: other values were loaded, on every rank."""
        self._watch.forget()
        self._in_turn.forget()

    def refuse_apart(
        self, before: Callable[[], None] | None = None, *, is_whole: bool = False, in_turn: bool = False
    ) -> None:
        """Refuse parameters that a script has given other values on ranks which hold the same; called outside of steps.

        Args:
            before: Called on every rank before it raises, to name another cause.
            is_whole: Whether every rank has every parameter whole now.
            in_turn: Whether a few parameters are looked at, the next ones at the next call.
        """
        if self.is_watching:
            self._apart.refuse(before, is_whole=is_whole, in_turn=in_turn)

    def take_whole_writes(self) -> None:
        """Take what was written inside `whole_parameters`; called where every rank leaves it."""
        self._watch.take_whole_writes()

    # -- findings ---------------------------------------------------------------------------------------------------

    def _report(self, findings: Sequence[Finding]) -> None:
        """Tell every rank the findings of all ranks; every rank calls it.

        Raises:
            CorruptionError: Something was found, and `on_finding` is "stop".
        """
        everyone, device = self._engine.everyone, self._engine.device
        count = torch.tensor([len(findings)], dtype=torch.float64, device=device)
        everyone.all_reduce(count)
        if not count.item():
            return
        mine = [[f.part, f.difference, f.tolerance, f.text] for f in findings]
        rows = [
            (everyone.ranks[place], Finding(part=part, difference=difference, tolerance=tolerance, text=text))
            for place, theirs in enumerate(everyone.all_gather_json(mine, device=device))
            for part, difference, tolerance, text in theirs
        ]
        texts = [_text(self._step + self.first_step, rank, finding) for rank, finding in rows]
        if self._on_finding == "stop":
            rank, finding = rows[0]
            more = f"; and {len(rows) - 1} more: {'; '.join(texts[1:4])}" if len(rows) > 1 else ""
            raise CorruptionError(
                texts[0] + more,
                rank=rank,
                step=self._step,
                part=finding.part,
                fix="restart from a checkpoint from before this step, and run `meshwright verify` on the plan; on_finding='warn' "
                "continues",
            )
        self._found += texts
        if everyone.group_rank == 0:
            for text in texts:
                _LOG.warning("%s", text)


def _text(step: int, rank: int, finding: Finding) -> str:
    found = f"step {step}, rank {rank}, '{finding.part}': {finding.text}"
    if math.isnan(finding.difference):
        return found
    return f"{found} (largest difference {finding.difference:.2g} of the largest entry, allowed are {finding.tolerance:.1g})"
