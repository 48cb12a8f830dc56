"""Own loops: forward, backward and optimizer as three calls of a script, each equal to one device's on the global batch.

- `outputs = model(inputs)`: marks the graph nodes of its outputs.
- `value = model.backward(loss, weight=n)`: ranks compare what they run; backward, exchange, sum with earlier gradients.
- `model.optimizer.step()`: hooks around it. Ranks agree, buffers, NaN, clipping; then values are spread.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from meshwright.apply.modules.synced_norms import share_reason
from meshwright.apply.norm import clip_, values_of
from meshwright.apply.randomness.sites import StepDraws, repeats_recognised
from meshwright.apply.shards.gradient_hooks import UserHook, guard_step_hooks
from meshwright.apply.state.hook_tables import is_ours
from meshwright.errors import ApplyError, ConfigError, NonFiniteError
from meshwright.ranks.allocator import memory_returned
from meshwright.run.agreement import Agreement
from meshwright.run.diagnose import unchanged_draws
from meshwright.run.loss_graph import ForwardMark, graph_of, mark_outputs
from meshwright.run.losses.loss import Loss
from meshwright.run.own_backward import OWN_MEAN, OwnBackward, real_number_of
from meshwright.run.put_back import in_training_mode
from meshwright.run.step import Stepper
from meshwright.run.written_gradients import WrittenGradients
from meshwright.spec import Plan
from meshwright.trees import map_tensors, tensors_in

__all__: list[str] = []

FIX_PLAN = "call model.step(batch), or use a plan of dp, zero and tp for an own loop"

_LIVE: weakref.WeakSet[OwnLoop] = weakref.WeakSet()


def refuse_shared(module: nn.Module, plan: str) -> None:
    """Refuse a plan over parameters of a model under another plan: both would exchange their gradients.

    Raises:
        ApplyError: A parameter is in both.
    """
    own = {id(parameter): name for name, parameter in module.named_parameters()}
    for loop in _LIVE:
        if (shared := next((own[id(other)] for other in loop.engine.parameters if id(other) in own), None)) is not None:
            raise ApplyError(
                f"parameter '{shared}' is in another model under the plan '{loop.plan}' too, and the plan '{plan}' would "
                "exchange its gradients again",
                fix="put both models into one module for one apply_plan, or call close() on the earlier one before",
            )


class OwnLoop:
    """The own loop over one model.

    Args:
        stepper: What steps the model otherwise.
        plan: The plan.
        number: Number of the model, equal on all ranks.
        wants_stop: Tells whether this rank was asked to stop.
        on_phase: Called with "forward", "backward" and "optimizer".
        on_update: Called after the optimizer's step.
        num_steps: Gives the steps of the optimizer so far [count].
    """

    def __init__(
        self,
        stepper: Stepper,
        plan: Plan,
        number: int,
        *,
        wants_stop: Callable[[], bool],
        on_phase: Callable[[str], None],
        on_update: Callable[[], None],
        num_steps: Callable[[], int],
    ) -> None:
        self.stepper = stepper
        self.plan = plan
        self.number = number
        self.engine = stepper.engine
        self.num_updates = 0
        """Updates of the parameters by own loops [count]."""
        self._wants_stop = wants_stop
        self._on_phase = on_phase
        self._on_update = on_update
        self._num_steps = num_steps
        self.has_looked_at_graph = False
        """Whether all of a loss's graph has been walked through once."""
        self._gradients_left = WrittenGradients(self.engine, plan)
        self._has_told_of_norms = self._norm_is_finite = False
        self._value = 0.0
        self._around_step: contextlib.ExitStack | None = None
        self.has_ranks = self.engine.everyone.size > 1
        if self.has_ranks:
            _LIVE.add(self)
        stepper.gate.own = self
        stepper.own_draws.model_number = number

    def close(self) -> None:
        """Forget the model."""
        _LIVE.discard(self)
        self.stepper.gate.own = None

    @property
    def is_over_several_batches(self) -> bool:
        """Whether ranks have different shares of a batch."""
        return self.engine.num_shares > 1

    def holds(self, parameter: torch.Tensor) -> bool:
        """Tell whether a parameter is this model's."""
        return any(parameter is own for own in self.engine.parameters)

    # -- forward ----------------------------------------------------------------------------------------------------

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the module's outputs with a graph that `backward` recognises."""
        self._prepare(args, kwargs)
        own = self.stepper.own_draws
        with own.forward(own.count(args, kwargs), step=self._num_steps(), batch=(args, kwargs)) as draws:
            return self._forward(args, kwargs, draws=draws)

    def _forward(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, draws: StepDraws | None) -> Any:
        engine = self.engine
        self._leave_step()
        self._on_phase("forward")
        if engine.copies > 1:
            self._agree((args, kwargs)).wait()
        self.stepper.sentinels.begin_own_forward()
        before = graph_of([t for t in tensors_in((args, kwargs)) if t.requires_grad])
        with self.stepper.casts.in_forward():
            outputs = engine.own_forward(args, kwargs)
        self.stepper.sentinels.end_draws()  # another model's forward may come before the optimizer's step
        mark = ForwardMark(weakref.ref(self), self.num_updates, engine.streams(), before, draws)
        mark_outputs(outputs, mark)
        return outputs

    def _prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        stepper, engine = self.stepper, self.engine
        if not engine.is_prepared:
            stepper.refuse_early_change()
        stepper.own_draws.learn(args, kwargs)
        self._tell_of_norms()
        if engine.is_prepared:
            return
        if stepper.casts.dtype is not None:  # a script that casts its inputs, too: the search runs without autocast
            args, kwargs = map_tensors((args, kwargs), _widened)
        with memory_returned(), in_training_mode(engine), unchanged_draws(engine), stepper.casts.left_out():
            engine.prepare(lambda module: module(*args, **kwargs))
            stepper.own_draws.learn_cut()
        stepper.is_now_prepared()

    def _tell_of_norms(self) -> None:
        """Add the layers that normalise over a share to the plan's reasons, once."""
        if self._has_told_of_norms or not self.is_over_several_batches:
            return
        self._has_told_of_norms = True
        reason = share_reason(self.engine.module)
        if reason is not None:
            self._tell(reason)

    def _tell(self, reason: str) -> None:
        rule = self.stepper.rule
        if reason not in rule.reasons:
            rule.reasons += (reason,)

    def _agree(self, batch: Any, *, moved: bool = False, steps: bool = False) -> Agreement:
        """Start the exchange in which ranks compare what they must have alike."""
        stepper, engine = self.stepper, self.engine

        def explain(topics: list[str]) -> None:
            self._gradients_left.explain(topics)
            stepper.sentinels.explain(topics)

        return Agreement(
            engine.everyone,
            engine.device,
            known_weight=0.0,
            num_samples=0,
            num_tokens=0,
            wants_stop=self._wants_stop(),
            switched=None,
            held=engine.trainable_states,
            broken=stepper.find_change(),
            sayings=[
                *stepper.sentinels.sayings(batch, stepper.casts.dtype),
                *(self._gradients_left.sayings() if steps else ()),
            ],
            on_difference=explain,
            moved=moved,
            has_news=stepper.draws is not None and stepper.draws.has_news,
        )

    def loss(self, batch: Any) -> Loss:
        """Return the loss of this rank's share, by the `loss_fn` of the plan, with what it counts."""
        return self.stepper.own_loss(batch, self._forward, step=self._num_steps())

    # -- backward ---------------------------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor | Loss, weight: float | torch.Tensor | None, *, retain_graph: bool) -> float:
        """Add the gradient of the global mean of this loss to the gradients, and return the mean."""
        if not self.engine.takes_own_loops:
            raise ApplyError(
                f"model.backward() was called under the plan '{self.plan}', whose forward and backward are one work of "
                f"several {'stages' if self.plan.pp > 1 else 'threads'}",
                fix=FIX_PLAN,
            )
        self._leave_step()
        if not self.has_ranks:
            self.stepper.gate.has_own_gradients, self._norm_is_finite = True, False
            return _backward_alone(loss, retain_graph=retain_graph)
        self._on_phase("backward")
        value = real_number_of(loss, weight)
        graph = graph_of([value])
        if self.is_over_several_batches and not isinstance(loss, Loss):
            self._tell(OWN_MEAN)
        work = OwnBackward(self, loss, weight, graph, sorted(_LIVE, key=lambda loop: loop.number))
        found = self._value = work.agree()
        with contextlib.ExitStack() as stack:
            stack.enter_context(repeats_recognised())
            for loop in work.loops:
                stack.enter_context(loop.engine.switch.plain())
            kept = [loop.take_gradients() for loop in work.loops]
            for loop, gradients in zip(work.loops, kept, strict=True):
                loop.follow_switched()
                loop.refuse_running_hooks(bool(gradients))
                loop.begin_backward(graph.marks, is_alone=len(graph.marks) == 1)
            torch.autograd.backward(value, work.root(), retain_graph=retain_graph)
            for loop, gradients in zip(work.loops, kept, strict=True):
                loop.end_backward(gradients)
        return found

    def take_gradients(self) -> Any:
        """Take the gradients of earlier backwards away, with what the script has written into them."""
        self._gradients_left.keep()
        return self.engine.take_gradients()

    def follow_switched(self) -> None:
        """Follow a change of `requires_grad`, made on every rank."""
        if self.find_switched() is not None:
            self.stepper.accept_switched()

    def find_switched(self) -> str | None:
        """Return a parameter whose `requires_grad` was switched since the last step or backward, or None."""
        return self.stepper.find_switched()

    def refuse_running_hooks(self, has_earlier: bool) -> None:
        """Refuse a hook that one device would call with the sum of this backward's gradients and earlier ones."""
        for name, parameter in self.engine.module.named_parameters() if has_earlier else ():
            hooks: Any = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
            if any(isinstance(hook, UserHook) or not is_ours(hook) for hook in hooks.values()):
                raise ApplyError(
                    f"a hook waits for the gradient of '{name}', and an own loop runs backward again before the optimizer's "
                    "step: one device would call it with the sum, which is made later here",
                    fix="change gradients between model.backward(loss) and model.optimizer.step(), or use register_hook",
                )

    def begin_backward(self, marks: Sequence[ForwardMark], *, is_alone: bool) -> None:
        """Prepare the engine and the user's hooks."""
        engine = self.engine
        engine.switch.moment.steps += 1
        engine.switch.moment.has_own_gradients = True
        streams = [mark.streams for mark in marks if mark.loop() is self]
        if streams:
            engine.set_streams(streams[-1])
        engine.begin_own_backward(is_alone=is_alone)
        self.stepper.guard_hooks()

    def end_backward(self, kept: Any) -> None:
        """Exchange the gradients, and add those of earlier backwards."""
        engine = self.engine
        engine.end_own_backward()
        engine.finish_gradients(1.0 / engine.repeats)
        engine.end_own_exchange()
        engine.add_gradients(kept)
        self.stepper.gate.has_own_gradients = True
        self._norm_is_finite = False
        self._gradients_left.leave()

    # -- between backward and the optimizer -----------------------------------------------------------------------------

    def clip_grad_norm(self, max_norm: float) -> float:
        """Scale the whole gradient to a norm of at most `max_norm`, and return its norm before."""
        if not (isinstance(max_norm, int | float | torch.Tensor) and max_norm > 0):
            raise ConfigError(f"max_norm must be above 0, it is {max_norm!r}", fix="leave the call out to clip nothing")
        self.note_clip(f"clip_grad_norm({float(max_norm)})")
        norm = self.engine.norm_of_squares()
        is_untouched = not self._gradients_left.are_written()
        clip_(self._gradients(), norm, max_norm)
        if is_untouched:
            self._gradients_left.leave()
        self._norm_is_finite = math.isfinite(norm.item())
        return norm.item()

    def note_clip(self, call: str) -> None:
        """Note a call that clips the gradient; ranks compare theirs in the optimizer's step."""
        self._gradients_left.note(call)

    def has_pending(self) -> bool:
        """Whether there are gradients that the optimizer has not used."""
        return self._gradients_left.are_pending()

    def _gradients(self) -> list[torch.Tensor]:
        return [values_of(holder.grad) for holder in self.engine.gradient_holders() if holder.grad is not None]

    def zero_grad(self, *, set_to_none: bool = True) -> None:
        """Drop all gradients, or set them to zero."""
        self._gradients_left.zero(set_to_none=set_to_none)

    # -- the optimizer ----------------------------------------------------------------------------------------------

    def before_optimizer(self, closure: Any) -> None:
        """Have ranks agree on the step, and look at the gradients; called by the gate."""
        stepper, engine = self.stepper, self.engine
        self._leave_step()
        if closure is not None and self.has_ranks:
            raise ApplyError(
                f"the optimizer's step was given a closure under the plan '{self.plan}': it would run backward inside of the "
                "step, and exchange nothing",
                fix="run forward and model.backward(loss) before model.optimizer.step()",
            )
        self._on_phase("optimizer")
        with contextlib.ExitStack() as stack:
            stack.enter_context(engine.switch.plain())
            stepper.sentinels.begin_step()
            moved = engine.buffers_changed() or engine.looks_at_buffers(begins=False)
            agreement = self._agree(None, moved=moved, steps=True)
            agreement.wait()
            stepper.sentinels.end_draws()  # before the optimizer's own stream begins, which leaves the generator as it is now
            stepper.stop_requested = agreement.wants_stop
            if stepper.draws is not None:
                stepper.draws.share_reasons(is_wanted=agreement.has_news)
            if agreement.buffers_moved:  # not earlier: backward may need what a forward has saved of them
                engine.sync_buffers()
            stepper.sentinels.compare_if_due()
            engine.drop_cleared_gradients()
            if closure is None:
                self._look_at_norm()
            guard_step_hooks(stepper.optimizer, engine.switch)
            stack.enter_context(stepper.common_draws())
            self._around_step = stack.pop_all()

    def _look_at_norm(self) -> None:
        stepper, engine = self.stepper, self.engine
        if self._norm_is_finite and stepper.max_grad_norm is None:
            return
        norm = engine.norm_of_squares()
        if math.isfinite(norm.item()):
            if stepper.max_grad_norm is not None:
                clip_(self._gradients(), norm, stepper.max_grad_norm)
            return
        engine.leave_out_step()
        if stepper.non_finite == "stop":
            raise NonFiniteError(
                f"the gradient of this step is not finite (its norm is {norm.item()}); the parameters are unchanged",
                fix="look for the first loss that is not finite among those that model.backward() returned, or pass "
                "non_finite='skip' to apply_plan",
            )
        for holder in engine.gradient_holders():
            holder.grad = None

    def after_optimizer(self) -> None:
        """Spread the new values; called by the gate."""
        if self._around_step is None:
            if not self.has_ranks:  # a plain loss.backward() came before it
                self._on_update()
            return
        engine = self.engine
        try:
            engine.finish_step()
            self.stepper.sentinels.end_step(self._value, 0.0)
        finally:
            self._leave_step()
        self.num_updates += 1
        self._norm_is_finite = False
        self._gradients_left.forget()
        self._on_update()

    def _leave_step(self) -> None:
        """Leave the contexts of an optimizer's step, also of one that has raised."""
        stack, self._around_step = self._around_step, None
        if stack is not None:
            stack.close()


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def _backward_alone(loss: torch.Tensor | Loss, *, retain_graph: bool) -> float:
    value = loss.sum / loss.weight if isinstance(loss, Loss) else loss
    with repeats_recognised():
        torch.autograd.backward(value, retain_graph=retain_graph)
    return value.item()
