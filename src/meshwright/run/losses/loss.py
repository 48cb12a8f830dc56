"""Loss as a sum and a weight, exact however the batch is cut."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from meshwright._torch_private import without_dispatch_modes, without_function_modes
from meshwright.apply.modules.synced_norms import SyncedNorms
from meshwright.apply.state.outside import Outside
from meshwright.describe.batches import BatchSplitter
from meshwright.errors import ApplyError
from meshwright.run.losses.weights import IGNORED_LABEL, Counted, Guard, find_uneven_labels, label_paths

__all__: list[str] = ["IGNORED_LABEL"]

WHOLE_BATCH = "micro_batches=1, and batch=whole or dp=1"
"""What leaves the batch whole. With ``batch=whole`` ZeRO saves memory, and dp no time."""


@dataclasses.dataclass(frozen=True, slots=True)
class Loss:
    """A loss as a sum over whatever is counted, tokens for example, and that count.

    Return it from `loss_fn` where micro-batches or ranks may hold different counts: the step's loss and gradients are
    ``sum of sums / sum of weights``, which is what one device computes on the whole batch.

    Args:
        sum: The sum of the losses, a scalar tensor with its graph.
        weight: How much was summed, tokens for example: a number, or a scalar tensor [count]. Zero is allowed.

    >>> Loss(torch.tensor(6.0), 3).weight
    3
    """

    sum: torch.Tensor
    weight: float | torch.Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class LossTerm:
    """Contribution of one micro-batch."""

    value: torch.Tensor
    """The scalar to run backward from."""
    weight: float | torch.Tensor
    """Its weight."""
    is_mean: bool
    """True: `value` is a mean over `weight` items. False: it is their sum."""
    dtypes: tuple[torch.dtype, ...] = ()
    """Of the outputs, and of the loss; the same for all micro-batches of all ranks."""
    is_empty: bool = False
    """Whether nothing in the micro-batch counts: `value` is 0, and backward from it gives gradients of 0."""

    def total(self) -> torch.Tensor:
        """Return the sum over the items, without its graph, in float64."""
        value = self.value.detach().double()
        return value * self.weight if self.is_mean else value


class LossRule:
    """Converts the results of the user's loss to LossTerms.

    Trials on the first batch find what a mean is taken over (`meshwright.run.losses.settle`). Until then, and where they find
    nothing, a user's loss counts samples. A model's own loss counts labels, shifted where its class says so.

    Args:
        loss_fn: ``(outputs, batch)`` -> a scalar mean over the samples, or a Loss; None takes the model's own ``.loss``.
        module: The model, whose own loss may count shifted labels.
        splitter: Counts samples.
    """

    def __init__(self, loss_fn: Callable[[Any, Any], Any] | None, module: nn.Module, splitter: BatchSplitter) -> None:
        self._loss_fn = loss_fn
        self._outside: Outside | None = None
        self._splitter = splitter
        kinds = " ".join(type(child).__name__ for child in module.modules())
        self._seems_shifted = "CausalLM" in kinds or "LMHeadModel" in kinds
        self._counted: Counted | None = Counted() if loss_fn is not None else None
        self._guards: tuple[Guard, ...] = ()
        self.is_settled = False
        """Whether the first batch has been tried."""
        self.refuses = True
        """Whether a loss that parts of the batch do not give is an error; else it is a reason."""
        self.untried = ""
        """The reason that says so where the batch is cut and nothing could be tried: the model draws in eval mode, too."""
        self.norms: SyncedNorms | None = None
        """BatchNorm layers that normalise over all ranks' samples; None: over each rank's share."""
        self.reasons: tuple[str, ...] = ()
        """What is to be known of the loss, for people."""
        self.changes: dict[str, None] = {}
        """What loss_fn keeps that calls on trial have changed, for people."""
        self.has_untried_keeping = False
        """Whether nobody has tried what a step keeps for the next: the model draws, or nothing could be tried."""
        self.has_untried_slopes = False
        """Whether parameters are too large for trials of gradients."""
        self.branches = False
        """Whether the model branches on values of its batch, which is told: parts may decide for themselves."""
        self.size = 0.0
        """The largest loss of the first batch's trials, beside which later ones are judged."""
        self.refusal: ApplyError | None = None
        """Why parts of the first batch are refused; the same on every rank."""
        self.is_in_doubt = False
        """Whether they are refused since nothing shows what they give."""
        self.join: Callable[[], tuple[Any, list[int]] | None] | None = None
        """Returns the first batch of all ranks and the samples of each, or None; every rank calls it. None: not to be joined."""
        self.join_some: Callable[[], tuple[Any, list[int]] | None] | None = None
        """Returns the same of some samples of each rank, for a trial; None: this rank's share is all there is."""
        self._is_in_turn = False

    @property
    def asks_for_whole(self) -> bool:
        """Whether ranks may join their shares to a whole batch, where nothing shows that parts do."""
        return self.join is not None

    @property
    def matters(self) -> bool:
        """Whether anything is done about a loss that parts do not give: an error, or shares that are joined."""
        return self.refuses or self.asks_for_whole

    @property
    def told(self) -> tuple[str, ...]:
        """What is to be known of the batch and the loss by now, for people."""
        return self.reasons if self.norms is None or not self.is_settled else (*self.norms.reasons, *self.reasons)

    @property
    def loss_fn(self) -> Callable[[Any, Any], Any] | None:
        """The user's loss, or None for the model's own."""
        return self._loss_fn

    @property
    def is_given(self) -> bool:
        """Whether the loss is the user's, not the model's own."""
        return self._loss_fn is not None

    @property
    def exchanges_in_forward(self) -> bool:
        """Whether ranks wait for one another inside of a step's forward, which each has to begin then."""
        return self.norms is not None

    def settle(self, counted: Counted | None, *, guards: Sequence[Guard] = (), reasons: Sequence[str] = ()) -> None:
        """Set what the mean is taken over; None keeps the assumption."""
        self._counted = counted or self._counted
        self._guards, self.reasons, self.is_settled = tuple(guards), tuple(reasons), True

    def refused(self, error: ApplyError, *, is_in_doubt: bool = False) -> ApplyError:
        """Take note that parts of the first batch are refused, perhaps since nothing is shown, and return the error."""
        self.refusal, self.is_in_doubt = error, is_in_doubt
        return error

    def find_uneven(self, parts: Sequence[Any]) -> ApplyError | None:
        """Return an error if the labels of these micro-batches do not fit the weights found on the first batch, or there are none
        where each rank needs some.
        """
        if self.norms is not None and (empty := self.norms.find_empty(sum(map(self._splitter.count, parts)))):
            return empty
        return find_uneven_labels(self._guards, parts, self._splitter) if self._guards else None

    def known_weight(self, batch: Any) -> float:
        """Return the weight of a mean over this micro-batch, before the model has run."""
        counted = self._counted
        if counted is None:
            paths = label_paths(batch, self._splitter.count(batch)) if isinstance(batch, Mapping) else []
            counted = Counted(("labels",), self._seems_shifted) if ("labels",) in paths else Counted()
        return counted.weigh(batch, self._splitter)

    def term(self, outputs: Any, batch: Any, weight: float) -> LossTerm:
        """Return the contribution of a micro-batch with these outputs; `weight` is its `known_weight`."""
        loss = _own_loss(outputs) if self._loss_fn is None else self._loss_fn(outputs, batch)
        if isinstance(loss, Loss):
            return LossTerm(_scalar(loss.sum), _usable(loss.weight), is_mean=False)
        return LossTerm(_scalar(loss), weight, is_mean=True)

    def try_term(self, outputs: Any, batch: Any, weight: float) -> LossTerm:
        """Return the result of `term` on trial: state that loss_fn changes, such as a count of calls, is restored."""
        if self._is_in_turn:
            return self.term(outputs, batch, weight)
        with self._restored():
            return self.term(outputs, batch, weight)

    @contextlib.contextmanager
    def in_turn(self) -> Iterator[None]:
        """Have calls on trial inside the context find what those before them have left; it is restored after the last one."""
        with self._restored():
            self._is_in_turn = True
            try:
                yield
            finally:
                self._is_in_turn = False

    @contextlib.contextmanager
    def _restored(self) -> Iterator[None]:
        if self._loss_fn is None:
            yield
            return
        with without_function_modes(), without_dispatch_modes():
            self._outside = self._outside or Outside(None, [self._loss_fn])
            before = self._outside.take()
        try:
            yield
        finally:
            with without_function_modes(), without_dispatch_modes():
                self.changes |= dict.fromkeys(before.changed(by_value=True).values())
                before.restore()


def _usable(weight: float | torch.Tensor) -> float | torch.Tensor:
    """Return a weight: NaN for a negative one, infinity for one with a graph. Both make the step fail on every rank."""
    if not isinstance(weight, torch.Tensor):
        return weight if weight >= 0 else float("nan")
    if weight.numel() != 1:
        raise ApplyError(
            f"the weight of a meshwright.Loss must be one number, it is a tensor of shape {tuple(weight.shape)}",
            fix="pass how much was summed, mask.sum() for example",
        )
    if weight.requires_grad:
        return float("inf")
    weight = weight.reshape(())
    return torch.where(weight >= 0, weight, torch.nan)  # on its device: reading it would wait for the GPU


def _own_loss(outputs: Any) -> Any:
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if loss is None:
        raise ApplyError(
            f"no loss_fn was given, and the model returned no loss of its own (its output is a {type(outputs).__name__})",
            fix="pass loss_fn=(outputs, batch) -> scalar to apply_plan, or put 'labels' into the batch",
        )
    return loss


def _scalar(loss: Any) -> torch.Tensor:
    if not isinstance(loss, torch.Tensor):
        raise ApplyError(
            f"loss_fn must return a scalar tensor or meshwright.Loss, it returned a {type(loss).__name__}",
            fix="return the mean over the samples, or meshwright.Loss(sum, weight)",
        )
    if loss.numel() != 1:
        raise ApplyError(
            f"loss_fn must return one number, it returned a tensor of shape {tuple(loss.shape)}",
            fix="take .mean() over the samples, or return meshwright.Loss(loss.sum(), loss.numel())",
        )
    return loss.reshape(())
