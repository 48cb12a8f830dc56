"""PowerSGD reducer: it sends low-rank factors, with error feedback and warm start. Vogels et al. 2019, arXiv:1905.13727.

There are two all-reduces: one of all left factors and of uncompressed gradients, one of all right factors. Every rank then has
the same two factors of each sum. Where ranks own slices (ZeRO) the small factors are all-reduced too, since every rank needs the
next step's starting basis.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from meshwright.comm.communicator import Communicator
from meshwright.comm.compression.low_rank import first_basis, orthonormal, project, take_out
from meshwright.comm.compression.reducer import GradientSet, GradientSpec, KeptTensors, Reducer, Stages, work_dtype

__all__: list[str] = []

RANK = 4
"""Columns of a factor [count]. Vogels et al. reach full accuracy with 2 to 4."""

_WORTH_IT = 1 / 8
"""A matrix is sent as factors where these have at most this share of its numbers: of smaller ones int4 would send less, and lose
less [fraction]. Square matrices from 64 x 64 on."""


@dataclasses.dataclass(slots=True)
class _Matrix:
    """One matrix to be sent: whole rows of a gradient."""

    spec: GradientSpec
    target: torch.Tensor  # [m * n], the memory for the sum
    unsent: torch.Tensor  # [m, n]
    basis: torch.Tensor  # [n, rank], orthonormal
    is_present: bool
    left: torch.Tensor  # [m, rank]
    right: torch.Tensor  # [n, rank]


class PowerSGDReducer(Reducer):
    """Sums gradients that are sent as low-rank factors, with error feedback.

    Args:
        group: The ranks.
        rank: Columns of a factor [count].
    """

    num_stages = 2
    sends_slices = False

    def __init__(self, group: Communicator, rank: int = RANK) -> None:
        self._unsent, self._bases = KeptTensors("unsent"), KeptTensors("basis")
        super().__init__(group, self._unsent, self._bases)
        self._rank = rank

    def all_reduce(self, gradients: GradientSet) -> Stages:
        """Sum over all ranks; every rank computes the same product of the same factors."""
        matrices, exact = self._take_apart(gradients) if self._group.size > 1 else ([], [])
        if not matrices and not any(tensor.numel() for tensor in exact):
            return
        for matrix in matrices:
            if matrix.is_present:
                matrix.left = project(matrix.unsent, matrix.basis)
        lefts = _joined([matrix.left for matrix in matrices] + exact, matrices)
        yield self._group.all_reduce(lefts, async_op=True)
        parts = lefts.split([matrix.left.numel() for matrix in matrices] + [tensor.numel() for tensor in exact])
        for tensor, total in zip(exact, parts[len(matrices) :], strict=True):
            tensor.copy_(total)
        for matrix, total in zip(matrices, parts, strict=False):
            matrix.left = orthonormal(total.view_as(matrix.left))
            if matrix.is_present:
                matrix.right = take_out(matrix.unsent, matrix.left)
        if not matrices:
            return
        rights = _joined([matrix.right for matrix in matrices], matrices)
        yield self._group.all_reduce(rights, async_op=True)
        for matrix, total in zip(matrices, rights.split([m.right.numel() for m in matrices]), strict=True):
            right = total.view_as(matrix.right)
            target = matrix.target.view_as(matrix.unsent)
            if target.dtype == right.dtype:
                torch.mm(matrix.left, right.t(), out=target)
            else:
                target.copy_(matrix.left @ right.t())
            self._bases.put(matrix.spec.name, right.clone())

    def reduce_slices(self, gradients: GradientSet, ends: Sequence[int]) -> None:  # noqa: ARG002
        """Sum this rank's slice of the concatenated tensors; the factors give the other slices as well."""
        for pending in self.all_reduce(gradients):
            pending.wait()

    def _take_apart(self, gradients: GradientSet) -> tuple[list[_Matrix], list[torch.Tensor]]:
        """Return the matrices, with this rank's unsent rest added, and the gradients that are sent uncompressed."""
        matrices: list[_Matrix] = []
        exact: list[torch.Tensor] = []
        for spec, tensor, is_present in zip(gradients.specs, gradients.tensors, gradients.present, strict=True):
            first, last = _whole_rows(spec)
            rank = min(self._rank, (last - first) // max(1, spec.row_numel), spec.row_numel)
            if not self._is_worth_it(spec, last - first, rank):
                exact.append(tensor)
                continue
            matrices.append(self._matrix(spec, tensor[first:last], rank, is_present=is_present))
            exact += [part for part in (tensor[:first], tensor[last:]) if part.numel()]
        if gradients.census is not None:
            exact.append(gradients.census)
        return matrices, exact

    def _is_worth_it(self, spec: GradientSpec, numel: int, rank: int) -> bool:
        if not spec.is_matrix or rank == 0:
            return False
        return rank * (numel // spec.row_numel + spec.row_numel) <= _WORTH_IT * numel

    def payload_bytes(self, spec: GradientSpec, dtype: torch.dtype) -> int:
        first, last = _whole_rows(spec)
        num_rows = (last - first) // max(1, spec.row_numel)
        rank = min(self._rank, num_rows, spec.row_numel)
        if not self._is_worth_it(spec, last - first, rank):
            return spec.numel * work_dtype(dtype).itemsize
        rest = spec.numel - (last - first)
        return (rank * (num_rows + spec.row_numel) + rest) * work_dtype(dtype).itemsize

    def _matrix(self, spec: GradientSpec, target: torch.Tensor, rank: int, *, is_present: bool) -> _Matrix:
        dtype, device = work_dtype(target.dtype), target.device
        num_rows, num_columns = target.numel() // spec.row_numel, spec.row_numel
        unsent = self._unsent.get(spec.name, (num_rows, num_columns), dtype, device)
        if unsent is None:
            unsent = self._unsent.put(spec.name, torch.zeros((num_rows, num_columns), dtype=dtype, device=device))
        basis = self._bases.get(spec.name, (num_columns, rank), dtype, device)
        if basis is None:
            basis = self._bases.put(spec.name, first_basis(spec.name, num_columns, rank, unsent))
        if is_present:
            unsent.add_(target.view_as(unsent))
        left, right = unsent.new_zeros(num_rows, rank), unsent.new_zeros(num_columns, rank)
        return _Matrix(spec, target, unsent, orthonormal(basis), is_present, left, right)

    def explain(self) -> str:
        return (
            f"gradients of matrices are sent as factors of rank {self._rank} (PowerSGD): this changes numbers. What the factors "
            "leave out is added to the next step's gradient; vectors, scalars and short matrices are sent as they are"
        )


def _whole_rows(spec: GradientSpec) -> tuple[int, int]:
    """Return begin and end of the whole rows in a range; a rank's slice may begin and end within a row."""
    first = -spec.start % spec.row_numel
    count = max(0, spec.numel - first) // spec.row_numel
    return (first, first + count * spec.row_numel) if count else (0, 0)


def _joined(tensors: Sequence[torch.Tensor], matrices: Sequence[_Matrix]) -> torch.Tensor:
    dtype = matrices[0].unsent.dtype if matrices else work_dtype(tensors[0].dtype)
    return torch.cat([tensor.reshape(-1).to(dtype) for tensor in tensors])
