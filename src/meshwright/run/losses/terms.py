"""Loss of one micro-batch as a term of the step's, and the root of its backward. Terms add up to one device's loss."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from typing import Any

import torch
from torch import nn

from meshwright.apply.engine import Engine
from meshwright.apply.first_look import FirstRun
from meshwright.apply.modules.copies import own_copy, repeat_call
from meshwright.describe.batches import BatchSplitter, call_model
from meshwright.errors import MeshwrightError
from meshwright.run.agreement import Agreement
from meshwright.run.autocast import Autocast
from meshwright.run.loss_graph import foreign_error, foreign_parameters
from meshwright.run.losses.buffer_calls import BufferCalls
from meshwright.run.losses.loss import WHOLE_BATCH, LossRule, LossTerm
from meshwright.run.losses.own_slopes import own_function_of
from meshwright.run.losses.watch import LossWatch
from meshwright.trees import move_to, tensors_in

__all__: list[str] = []

_NUM_LOOKED_AT = 2
"""Outputs among which those are that all ranks have in one dtype: a loss of the model's own may come before [count]."""
_UNTRIED = "loss: {} is in backward, and parameters are too large to try whether gradients of parts of a batch give the whole's"
_FEW_SAMPLES = 2
"""Samples with which a strategy looks at the model before it starts [samples]."""


class LossTerms:
    """Computes losses of micro-batches.

    Args:
        engine: The engine.
        rule: Reads losses.
        autocast: The dtype that forward runs in, or None for the model's own.
        splitter: Counts and cuts batches.
        is_cut: Whether the plan cuts a rank's share into micro-batches.
    """

    def __init__(
        self,
        engine: Engine,
        rule: LossRule,
        autocast: torch.dtype | None,
        splitter: BatchSplitter,
        *,
        is_cut: bool = False,
    ) -> None:
        self.watch = LossWatch(rule, splitter, engine.device, is_threaded=engine.num_replicas > 1)
        """What looks at losses of new kinds of batches."""
        self.buffer_calls = BufferCalls(engine, rule, is_cut=is_cut)
        """What looks at buffers after each forward of a step."""
        self._engine = engine
        self._rule = rule
        self._splitter = splitter
        self._has_looked_at_graph = False
        self._is_cut = is_cut
        self.casts = Autocast(engine.device.type, autocast)
        """The dtype of forwards and losses."""

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context of forward and loss."""
        return self.casts.in_forward()

    @property
    def exchanges_in_forward(self) -> bool:
        """Whether ranks wait for one another inside of a step's forward."""
        return self._rule.exchanges_in_forward

    def norms_of(self, part: Any, *, is_step: bool) -> contextlib.AbstractContextManager[Any]:
        """Return the context in which BatchNorm layers take the samples of all ranks, where they do, in steps."""
        norms = self._rule.norms
        return norms.running(self._splitter.count(part)) if norms is not None and is_step else contextlib.nullcontext()

    def norms_repeating(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context in which this rank repeats a step's forward alone."""
        norms = self._rule.norms
        return contextlib.nullcontext() if norms is None else norms.repeating()

    def of(self, module: nn.Module, part: Any, weight: float) -> LossTerm | None:
        """Return the loss of a micro-batch; None on a pipeline stage that it does not need."""
        with self._engine.switch.user_code(), self.autocast():
            outputs = self._call(module, part)
            if self._engine.owes_nothing_to_the_loss:
                return None
            few = list(itertools.islice(tensors_in(outputs), _NUM_LOOKED_AT))
            if not weight:
                return self.empty(outputs)
            first = next(iter(few), None)
            if first is not None and first.device != self._engine.device:
                part = move_to(part, first.device)  # the last layers may live on another device
            term = self._rule.term(outputs, part, weight)
            with self._engine.group.ledger.of_checks():
                self.watch.look(outputs, part)
            if not self._has_looked_at_graph and term.value.requires_grad:
                self._look_at_graph(term.value)
            shown = [each.dtype for each in few if each.dim() and each.is_floating_point()][:1]
            return dataclasses.replace(term, dtypes=(*shown, term.value.dtype))

    def _call(self, module: nn.Module, part: Any) -> Any:
        try:
            return call_model(module, part)
        except Exception as error:
            engine = self._engine
            is_cut = self._is_cut and not engine.joins_micro_batches
            takes_parts = is_cut or engine.num_shares * engine.num_replicas > 1
            if takes_parts and not isinstance(error, MeshwrightError):
                error.add_note(
                    f"the model was called with a part of the batch, {self._splitter.count(part)} samples. Where dim 0 of a "
                    "tensor is not the samples' (sequences first), pass split= to apply_plan; a batch that is one whole (a "
                    f"graph) needs {WHOLE_BATCH}"
                )
            raise

    def _look_at_graph(self, value: torch.Tensor) -> None:
        """Refuse a first loss that trains parameters outside of the model: ranks would not exchange their gradients.

        Under tp alone all ranks compute the same loss; of a pipeline the last stage alone does.
        """
        engine = self._engine
        is_apart = engine.num_shares > 1 or (engine.everyone.size > 1 and not engine.takes_own_loops)
        if is_apart and self.watch.failure is None:
            # Not the module's own list: under ZeRO-3 a look into it gathers everything.
            foreign = foreign_parameters(value, engine.parameters)
            self.watch.failure = foreign_error(foreign[0], engine.switch.moment.plan) if foreign else None
        self._has_looked_at_graph = self.watch.failure is None
        if self._rule.has_untried_slopes and (own := own_function_of(value)):
            self._rule.reasons += (_UNTRIED.format(own),)

    def first_run(self, part: Any, *, evaluates: bool = False) -> FirstRun:
        """Return what runs a module and its loss on a few samples of a first micro-batch, and returns its outputs."""

        def take() -> tuple[Any, int]:
            pieces = max(1, self._splitter.count(part) // _FEW_SAMPLES)
            return self._splitter.cut(part, pieces)[0], pieces

        def repeat(few: Any) -> Any | None:
            is_one = self._splitter.splits_by_row and self._splitter.count(few) == 1
            return repeat_call(few, 1, 2, along_samples=True) if is_one else None

        run = FirstRun(self._try_out, take, repeat, part)
        run.evaluates = evaluates
        return run

    def _try_out(self, module: nn.Module, few: Any) -> Any:
        few = own_copy(few)
        with self.autocast():
            outputs = call_model(module, few)
            self._rule.try_term(outputs, few, self._rule.known_weight(few))
        return outputs

    def of_any(self, module: nn.Module, part: Any, weight: float | None = None) -> LossTerm | None:
        """Return the loss of a part of a batch, whose weight is found where it is not given."""
        return self.of(module, part, self._rule.known_weight(part) if weight is None else weight)

    def empty(self, outputs: Any) -> LossTerm:
        """Return the term of a micro-batch in which nothing counts: its loss would be 0 / 0, but its forward writes buffers."""
        floats = [each for each in tensors_in(outputs) if each.is_floating_point()]
        given = next((each for each in floats if each.dim()), None)
        if given is None and floats:
            # A loss of the model's own alone: it is 0 / 0 here, and so may be its gradients. It tells the device and the stage.
            given = floats[0].detach()
        value = torch.zeros((), device=self._engine.device) if given is None else given.flatten()[:0].sum()
        return LossTerm(value, 0.0, is_mean=True, is_empty=True)

    @staticmethod
    def root(term: LossTerm, agreement: Agreement, *, alone: bool) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """Return the root of backward and its gradient; None where this micro-batch used only frozen parameters.

        Args:
            term: The loss.
            agreement: The first exchange of the step.
            alone: Whether it is the only term of the step.
        """
        if not term.value.requires_grad:
            return None
        if term.is_empty:
            return term.value, None
        if term.is_mean:
            share = float(term.weight) / agreement.known_weight
        else:
            share = 1.0 / float(term.weight) if alone and term.weight else 1.0
        return term.value, None if share == 1.0 else torch.full_like(term.value, share)
