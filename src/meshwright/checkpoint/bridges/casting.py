"""Another type for the entries of floating-point tensors: rounded as torch rounds, and refused where one would overflow."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from meshwright.errors import CheckpointError

__all__: list[str] = []

CASTABLE = ("float16", "bfloat16", "float32", "float64")
"""Types that are cast and that may be cast to; 8-bit floats have scales of their own and stay, as all others do."""
_PIECE = 1 << 22  # entries at once: what is cast exists twice


def cast_pieces(name: str, pieces: Iterable[torch.Tensor], dtype: str) -> Iterator[torch.Tensor]:
    """Yield pieces of a tensor in another type.

    Args:
        name: Its name, for messages.
        pieces: Its entries.
        dtype: One of `CASTABLE`.

    Raises:
        CheckpointError: A finite entry is too large for the type.
    """
    wanted = getattr(torch, dtype)
    for whole in pieces:
        for piece in whole.reshape(-1).split(_PIECE):
            cast = piece.to(wanted)
            kept = cast.isfinite()
            if not kept.all() and (lost := piece.isfinite() & ~kept).any():
                largest = piece[lost].abs().max().item()
                raise CheckpointError(
                    f"{name!r} has {int(lost.sum())} entries that {dtype} cannot hold, {largest:g} for example",
                    fix="--dtype bfloat16" if dtype == "float16" else "leave out --dtype",
                )
            yield cast
