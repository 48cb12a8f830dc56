"""Philox: the known answers of Random123, the same bits from C++ and from torch operators, and statistics."""

from __future__ import annotations

import math

import pytest
import torch

from meshwright.apply.randomness import distributions, native
from meshwright.apply.randomness.philox import ElementPlace, Level, RowPlaces, key_of, merge_levels, philox, words_at

CPU = torch.device("cpu")
ONES = 0xFFFFFFFF
# Random123, kat_vectors, "philox4x32 10": https://github.com/DEShawResearch/random123
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES, ONES, ONES, ONES), (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
PLACES = [
    ElementPlace(key_of("rows"), (Level(4, 1, 0), Level(1003, 0, 1)), 2**33, 2**34 + 1),
    ElementPlace(key_of("middle"), (Level(3, 0, 7), Level(4, 1, 0), Level(7, 0, 1)), 9, 2),
    ElementPlace(key_of("last"), (Level(5, 0, 3), Level(3, 1, 0)), 1, 0),
    ElementPlace(key_of("one"), (Level(1, 0, 1),)),
    ElementPlace(
        key_of("chosen"),
        (Level(2, 0, 9), Level(7, 0, 1)),
        first_index=3,
        rows=RowPlaces(torch.tensor([5, 2**40 + 1, 9]), torch.tensor([0, 14, 7])),
    ),
    ElementPlace(
        key_of("many short"),
        (Level(5, 0, 1),),
        first_index=2,
        rows=RowPlaces(torch.arange(100) % 7, torch.arange(100) * 5),
    ),
    ElementPlace(key_of("short runs"), (Level(40, 1, 0), Level(3, 0, 50), Level(6, 0, 1)), 3, 1),
    ElementPlace(key_of("none"), (Level(7, 0, 1),), rows=RowPlaces(torch.tensor([]).long(), torch.tensor([]).long())),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, int], words: tuple[int, ...]) -> None:
    found = philox([torch.tensor([word]) for word in counter], key)
    assert [int(word) for word in found] == list(words)


needs_compiler = pytest.mark.skipif(native.library() is None, reason="no C++ compiler")


@needs_compiler
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("plane", [0, 1])
def test_native_words_are_those_of_torch_operators(place: ElementPlace, plane: int) -> None:
    assert torch.equal(distributions.words(place, plane, CPU), words_at(place, plane, CPU))


@needs_compiler
@pytest.mark.parametrize("place", PLACES)
def test_native_numbers_are_those_of_torch_operators(place: ElementPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [draw(place) for draw in _DRAWS]
    monkeypatch.setattr(distributions, "takes", lambda *_: False)
    for number, one in zip(_DRAWS, found, strict=True):
        assert torch.equal(number(place), one)


@needs_compiler
def test_native_threads_give_the_same_numbers() -> None:
    place = ElementPlace(key_of("threads"), (Level(3, 1, 0), Level(2**20 + 5, 0, 1)))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = distributions.uniform(place, torch.float32, CPU)
        torch.set_num_threads(3)
        assert torch.equal(distributions.uniform(place, torch.float32, CPU), one)
    finally:
        torch.set_num_threads(before)


def _kept(dtype: torch.dtype, place: ElementPlace) -> torch.Tensor:
    out = torch.empty(place.count, dtype=dtype)
    distributions.fill_bernoulli(out, place, 0.7)
    return out


_DRAWS = [
    *(
        lambda place, dtype=dtype: distributions.uniform(place, dtype, CPU)
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    ),
    *(
        lambda place, dtype=dtype: _kept(dtype, place)
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.bool, torch.int64)
    ),
    lambda place: distributions.normal(place, CPU),
    lambda place: distributions.exponential(place, CPU),
    lambda place: distributions.integers(place, -3, 9, CPU),
    lambda place: distributions.integers(place, 0, 2**62, CPU),
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.bool])
def test_a_mask_is_the_same_in_every_dtype(dtype: torch.dtype) -> None:
    assert torch.equal(_kept(dtype, PLACES[0]).float(), _kept(torch.float32, PLACES[0]))


def test_levels_are_merged_where_runs_continue() -> None:
    assert merge_levels([Level(3, 0, 20), Level(4, 0, 5), Level(5, 0, 1)]) == (Level(60, 0, 1),)
    assert merge_levels([Level(3, 1, 0), Level(1, 0, 9), Level(5, 0, 1)]) == (Level(3, 1, 0), Level(5, 0, 1))


# -- statistics: fixed keys, so that a failure is a bug and not chance -----------------------------------------------------

NUM = 200_000


def _place(text: str, sample: int = 0) -> ElementPlace:
    return ElementPlace(key_of(text), (Level(NUM, 0, 1),), sample)


def test_moments_of_each_distribution() -> None:
    sigmas = 4 / math.sqrt(NUM)
    uniform = distributions.uniform(_place("u"), torch.float64, CPU)
    assert abs(float(uniform.mean()) - 0.5) < sigmas / math.sqrt(12)
    assert abs(float(uniform.var()) - 1 / 12) < sigmas * 0.075
    assert float(uniform.min()) >= 0
    assert float(uniform.max()) < 1
    normal = distributions.normal(_place("n"), CPU)
    assert abs(float(normal.mean())) < sigmas
    assert abs(float(normal.var()) - 1) < sigmas * math.sqrt(2)
    assert abs(float(normal.pow(4).mean()) - 3) < sigmas * math.sqrt(96)
    exponential = distributions.exponential(_place("e"), CPU)
    assert abs(float(exponential.mean()) - 1) < sigmas
    kept = torch.empty(NUM)
    distributions.fill_bernoulli(kept, _place("b"), 0.9)
    assert abs(float(kept.mean()) - 0.9) < sigmas * 0.3


def test_uniform_numbers_fill_bins_evenly() -> None:
    bins = torch.histc(distributions.uniform(_place("bins"), torch.float32, CPU), 64, 0, 1)
    chi = float(((bins - NUM / 64).square() / (NUM / 64)).sum())
    assert 30 < chi < 110  # 63 degrees of freedom: beyond either end once in 10,000


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((_place("s/step/0/drop/0")), (_place("s/step/0/drop/1"))),  # calls
        ((_place("s/step/0/drop/0")), (_place("s/step/1/drop/0"))),  # steps
        ((_place("s/step/0/drop/0", 0)), (_place("s/step/0/drop/0", 1))),  # samples, on whatever rank
    ],
)
def test_draws_are_independent(one: ElementPlace, other: ElementPlace) -> None:
    first, second = (distributions.normal(place, CPU) for place in (one, other))
    assert abs(float((first * second).mean())) < 4 / math.sqrt(NUM)
    assert abs(float((first[1:] * first[:-1]).mean())) < 4 / math.sqrt(NUM)
    assert not torch.equal(first, second)
