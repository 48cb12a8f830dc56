"""Sample dims: found from shapes, and places that a cut of the batch or of the tensor does not change."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from meshwright.apply.randomness import distributions
from meshwright.apply.randomness.draw_cuts import find_cut
from meshwright.apply.randomness.forward_draws import ForwardDraws
from meshwright.apply.randomness.philox import NO_SAMPLE, ElementPlace, key_of, words_at
from meshwright.apply.randomness.row_slices import place_pieces
from meshwright.apply.randomness.sample_dims import DrawnPart, SiteDims, find_dims, locate

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("shapes", "dim", "is_merged"),
    [
        ([(4, (4, 3)), (2, (2, 3))], 0, False),
        ([(4, (4, 4)), (1, (4, 1))], 1, False),
        ([(3, (5, 3, 2)), (1, (5, 1, 2)), (2, (5, 2, 2))], 1, False),
        ([(4, (24, 3)), (2, (12, 3))], 0, True),
        ([(4, (3, 2)), (2, (3, 2))], None, False),
        ([(4, ()), (2, ())], None, False),
    ],
)
def test_the_dim_that_grows_holds_the_samples(
    shapes: list[tuple[int, tuple[int, ...]]], dim: int | None, is_merged: bool
) -> None:
    found = find_dims(shapes)
    assert found is not None
    assert (found.dim, found.is_merged) == (dim, is_merged)


@pytest.mark.parametrize(
    "shapes",
    [
        [(4, (4, 4)), (2, (2, 2))],  # each with each
        [(4, (7, 3)), (2, (5, 3))],  # routed tokens
        [(4, (4, 3)), (2, (2, 3, 1))],
        [(4, (4, 3)), (4, (4, 3))],
    ],
)
def test_what_does_not_grow_with_the_samples_is_unknown(shapes: list[tuple[int, tuple[int, ...]]]) -> None:
    assert find_dims(shapes) is None


def _draw(shape: tuple[int, ...], dims: SiteDims, num_samples: int, first: int) -> torch.Tensor:
    found = locate(shape, dims, num_samples)
    assert found is not None
    sample = NO_SAMPLE if dims.dim is None else first + found.first_sample
    place = ElementPlace(7, found.levels, sample, found.first_index)
    return distributions.uniform(place, torch.float64, CPU).view(shape)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_parts_of_a_batch_draw_what_the_whole_draws(dim: int) -> None:
    shape = [3, 5, 2]
    shape[dim] = 6
    whole = _draw(tuple(shape), SiteDims(dim), 6, 10)
    parts = []
    for first, count in ((0, 1), (1, 3), (4, 2)):
        shape[dim] = count
        parts.append(_draw(tuple(shape), SiteDims(dim), count, 10 + first))
    assert torch.equal(torch.cat(parts, dim), whole)


@pytest.mark.parametrize("is_minor", [False, True])
def test_a_merged_dim_is_cut_by_samples(is_minor: bool) -> None:
    dims = SiteDims(0, is_minor=is_minor, is_merged=True)
    shape = (5, 6) if is_minor else (6, 5)  # entries of a sample, samples
    along = 1 if is_minor else 0
    whole = _draw((30, 2), dims, 6, 0).view(*shape, 2)
    parts = [_draw((5 * n, 2), dims, n, first) for first, n in ((0, 2), (2, 4))]
    views = [part.view((5, -1, 2) if is_minor else (-1, 5, 2)) for part in parts]
    assert torch.equal(torch.cat(views, along), whole)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_slices_of_a_tensor_draw_their_parts(dim: int) -> None:
    full = [4, 6, 8]  # samples, then two dims of their own; dim 0 holds 2 entries of each of 2 samples
    sizes = {0: (1, 1), 1: (4, 2), 2: (5, 3)}[dim]
    whole = _draw(tuple(full), SiteDims(0, is_merged=True), 2, 0)
    parts = []
    for rank, size in enumerate(sizes):
        shape = list(full)
        shape[dim] = size * 2 if dim == 0 else size
        parts.append(_draw(tuple(shape), SiteDims(0, is_merged=True, cut=DrawnPart(dim, sizes, rank)), 2, 0))
    if dim == 0:
        joined = torch.cat([part.view(2, 1, 6, 8) for part in parts], 1).view(4, 6, 8)
    else:
        joined = torch.cat(parts, dim)
    assert torch.equal(joined, whole)


# The second is a call in which the other dim holds the samples: a layer that chance left out has shifted the calls.
@pytest.mark.parametrize(("shape", "num_samples"), [((5, 2), 2), ((6, 3), 3), ((4,), 0)])
def test_shapes_that_do_not_fit_have_no_place(shape: tuple[int, ...], num_samples: int) -> None:
    assert locate(shape, SiteDims(0), num_samples) is None


@pytest.mark.parametrize(
    ("whole", "shapes", "dim", "sizes"),
    [
        ((2, 4, 4, 4), [(2, 2, 4, 4), (2, 2, 4, 4)], 1, (2, 2)),  # heads, of which there are as many as tokens
        ((2, 3, 5, 5), [(2, 2, 5, 5), (2, 1, 5, 5)], 1, (2, 1)),
        ((2, 1, 5, 5), [(2, 1, 5, 5), None], None, ()),  # one head: the other rank has none
        ((2, 2, 5, 5), [(2, 1, 5, 5), (2, 1, 5, 5), None], 1, (1, 1, 0)),
    ],
)
def test_heads_are_a_cut(
    whole: tuple[int, ...], shapes: list[tuple[int, ...] | None], dim: int | None, sizes: tuple[int, ...]
) -> None:
    found = find_cut(SiteDims(0, num_dims=4), whole, shapes, 0, num_samples=2, slicing=(1, (2, 2), 0))
    assert found.cut == (None if dim is None else DrawnPart(dim, sizes, 0))
    assert not found.on_stream
    assert not found.is_apart


def test_a_draw_on_the_stream_is_the_chains() -> None:
    found = find_cut(
        SiteDims(0, num_dims=3), (2, 4, 8), [(2, 2, 8), (2, 2, 8)], 0, num_samples=2, slicing=(1, (2, 2), 0)
    )
    assert found.on_stream


def test_slices_of_the_samples_are_the_chains_in_tensors_of_any_dims() -> None:
    shapes = [(2, 2, 2, 8), (1, 2, 2, 8)]
    given: dict[str, Any] = {"num_samples": 3, "slicing": (0, (2, 1), 1)}
    assert find_cut(SiteDims(0, num_dims=4), (3, 2, 2, 8), shapes, 1, **given).on_stream
    merged = SiteDims(0, num_dims=4, is_merged=True)  # of each sample's heads, as many as slices
    assert not find_cut(merged, (3, 2, 2, 8), shapes, 1, **given).on_stream


@pytest.mark.parametrize("is_minor", [False, True])
@pytest.mark.parametrize("sizes", [(20, 20), (7, 0, 33)])
def test_slices_of_merged_rows_have_the_numbers_of_the_whole(sizes: tuple[int, ...], is_minor: bool) -> None:
    dims = SiteDims(0, is_minor=is_minor, num_dims=3, is_merged=True, on_stream=True)
    shape, key = (2, 3), key_of("call")
    found = locate((sum(sizes), *shape), dims, 5)
    assert found is not None
    whole = words_at(ElementPlace(key, found.levels, 4), 0, CPU)
    parts = [
        place_pieces(key, (size, *shape), dims, ForwardDraws(4, 5), (0, sizes, rank)) for rank, size in enumerate(sizes)
    ]
    assert all(part is not None for part in parts)
    assert torch.equal(torch.cat([words_at(part, 0, CPU) for part in parts if part]), whole)


def test_another_call_than_a_slice_of_merged_rows_has_no_places() -> None:
    dims = SiteDims(0, num_dims=3, is_merged=True, on_stream=True)
    forward, slicing = ForwardDraws(0, 5), (0, (20, 20), 1)
    assert place_pieces(1, (40, 2, 3), dims, forward, slicing) is None  # the whole
    assert place_pieces(1, (20, 2, 3), SiteDims(0, num_dims=3, is_merged=True), forward, slicing) is None
    assert place_pieces(1, (20, 2, 3), dims, ForwardDraws(0, 3), slicing) is None  # 40 rows of 3 samples


def test_a_length_that_numbers_decide_is_no_cut() -> None:
    dims = SiteDims(0, num_dims=3)
    given = {"num_samples": 4, "slicing": None}
    assert find_cut(dims, (4, 8, 20), [(4, 8, 26), (4, 8, 26)], 1, **given) == dims  # all ranks draw the whole
    assert find_cut(dims, (4, 8, 20), [(4, 8, 9), (4, 8, 14)], 1, **given).is_apart
    cut = find_cut(dims, (4, 8, 20), [(4, 4, 20), (4, 4, 20)], 1, **given)
    assert cut.cut == DrawnPart(1, (4, 4), 1)
