"""Draws of a model that do not know the layout: found and tried at the first batch, then given to each step (ADR 0025).

The first batch is run whole and in parts, without a trace. A dim that grows with the samples holds them. Then the whole and the
parts are run again, with draws by place: where the outputs of parts are those of the whole, the numbers do not depend on how a
batch is cut.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import random
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from meshwright.apply.engine import Engine
from meshwright.apply.randomness.operators import install_operators
from meshwright.apply.randomness.philox import key_of
from meshwright.apply.randomness.sample_dims import SiteDims, find_dims
from meshwright.apply.randomness.sites import Call, ForwardDraws, Names, Note, StepDraws, in_forward, in_step
from meshwright.apply.state.outside import Outside
from meshwright.apply.state.random_states import PythonState
from meshwright.describe.batches import BatchSplitter
from meshwright.run.losses.loss import LossTerm
from meshwright.run.losses.trial_runs import run_alone, run_together
from meshwright.run.losses.trials import Evidence, TrialForward, TrialOutcome
from meshwright.trees import tensors_in

__all__: list[str] = []

_NUM_PARTS = 3
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-3}
_LOW_TOLERANCE = 5e-2
"""By how much outputs of parts may differ from the whole's: another mask changes them by far more [fraction]."""
_MOST_TOLD = 16

_Trials = Generator[list[TrialForward], list[TrialOutcome], Evidence]
_UNPROVEN = (
    "rng: parts of the first batch did not give the outputs of the whole with the same random numbers; they may depend on the "
    "layout"
)


class TrialDraws:
    """The draws of one trial forward, and its outputs.

    Args:
        draws: The model's draws.
        first: The place of its first sample.
        num_samples: Its samples [count].
        dims: Known sample dims.
    """

    def __init__(self, draws: GlobalDraws, first: int, num_samples: int, dims: Mapping[Call, SiteDims]) -> None:
        self._draws = draws
        self._forward = ForwardDraws(first, num_samples)
        self._dims = dims
        self.notes: dict[Call, Note] = {}
        self.outputs: list[Tensor] = []
        self._forward.notes = self.notes
        self.num_samples = num_samples

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Draw by place inside the context; batch statistics, which mix samples, are left out."""
        for module in self._draws.module.modules():
            if isinstance(module, _BATCH_NORMS):
                module.eval()
        step = StepDraws(self._draws.text_of("trial", 0), self._draws.names, self._dims)
        with in_step(step), in_forward(self._forward), self._draws.python_draws("trial", 0):
            yield

    def take(self, outputs: Any) -> None:
        """Keep the outputs."""
        self.outputs = [tensor.detach() for tensor in tensors_in(outputs) if type(tensor) is Tensor]


@dataclasses.dataclass
class _Found:
    """What one rank's trials have shown."""

    draws: bool = False
    is_proven: bool = True
    dims: dict[Call, SiteDims] = dataclasses.field(default_factory=dict)


class GlobalDraws:
    """The draws of a model.

    Args:
        engine: The strategy.
        module: The model.
        seed: Of the run.
    """

    def __init__(self, engine: Engine, module: nn.Module, seed: int) -> None:
        self.module = module
        self.names = Names(module)
        self.step = 0
        """Steps taken before this one, earlier processes' too [count]."""
        self.is_known = False
        """Whether the first batch has been tried."""
        self.has_draws = False
        """Whether a forward draws, on any rank."""
        self.dims: dict[Call, SiteDims] = {}
        self.seed = seed
        self._engine = engine
        self._told: dict[str, None] = {}
        self._python: bool | None = None
        install_operators()

    @property
    def reasons(self) -> tuple[str, ...]:
        """What depends on the layout even so."""
        return tuple(self._told)

    def text_of(self, kind: str, number: int) -> str:
        """Return what numbers of a run depend on, beside calls and places."""
        return f"{self.seed}/{kind}/{number}"

    def tell(self, text: str) -> None:
        """Add a reason, once."""
        if len(self._told) < _MOST_TOLD:
            self._told[f"rng: {text}" if not text.startswith("rng: ") else text] = None

    # -- running --------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def running(self, kind: str) -> Iterator[None]:
        """Draw for a step or an evaluation inside the context.

        Args:
            kind: "step" or "evaluate".
        """
        share = f"share {self._engine.group.group_rank}"
        text = self.text_of(kind, self.step)
        with in_step(StepDraws(text, self.names, self.dims, share=share, on_unknown=self.tell)):
            yield

    @contextlib.contextmanager
    def forward(self, kind: str, first: int, num_samples: int) -> Iterator[None]:
        """Run one forward inside the context.

        Args:
            kind: As for `running`.
            first: The place of its first sample in the global batch.
            num_samples: Its samples [count].
        """
        with in_forward(ForwardDraws(first, num_samples)), self.python_draws(kind, self.step):
            yield

    @contextlib.contextmanager
    def python_draws(self, kind: str, number: int) -> Iterator[None]:
        """Start Python's and NumPy's generators alike in all forwards of a step, where the model's code may draw from them."""
        if self._python is None:
            self._python = Outside(self.module).draws
        if not self._python:
            yield
            return
        before = PythonState()
        seed = key_of(self.text_of(kind, number) + "/python")
        random.seed(seed)
        np.random.seed(seed % 2**32)
        try:
            yield
        finally:
            before.restore()

    # -- the first batch ------------------------------------------------------------------------------------------

    def learn(self, share: Any, splitter: BatchSplitter, term: Callable[[Any, Any], LossTerm]) -> None:
        """Find the sample dims of all draws by trials of the first batch; every rank calls it.

        Args:
            share: At least two samples of this rank's share; None where it has none, or they cannot be cut.
            splitter: Counts and cuts batches.
            term: (outputs, batch) -> loss, which may draw, too.
        """
        engine, found = self._engine, _Found()
        module = self.module
        trials = None if share is None else self._examine(share, splitter, found)
        with engine.group.ledger.of_checks():
            if engine.is_prepared and (engine.needs_lockstep or engine.copies > 1):
                run_together(engine, module, trials, term)
            else:
                run_alone(engine, module, trials, term)
            self._agree(found if share is not None else None)
        self.is_known = True

    def _examine(self, share: Any, splitter: BatchSplitter, found: _Found) -> _Trials:
        num_samples = splitter.count(share)
        whole, outcomes = yield from self._run([(share, 0)], splitter, {})
        found.draws = bool(whole[0].notes)
        if outcomes[0].obstacle is not None and not whole[0].notes:
            found.is_proven = False
            return Evidence()
        if not found.draws:
            return Evidence()
        parts = splitter.cut(share, min(_NUM_PARTS, num_samples))
        firsts = [sum(map(splitter.count, parts[:place])) for place in range(len(parts))]
        placed = list(zip(parts, firsts, strict=True))
        pieces, _ = yield from self._run(placed, splitter, {})
        for call, note in whole[0].notes.items():
            shapes = [(piece.num_samples, piece.notes[call].shape) for piece in pieces if call in piece.notes]
            dims = find_dims([(num_samples, note.shape), *shapes])
            if dims is not None:
                found.dims[call] = dims
        found.is_proven = yield from self._prove(share, placed, splitter, found.dims)
        if not found.is_proven and any(dims.is_merged for dims in found.dims.values()):
            turned = {c: dataclasses.replace(d, is_minor=d.is_merged) for c, d in found.dims.items()}
            found.is_proven = yield from self._prove(share, placed, splitter, turned)
            if found.is_proven:
                found.dims.update(turned)
        return Evidence()

    def _run(
        self, batches: Sequence[tuple[Any, int]], splitter: BatchSplitter, dims: Mapping[Call, SiteDims]
    ) -> Generator[list[TrialForward], list[TrialOutcome], tuple[list[TrialDraws], list[TrialOutcome]]]:
        draws = [TrialDraws(self, first, splitter.count(batch), dims) for batch, first in batches]
        wanted = [
            TrialForward(batch, evaluates=False, draws=own) for (batch, _), own in zip(batches, draws, strict=True)
        ]
        outcomes = yield wanted
        return draws, outcomes

    def _prove(
        self, share: Any, placed: Sequence[tuple[Any, int]], splitter: BatchSplitter, dims: Mapping[Call, SiteDims]
    ) -> Generator[list[TrialForward], list[TrialOutcome], bool]:
        """Tell whether parts give the outputs of the whole."""
        whole, _ = yield from self._run([(share, 0)], splitter, dims)
        pieces, _ = yield from self._run(placed, splitter, dims)
        return are_parts(whole[0], pieces)

    def _agree(self, found: _Found | None) -> None:
        """Take what all ranks have found."""
        own = None if found is None else [found.draws, found.is_proven, _to_rows(found.dims)]
        rows = [row for row in self._engine.everyone.all_gather_json(own, device=self._engine.device) if row]
        self.has_draws = any(row[0] for row in rows) or not rows
        merged: dict[Call, SiteDims | None] = {}
        for row in rows:
            for call, dims in _from_rows(row[2]).items():
                merged[call] = dims if merged.setdefault(call, dims) == dims else None
        self.dims = {call: dims for call, dims in merged.items() if dims is not None}
        if self.has_draws and not all(row[1] for row in rows):
            self.tell(_UNPROVEN)
        if not rows:
            self.tell("the first batch could not be tried in parts, so that sample dims are unknown")


def _to_rows(dims: Mapping[Call, SiteDims]) -> list[list[Any]]:
    return [[*call, d.dim, d.is_minor, d.num_dims, d.is_merged] for call, d in dims.items()]


def _from_rows(rows: Sequence[Sequence[Any]]) -> dict[Call, SiteDims]:
    return {(name, number): SiteDims(*rest) for name, number, *rest in rows}


def are_parts(whole: TrialDraws, pieces: Sequence[TrialDraws]) -> bool:
    """Tell whether the outputs of pieces, in their order, are those of the whole; means of scalars are compared as such."""
    counts = [piece.num_samples for piece in pieces]
    columns = list(zip(whole.outputs, *(piece.outputs for piece in pieces), strict=False))
    num_outputs = {len(piece.outputs) for piece in (whole, *pieces)}
    if not columns or len(num_outputs) > 1:
        return False
    compared, scalars = 0, []
    for tensor, *parts in columns:
        if not tensor.is_floating_point():
            continue
        if tensor.dim() == 0:
            scalars.append((tensor, parts))
            continue
        found = find_dims([(whole.num_samples, tuple(tensor.shape)), *_shapes(counts, parts)])
        if found is None or found.dim is None or found.is_merged:
            continue
        if not _are_close(tensor, torch.cat(parts, found.dim)):
            return False
        compared += 1
    if compared:
        return True
    means = [
        (tensor, sum((part * count for part, count in zip(parts, counts, strict=True)), start=torch.zeros(())))
        for tensor, parts in scalars
    ]
    return bool(means) and all(_are_close(tensor, total / sum(counts)) for tensor, total in means)


def _shapes(counts: Sequence[int], parts: Sequence[Tensor]) -> list[tuple[int, tuple[int, ...]]]:
    return [(count, tuple(part.shape)) for count, part in zip(counts, parts, strict=True)]


def _are_close(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    tolerance = _TOLERANCES.get(one.dtype, _LOW_TOLERANCE)
    scale = float(one.abs().max()) if one.numel() else 0.0
    gap = float((one.double() - other.double()).abs().max()) if one.numel() else 0.0
    return math.isfinite(gap) and gap <= tolerance * scale
