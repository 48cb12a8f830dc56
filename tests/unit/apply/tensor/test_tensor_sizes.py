"""Sizes that code computes from the full model, translated to the shard's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from meshwright.apply.tensor.sizes import Resizing
from meshwright.apply.tensor.tensor_layout import Region

HEADS, WIDTH = 4, 48


@pytest.fixture
def resizing() -> Resizing:
    """The first of two ranks with 4 heads of 12 between them; the sequence is a multiple of the heads."""
    group: Any = SimpleNamespace(size=2, group_rank=0)
    return Resizing(Region(scope="", num_units=HEADS, cuts={}, roles={}, resizes=True), group)


@pytest.mark.parametrize(
    ("have", "asked", "made"),
    [
        ((2, 16, 24), (2, 16, HEADS, 12), (2, 16, 2, 12)),
        ((2, 16, 2, 12), (2, 16, WIDTH), (2, 16, 24)),
        ((2, 2, 16, 12), (2 * HEADS, 16, 12), (4, 16, 12)),
        ((2, 16, 24), (2, 16, 24), (2, 16, 24)),
        ((4, 8, 24), (4, 8, 2, 12), (4, 8, 2, 12)),
        ((2, 16, 24), (2, -1, HEADS, 12), (2, 16, 2, 12)),
        ((HEADS, 16, 24), (HEADS, 16, -1, 12), (HEADS, 16, 2, 12)),
        ((HEADS, 16, 24), (HEADS, -1, HEADS, 12), (HEADS, 16, 2, 12)),
    ],
)
def test_reshapes(resizing: Resizing, have: tuple[int, ...], asked: tuple[int, ...], made: tuple[int, ...]) -> None:
    with resizing:
        assert tuple(torch.zeros(have).reshape(asked).shape) == made
        assert tuple(torch.zeros(have).view(*asked).shape) == made


def test_unflatten_split_slices_and_expand(resizing: Resizing) -> None:
    fused = torch.arange(72.0).expand(2, 16, 72)
    with resizing:
        assert tuple(torch.zeros(2, 16, 24).unflatten(-1, (HEADS, 12)).shape) == (2, 16, 2, 12)
        assert [part.shape[-1] for part in fused.split(WIDTH, dim=-1)] == [24, 24, 24]
        parts = fused[..., :WIDTH], fused[..., WIDTH : 2 * WIDTH], fused[..., 2 * WIDTH :]
        assert [part[0, 0, 0].item() for part in parts] == [0.0, 24.0, 48.0]
        assert tuple(torch.zeros(2, 2, 1, 12).expand(2, HEADS, 16, 12).shape) == (2, 2, 16, 12)


def test_slices_of_several_dims_at_once_are_no_parts(resizing: Resizing) -> None:
    # As many entries as the bound says: two parts of a cut dim, or an image without its padding.
    image = torch.zeros(2, WIDTH, WIDTH, 3)
    with resizing:
        assert tuple(image[:, :WIDTH, :WIDTH, :].shape) == (2, WIDTH, WIDTH, 3)
        assert tuple(image[:, :WIDTH].shape) == (2, WIDTH // 2, WIDTH, 3)


def test_what_cannot_be_right_is_left_to_fail(resizing: Resizing) -> None:
    # Half of the sequence would make the numbers of entries equal: never.
    with resizing, pytest.raises(RuntimeError, match="invalid for input"):
        torch.zeros(2, 16, 25).view(2, 16, 50)
