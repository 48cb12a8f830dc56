"""One trial forward of a model and its loss, after which all is as it was."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from meshwright._torch_private import PlainCheckpoints
from meshwright.apply.modules.copies import own_copy
from meshwright.apply.modules.modes import set_eval_flags
from meshwright.apply.state.buffers import BufferSnapshot, buffer_digests
from meshwright.apply.state.outside import Outside
from meshwright.apply.state.undisturbed import GeneratorStates, buffer_versions, draw_ahead, undisturbed
from meshwright.describe.batches import split_samples
from meshwright.run.losses.loss import LossTerm
from meshwright.run.losses.own_slopes import Slopes, own_function_of, slopes_of, without_parameter_hooks
from meshwright.run.losses.trial_watch import TrialWatch, term_with_slopes
from meshwright.run.losses.trial_writes import OwnBackwardError
from meshwright.run.losses.widened import widen, widened
from meshwright.trees import map_tensors

__all__: list[str] = []

RAISED = "it raised"
"""How the obstacle of a trial begins whose code has raised."""

DRAWS = "it draws random numbers"
"""The obstacle of a trial in which a generator has moved."""
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@runtime_checkable
class InTurn(Protocol):
    """A loss whose code may keep something of one call for the next (`LossRule`)."""

    def __call__(self, outputs: Any, batch: Any, /) -> LossTerm:
        """Return the loss."""
        ...

    def in_turn(self) -> contextlib.AbstractContextManager[None]:
        """Return the context in which calls find what those before them have left."""
        ...


class DrawsOfTrial(Protocol):
    """Random numbers of one trial (`run/global_draws.py`)."""

    def running(self) -> contextlib.AbstractContextManager[None]:
        """Return the context of the forward."""
        ...

    def take(self, outputs: Any) -> None:
        """Take the model's outputs."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class TrialForward:
    """One forward to run."""

    batch: Any
    evaluates: bool
    """Whether in eval mode; else in the mode that the model is in."""
    counts: tuple[int, ...] = ()
    """Rows of the outputs to take the loss of, each beside the same rows of the batch, instead of the loss of all."""
    draws: DrawsOfTrial | None = None
    """By which its random numbers are drawn by place, in training mode; None: as torch does."""
    ahead: int | None = None
    """Numbers that each generator draws before it, where random numbers do not decide the loss; None: they may [count]."""
    slopes: float = 0.0
    """What the loss is multiplied by for its gradients by the parameters; 0: none are taken."""
    then: Any = None
    """A second batch, of which the loss is taken, with what code has kept of the first one outside of buffers."""
    is_wide: bool = False
    """Whether it runs in float32 where the model or the batch has fewer digits."""
    casts: torch.dtype | None = None
    """What it is cast to, as under autocast; None: nothing is."""

    @property
    def num_forwards(self) -> int:
        """Forwards that it takes [count]."""
        return 1 if self.then is None else 2


@dataclasses.dataclass(frozen=True, slots=True)
class TrialOutcome:
    """Result of a trial."""

    value: float = math.nan
    weight: float | None = None
    """The weight of a Loss; None for a mean."""
    dtype: torch.dtype = torch.float64
    ignored: tuple[int, ...] = ()
    """Labels that the cross-entropies in it ignored."""
    has_class_weights: bool = False
    branches: bool = False
    """Whether Python read a value of a tensor."""
    parts: tuple[float, ...] = ()
    """The losses of the trial's rows."""
    obstacle: str | None = None
    """Why nothing can be concluded from it."""
    error: Exception | None = None
    """What its code raised, where that is the obstacle."""
    written: tuple[tuple[str, Tensor], ...] = ()
    """Parameters that the forward has set, by FQN, or numbers that stand for their values; they are put back."""
    left: frozenset[str] = frozenset()
    """Those that are too large to be put back."""
    own_generator: str = ""
    """The place of a generator of the model's own that has drawn."""
    changes: tuple[str, ...] = ()
    """What code keeps outside of buffers that it has changed, for people."""
    own_slopes: str = ""
    """Code of its own that is in backward, for people; "" where there is none."""
    slopes: Slopes = dataclasses.field(default_factory=dict[str, Sequence[float]])
    """Gradients by parameters, where they were taken."""
    is_coarse: bool = False
    """Whether something in it has fewer digits than float32."""


def run_trial(
    module: nn.Module,
    device: torch.device,
    trial: TrialForward,
    forward: Callable[[Any], Any],
    term: Callable[[Any, Any], LossTerm],
    *,
    has_graph: bool = False,
) -> TrialOutcome:
    """Return the results of a forward and its loss; an exception in them is an obstacle, and all state is restored.

    Args:
        module: The model.
        device: Its device.
        trial: The trial.
        forward: batch -> outputs.
        term: (outputs, batch) -> loss.
        has_graph: Whether code may take gradients inside.
    """
    batch, then = _own_batches(trial)
    norms = _statistics_lent(module) if trial.evaluates else contextlib.nullcontext()
    with undisturbed(module, device), widened(module, trial.is_wide), norms:
        if trial.evaluates:
            set_eval_flags(module)
        elif trial.draws is not None and not module.training:
            module.train()  # a model that trains keeps the modes of its parts: some may be frozen, or not yet be so
        normalises = any(
            isinstance(m, _BATCH_NORMS) and (m.training or m.running_mean is None) for m in module.modules()
        )
        draw_ahead(device, trial.ahead or 0)
        generators, versions, watch = GeneratorStates(device), buffer_versions(module), TrialWatch()
        numbers = _buffer_numbers(module)
        outside = _OutsideState(module, is_kept=bool(trial.slopes) or trial.then is not None)
        slopes: dict[str, list[float]] = {}
        try:
            with (
                outside,
                term.in_turn() if isinstance(term, InTurn) and trial.then is not None else contextlib.nullcontext(),
                warnings.catch_warnings(action="ignore"),
                _eagerly(),
                watch,
                torch.set_grad_enabled(has_graph or bool(trial.slopes)),
                without_parameter_hooks(module.parameters() if trial.slopes else ()),
                _without_checkpoints() if trial.slopes else contextlib.nullcontext(),
                torch.autocast(device.type, dtype=trial.casts, enabled=trial.casts is not None),
                contextlib.nullcontext() if trial.draws is None else trial.draws.running(),
            ):
                if trial.then is not None:
                    _run_first(module, trial.slopes or 1.0, batch, forward, term)
                    batch = then
                outputs = forward(batch)
                if trial.draws is not None:
                    trial.draws.take(outputs)
                branches = watch.branches
                if trial.counts:
                    rows = zip(_rows(outputs, trial.counts), split_samples(batch, trial.counts), strict=True)
                    return TrialOutcome(parts=tuple(float(term_with_slopes(term, *pair).value) for pair in rows))
                found = term_with_slopes(term, outputs, batch)
                own_slopes = watch.own_slopes or own_function_of(found.value)
                if trial.slopes:
                    slopes = slopes_of(found.value, module.named_parameters(), trial.slopes)
            value, weight = float(found.value), None if found.is_mean else float(found.weight)
        except OwnBackwardError:
            raise
        except Exception as error:  # noqa: BLE001 - the user's code: what it raises here it raises in the step, too
            obstacle = f"{RAISED} {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            return TrialOutcome(obstacle=obstacle, error=error)
        obstacle = None
        if normalises:
            obstacle = "it normalises with statistics of the batch"
        elif trial.ahead is None and generators.have_moved():
            obstacle = DRAWS
        elif (  # a proof puts them back
            not trial.evaluates and buffer_versions(module) != versions and _buffer_numbers(module) != numbers
        ):
            obstacle = "it writes into its buffers"  # which it may not do in eval mode
        return TrialOutcome(
            value,
            weight,
            found.value.dtype,
            tuple(dict.fromkeys(watch.ignored)),
            watch.has_class_weights,
            branches,
            obstacle=obstacle,
            own_generator=outside.own_generator,
            changes=outside.changes,
            own_slopes=own_slopes,
            slopes=slopes,
            is_coarse=watch.is_coarse,
        )


@contextlib.contextmanager
def _statistics_lent(module: nn.Module) -> Iterator[None]:
    """Give norms without running statistics those of a new norm, so that an evaluation does not normalise over its batch.

    What a loss does with samples does not depend on the scale of what it is given.
    """
    # Under ZeRO-3 look-ups by name gather what is asked for, and other ranks may run no trial.
    held = (p for child in module.modules() for p in dict.values(child._parameters))
    like = next((p for p in held if p is not None and p.is_floating_point()), torch.empty(0))
    norms = [m for m in module.modules() if isinstance(m, _BATCH_NORMS) and m.running_mean is None and m.num_features]
    for norm in norms:
        norm.running_mean, norm.running_var = like.new_zeros(norm.num_features), like.new_ones(norm.num_features)
    try:
        yield
    finally:
        for norm in norms:
            norm.running_mean = norm.running_var = None


def _without_checkpoints() -> contextlib.AbstractContextManager[None]:
    """Return the context in which torch.utils.checkpoint has a graph at once: a reentrant one gives no gradients on request."""
    return PlainCheckpoints(lambda: True, lambda _: None)


def _buffer_numbers(module: nn.Module) -> list[tuple[str, str | int]]:
    """Return what tells the buffers' numbers from others; of those without strides, which tensor it is, and of what version."""
    dense = {name: digest for name, _, _, digest in buffer_digests(module)}
    return [(name, dense.get(name, id(held) + held._version)) for name, held in module.named_buffers()]


class _OutsideState:
    """What code keeps outside of parameters and buffers, around a trial.

    Args:
        module: The model.
        is_kept: Whether it is compared and restored; else its generators alone are looked at.
    """

    def __init__(self, module: nn.Module, *, is_kept: bool) -> None:
        self._outside = Outside.of(module)
        self._generators = self._outside.generator_states()
        self._before = self._outside.take() if is_kept else None
        self.own_generator = ""
        """The place of a generator of the model's own that has drawn."""
        self.changes: tuple[str, ...] = ()
        """What was changed, for people."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pairs = zip(self._generators, self._outside.generator_states(), strict=False)
        self.own_generator = next((before[0] for before, after in pairs if before != after), "")
        if self._before is not None:
            self.changes = tuple(dict.fromkeys(self._before.changed(by_value=True).values()))
            self._before.restore()


def _run_first(
    module: nn.Module, factor: float, batch: Any, forward: Callable[[Any], Any], term: Callable[[Any, Any], LossTerm]
) -> None:
    """Run a first batch, and put the buffers back."""
    buffers = BufferSnapshot(module)
    found = term_with_slopes(term, forward(batch), batch)
    if torch.is_grad_enabled():  # hooks in backward may keep something, too
        slopes_of(found.value, module.named_parameters(), factor)
    buffers.restore()


def _own_batches(trial: TrialForward) -> tuple[Any, Any]:
    """Return copies of its batches: the next trial, and the step, take what this one's code may write into."""
    batch, then = own_copy(trial.batch), own_copy(trial.then)
    return (widen(batch), widen(then)) if trial.is_wide else (batch, then)


def _rows(outputs: Any, counts: Sequence[int]) -> Iterator[Any]:
    """Yield the outputs of each part; those without one row for each sample are the same in all of them."""
    start = 0
    for count in counts:
        stop = start + count

        def cut(tensor: Tensor, start: int = start, stop: int = stop) -> Tensor:
            return tensor[start:stop] if tensor.dim() > 0 and tensor.shape[0] == sum(counts) else tensor

        yield map_tensors(outputs, cut)
        start = stop


def _eagerly() -> contextlib.AbstractContextManager[Any]:
    # Other batch sizes would make torch.compile compile again; importing it takes seconds.
    is_there = "torch._dynamo" in sys.modules
    return torch.compiler.set_stance("force_eager") if is_there else contextlib.nullcontext()
