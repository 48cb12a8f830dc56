"""One step of PowerSGD: a sum of matrices as the product of two thin ones.

Vogels et al. 2019, arXiv:1905.13727, algorithm 1: one step of power iteration from where the step before left off. Two things
differ. The basis that is started from is made orthonormal, too, so that it cannot shrink to nothing after gradients of
zeros. And what a rank keeps is what is left of its own matrix, M - P P^T M, instead of M minus the mean of what was sent: the
sum over ranks is the same, and a rank without samples is left with nothing that it never had.
"""

from __future__ import annotations

import zlib

import torch

__all__: list[str] = []


def first_basis(name: str, num_columns: int, rank: int, like: torch.Tensor) -> torch.Tensor:
    """Return the basis that the first step starts from, the same on every rank: [num_columns, rank], normal numbers."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    basis = torch.randn(num_columns, rank, generator=generator, dtype=torch.float64)
    return basis.to(like.device, like.dtype)


def orthonormal(columns: torch.Tensor) -> torch.Tensor:
    """Return an orthonormal basis of what the columns span, [n, rank] with rank <= n; any where they span less.

    All NaN where one of them is not finite.
    """
    if not bool(torch.isfinite(columns).all()):  # LAPACK promises nothing
        return torch.full_like(columns, float("nan"))
    return torch.linalg.qr(columns).Q


def project(matrix: torch.Tensor, basis: torch.Tensor) -> torch.Tensor:
    """Return this rank's share of the left factor before it is summed and made orthonormal: [m, n] @ [n, rank]."""
    return matrix @ basis


def take_out(matrix: torch.Tensor, left: torch.Tensor) -> torch.Tensor:
    """Take the part that lies in the span of `left` out of a matrix, in place.

    Args:
        matrix: [m, n].
        left: [m, rank], orthonormal.

    Returns:
        The right factor, [n, rank]: the part that was taken out is left @ right.T.
    """
    right = matrix.t() @ left
    matrix.addmm_(left, right.t(), alpha=-1)
    return right
