"""Engine: what the step asks of a strategy. The base class is the engine of one device, which exchanges nothing."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from meshwright._torch_private import without_function_modes
from meshwright.apply.batch_shares import BatchShares
from meshwright.apply.finding import Finding
from meshwright.apply.forecast import Forecast
from meshwright.apply.gradient_sums import GradientExit
from meshwright.apply.held_state import HeldPart, whole_parts
from meshwright.apply.norm import squares_of, total_norm, values_of
from meshwright.apply.one_by_one import run_one_by_one
from meshwright.apply.own_passes import OwnPasses
from meshwright.apply.passes import StepWork, TermT
from meshwright.apply.shards.facts import RunMoment, ShardFacts
from meshwright.apply.shards.switch import ShardSwitch
from meshwright.comm.communicator import Communicator
from meshwright.describe.batches import call_model
from meshwright.errors import ApplyError, LostPeerError
from meshwright.spec import Plan

__all__: list[str] = []

T = TypeVar("T")


class Engine(OwnPasses, BatchShares):
    """A module placed on its device(s), and the exchange of its gradients.

    The step calls, in this order: `begin_step`, `run`, `finish_gradients`, and after the optimizer `finish_step` and
    `sync_buffers`; an evaluation `begin_forward`, `run`, `end_forward`. A rank with an empty share calls all of them.

    `run` is one micro-batch after the other, of which a strategy changes what it must: `arm`, `forward_backward`,
    `begin_backward` and `idle_pass` are called by `run` alone. A strategy with another order has a `run` of its own.

    Args:
        module: The user's module; its parameters keep their identity and their FQNs.
        group: The data-parallel ranks.
        device: Where this process's inputs belong.
    """

    def __init__(self, module: nn.Module, group: Communicator, device: torch.device) -> None:
        self.module = module
        self.group = group
        self.device = device
        self.parameters = list(module.parameters())

    switch = ShardSwitch()
    """What guards tensors of which this rank has a part, where user code can reach them."""

    num_replicas = 1
    """Copies of the module that compute at the same time in this process [count]."""

    puts_aside = False  # whether values of parameters are there while their layer runs alone

    @property
    def everyone(self) -> Communicator:
        """All ranks that take a step together."""
        return self.group

    @property
    def loss_group(self) -> Communicator:
        """The ranks over which losses are summed: together they compute each loss once."""
        return self.group

    def detail(self, plan: Plan) -> Plan:
        """Return the plan with the decisions that the strategy made itself."""
        return plan

    @property
    def is_prepared(self) -> bool:
        """Whether `prepare` has nothing to do."""
        return True

    def prepare(self, run: Callable[[nn.Module], Any] | None) -> None:
        """Look at a first batch, before anything else happens with it; None where this rank has no sample."""

    # -- inspections: a part of the strategy beside one device, on live data -----------------------------------------

    def begin_inspection(self, number: int) -> str | None:  # noqa: ARG002 - for strategies that have parts
        """Start the inspection of one part: the next forward runs it a second time as on one device. Parts take turns.

        Args:
            number: Inspections before this one [count]; the part is `number` modulo the parts that there are.

        Returns:
            The part's name, equal on all ranks; None where this strategy has nothing to compare.
        """
        return None

    def end_inspection(self) -> Sequence[Finding]:
        """Return the part's differences on this rank; nothing where it was equal or did not run."""
        return ()

    def copies_of_state(self) -> list[tuple[Communicator, list[tuple[str, torch.Tensor]]]]:
        """Return (ranks, [(FQN, parameter or buffer)]) of what is equal, bit for bit, on those ranks between steps.

        Groups come in one order on all ranks. What the optimizer keeps for a parameter is equal there, too.
        """
        return []

    def held_state(self) -> list[HeldPart]:
        """Return this rank's part of each parameter and persistent buffer, between steps; together ranks hold every entry."""
        return whole_parts(self.module)

    def take_held_state(self) -> None:
        """Give new values of `held_state` to copies of them; every rank calls it."""

    def generators(self) -> dict[str, torch.Generator]:
        """Return the strategy's own generators, by name."""
        return {}

    # -- what it says of itself ---------------------------------------------------------------------------------------

    def forecast(self) -> Forecast:
        """Return what works out the bytes that this rank sends in a step, before the first step."""
        return Forecast()

    @property
    def num_walks(self) -> int:
        """Forwards of the model, with stand-ins for layers of other ranks, that one micro-batch takes on this rank [count]."""
        return 1

    def gives_own(self, name: str) -> bool:  # noqa: ARG002 - for strategies that have parts
        """Tell whether what a module gives here is its output, or a slice of it: no stand-in, and no term of a sum."""
        return True

    def own_value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return this rank's values of a tensor that a module has just given, plain; None where another rank has them."""
        with without_function_modes():
            return tensor.detach()

    @property
    def deals_parameters_out(self) -> bool:
        """Whether this rank's optimizer gets some of the model's parameters alone, or pieces of them."""
        return False

    @property
    def exchanges_in_backward(self) -> bool:
        """Whether gradients may be on their way before backward has ended."""
        return False

    @property
    def may_stop_alone(self) -> bool:
        """Whether a rank whose forward or loss raises can still tell the others, since none of them waits for it in a forward."""
        return self.everyone.size > 1 and not self.needs_lockstep and self.copies == 1

    @property
    def owes_nothing_to_the_loss(self) -> bool:
        """Whether only other ranks have the outputs of the forward under way, so that they alone compute the loss."""
        return False

    @property
    def needs_lockstep(self) -> bool:
        """Whether every rank must run as many micro-batches as any; a rank without one runs `idle_pass` in its place."""
        return False

    @property
    def agrees_first(self) -> bool:
        """Whether all ranks must have agreed to take a step before the first forward, since others may wait in it."""
        return self.needs_lockstep

    def trainable_states(self) -> dict[str, bool]:
        """Return `requires_grad` of each parameter that this rank holds, by FQN."""
        return {name: parameter.requires_grad for name, parameter in self.module.named_parameters()}

    def adopt_optimizer(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Prepare the optimizer before anything runs; an engine that shards gives it this rank's shards."""

    @property
    def holds_parts(self) -> bool:
        """Whether the module's parameters hold only parts of their values now, outside `whole_parameters`."""
        return False

    def use_switch(self, switch: ShardSwitch) -> None:
        """Set the switch that guards this model's tensors."""
        self.switch = switch

    def guard_parts(self) -> None:
        """Guard the tensors of which this rank has a part now."""
        self.switch.adopt(self.held_parts(self.switch.moment))
        self.use_switch(self.switch)

    def held_parts(self, moment: RunMoment) -> list[tuple[torch.Tensor, ShardFacts]]:  # noqa: ARG002 - for strategies that cut
        """Return the tensors of which this rank has a part between steps, each once, with the facts about them."""
        return []

    def gradient_terms(self) -> set[int]:
        """Return ids of the parameters whose gradients are terms of sums until `finish_gradients`."""
        return {id(parameter) for parameter in self.parameters} if self.group.size > 1 else set()

    @property
    def reads_as_nan(self) -> str:
        """Names of values that a script may have read and this rank does not have; "" where there are none."""
        return ""

    @property
    def fixes_memory(self) -> bool:
        """Whether the parameters' values must stay in their present memory."""
        return False

    def refuse_lost_writes(self) -> None:
        """Raise ApplyError if a script has written into parameters whose values are not on this rank."""

    def accept_groups(self, optimizer: torch.optim.Optimizer) -> ApplyError | None:
        """Correct an optimizer whose groups the user has changed, or return why that is impossible."""
        if self.everyone.size == 1 and self.num_replicas == 1:
            return None
        live = {id(parameter) for parameter in self.module.parameters()}
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        strange = [tuple(parameter.shape) for parameter in held if id(parameter) not in live]
        if not strange:
            return None
        return ApplyError(
            f"{len(strange)} of the {len(held)} parameters of {type(optimizer).__name__}, one of shape {strange[0]} for "
            "example, are not this rank's part of the model: their gradients are not summed over the ranks",
            fix="add parameters that model.parameters() has now",
        )

    def begin_step(self) -> None:
        """Drop the last step's gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    def arm(self) -> None:
        """Mark the next backward as the last of this step, so that reduction may start while it runs."""

    def begin_forward(self) -> None:
        """Prepare for forwards outside a step."""

    def end_forward(self) -> None:
        """End these forwards."""

    def before_layer(self, layer: nn.Module) -> None:
        """Prepare for a layer's forward, which may be a repetition in backward."""

    def begin_backward(self) -> None:
        """End a micro-batch's forward and begin its backward."""

    def idle_pass(self) -> None:
        """Take part in the other ranks' exchanges of a micro-batch; without a backward where gradients are off."""

    def end_failed_pass(self) -> None:
        """Take part in what is left of a pass whose forward has raised here, in the user's code; other ranks go on with it."""

    # -- trials: forwards outside of a step, to find out what a loss counts -------------------------------------------

    @property
    def forward_groups(self) -> list[Communicator]:
        """Groups whose ranks run each forward together: what one notices in it is told to the others."""
        return []

    def look_at(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take note of a first micro-batch's inputs, before any forward on this rank."""

    @contextlib.contextmanager
    def trying(self) -> Iterator[None]:
        """Have forwards run by `try_forward` inside, and `idle_pass`: together as many on every rank."""
        self.begin_forward()
        yield
        self.end_forward()

    def try_forward(self, batch: Any) -> Any:
        """Return the module's outputs for a batch."""
        try:
            return self.forward_backward(batch, call_model)[0]
        except LostPeerError:
            raise
        except Exception:  # the trial ends with it here, and other ranks have exchanges of this pass to come
            self.end_failed_pass()
            raise

    def refresh_trainable(self) -> None:
        """Follow a change of `requires_grad`, made on every rank."""

    def run(self, work: StepWork[TermT]) -> list[TermT]:
        """Run the micro-batches of a step, backward too where gradients are on, and return the losses that this rank computes.

        Raises:
            ApplyError: The ranks cannot take this step.
            Exception: What the user's code raises; the other ranks have been told of it where they can be.
        """
        return run_one_by_one(self, work)

    def forward_backward(self, batch: Any, compute: Callable[[nn.Module, Any], T]) -> list[T]:
        """Run `compute(module, batch)`, which does forward, loss and backward, and return its results."""
        return [compute(self.module, batch)]

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the module's outputs for these inputs."""
        return self.module(*args, **kwargs)

    @property
    def gradients_leave(self) -> GradientExit:
        """When whole gradients leave this rank: an engine around this one has to add up its own terms before."""
        return GradientExit.NEVER

    def finish_gradients(self, scale: float) -> None:
        """Return when every parameter's `.grad` is the whole batch's, multiplied by `scale`."""
        if scale != 1.0:
            for parameter in self.parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(scale)

    def gradient_tensors(self) -> Sequence[torch.Tensor]:
        """Return tensors that together hold each gradient element once, for norms and scaling."""
        return [parameter.grad for parameter in self.parameters if parameter.grad is not None]

    def gradient_pieces(self) -> list[tuple[torch.Tensor, nn.Parameter]]:
        """Return (gradient, parameter), each gradient element once, over the ranks of `sum_over_pieces`."""
        pairs = [(parameter.grad, parameter) for parameter in self.parameters if parameter.grad is not None]
        return [(values_of(grad), parameter) for grad, parameter in pairs]

    def sum_over_pieces(self, values: torch.Tensor) -> None:
        """Add up, in place, over the ranks that hold other pieces of the same gradients."""

    def gradient_squares(self, skipped: frozenset[int], *, exact: bool) -> torch.Tensor:
        """Return the sum of the whole gradient's squares, a float64 scalar, without the parameters of these ids.

        `exact` takes each square in float64, too.
        """
        gradients = [gradient for gradient, parameter in self.gradient_pieces() if id(parameter) not in skipped]
        squares = squares_of(gradients, self.device, exact=exact)
        self.sum_over_pieces(squares)
        return squares

    def norm_of_squares(self) -> torch.Tensor:
        """Return the 2-norm of the whole gradient by its squares, in float64 where they overflow the gradient's dtype."""
        norm = self.gradient_squares(frozenset(), exact=False).sqrt()
        return norm if math.isfinite(norm.item()) else self.gradient_squares(frozenset(), exact=True).sqrt()

    def gradient_norm(self) -> torch.Tensor:
        """Return the 2-norm of the whole gradient, a scalar."""
        return total_norm(self.gradient_tensors(), self.device)

    def refuse_taken(self) -> None:
        """Raise ApplyError, on every rank, if the gradient is not finite because a hook removed a part of it on any."""

    def finish_step(self) -> None:
        """End the step: the optimizer has written new values."""

    def leave_out_step(self) -> None:
        """End the step without the optimizer: a loss or gradient is not finite."""

    def compression_state(self) -> dict[str, torch.Tensor]:
        """Return the compressed gradients' unsent rest on this rank, by name: the live tensors, for a checkpoint."""
        return {}

    def load_compression_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load the result of `compression_state` on this rank, under the same plan.

        Raises:
            ApplyError: It is of another plan; where only a shape tells, when the tensor is needed.
        """
        if state:
            raise ApplyError(
                f"the state holds {len(state)} tensors of compressed gradients, and this plan compresses none",
                fix="load it under the plan that it was saved under, or leave it out",
            )

    @contextlib.contextmanager
    def whole_parameters(self) -> Iterator[None]:
        """Make every parameter whole inside the context. Every rank enters it."""
        yield

    def full_gradients(self) -> dict[str, torch.Tensor | None]:
        """Return each parameter's whole gradient by FQN, after `finish_gradients`; None where it has none. On every rank."""
        return {name: parameter.grad for name, parameter in self.module.named_parameters()}

    def held_tensors(self) -> dict[str, list[torch.Tensor]]:
        """Return the tensors whose memory this rank holds for "parameters" and "gradients"; several may share memory."""
        return {
            "parameters": list(self.parameters),
            "gradients": [parameter.grad for parameter in self.parameters if parameter.grad is not None],
        }

    def buffers_changed(self) -> bool:
        """Tell whether anything wrote into a buffer since the last `sync_buffers` or `note_buffers`."""
        return False

    def looks_at_buffers(self, *, begins: bool) -> bool:  # noqa: ARG002
        """Tell whether `sync_buffers` follows this step even where no write is known of; it `begins`: no forward has run."""
        return False

    def note_buffers(self) -> None:
        """Record the present buffers as equal on all ranks."""

    def sync_buffers(self) -> None:
        """Make the buffers equal on all ranks."""

    def close(self) -> None:
        """Release threads and hooks."""
