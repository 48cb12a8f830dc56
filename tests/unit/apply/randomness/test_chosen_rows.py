"""Places of rows that an index chose: the same from C++ and from torch operators."""

from __future__ import annotations

import pytest
import torch

from meshwright.apply.randomness import native
from meshwright.apply.randomness.chosen_rows import ChosenRows
from meshwright.apply.randomness.sample_dims import SiteDims

NUM_SAMPLES, FIRST = 3, 4


def places(index: torch.Tensor, num_sources: int, *, is_minor: bool, calls: int) -> list[tuple[list[int], list[int]]]:
    """Return samples and indices of the rows in each of several calls for the same choice."""
    rows, source = ChosenRows(), torch.randn(num_sources, 2)
    chosen = source[index]
    rows.note("block", source, chosen, sizes=[num_sources], indices=[index], dim=0)
    dims = SiteDims(0, num_dims=2, is_merged=True, follows="block", is_minor=is_minor)
    found = []
    for number in range(calls):
        place = rows.place(
            ("block", number), dims, len(chosen), given=(), first=FIRST, num_samples=NUM_SAMPLES, row_stride=1
        )
        assert place is not None
        found.append((place.samples.tolist(), place.indices.tolist()))
    return found


@pytest.mark.skipif(native.library() is None, reason="no C++ compiler")
@pytest.mark.parametrize("is_minor", [False, True])
@pytest.mark.parametrize(
    "index",
    [
        torch.tensor([7, 0, 7, 11, 3, 7, 0]),
        torch.tensor([5, -1, 2]),
        torch.arange(12).flip(0)[::2],
        torch.arange(12) % 5 == 1,
        torch.tensor([], dtype=torch.int64),
    ],
    ids=["twice", "negative", "strided", "mask", "none"],
)
def test_native_places_are_those_of_torch_operators(
    index: torch.Tensor, is_minor: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = places(index, 12, is_minor=is_minor, calls=2)
    monkeypatch.setattr(native, "library", lambda: None)
    assert found == places(index, 12, is_minor=is_minor, calls=2)


def test_a_row_that_is_chosen_again_has_a_turn_of_its_own() -> None:
    (first, own), (second, _) = places(torch.tensor([7, 0, 7]), 12, is_minor=False, calls=2)
    assert own == [3, 0, 3]
    assert first == [1 + FIRST, FIRST, 1 + FIRST + 2**40]
    assert second == [1 + FIRST + 2 * 2**40, FIRST + 2**40, 1 + FIRST + 3 * 2**40]


def test_turns_do_not_depend_on_how_long_other_samples_are() -> None:
    """A module draws for rows of tensors of three and of five rows a sample: each row counts its own turns."""
    for order in ([3, 5], [5, 3]):
        rows = ChosenRows()
        for number, each in enumerate(order):
            source = torch.randn(NUM_SAMPLES * each, 2)
            index = torch.tensor([2 * each + 1])
            chosen = source[index]
            rows.note("block", source, chosen, sizes=[len(source)], indices=[index], dim=0)
            dims = SiteDims(0, num_dims=2, is_merged=True, follows="block", follows_last=True)
            place = rows.place(
                ("block", number), dims, 1, given=[chosen], first=0, num_samples=NUM_SAMPLES, row_stride=1
            )
            assert place is not None
            assert place.samples.tolist() == [2 + number * 2**40]
            assert place.indices.tolist() == [1]


def test_rows_are_followed_through_many_later_choices() -> None:
    """A model of many experts chooses hundreds of times in a forward; rows without padding were chosen before all of them."""
    rows, source, index = ChosenRows(), torch.randn(12, 2), torch.tensor([1, 2, 5, 7, 10, 11])
    rows.note("", source, source[index], sizes=[12], indices=[index], dim=0)
    own, given = torch.tensor([0, 4]), torch.randn(6, 2)
    for number in range(100):
        rows.note(f"layers.{number}", given, given[own], sizes=[6], indices=[own], dim=0)
    dims = SiteDims(0, num_dims=2, is_merged=True, follows="layers.99")
    found = rows.place(("layers.99", 0), dims, 2, given=(), first=0, num_samples=NUM_SAMPLES, row_stride=1)
    assert found is not None
    assert (found.samples.tolist(), found.indices.tolist()) == ([0, 2], [1, 2])
