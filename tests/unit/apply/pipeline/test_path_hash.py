"""Paths of forwards: what stages compare, and what they do not."""

from __future__ import annotations

import pytest
import torch

from meshwright.apply.pipeline.walking.path_hash import Way
from meshwright.apply.pipeline.walking.stand_ins import StageValue


def digest_of(*homes: int, is_cut: bool) -> int:
    """Return the digest of a forward with code on stage 0 between layers, each time of a tensor of one of these stages."""
    way, tensor = Way(0, is_training=True, is_cut=is_cut), torch.ones(2)
    for home in homes:
        way.between(0, [StageValue(None, home, tensor, None)])
    return way.digest


def test_code_on_one_stage_is_part_of_the_path() -> None:
    assert digest_of(0, 0, is_cut=False) != digest_of(0, is_cut=False)


def test_code_inside_of_cut_layers_is_not() -> None:
    """The stage that holds such a layer runs exchanges in it, which the others do not see."""
    assert digest_of(0, 0, is_cut=True) == digest_of(0, is_cut=True)


@pytest.mark.parametrize("is_cut", [False, True])
def test_tensors_of_other_stages_are(is_cut: bool) -> None:
    assert digest_of(1, is_cut=is_cut) != digest_of(1, 1, is_cut=is_cut) != digest_of(0, is_cut=is_cut)
