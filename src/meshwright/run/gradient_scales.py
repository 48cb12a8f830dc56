"""Scales of gradient pieces: the factor by which a script has multiplied pieces that no other rank has.

Where each rank holds a piece of the gradient, what a script writes there cannot be compared. A factor can be: two norms
of samples of some pieces are kept, and where both have grown alike in these, that is the factor. It must be one for all ranks.
Clipping by value changes the two norms unlike, and has no factor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from meshwright._torch_private import foreach_norm

__all__: list[str] = []

NO_FACTOR = math.nan
"""Factor of pieces that were not multiplied, but changed in another way, or show nothing."""
_MOST = 8
"""Pieces that are measured: the largest, and others at even places, since each takes two calls in each backward [count]."""
_ENTRIES = 4096
"""Entries of a piece that are measured, at even places: all of them took 8 % of a step of 6 million parameters [count]."""


class PieceNorms:
    """The norms of gradient pieces at one moment.

    Args:
        pieces: Gradients, dense and not empty.
    """

    def __init__(self, pieces: Sequence[torch.Tensor]) -> None:
        self._marks = [_mark(piece) for piece in pieces]
        self._places = _places(pieces)
        self._norms = _norms([_sample(pieces[place]) for place in self._places])

    def are_of(self, pieces: Sequence[torch.Tensor]) -> bool:
        """Tell whether these are the same pieces, unwritten since."""
        return [_mark(piece) for piece in pieces] == self._marks

    def factor_to(self, pieces: Sequence[torch.Tensor]) -> float:
        """Return by what those that are measured were multiplied since, without its sign, or `NO_FACTOR`.

        >>> before = [torch.tensor([1.0, 2.0]), torch.tensor([3.0])]
        >>> norms = PieceNorms([piece.clone() for piece in before])
        >>> norms.factor_to([2 * piece for piece in before])
        2.0
        >>> norms.factor_to([piece.clamp(max=1.5) for piece in before])
        nan
        """
        if len(pieces) != len(self._marks) or not pieces:
            return NO_FACTOR
        chosen = [_sample(pieces[place]) for place in self._places]
        before, after = ([norm.item() for norm in norms] for norms in (self._norms, _norms(chosen)))
        half = len(chosen)
        found: list[float] = []
        shown = 0
        for index, piece in enumerate(chosen):
            squares, largest = before[index], before[half + index]
            if squares == 0 == after[index]:
                continue
            if squares == 0 or not (math.isfinite(squares) and math.isfinite(after[index])):
                return NO_FACTOR
            found += [after[index] / squares, after[half + index] / largest]
            # One entry is multiplied by whatever is done to it; several show more.
            shown += 2 if squares > largest * (1 + _tolerance(piece)) else 1
        if shown < 2 or max(found) - min(found) > max(map(_tolerance, chosen)) * max(found):
            return NO_FACTOR
        return found[0]


def differ(factors: Sequence[float], tolerance: float) -> bool:
    """Tell whether two of these factors differ; `NO_FACTOR` says nothing.

    >>> differ([1.0, 2.0, NO_FACTOR], 1e-6), differ([1.0, NO_FACTOR], 1e-6)
    (True, False)
    """
    known = [factor for factor in factors if not math.isnan(factor)]
    return bool(known) and max(known) - min(known) > tolerance * max(known)


def tolerance_of(pieces: Sequence[torch.Tensor]) -> float:
    """Return how far the factors of ranks may differ by rounding, relative to the largest."""
    return 4 * max(map(_tolerance, pieces), default=0.0)


def _tolerance(piece: torch.Tensor) -> float:
    return 8 * torch.finfo(piece.dtype).eps


def _places(pieces: Sequence[torch.Tensor]) -> list[int]:
    """Return the places of the pieces that are measured."""
    if len(pieces) <= _MOST:
        return list(range(len(pieces)))
    by_size = sorted(range(len(pieces)), key=lambda place: -pieces[place].numel())
    half = _MOST // 2
    rest = by_size[half:]
    return sorted(by_size[:half] + [rest[number * len(rest) // half] for number in range(half)])


def _sample(piece: torch.Tensor) -> torch.Tensor:
    """Return entries of a piece, one behind the other."""
    flat = piece.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // _ENTRIES)]


def _norms(pieces: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the Euclidean norm of each piece, then the largest absolute entry of each."""
    if not pieces:
        return []
    with torch.no_grad():
        return [*foreach_norm(list(pieces), 2), *foreach_norm(list(pieces), math.inf)]


def _mark(piece: torch.Tensor) -> tuple[int, int]:
    """Return what tells a piece from another, and from itself before it was written, and keeps no memory."""
    return piece.data_ptr(), piece._version
