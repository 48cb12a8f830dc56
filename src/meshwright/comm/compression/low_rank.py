"""One step of PowerSGD: a sum of matrices as the product of two thin ones.

Vogels et al. 2019, arXiv:1905.13727, algorithm 1: one step of power iteration from the last step's result. Two things differ. The
starting basis is made orthonormal too, so that it cannot vanish after zero gradients. And a rank keeps the rest of its own
matrix, M - P P^T M, instead of M minus the mean of what was sent. The sum over ranks is the same, and a rank without samples
keeps nothing that it never had.
"""

from __future__ import annotations

import zlib

import torch

__all__: list[str] = []


def first_basis(name: str, num_columns: int, rank: int, like: torch.Tensor) -> torch.Tensor:
    """Return the basis of the first step, the same on every rank: [num_columns, rank], normal numbers."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    basis = torch.randn(num_columns, rank, generator=generator, dtype=torch.float64)
    return basis.to(like.device, like.dtype)


def orthonormal(columns: torch.Tensor) -> torch.Tensor:
    """Return an orthonormal basis of the columns' span, [n, rank] with rank <= n, extended arbitrarily if they span less.

    It is all NaN where a column is not finite.
    """
    if not bool(torch.isfinite(columns).all()):  # LAPACK does not define this case
        return torch.full_like(columns, float("nan"))
    return torch.linalg.qr(columns).Q


def project(matrix: torch.Tensor, basis: torch.Tensor) -> torch.Tensor:
    """Return this rank's term of the left factor, before it is summed and made orthonormal: [m, n] @ [n, rank]."""
    return matrix @ basis


def take_out(matrix: torch.Tensor, left: torch.Tensor) -> torch.Tensor:
    """Subtract the part of a matrix in the span of `left`, in place.

    Args:
        matrix: [m, n].
        left: [m, rank], orthonormal.

    Returns:
        The right factor, [n, rank]: the subtracted part is left @ right.T.
    """
    right = matrix.t() @ left
    matrix.addmm_(left, right.t(), alpha=-1)
    return right
