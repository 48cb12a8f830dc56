"""Paths of forwards: what stages compare, and what they do not."""

from __future__ import annotations

import pytest
import torch

from meshwright.apply.pipeline.walking.path_hash import Way
from meshwright.apply.pipeline.walking.stand_ins import StageValue


def digest_of(*homes: int, shards: int) -> int:
    """Return the digest of a forward with code on stage 0 between layers, each time of a tensor of one of these stages."""
    way, tensor = Way(0, is_training=True, shards=shards), torch.ones(2)
    for home in homes:
        way.between(0, [StageValue(None, home, tensor, None)])
    return way.digest


def test_code_on_one_stage_is_part_of_the_path() -> None:
    assert digest_of(0, 0, shards=1) != digest_of(0, shards=1)


def test_code_inside_of_cut_layers_is_not() -> None:
    """The stage that holds such a layer runs exchanges in it, which the others do not see."""
    assert digest_of(0, 0, shards=2) == digest_of(0, shards=2)


@pytest.mark.parametrize("shards", [1, 2])
def test_tensors_of_other_stages_are(shards: int) -> None:
    assert digest_of(1, shards=shards) != digest_of(1, 1, shards=shards) != digest_of(0, shards=shards)


def digest_of_result(*sizes: int, shards: int, looks: bool) -> int:
    way = Way(0, is_training=True, shards=shards)
    way.result(sizes, looks=looks)
    return way.digest


def test_sizes_of_results_are_part_of_the_path() -> None:
    assert digest_of_result(3, 8, shards=1, looks=False) != digest_of_result(4, 8, shards=1, looks=False)


def test_where_layers_are_cut_they_are_for_layers_that_look_at_values_and_may_lie_in_shards() -> None:
    """The stage that holds a cut layer may have a third of its result, and knows no more of what the layer returns."""
    assert digest_of_result(5, 8, shards=3, looks=True) != digest_of_result(7, 8, shards=3, looks=True)
    assert digest_of_result(5, 24, shards=3, looks=True) == digest_of_result(5, 8, shards=3, looks=True)
    assert digest_of_result(5, 8, shards=3, looks=False) == digest_of_result(7, 8, shards=3, looks=False)


def test_numbers_beside_tensors_count_whole_where_layers_are_cut() -> None:
    """They lie in no shards: one and two are no halves of each other."""

    def digest(number: int) -> int:
        way = Way(0, is_training=True, shards=2)
        way.result([8], [number], looks=False)
        return way.digest

    assert digest(1) != digest(2)


def test_sizes_count_whole_where_no_layer_around_is_cut() -> None:
    """Two rows in place of four are no half of a result that lies in one piece."""

    def digest(size: int, *, in_parts: bool) -> int:
        way = Way(0, is_training=True, shards=2)
        way.result([size, 8], looks=True, in_parts=in_parts)
        return way.digest

    assert digest(2, in_parts=False) != digest(4, in_parts=False)
    assert digest(2, in_parts=True) == digest(4, in_parts=True)
