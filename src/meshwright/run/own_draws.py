"""Random numbers of forwards that a user's own loop calls: `model(...)` and `model.loss(batch)`.

Each call is a batch of its own: ranks tell one another how many samples they brought, and the calls before one step of the
optimizer follow one another in the global order. What backward repeats of such a forward finds its numbers by their marks.
"""

from __future__ import annotations

import contextlib
import inspect
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from meshwright.apply.engine import Engine
from meshwright.apply.randomness.philox import key_of
from meshwright.apply.randomness.sites import StepDraws, in_step, keep
from meshwright.describe.batches import BatchSplitter, count_samples
from meshwright.errors import ApplyError
from meshwright.run.global_draws import GlobalDraws
from meshwright.run.loss_graph import ForwardMark
from meshwright.run.losses.enough import enough_samples
from meshwright.run.losses.loss import LossTerm
from meshwright.trees import map_tensors

__all__: list[str] = []

_NUM_KEPT = 64
"""Forwards that are recognised though the graph of their outputs is gone, as where a loss reads what a layer has kept [count]."""
_NO_PLACE = (
    "the inputs of model(...) have no common number of samples in dim 0, so that torch's generators draw in it; "
    "model.loss(batch) and model.step(batch) count by the batch"
)
_SPLIT = (
    "split= of apply_plan counts batches, not the inputs of model(...), whose samples are unknown (model.loss(batch) and "
    "model.step(batch) count by it)"
)
_NO_GRAPH = "model(...) without a graph (torch.no_grad, frozen weights) draws from torch's generators: each rank draws for itself"
_VIEWS = (
    "model(...) was given several rows for each sample that its loss counts, and views of a batch that are joined "
    "(torch.cat([x, x])) lie in another order on several ranks: their numbers may depend on the layout; call the model once "
    "for each view"
)


class OwnDraws:
    """The draws of own loops over a model.

    Args:
        draws: The model's; None where torch's generators draw.
        engine: The strategy.
        splitter: Counts and cuts batches.
    """

    def __init__(self, draws: GlobalDraws | None, engine: Engine, splitter: BatchSplitter) -> None:
        self._draws = draws
        self._engine = engine
        self._splits_by_row = splitter.splits_by_row
        self.model_number = 0
        """Number of the model among those of this process, equal on all ranks."""
        self._step = -1
        self._num_samples = 0
        """Samples of this step's earlier forwards, of all ranks [count]."""
        self._num_forwards = 0
        """Forwards of this step so far [count]."""
        self._recent: deque[StepDraws] = deque(maxlen=_NUM_KEPT)

    def learn(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Find the sample dims of all draws by trials of a call's inputs, once; every rank calls it."""
        draws = self._draws
        if draws is None or draws.is_known:
            return
        engine, splitter, share = self._engine, BatchSplitter(), None
        count = self.count(args, kwargs)
        batch = as_batch(engine.module, args, kwargs)
        given = None if batch is None else map_tensors(batch, torch.Tensor.detach)
        if given is not None and count == 0:  # what no rank can tell by its samples: two of zeros may draw
            given = map_tensors(
                given, lambda tensor: tensor.new_zeros((2, *tensor.shape[1:])) if tensor.dim() else tensor
            )
        # Models that draw nothing exchange nothing here: their ranks may not even make the same calls before an error.
        is_alone = engine.is_prepared and not engine.needs_lockstep and engine.copies == 1
        is_alone = is_alone and (engine.everyone.size > 1 or not count)
        if is_alone and given is not None and not draws.look_alone(given, _AnySize(), _no_loss):
            return
        if not self._splits_by_row:
            draws.leave_to_torch(_SPLIT)
            return
        if given is not None and count:
            share = enough_samples([given], splitter)
        draws.learn(share, splitter, _no_loss)

    def learn_cut(self) -> None:
        """Find which parts cut layers draw, once layers are cut; every rank calls it."""
        if self._draws is not None:
            self._draws.learn_cut(BatchSplitter(), _no_loss)

    def count(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
        """Return the samples of a call; None where its inputs do not tell [count]."""
        if not self._splits_by_row:
            return None
        try:
            return count_samples((args, dict(kwargs)))
        except ApplyError:
            return None

    def without_graph(self) -> contextlib.AbstractContextManager[None]:
        """Return the context of a forward that ranks may call alone: torch's generators draw, and that they do is told."""
        return contextlib.nullcontext() if self._draws is None else self._draws.left(_NO_GRAPH)

    @contextlib.contextmanager
    def forward(self, num_samples: int | None, *, step: int, batch: Any) -> Iterator[StepDraws | None]:
        """Run a forward inside the context; every rank enters it, unless it has no graph.

        Args:
            num_samples: This rank's samples; None: not known [count].
            step: Steps of the optimizer so far [count].
            batch: What it takes.

        Yields:
            What the graph has to hold until backward; None where torch's generators draw.
        """
        draws = self._draws
        if draws is None or draws.is_off:
            yield None
            return
        if not draws.has_draws or not torch.is_grad_enabled():
            has_graph = torch.is_grad_enabled()
            alike = draws.forward("step", 0, 0, self._next(draws, step)) if has_graph else contextlib.nullcontext()
            with draws.left() if has_graph else draws.left(_NO_GRAPH), alike:
                yield None
            return
        number, first = self._next(draws, step), self._take_place(num_samples)
        if first is None:
            with draws.left(_NO_PLACE), draws.forward("step", 0, 0, number):
                yield None
            return
        own = draws.new_step("step")
        own.num_samples = num_samples
        placed = draws.forward("step", first, num_samples or 0, number, batch=batch)
        with _stream_of_its_own(f"{self.model_number}/{draws.share}/{own.text}/{number}"), in_step(own), placed:
            yield own
        if own.marks:
            self._recent.append(own)
            keep(own)

    def look_at_views(self, marks: Sequence[ForwardMark], weight: float) -> None:
        """Tell where a loss counts fewer samples than rows that drew: views that a script has joined lie in an unknown order.

        Args:
            marks: Calls of the model that the loss comes from.
            weight: What the loss counts on this rank.
        """
        if self._draws is None or self._engine.num_shares == 1 or weight < 1:
            return
        for mark in marks:
            num_rows = 0 if mark.draws is None or not mark.draws.marks else mark.draws.num_samples or 0
            if num_rows > weight and num_rows % weight == 0:
                self._draws.tell(_VIEWS)

    def _next(self, draws: GlobalDraws, step: int) -> int:
        """Return the forwards of this step before the one that begins now, which is counted [count]."""
        draws.step = step
        if step < self._step:  # an earlier checkpoint was loaded: its forwards make the marks of those that were kept
            self._recent.clear()
        if step != self._step:
            self._step, self._num_samples, self._num_forwards = step, 0, 0
        self._num_forwards += 1
        return self._num_forwards - 1

    def _take_place(self, num_samples: int | None) -> int | None:
        """Return the place of this rank's first sample in the step; None, on every rank, where any does not know its number."""
        group = self._engine.group
        counts = [-1.0 if num_samples is None else float(num_samples)]
        if self._engine.num_shares > 1:
            told = torch.zeros(group.size, dtype=torch.float64, device=group.message_device(self._engine.device))
            told[group.group_rank] = counts[0]
            group.all_reduce(told)
            counts = told.tolist()
        if min(counts) < 0:
            return None
        first = self._num_samples + round(sum(counts[: self._engine.share]))
        self._num_samples += round(sum(counts))
        return first


class _AnySize(BatchSplitter):
    """Counts samples where they can be counted."""

    def count(self, batch: Any) -> int:
        """Return the samples of a batch; 0 where its tensors do not agree [count]."""
        try:
            return super().count(batch)
        except ApplyError:
            return 0


@contextlib.contextmanager
def _stream_of_its_own(text: str) -> Iterator[None]:
    """Give torch's generator a state that no other forward has, so that marks differ whatever a script seeds it with."""
    state = torch.default_generator.get_state()
    torch.default_generator.manual_seed(key_of(text) >> 1)
    try:
        yield
    finally:
        torch.default_generator.set_state(state)


def as_batch(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the batch that gives these arguments to a module; None where positional ones have no names."""
    if not kwargs:
        return (args,)
    if not args:
        return dict(kwargs)
    try:
        bound = inspect.signature(module.forward).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return None
    kinds = {name: parameter.kind for name, parameter in bound.signature.parameters.items()}
    found: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        if kinds[name] in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY):
            return None
        found |= value if kinds[name] is inspect.Parameter.VAR_KEYWORD else {name: value}
    return found


def _no_loss(outputs: Any, batch: Any) -> LossTerm:
    del outputs, batch
    return LossTerm(torch.zeros(()), 1.0, is_mean=True)
