"""run/sentinels/imprint.py: one changed entry is found, named and told from what it was; several are told apart from one."""

from __future__ import annotations

import math

import pytest
import torch

from meshwright.run.sentinels.imprint import Change, Imprint, change_of

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int8)


def _tensors(dtype: torch.dtype, sizes: tuple[int, ...]) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(f"t{place}", (torch.randn(size, generator=generator) * 50).to(dtype)) for place, size in enumerate(sizes)]


def _flip(tensor: torch.Tensor, entry: int, bit: int) -> None:
    size = tensor.element_size()
    tensor.data.view(-1).view(torch.uint8)[entry * size + bit // 8] ^= 1 << bit % 8


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [(3, 5, 7), (20_001, 3), (9_000, 40_000)], ids=str)
def test_one_flipped_bit_is_found_wherever_it_is(dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
    named = _tensors(dtype, sizes)
    for index, size in enumerate(sizes):
        for entry in sorted({0, size // 2, size - 1}):
            name, tensor = named[index]
            for bit in (0, tensor.element_size() * 8 - 1):
                imprint = Imprint(named)
                assert imprint.changes() == []
                before = tensor[entry].item()
                _flip(tensor, entry, bit)
                found = imprint.changes()
                assert [(change.name, change.place) for change in found] == [(name, entry)]
                if dtype.is_floating_point:
                    assert (found[0].before, found[0].now) == (before, tensor[entry].item())
                    assert found[0].relative > 0
                    assert f"entry {entry} changed from" in found[0].text
                _flip(tensor, entry, bit)


def test_several_changes_are_not_taken_for_one() -> None:
    named = _tensors(torch.float32, (30_000, 5))
    imprint = Imprint(named)
    named[0][1].data[3:900] *= 2
    assert imprint.changes() == [Change("t0")] or [change.place for change in imprint.changes()] == [None]


def test_what_torch_counts_and_what_is_replaced_is_a_script() -> None:
    named = _tensors(torch.float64, (8, 40_000))
    imprint = Imprint(named)
    named[0][1][2] = 1.0  # counted
    assert imprint.changes() == []
    imprint = Imprint(named)
    named[1][1].data = torch.zeros(40_000, dtype=torch.float64)
    assert imprint.changes() == []


def test_a_change_beside_a_copy() -> None:
    before = torch.tensor([1.0, 2.0, 4.0])
    now = before.clone()
    assert change_of("w", now, before) is None
    now[1] = 3.0
    change = change_of("w", now, before)
    assert change == Change("w", 1, 2.0, 3.0, 0.25)
    now[2] = 5.0
    several = change_of("w", now, before)
    assert several is not None
    assert several.place is None
    assert math.isnan(several.relative)
    assert several.text == "its values changed"


def test_a_shard_that_begins_between_words_is_read() -> None:
    whole = torch.arange(40_003, dtype=torch.float32)
    shard = whole[1:]
    imprint = Imprint([("shard", shard)])
    whole.data[17] = 0.5
    assert [(change.place, change.before) for change in imprint.changes()] == [(16, 17.0)]
