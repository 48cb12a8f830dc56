"""Second small exchange of a step, which sums losses, weights and failures of all ranks while backward runs.

Over shared memory it runs after backward. Together with the first one (`agreement.py`) it lets all ranks take every decision of
a step alike.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from meshwright.apply.pipeline.p2p import OtherStageError, OtherWayError
from meshwright.comm.communicator import Communicator
from meshwright.comm.told_errors import error_of_rank, kind_of
from meshwright.errors import ApplyError, MeshwrightError
from meshwright.run.losses.loss import LossTerm

__all__: list[str] = []

_DTYPES = {
    dtype: number
    for number, dtype in enumerate([torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64])
}


@dataclasses.dataclass(frozen=True, slots=True)
class Sums:
    """Summed losses and weights of all ranks."""

    loss_sum: float
    weight: float
    has_sums: bool
    """Whether the losses were Loss objects (sums) rather than means."""
    buffers_changed: bool

    @property
    def loss(self) -> float:
        """Sum of losses divided by sum of weights."""
        return self.loss_sum / self.weight if self.weight else float("nan")

    @property
    def gradient_scale(self) -> float:
        """Factor that remains to be applied to the summed gradients."""
        return 1.0 / self.weight if self.has_sums else 1.0


def _vector_of(numbers: Sequence[float], device: torch.device) -> torch.Tensor:
    """Return a float64 vector on the device; on a GPU its kernels go on meanwhile, which a copy of pageable memory waits for."""
    if device.type != "cuda":
        return torch.tensor(numbers, dtype=torch.float64, device=device)
    return torch.tensor(numbers, dtype=torch.float64, pin_memory=True).to(device, non_blocking=True)


def _code_of(dtypes: Sequence[torch.dtype]) -> int:
    return sum((_DTYPES.get(dtype, 0) + 1) * 32**place for place, dtype in enumerate(dtypes))


class SumExchange:
    """Sums the losses of all ranks in the background.

    Args:
        group: The data-parallel ranks.
        device: The device of the vector.
        terms: The losses of this rank's micro-batches.
        buffers_changed: Whether a forward wrote into a buffer on this rank.
        in_background: Whether to start now; else the exchange is made in `wait`. All ranks say the same.
        is_trained: Whether a parameter of this rank is to get a gradient.
        failure: Why this rank cannot go on; the others learn of it here.
        is_alone: Whether it has stopped in its forward or its loss, while others go on to exchange gradients.
        drain: Called on every rank where one has stopped: completes exchanges that some ranks may have begun.
    """

    def __init__(
        self,
        group: Communicator,
        device: torch.device,
        terms: Sequence[LossTerm],
        *,
        buffers_changed: bool = False,
        in_background: bool = False,
        is_trained: bool = False,
        failure: Exception | None = None,
        is_alone: bool = False,
        drain: Callable[[], None] | None = None,
    ) -> None:
        self._drain = drain
        num_means = sum(term.is_mean for term in terms)
        num_graphs = sum(term.value.requires_grad for term in terms)
        changed = math.inf if failure is not None else float(buffers_changed)
        self._dtypes = [term.dtypes for term in terms]
        codes = [_code_of(dtypes) for dtypes in self._dtypes]
        kinds = [sum(codes), sum(code * code for code in codes)]
        counts = [len(terms) - num_means, num_means, changed, num_graphs, is_trained, *kinds, is_alone]
        weight = sum(term.weight for term in terms if not isinstance(term.weight, torch.Tensor))
        self._vector = _vector_of([0.0, weight, *counts], device)
        for term in terms:
            self._vector[0] += term.total().to(device)
            if isinstance(term.weight, torch.Tensor):
                self._vector[1] += term.weight.to(device)
        self._group = group
        self._failure = failure
        self._pending = group.all_reduce(self._vector, async_op=True) if in_background else None

    def wait(self) -> Sums:
        """Return the sums, once they are there.

        Raises:
            ApplyError: Some losses were means and some sums, all weights are 0, a weight is invalid, or no loss has a graph.
            MeshwrightError: Another rank has failed: of its error's class where that is ours, else UserCodeError.
            Exception: The failure of this rank.
        """
        if self._pending is None:
            self._group.all_reduce(self._vector)
        else:
            self._pending.wait()
        loss_sum, weight, num_sums, num_means, changed, num_graphs, num_trained, *rest = self._vector.tolist()
        kinds, stopped = [round(number) for number in rest[:2]], rest[2]
        if stopped:
            if self._drain is not None:
                self._drain()  # a rank that is alone has left exchanges to the others
            self._raise_failure()
        if math.isinf(changed):
            self._raise_failure()
        if round(num_sums + num_means) * kinds[1] != kinds[0] ** 2:  # equal only where all numbers are the same
            self._raise_dtypes()
        if num_sums and num_means:
            raise ApplyError(
                f"loss_fn returned meshwright.Loss for {num_sums:.0f} micro-batches and a plain scalar for {num_means:.0f} "
                "of one step; their weights cannot be compared",
                fix="return meshwright.Loss(sum, weight) always, or a mean always",
            )
        if math.isnan(weight):
            raise ApplyError(
                "loss_fn returned a meshwright.Loss whose weight is negative or NaN, on some rank",
                fix="return how much was summed as weight, at least 0; the sign of a loss belongs into its sum",
            )
        if math.isinf(weight):
            raise ApplyError(
                "the weight of a meshwright.Loss has a graph, or is infinite, on some rank; gradients are those of sum / weight "
                "with the weight held fixed",
                fix="return meshwright.Loss(sum, weight.detach()); a weight that is trained is not a count",
            )
        if weight == 0:
            raise ApplyError(
                "the weights of all micro-batches on all ranks add up to 0, so the loss of this step is 0 / 0",
                fix="leave out batches in which nothing counts (all labels ignored, say)",
            )
        if num_trained and not num_graphs:
            raise ApplyError(
                "no loss of this step has a graph, on any rank, while parameters require gradients: nothing would be trained",
                fix="compute the loss from the outputs themselves, without .detach(), .item() or torch.no_grad()",
            )
        return Sums(loss_sum, weight, bool(num_sums), bool(changed))

    def _raise_dtypes(self) -> NoReturn:
        """Raise an error, on every rank, that names two micro-batches with outputs of different dtypes."""
        mine = [[str(dtype) for dtype in dtypes] for dtypes in self._dtypes]
        told = self._group.all_gather_json(mine, device=self._vector.device)
        found = [(rank, dtypes) for rank, entry in zip(self._group.ranks, told, strict=True) for dtypes in entry]
        rank, dtypes = found[0]
        other, theirs = next(entry for entry in found if entry[1] != dtypes)
        raise ApplyError(
            f"the first outputs and the loss of a micro-batch are of {', '.join(dtypes)} on rank {rank} and of "
            f"{', '.join(theirs)} on rank {other}",
            fix="let model and loss compute in one dtype: torch.autocast, .to() and .float() on every rank, or on none",
        )

    def _raise_failure(self) -> NoReturn:
        error = self._failure
        fix = error.fix if isinstance(error, MeshwrightError) else None
        mine = error and [
            isinstance(error, OtherStageError),
            f"{getattr(error, 'message', error)}",
            kind_of(error),
            fix,
            isinstance(error, OtherWayError),
        ]
        told = self._group.all_gather_json(mine, device=self._vector.device)
        if error is not None and not isinstance(error, OtherStageError):
            self._raise_own(error, told)
        failed = [(entry[0], rank, entry) for rank, entry in enumerate(told) if entry is not None]
        _, rank, (_, message, kind, fix, _) = min(failed, key=lambda found: found[:2])
        raise error_of_rank(self._group.ranks[rank], kind, message, fix) from error

    def _raise_own(self, error: Exception, told: Sequence[list[Any] | None]) -> NoReturn:
        """Raise this rank's error, unless another stage's tensors caused it; that stage then raises the cause."""
        ways = [(rank, entry) for rank, entry in enumerate(told) if entry is not None and entry[4]]
        if isinstance(error, MeshwrightError) or not ways:
            raise error
        rank, (_, message, _, fix, _) = ways[0]
        raise ApplyError(f"rank {self._group.ranks[rank]} cannot go on: {message}", fix=fix) from error
