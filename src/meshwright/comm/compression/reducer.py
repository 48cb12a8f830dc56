"""Reducer: the sum of gradients over ranks. Buckets and units are given one, and do not know what it sends.

A reducer exchanges in stages. It is a generator that yields each exchange once it has been started. So an algorithm reads from
top to bottom, and its caller decides how much computation runs between the stages.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence

import torch

from meshwright.comm.communicator import Communicator, Pending
from meshwright.errors import ApplyError

__all__: list[str] = []

Stages = Generator[Pending, None, None]
"""Yields each exchange after it has been started; it is waited for before the generator goes on."""


@dataclasses.dataclass(frozen=True, slots=True)
class GradientSpec:
    """Description of one gradient, or of a range of it, without its values.

    Args:
        name: The parameter's FQN, with the offset for a range of it; the key of its unsent rest.
        numel: Real numbers in it; a complex number is two [count].
        row_numel: Real numbers of one row, as a matrix in memory order; 1 for vectors and scalars [count].
        start: Offset of its first number in the parameter [count].
    """

    name: str
    numel: int
    row_numel: int
    start: int = 0

    @classmethod
    def of(cls, name: str, parameter: torch.Tensor, start: int = 0, stop: int | None = None) -> GradientSpec:
        """Describe a parameter's gradient, or elements `start` to `stop` of it, counted in the parameter's memory order."""
        parts = 2 if parameter.is_complex() else 1
        numel = parameter.numel()
        stop = numel if stop is None else stop
        longest = max(
            range(parameter.dim()), key=lambda dim: (parameter.size(dim) > 1, parameter.stride(dim)), default=0
        )
        rows = parameter.size(longest) if parameter.dim() > 1 and numel else numel
        whole = start == 0 and stop == numel
        return cls(
            name if whole else f"{name}[{start}:{stop}]",
            parts * (stop - start),
            parts * (numel // rows) if rows < numel else 1,
            parts * start,
        )

    @property
    def is_matrix(self) -> bool:
        """Whether it has rows; biases, norms' weights and scalars have none, and are always sent uncompressed."""
        return self.row_numel > 1


@dataclasses.dataclass(frozen=True, slots=True)
class GradientSet:
    """Gradients of one dtype and device that are summed together. In place: the sums are written over them.

    Args:
        specs: Their descriptions.
        tensors: Their values, contiguous and real, [spec.numel] each; zeros where this rank has none.
        present: Whether this rank has each gradient. Without one it keeps its unsent rest: perhaps no rank has one, and the sum
            is discarded.
        census: [n], more numbers to sum exactly, or None.
        whole: The contiguous memory that holds all of the above, or None.
    """

    specs: Sequence[GradientSpec]
    tensors: Sequence[torch.Tensor]
    present: Sequence[bool]
    census: torch.Tensor | None = None
    whole: torch.Tensor | None = None


class Reducer(ABC):
    """Sums gradients over the ranks of a group.

    Args:
        group: The ranks.
        *kept: What must survive a step; none where nothing must.
    """

    num_stages: int = 1
    """Exchanges that one `all_reduce` makes, one after the other [count]."""
    sends_slices: bool = True
    """Whether `reduce_slices` sends to each rank its slice alone, and not to everyone everything."""

    def __init__(self, group: Communicator, *kept: KeptTensors) -> None:
        self._group = group
        self._kept = kept

    @abstractmethod
    def all_reduce(self, gradients: GradientSet) -> Stages:
        """Sum over all ranks; every rank holds the same bits afterwards."""

    @abstractmethod
    def reduce_slices(self, gradients: GradientSet, ends: Sequence[int]) -> None:
        """Sum this rank's slice of the concatenated tensors, as `Communicator.reduce_slices`."""

    @abstractmethod
    def payload_bytes(self, spec: GradientSpec, dtype: torch.dtype) -> int:
        """Return the sent size of a gradient whose real numbers have this dtype [bytes]."""

    def explain(self) -> str:
        """Return the effect on numbers, for a plan's reasons; "" where there is none."""
        return ""

    def state(self) -> dict[str, torch.Tensor]:
        """Return the state that must survive a step, on this rank: the live tensors, by name."""
        return {name: tensor for kept in self._kept for name, tensor in kept.state().items()}

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load the result of `state` of this rank, under the same plan.

        Raises:
            ApplyError: There is a state, and this plan has none.
        """
        if state and not self._kept:
            raise ApplyError(
                f"the state holds {len(state)} tensors of gradients that a compressing plan has not sent yet, and this plan "
                "compresses nothing",
                fix="load it under the plan that it was saved under, or leave it out",
            )
        for kept in self._kept:
            kept.load_state(state)

    def reset(self) -> None:
        """Drop the state on all ranks: a step was left out."""
        for kept in self._kept:
            kept.clear()

    def keep_only(self, names: Sequence[str]) -> None:
        """Drop the state of other parameters: they were frozen."""
        for kept in self._kept:
            kept.keep_only(names)


class Exchange:
    """A reduction under way.

    Args:
        stages: The reduction, whose first stage is started.
    """

    def __init__(self, stages: Stages) -> None:
        self._stages = stages
        self._pending = next(stages, None)

    def advance(self) -> None:
        """Wait for the current stage and start the next. All ranks do so at the same point."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = next(self._stages, None)

    def finish(self) -> None:
        """Wait for the sums."""
        while self._pending is not None:
            self.advance()


class PlainReducer(Reducer):
    """Sums gradients uncompressed."""

    def all_reduce(self, gradients: GradientSet) -> Stages:
        """Sum in the background if the gradients lie in one piece of memory, else at once."""
        if gradients.whole is not None:
            yield self._group.all_reduce(gradients.whole, async_op=True)
        elif gradients.tensors:
            self._group.all_reduce_together(gradients.tensors)

    def reduce_slices(self, gradients: GradientSet, ends: Sequence[int]) -> None:
        self._group.reduce_slices(gradients.tensors, ends)

    def payload_bytes(self, spec: GradientSpec, dtype: torch.dtype) -> int:
        return spec.numel * dtype.itemsize


def work_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums and rests of such gradients."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class KeptTensors:
    """Tensors that survive a step, by the name of their owner.

    Args:
        kind: Their kind; the suffix of their names in `state`.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._tensors: dict[str, torch.Tensor] = {}

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor | None:
        """Return the tensor of a name, on this device and in this dtype; None where there is none yet.

        Raises:
            ApplyError: The loaded tensor has another shape.
        """
        found = self._tensors.get(name)
        if found is None:
            return None
        if found.shape != shape:
            raise ApplyError(
                f"the saved {self._kind} of '{name}' has the shape {tuple(found.shape)}, and this plan needs {shape}",
                fix="load it under the plan that it was saved under, or leave it out",
            )
        if found.device != device or found.dtype != dtype:
            found = self._tensors[name] = found.to(device, dtype)
        return found

    def put(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Keep a tensor, and return it."""
        self._tensors[name] = tensor
        return tensor

    def state(self) -> dict[str, torch.Tensor]:
        """Return all tensors as ``{name}/{kind}``."""
        return {f"{name}/{self._kind}": tensor for name, tensor in self._tensors.items()}

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Copy the tensors of this kind."""
        ending = f"/{self._kind}"
        self._tensors = {
            key.removesuffix(ending): tensor.detach().clone() for key, tensor in state.items() if key.endswith(ending)
        }

    def clear(self) -> None:
        """Drop all."""
        self._tensors.clear()

    def keep_only(self, names: Sequence[str]) -> None:
        """Drop those of other names."""
        wanted = set(names)
        self._tensors = {name: tensor for name, tensor in self._tensors.items() if name in wanted}
