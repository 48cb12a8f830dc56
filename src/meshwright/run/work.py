"""The work of a step as its engine sees it: losses of micro-batches, what backward runs from, and the sum over ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from meshwright._torch_private import FakeTensor
from meshwright.apply.engine import Engine
from meshwright.apply.model_guard import ModelGuard
from meshwright.apply.passes import MicroBatch, Root
from meshwright.errors import ApplyError
from meshwright.run.agreement import Agreement
from meshwright.run.draws_of_work import DrawsOfWork
from meshwright.run.exchange import SumExchange, Sums
from meshwright.run.losses.loss import LossTerm
from meshwright.run.losses.terms import LossTerms

__all__: list[str] = []


class LossWork:
    """Micro-batches of one step or evaluation, with the losses that all ranks add up.

    Args:
        engine: The strategy that runs them.
        terms: Computes losses.
        agreement: What all ranks bring.
        parts: This rank's parts of the batch.
        weights: The weight of each. What weighs nothing runs too, since its forward writes buffers.
        guard: Knows which parameters of this rank are to get a gradient; None for an evaluation.
        on_phase: Called with "backward" when the last one begins.
        draws: Random numbers by the places of samples; None: as torch draws.
    """

    def __init__(
        self,
        engine: Engine,
        terms: LossTerms,
        agreement: Agreement,
        parts: Sequence[Any],
        weights: Sequence[float],
        *,
        guard: ModelGuard | None = None,
        on_phase: Callable[[str], None] = lambda _: None,
        draws: DrawsOfWork | None = None,
    ) -> None:
        self.micro_batches = [MicroBatch(*pair) for pair in zip(parts, weights, strict=True)]
        if draws is not None:
            self.micro_batches = draws.placed(self.micro_batches, agreement)
        self._draws = draws
        self._engine = engine
        self._terms = terms
        self._agreement = agreement
        self._guard = guard
        self._is_trained = is_trained = None if guard is None else guard.is_trained
        self._on_phase = on_phase
        self._exchange: SumExchange | None = None
        self._looks_at_buffers = is_trained is not None and engine.looks_at_buffers(begins=True)
        # Alone, backward is run from the mean; so it is where each rank takes all samples at once.
        self._is_at_once = engine.num_shares * engine.num_replicas == 1 and len(self.micro_batches) == 1
        self._is_alone = engine.everyone.size == 1 and len(self.micro_batches) == 1 and engine.num_replicas == 1

    @property
    def may_stop_alone(self) -> bool:
        """Whether a rank that stops in its forward can still tell the others: where none waits for it inside of theirs."""
        return self._engine.may_stop_alone and not (self._is_trained is not None and self._terms.exchanges_in_forward)

    def agree(self) -> int:
        self._agreement.wait()
        return self._agreement.num_passes

    def loss_of(self, module: nn.Module, micro_batch: MicroBatch) -> LossTerm | None:
        draws = contextlib.nullcontext() if self._draws is None else self._draws.forward(micro_batch)
        with draws, self._terms.norms_of(micro_batch.batch, is_step=self._is_trained is not None):
            term = self._terms.of_any(module, micro_batch.batch, micro_batch.weight)
        if term is not None and isinstance(term.value, FakeTensor):
            raise ApplyError(
                "the loss has no values: the model's code keeps a tensor of a trial without values, which an earlier plan of "
                "this process ran (functools.lru_cache around what a layer computes)",
                fix="clear that cache (cache_clear()) before apply_plan, or apply the plan in a new process",
            )
        if self._guard is not None:
            self._terms.buffer_calls.note_forward()
            self._refuse_switched(self._guard)
        return term

    def _refuse_switched(self, guard: ModelGuard) -> None:
        """Refuse a forward that freezes or unfreezes parameters: ranks have agreed which gradients this step exchanges.

        Raises:
            ApplyError: It has done so, on this rank.
        """
        name = guard.find_switched() if self._engine.group.size > 1 else None
        if name is not None:
            raise ApplyError(
                f"the forward has switched requires_grad of '{name}', and this step exchanges the gradients of those that were "
                "trained when it began",
                fix="switch it between steps, on every rank: before model.step(batch) of the step from which it counts",
            )

    def root_of(self, term: LossTerm) -> Root | None:
        return self._terms.root(term, self._agreement, alone=self._is_at_once)

    @contextlib.contextmanager
    def around(self, index: int) -> Iterator[None]:
        """Repeat a micro-batch's forward and backward inside the context, with the random numbers of the step."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._terms.norms_repeating())
            if self._draws is not None:
                stack.enter_context(self._draws.running())
                stack.enter_context(self._draws.forward(self.micro_batches[index]))
            yield

    def end_losses(self, terms: Sequence[LossTerm]) -> None:
        self._exchange = self._start(terms, self._terms.watch.failure)
        self._on_phase("backward")

    def tell_failure(self, error: Exception, *, is_alone: bool) -> None:
        self._start((), error, is_alone=is_alone).wait()

    def _start(self, terms: Sequence[LossTerm], failure: Exception | None, *, is_alone: bool = False) -> SumExchange:
        """Start summing the losses of all ranks; ranks that cannot go on have reported that before."""
        engine, is_trained = self._engine, self._is_trained
        self._agreement.wait()  # where a rank cannot go on, all ranks exchange that first
        # Over shared memory it is faster after backward than in another thread now; but it must not come after
        # gradients that some ranks have begun to exchange by then.
        shares_memory = engine.group.shares_memory_of(engine.device)
        later = is_trained is None or (shares_memory and not engine.exchanges_in_backward)
        has_begun = is_trained is not None and self.may_stop_alone
        return SumExchange(
            *(engine.loss_group, engine.device, [term for term in terms if not term.is_empty]),
            buffers_changed=self._looks_at_buffers or engine.buffers_changed(),
            in_background=not later,
            is_trained=bool(is_trained),
            failure=failure,
            is_alone=is_alone,
            drain=functools.partial(engine.finish_gradients, 1.0) if has_begun else None,
        )

    def finish(self, terms: Sequence[LossTerm]) -> tuple[Sums, torch.Tensor]:
        """Return the summed losses, and the norm of the gradients, which are the step's then; errors are those of `sums`."""
        if self._is_alone:  # a GPU computes the norm while the host comes to wait for the loss
            self._engine.finish_gradients(1.0)
            norm = self._engine.gradient_norm()
            return self.sums(terms), norm
        sums = self.sums(terms)
        rest = 1.0 / self._engine.repeats
        self._engine.finish_gradients(rest if self._is_at_once or not sums.has_sums else sums.gradient_scale)
        # After the gradients, of which a rank without samples sends its part only now.
        self._terms.buffer_calls.end_step(self._agreement.num_samples)
        return sums, self._engine.gradient_norm()

    def sums(self, terms: Sequence[LossTerm]) -> Sums:
        """Return what the losses of all ranks add up to.

        Raises:
            ApplyError: The losses cannot be added up, or a rank cannot go on; see `SumExchange.wait`.
        """
        exchange = self._exchange or self._start(terms, self._terms.watch.failure)
        sums = exchange.wait()
        return dataclasses.replace(sums, has_sums=False) if self._is_alone else sums
