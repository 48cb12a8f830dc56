"""Tensors of which a rank has a part: what is done on them, what is refused, and which class they have when."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.apply.shards import elementwise
from meshwright.apply.shards.classes import ShardTensor, as_shard
from meshwright.apply.shards.facts import ShardFacts
from meshwright.apply.shards.switch import ShardSwitch


def facts(switch: ShardSwitch, name: str, key: int, **options: Any) -> ShardFacts:
    options = {"values": "shard", "is_cut_inside": True} | options
    return ShardFacts(name=name, held="rank 0 has half of it", moment=switch.moment, key=key, **options)


@pytest.fixture
def switch() -> Iterator[ShardSwitch]:
    made = ShardSwitch("tp=2")
    yield made
    made.close()


@pytest.fixture
def pair(switch: ShardSwitch) -> tuple[nn.Parameter, nn.Parameter]:
    torch.manual_seed(0)
    one, two = nn.Parameter(torch.rand(4, 3)), nn.Parameter(torch.rand(4, 3))
    one.grad = torch.rand(4, 3)
    switch.adopt([(one, facts(switch, "one", 1)), (two, facts(switch, "two", 2))])
    switch.begin()
    return one, two


Pair = tuple[nn.Parameter, nn.Parameter]

ALLOWED: list[Callable[[Pair], Any]] = [
    lambda pair: 1 - pair[0] * 2,
    lambda pair: pair[0] + pair[0].detach(),
    lambda pair: pair[0].grad.clamp_(-1, 1),  # pyright: ignore[reportOptionalMemberAccess]
    lambda pair: pair[0].mul_(2).add_(pair[0], alpha=0.5),
    lambda pair: torch.where(pair[0] > 0, pair[0], 0.0),
    lambda pair: nn.init.zeros_(pair[0]),
    lambda pair: torch._foreach_lerp(list(pair), [p.detach().clone() for p in pair], 0.5)[0],
    lambda pair: pair[0].data.copy_(pair[0].detach()),
    lambda pair: copy.deepcopy(pair[0]),
]

REFUSED: list[Callable[[Pair], Any]] = [
    lambda pair: pair[0].norm(),
    lambda pair: pair[0].sum(),
    lambda pair: pair[0][0],
    lambda pair: pair[0].__setitem__(0, 1.0),
    lambda pair: list(pair[0]),
    lambda pair: pair[0] @ torch.ones(3),
    lambda pair: pair[0] + pair[1],
    lambda pair: pair[0] + torch.ones(4, 3),
    lambda pair: torch.empty(8, 3).copy_(pair[0]),
    lambda pair: pair[0].copy_(torch.ones(4, 3)),
    lambda pair: nn.init.orthogonal_(pair[0]),
    lambda pair: pair[0].uniform_(),
    lambda pair: pair[0].tolist(),
    lambda pair: pair[0].detach().numpy(),
    lambda pair: pickle.dumps(pair[0]),
    lambda pair: torch.stack(list(pair)),
    lambda pair: pair[0].grad.norm(),  # pyright: ignore[reportOptionalMemberAccess]
    lambda pair: nn.utils.clip_grad_norm_(pair, 1.0),
    lambda pair: setattr(pair[0], "grad", torch.ones(4, 3)),
    nn.utils.parameters_to_vector,
    lambda pair: torch.where(pair[0] > 0),
]


@pytest.mark.parametrize("work", ALLOWED)
@torch.no_grad()
def test_what_treats_each_entry_by_itself_gives_shards(pair: Pair, work: Callable[[Pair], Any]) -> None:
    assert isinstance(work(pair), ShardTensor)


@pytest.mark.parametrize("work", REFUSED)
@torch.no_grad()
def test_what_needs_other_entries_is_refused_by_name(pair: Pair, work: Callable[[Pair], Any]) -> None:
    before = [parameter.data_ptr() for parameter in pair]
    with pytest.raises(mw.ApplyError, match=r"of (the gradient of )?one needs the whole tensor: under the plan 'tp=2'"):
        work(pair)
    assert [parameter.data_ptr() for parameter in pair] == before


def test_values_are_those_of_the_plain_tensor(switch: ShardSwitch, pair: Pair) -> None:
    with switch.plain():
        expected = 3 * pair[0].detach() + 1
    found = 3 * pair[0].detach() + 1
    with switch.plain():
        assert torch.equal(found.as_subclass(Tensor), expected)


def test_classes_change_with_who_runs(switch: ShardSwitch, pair: Pair) -> None:
    one = pair[0]
    assert isinstance(one, ShardTensor)
    assert isinstance(one, nn.Parameter)
    with switch.plain():
        assert type(one) is nn.Parameter
        with switch.user_code():
            assert isinstance(one, ShardTensor)
            opened = switch.open_part(switch.entries_of([one]))
            assert type(one) is nn.Parameter
            assert isinstance(pair[1], ShardTensor)
            switch.close_part(opened)
            assert isinstance(one, ShardTensor)
    with switch.whole():
        assert one.norm() > 0
        with pytest.raises(mw.ApplyError, match="the gradient of one"):
            one.grad.norm()  # pyright: ignore[reportOptionalMemberAccess]
        assert type(copy.deepcopy(one)) is nn.Parameter
        assert type(pickle.loads(pickle.dumps(one))) is nn.Parameter
    switch.close()
    assert type(one) is nn.Parameter
    assert not vars(one)


def test_a_gradient_that_is_elsewhere_is_no_missing_one(switch: ShardSwitch) -> None:
    one = nn.Parameter(torch.rand(3))
    switch.adopt([(one, facts(switch, "one", 1, values="whole", is_cut=False, gradient_is_elsewhere=lambda: True))])
    switch.begin()
    assert one.sum() > 0
    assert one.grad is not None
    with pytest.raises(mw.ApplyError, match="full_gradients"):
        one.grad.norm()
    one.grad = None
    assert one.grad is None


def test_a_parameter_made_of_a_parameter_is_refused_with_its_cause(switch: ShardSwitch) -> None:
    # As parametrizations do, with torch's words about detach() else.
    part, whole = nn.Parameter(torch.rand(4, 3)), nn.Parameter(torch.rand(3, 3))
    held = facts(switch, "whole", 2, values="whole", is_cut=False, gradient_is_elsewhere=lambda: True)
    switch.adopt([(part, facts(switch, "part", 1)), (whole, held)])
    switch.begin()
    for parameter in (part, whole):
        with pytest.raises(mw.ApplyError, match="register parametrizations before apply_plan"):
            nn.Parameter(parameter)
    assert torch.equal(nn.Parameter(whole.detach().clone()), whole)


@pytest.mark.parametrize("is_cut", [False, True])
def test_terms_of_a_sum_go_through_linear_functions_alone(switch: ShardSwitch, *, is_cut: bool) -> None:
    term = as_shard(torch.rand(4, 3), facts(switch, "one", 1, values="share", is_cut=is_cut))
    for made in (
        term * 2,
        -term,
        term / 3,
        term + term,
        term.clone().mul_(0.5),
        term.masked_fill(torch.tensor(True), 0),
    ):
        assert isinstance(made, ShardTensor)
    assert type(torch.isnan(term)) is Tensor
    works = [lambda: term + 1, lambda: 1 / term, lambda: term * term, lambda: term.clamp(-1, 1), term.norm]
    for work in works:
        with pytest.raises(mw.ApplyError, match="of one"):
            work()
    if is_cut:
        with pytest.raises(mw.ApplyError, match="of one"):
            term * torch.ones(4, 3)
    else:
        term[1:] = 0
        assert isinstance(term * torch.ones(4, 3) - term.mean(), ShardTensor)


def test_names_say_what_is_written() -> None:
    writes = [
        name for name in ("add_", "__iadd__", "__setitem__", "_foreach_mul_") if elementwise.writes_in_place(name)
    ]
    assert len(writes) == 4
    assert not any(map(elementwise.writes_in_place, ("add", "__add__", "__invert__", "_foreach_mul", "isnan")))
