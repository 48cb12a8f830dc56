"""Base of an engine around another: it changes the module first, and delegates everything else to the inner engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from meshwright.apply.engine import Engine
from meshwright.apply.finding import Finding
from meshwright.apply.gradient_sums import GradientExit
from meshwright.apply.shards.facts import RunMoment, ShardFacts
from meshwright.apply.shards.switch import ShardSwitch
from meshwright.comm.communicator import Communicator
from meshwright.errors import ApplyError

__all__: list[str] = []


class OuterEngine(Engine):
    """An engine that needs a first batch before it can build its inner engine.

    Args:
        module: The user's module, on `device`.
        group: The data-parallel ranks.
        device: This rank's device.
        everyone: All ranks.
        not_prepared: The error's message where the inner engine is used before the first batch.
    """

    def __init__(
        self, module: nn.Module, group: Communicator, device: torch.device, everyone: Communicator, not_prepared: str
    ) -> None:
        super().__init__(module, group, device)
        self._everyone = everyone
        self._not_prepared = not_prepared
        self._inner: Engine | None = None

    @property
    def everyone(self) -> Communicator:
        return self._everyone

    @property
    def inner(self) -> Engine:
        """The engine inside."""
        if self._inner is None:
            raise ApplyError(
                self._not_prepared,
                fix="call step() or evaluate() first, or pass example_batch= to apply_plan",
            )
        return self._inner

    @property
    def is_prepared(self) -> bool:
        return self._inner is not None

    @property
    def holds_parts(self) -> bool:
        return self.is_prepared

    def use_switch(self, switch: ShardSwitch) -> None:
        super().use_switch(switch)
        if self._inner is not None:
            self._inner.use_switch(switch)

    def held_parts(self, moment: RunMoment) -> list[tuple[Tensor, ShardFacts]]:
        return [] if self._inner is None else self._inner.held_parts(moment)

    def gradient_terms(self) -> set[int]:
        return set() if self._inner is None else self._inner.gradient_terms()

    @property
    def reads_as_nan(self) -> str:
        return "" if self._inner is None else self._inner.reads_as_nan

    @property
    def fixes_memory(self) -> bool:
        return self.is_prepared

    def accept_groups(self, optimizer: torch.optim.Optimizer) -> ApplyError | None:
        return super().accept_groups(optimizer) if self._inner is None else self._inner.accept_groups(optimizer)

    # -- what the inner engine says: it knows of no other, and would be right alone -------------------------------------

    @property
    def needs_lockstep(self) -> bool:
        return self.inner.needs_lockstep

    @property
    def exchanges_in_backward(self) -> bool:
        return self.inner.exchanges_in_backward

    @property
    def gradients_leave(self) -> GradientExit:
        return self.inner.gradients_leave

    @property
    def outputs_have_graph(self) -> bool:
        return self.inner.outputs_have_graph

    @property
    def num_walks(self) -> int:
        return self.inner.num_walks

    def trainable_states(self) -> dict[str, bool]:
        return self.inner.trainable_states()

    def refuse_lost_writes(self) -> None:
        if self._inner is not None:
            self._inner.refuse_lost_writes()

    def refuse_taken(self) -> None:
        self.inner.refuse_taken()

    def idle_pass(self) -> None:
        self.inner.idle_pass()

    def end_failed_pass(self) -> None:
        self.inner.end_failed_pass()

    def gradient_pieces(self) -> list[tuple[Tensor, nn.Parameter]]:
        return self.inner.gradient_pieces()

    def sum_over_pieces(self, values: Tensor) -> None:
        self.inner.sum_over_pieces(values)

    # -- the step -----------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        self.inner.begin_step()

    def arm(self) -> None:
        self.inner.arm()

    def begin_forward(self) -> None:
        self.inner.begin_forward()

    def end_forward(self) -> None:
        self.inner.end_forward()

    def before_layer(self, layer: nn.Module) -> None:
        if self._inner is not None:
            self._inner.before_layer(layer)

    def begin_backward(self) -> None:
        self.inner.begin_backward()

    def refresh_trainable(self) -> None:
        self.inner.refresh_trainable()

    def begin_inspection(self, number: int) -> str | None:
        return self.inner.begin_inspection(number)

    def end_inspection(self) -> Sequence[Finding]:
        return self.inner.end_inspection()

    def copies_of_state(self) -> list[tuple[Communicator, list[tuple[str, Tensor]]]]:
        return self.inner.copies_of_state()

    def gradient_tensors(self) -> Sequence[Tensor]:
        return self.inner.gradient_tensors()

    def gradient_norm(self) -> Tensor:
        return self.norm_of_squares()

    def finish_step(self) -> None:
        self.inner.finish_step()

    def leave_out_step(self) -> None:
        self.inner.leave_out_step()

    def compression_state(self) -> dict[str, Tensor]:
        return {} if self._inner is None else self._inner.compression_state()

    def load_compression_state(self, state: Mapping[str, Tensor]) -> None:
        self.inner.load_compression_state(state)

    def held_tensors(self) -> dict[str, list[Tensor]]:
        return self.inner.held_tensors()

    def buffers_changed(self) -> bool:
        return self._inner is not None and self._inner.buffers_changed()

    def note_buffers(self) -> None:
        if self._inner is not None:
            self._inner.note_buffers()

    def sync_buffers(self) -> None:
        self.inner.sync_buffers()
