"""Base of an engine around another: it changes the module first, and delegates everything else to the inner engine."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.apply.engine import Engine
from meshwright.apply.gradient_sums import GradientExit
from meshwright.apply.own_passes import OwnPasses
from meshwright.apply.shards.switch import ShardSwitch
from meshwright.comm.communicator import Communicator
from meshwright.errors import ApplyError

__all__: list[str] = []


def _handed_on(name: str, *, from_the_start: bool = False, base: type[OwnPasses] = Engine) -> Any:
    """Return a method of `Engine` that asks the inner engine.

    Args:
        name: The name in `Engine`.
        from_the_start: Whether the base class answers while there is no inner engine; else that is an error.
        base: The class that describes the method.
    """
    described = vars(base)[name]

    @functools.wraps(described)
    def ask(self: OuterEngine, *args: Any, **kwargs: Any) -> Any:
        if from_the_start and not self.is_prepared:
            return described(self, *args, **kwargs)
        return getattr(self.inner, name)(*args, **kwargs)

    return ask


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

    @property
    def puts_aside(self) -> bool:
        return self._inner is not None and self._inner.puts_aside

    def use_switch(self, switch: ShardSwitch) -> None:
        super().use_switch(switch)
        if self._inner is not None:
            self._inner.use_switch(switch)

    def gradient_terms(self) -> set[int]:
        return set() if self._inner is None else self._inner.gradient_terms()

    @property
    def reads_as_nan(self) -> str:
        return "" if self._inner is None else self._inner.reads_as_nan

    @property
    def fixes_memory(self) -> bool:
        return self.is_prepared

    def gradient_norm(self) -> Tensor:
        return self.norm_of_squares()

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
    def num_walks(self) -> int:
        return self.inner.num_walks

    trainable_states = _handed_on("trainable_states")
    refuse_taken = _handed_on("refuse_taken")
    idle_pass = _handed_on("idle_pass")
    end_failed_pass = _handed_on("end_failed_pass")
    gradient_pieces = _handed_on("gradient_pieces")
    sum_over_pieces = _handed_on("sum_over_pieces")
    begin_step = _handed_on("begin_step")
    arm = _handed_on("arm")
    begin_forward = _handed_on("begin_forward")
    end_forward = _handed_on("end_forward")
    begin_backward = _handed_on("begin_backward")
    refresh_trainable = _handed_on("refresh_trainable")
    begin_inspection = _handed_on("begin_inspection")
    end_inspection = _handed_on("end_inspection")
    copies_of_state = _handed_on("copies_of_state")
    gradient_tensors = _handed_on("gradient_tensors")
    finish_step = _handed_on("finish_step")
    leave_out_step = _handed_on("leave_out_step")
    load_compression_state = _handed_on("load_compression_state")
    held_tensors = _handed_on("held_tensors")
    gradient_holders = _handed_on("gradient_holders", base=OwnPasses)
    drop_cleared_gradients = _handed_on("drop_cleared_gradients", base=OwnPasses)
    drop_gradients = _handed_on("drop_gradients", base=OwnPasses)
    take_gradients = _handed_on("take_gradients", base=OwnPasses)
    begin_own_backward = _handed_on("begin_own_backward", base=OwnPasses)
    end_own_backward = _handed_on("end_own_backward", base=OwnPasses)
    end_own_exchange = _handed_on("end_own_exchange", base=OwnPasses)
    take_held_state = _handed_on("take_held_state", from_the_start=True)
    held_state = _handed_on("held_state", from_the_start=True)
    generators = _handed_on("generators", from_the_start=True)
    sync_buffers = _handed_on("sync_buffers")

    # -- the same, and before there is an inner engine what the base class says: nothing is cut yet ---------------------

    held_parts = _handed_on("held_parts", from_the_start=True)
    accept_groups = _handed_on("accept_groups", from_the_start=True)
    refuse_lost_writes = _handed_on("refuse_lost_writes", from_the_start=True)
    before_layer = _handed_on("before_layer", from_the_start=True)
    compression_state = _handed_on("compression_state", from_the_start=True)
    buffers_changed = _handed_on("buffers_changed", from_the_start=True)
    looks_at_buffers = _handed_on("looks_at_buffers", from_the_start=True)
    note_buffers = _handed_on("note_buffers", from_the_start=True)
