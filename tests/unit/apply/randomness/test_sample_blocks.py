"""Blocks of a drawn tensor that are of one sample each: found from their samples, and the numbers that they get."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor

from meshwright.apply.randomness.distributions import uniform
from meshwright.apply.randomness.probes import Probes, ProbesOfFactories
from meshwright.apply.randomness.sample_blocks import NO_OWNER, find_blocks, place_blocks
from meshwright.apply.randomness.sample_dims import DrawnPart, SampleBlocks, SiteDims, from_rows, to_rows

CPU = torch.device("cpu")


def queries(count: int) -> Tensor:
    """Return the samples of queries above two documents of each."""
    return torch.cat([torch.arange(count), torch.arange(count).repeat_interleave(2)])


def first_rows(count: int) -> Tensor:
    """Return those of frames' tokens, the first of which are taken from the first rows."""
    owners = torch.arange(count).repeat_interleave(2)[:, None].repeat(1, 3)
    owners[:, 0] = NO_OWNER
    owners[:count, 0] = torch.arange(count)
    return owners


def found(kind: object, *counts: int) -> SampleBlocks:
    assert callable(kind)
    blocks = find_blocks([(count, kind(count)) for count in counts])
    assert blocks is not None
    return blocks


def numbers(
    blocks: SampleBlocks, shape: tuple[int, ...], first: int, count: int, cut: DrawnPart | None = None
) -> Tensor:
    own = SiteDims(0, num_dims=len(shape), is_merged=True, blocks=blocks, cut=cut)
    place = place_blocks(5, shape, own, blocks, first=first, num_samples=count, slicing=None)
    assert place is not None
    return uniform(place, torch.float64, CPU).view(shape)


@pytest.mark.parametrize("kind", [queries, first_rows])
@pytest.mark.parametrize("count", [1, 3, 7])
def test_samples_have_their_numbers_in_any_batch(kind: object, count: int) -> None:
    blocks = found(kind, 4, 2, 1, 1)
    assert callable(kind)
    owners, all_owners = kind(count), kind(9)
    mine = numbers(blocks, (*owners.shape, 5), 2, count)
    whole = numbers(blocks, (*all_owners.shape, 5), 0, 9)
    for sample in range(count):
        torch.testing.assert_close(mine[owners == sample], whole[all_owners == sample + 2], rtol=0, atol=0)
    assert len(whole[all_owners >= 0].unique()) == whole[all_owners >= 0].numel()


def test_a_part_of_the_features_has_the_wholes_numbers() -> None:
    blocks = found(first_rows, 3, 1)
    whole = numbers(blocks, (6, 3, 5), 0, 3)
    part = numbers(blocks, (6, 3, 2), 0, 3, cut=DrawnPart(2, (3, 2), 1))
    torch.testing.assert_close(part, whole[..., 3:], rtol=0, atol=0)


def test_other_shapes_have_no_places() -> None:
    blocks = found(queries, 4, 1)
    dims = SiteDims(0, blocks=blocks)
    assert place_blocks(5, (13, 5), dims, blocks, first=0, num_samples=4, slicing=None) is None
    assert place_blocks(5, (12, 5), dims, blocks, first=0, num_samples=0, slicing=None) is None


@pytest.mark.parametrize(
    "seen",
    [
        [(2, torch.tensor([0, 1]))],  # one size alone
        [(3, torch.tensor([0, 2, 1])), (1, torch.tensor([0]))],  # on no line
        [(2, torch.tensor([0, 1, 1])), (1, torch.tensor([0]))],  # more of one sample
        [(2, torch.tensor([-1, -1])), (1, torch.tensor([-1]))],  # of none
        [(3, torch.tensor([0, 1, 2, -1])), (1, torch.tensor([0, -1, -1]))],  # sizes on no line
    ],
)
def test_blocks_on_no_line_are_not_found(seen: list[tuple[int, Tensor]]) -> None:
    assert find_blocks(seen) is None


def test_blocks_are_told_to_other_ranks() -> None:
    dims = {("", 0): SiteDims(0, num_dims=3, is_merged=True, blocks=found(first_rows, 3, 1), kind="bernoulli_", site=4)}
    assert from_rows(json.loads(json.dumps(to_rows(dims)))) == dims


def test_probes_leave_no_graph() -> None:
    """A buffer that each forward fills would keep one, and so would what code keeps of a draw."""

    class Drawn:
        shape: tuple[int, ...] = (3,)

    probes, kept, view = Probes({("", 0): Drawn(), ("", 1): Drawn()}), torch.rand(3), torch.rand(6)[:3]
    probes.add(view)
    assert not view.requires_grad
    probes.add(kept)
    assert kept.requires_grad
    assert list(probes.of_calls) == [("", 1)]
    probes.leave()
    assert not kept.requires_grad


def test_nans_pass_masks_that_a_batch_decides() -> None:
    """A weight of zero passes them by itself, `where` and `masked_fill` do not."""

    class Drawn:
        shape: tuple[int, ...] = (4, 2)

    probes = Probes({("", 0): Drawn()}, {("", 0): torch.tensor([False, True, False, True])})
    mask = torch.zeros(4, 1, dtype=torch.bool)
    with ProbesOfFactories(probes):
        drawn = torch.rand(4, 2)
        chosen, filled, own = torch.where(mask, drawn, 0.0), drawn.masked_fill(~mask, 0.0), drawn.clone()
        own.masked_fill_(~mask, value=0.0)
    for result in (drawn, chosen, filled, own):
        assert result.isnan().all(1).tolist() == [False, True, False, True]
    assert not probes.of_calls
