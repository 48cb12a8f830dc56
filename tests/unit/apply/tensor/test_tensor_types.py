"""Types beside the proof: programs whose numbers agree on the example and that are still wrong are refused, with the line."""

from __future__ import annotations

import contextlib
import inspect
import linecache
import math
import re
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.unit.apply.tensor.tensor_type_cases import HIDDEN, PAIR, WIDTH, Between, experiment_of, types_of
from torch import Tensor, nn

from meshwright.apply.tensor.proof import proof
from meshwright.apply.tensor.proof.proof import DisprovedError
from meshwright.apply.tensor.search.search import Search
from meshwright.apply.tensor.tensor_layout import Cut, Region, TensorLayout

OUTSIDE = torch.tensor(2.0, dtype=torch.float64)


# -- right programs -----------------------------------------------------------------------------------------------


def _heads(_: Any, h: Tensor) -> Tensor:
    heads = h.view(*h.shape[:2], -1, 2).transpose(1, 2)
    scores = heads @ heads.transpose(-1, -2) / math.sqrt(heads.size(-1))
    mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    return (scores.masked_fill(~mask, -1e9).softmax(-1) @ heads).transpose(1, 2).flatten(2)


def _in_place(_: Any, h: Tensor) -> Tensor:
    h = h.clone()
    h += 1
    h[:, 0] = 0.0
    return h.mul_(2).relu_()


def _constants(_: Any, h: Tensor) -> Tensor:
    rows = h.new_zeros(h.shape[0], 1, 1)
    rows[:, 0] = OUTSIDE
    return h * (rows + torch.arange(h.shape[1]).to(h).view(-1, 1))


def _of_own_size(_: Any, h: Tensor) -> Tensor:
    return h * torch.ones(h.shape[-1], dtype=h.dtype) + torch.zeros_like(h)


RIGHT: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "an activation": lambda _, h: F.gelu(h),
    "heads": _heads,
    "in place": _in_place,
    "ones of this rank's size": _of_own_size,
    "constants of the code": _constants,
    "a scalar for all": lambda m, h: m.scale * h,
    "norm over positions": lambda _, h: h - h.mean((0, 1)),
    "dropout that does not draw": lambda _, h: F.dropout(h, 0.5, training=False),
}


@pytest.mark.parametrize("num_parts", [2, 3])
@pytest.mark.parametrize("name", RIGHT)
def test_right_programs_are_cut(name: str, num_parts: int) -> None:
    region = PAIR.replace(num_units=4) if name == "heads" else PAIR
    report = types_of(RIGHT[name], region, num_parts=num_parts)
    assert not report.refusals
    assert report.num_operations > 2  # it did look


def test_a_whole_parameter_that_meets_parts_has_terms_of_a_gradient() -> None:
    assert types_of(RIGHT["a scalar for all"]).partial == {"scale"}
    assert types_of(RIGHT["an activation"]).partial == set()


# -- programs whose numbers agree, and that are wrong -----------------------------------------------------------------


def _branch_on_values(_: Any, h: Tensor) -> Tensor:
    if h.abs().max() > 1e6:
        h = h / h.abs().max()
    return h


def _branch_on_part(_: Any, h: Tensor) -> Tensor:
    if bool(h[0, 0].sum() * 0):
        h = h / 2
    return h


def _item(m: Any, h: Tensor) -> Tensor:
    m.aux = h.select(0, 0).select(0, 0).sum().item()
    return h


def _rescaled(_: Any, h: Tensor) -> Tensor:
    return h * (1 + 0 * float(h.detach().square().sum()))


def _softmax(_: Any, h: Tensor) -> Tensor:
    return h + 0 * h.softmax(-1)


def _mean(_: Any, h: Tensor) -> Tensor:
    return h - 0 * h.mean(-1, keepdim=True)


def _kept_attribute(m: Any, h: Tensor) -> Tensor:
    m.aux = h.square().sum()
    return h


def _kept_part(m: Any, h: Tensor) -> Tensor:
    m.aux = {"hidden": [h.detach()]}
    return h


def _kept_buffer(m: Any, h: Tensor) -> Tensor:
    m.seen.add_(h.detach().sum())
    return h


def _new_buffer(m: Any, h: Tensor) -> Tensor:
    m.seen = h.detach().sum()
    return h


def _without_rule(_: Any, h: Tensor) -> Tensor:
    return torch.special.i0e(h)


def _drawn(_: Any, h: Tensor) -> Tensor:
    return h + 0 * torch.rand_like(h)


def _drawn_by_size(_: Any, h: Tensor) -> Tensor:
    return h + 0 * torch.randn(h.shape, dtype=h.dtype)


def _value_shape(_: Any, h: Tensor) -> Tensor:
    return h + 0 * len(torch.nonzero(h > 1e6))


def _masked_shape(_: Any, h: Tensor) -> Tensor:
    return h + 0 * h[h > 1e6].sum()


def _size_branch(_: Any, h: Tensor) -> Tensor:
    if h.shape[-1] > HIDDEN // 2:
        h = h * 1.0
    return h


def _size_of_dim(_: Any, h: Tensor) -> Tensor:
    half = h.size(-1) // 2
    return h * (1.0 if half + 1 == HIDDEN // 2 + 1 else 1)


def _numel(_: Any, h: Tensor) -> Tensor:
    return h if h.numel() < 40 else h.clone()


def _numbered(_: Any, h: Tensor) -> Tensor:
    return h + 0 * torch.arange(h.shape[-1], dtype=h.dtype)


def _dropped(_: Any, h: Tensor) -> Tensor:
    return F.dropout(h, 0.5)


def _list(_: Any, h: Tensor) -> Tensor:
    return h * (1 if h.detach().flatten().tolist() else 2)


def _sorted(_: Any, h: Tensor) -> Tensor:
    return h + 0 * h.sort(-1).values


def _kept_in_an_object(m: Any, h: Tensor) -> Tensor:
    m.aux = types.SimpleNamespace(loss=h.square().sum())
    return h


def _hooked(_: Any, h: Tensor) -> Tensor:
    h.register_hook(lambda g: g)
    return h


def _from_outside(_: Any, h: Tensor) -> Tensor:
    with torch._C.DisableTorchFunction():
        return h * 2


WRONG: dict[str, tuple[Callable[[Any, Tensor], Tensor], str, str]] = {
    "a branch on values": (_branch_on_values, "goes over the sharded dim", "if h.abs().max() > 1e6"),
    "a branch on a part": (_branch_on_part, "reads a number", "if bool(h[0, 0].sum() * 0)"),
    "item": (_item, "reads a number", ".item()"),
    "float": (_rescaled, "reads a number", "float("),
    "a list of values": (_list, "reads a number", ".tolist()"),
    "softmax over the cut dim": (_softmax, "goes over the sharded dim", "softmax"),
    "mean over the cut dim": (_mean, "goes over the sharded dim", "h.mean"),
    "sorted over the cut dim": (_sorted, "goes over the sharded dim", "h.sort"),
    "kept as an attribute": (_kept_attribute, "kept as 'aux'", "m.aux ="),
    "kept deep in an attribute": (_kept_part, "kept as 'aux'", "m.aux ="),
    "written to a buffer": (_kept_buffer, "into what is replicated", "m.seen.add_"),
    "put in a buffer's place": (_new_buffer, "kept as 'seen'", "m.seen ="),
    "kept in an object": (_kept_in_an_object, "kept as 'aux'", "m.aux ="),
    "a hook on a gradient": (_hooked, "lets code see the gradient", "h.register_hook"),
    "made by what is not seen": (_from_outside, "no torch function made", ""),
    "without a rule": (_without_rule, "no rule for it", "i0e"),
    "random numbers": (_drawn, "draws random numbers for a part", "rand_like"),
    "random numbers by size": (_drawn_by_size, "draws random numbers for a part", "torch.randn"),
    "as many as the values say": (_value_shape, "depends on all values", "nonzero"),
    "as many as a mask says": (_masked_shape, "mask", "h[h > 1e6]"),
    "a branch on the size": (_size_branch, "comes out otherwise", "if h.shape[-1]"),
    "a branch on a computed size": (_size_of_dim, "comes out otherwise", "half + 1"),
    "a branch on the number of entries": (_numel, "comes out otherwise", "h.numel()"),
    "numbers of places": (_numbered, "gives a tensor that is varying|leaves|takes a tensor that is varying", ""),
    "masks that are the same on every rank": (_dropped, "all ranks draw the same", "F.dropout"),
}


LEFT_BEHIND = {
    "item",
    "kept as an attribute",
    "kept deep in an attribute",
    "written to a buffer",
    "put in a buffer's place",
    "kept in an object",
}
"""Those whose forward leaves a wrong number behind, which the comparison of what is left refuses before the types are asked."""


@pytest.mark.parametrize("name", WRONG)
def test_numbers_that_agree_by_chance_are_refused_with_the_line(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, text, code = WRONG[name]
    message = experiment_of(Between(function)).check_types(TensorLayout(regions=(PAIR,))).refusals[0]
    assert message.startswith("types: ")
    assert re.search(text, message)
    if code:
        file, line = inspect.getfile(function), _line_of(message)
        assert f"{file.rsplit('/', 1)[-1]}:{line}" in message
        assert code in linecache.getline(file, line)
    with pytest.raises(DisprovedError) as caught:
        types_of(function)
    told = caught.value.message
    assert told.startswith("what is left in") if name in LEFT_BEHIND else told == message
    # The numbers alone would let the others pass.
    monkeypatch.setattr(proof, "Checker", lambda *_: None)
    with pytest.raises(DisprovedError) if name in LEFT_BEHIND else contextlib.nullcontext():
        experiment_of(Between(function)).prove(PAIR)


def _line_of(message: str) -> int:
    return int(message.partition(".py:")[2].split(" ")[0])


def test_a_size_may_be_compared_where_it_makes_no_difference() -> None:
    assert not types_of(lambda _, h: h if h.shape[-1] > 2 else h.relu()).refusals
    assert not types_of(lambda _, h: h if len(h.transpose(0, -1)) > 2 else h.relu()).refusals


def test_an_integer_of_the_module_is_compared_with_what_it_was() -> None:
    class Counted(Between):
        def __init__(self) -> None:
            super().__init__(lambda m, h: h if m.units >= 5 else h.clone())
            self.units = HIDDEN

    experiment = experiment_of(Counted())
    with pytest.raises(DisprovedError, match="comes out otherwise"):
        experiment.prove(PAIR.replace(integers=(("", "units"),)))
    same = Between(lambda m, h: h.view(*h.shape[:2], m.units) if h.shape[-1] == m.units else h.clone())
    same.units = HIDDEN
    assert experiment_of(same).prove(PAIR.replace(integers=(("", "units"),)))


def test_another_path_on_shards_is_refused() -> None:
    calls: list[int] = []

    def other(_: Any, h: Tensor) -> Tensor:
        calls.append(1)
        return h * 1.0 if len(calls) == 1 else h

    with pytest.raises(DisprovedError, match="another path"):
        types_of(other)


# -- edges of a region ------------------------------------------------------------------------------------------------


class Scope(nn.Module):
    """A module that is a sum: weights that are no layers."""

    def __init__(self, after: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(WIDTH, HIDDEN))
        self.v = nn.Parameter(torch.randn(HIDDEN, WIDTH))
        self.bias = nn.Parameter(torch.randn(WIDTH))
        self.after = after

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self, F.relu(x @ self.w) @ self.v)


SUM = Region(
    scope="",
    num_units=HIDDEN,
    cuts={"w": Cut(dim=1, groups=(HIDDEN,)), "v": Cut(dim=0, groups=(HIDDEN,), kind="row")},
    roles={"": "sum"},
)


def test_a_bias_after_a_sum_belongs_to_one_rank() -> None:
    module = Scope(lambda m, y: y + m.bias)
    assert experiment_of(module).prove(SUM.replace(once=("bias",))).partial == ("bias",)
    silent = Scope(lambda m, y: y + 0 * m.bias)
    with pytest.raises(DisprovedError, match="added once for each"):
        experiment_of(silent).prove(SUM)


@pytest.mark.parametrize(
    "after", [lambda _, y: y + 0 * y.relu(), lambda _, y: y + 0 * y * y.sum(), lambda _, y: y + 0 * y**2]
)
def test_a_function_of_a_term_is_refused(after: Callable[[Any, Tensor], Tensor]) -> None:
    with pytest.raises(DisprovedError, match="not linear"):
        experiment_of(Scope(after)).prove(SUM)


def test_dropout_of_a_term_is_right_where_it_drops_nothing() -> None:
    assert experiment_of(Scope(lambda _, y: F.dropout(y, 0.0))).prove(SUM)
    assert experiment_of(Scope(lambda _, y: F.dropout(y, 0.5, training=False))).prove(SUM)
    with pytest.raises(DisprovedError, match="not linear"):
        experiment_of(Scope(lambda _, y: F.dropout(y, 0.1))).prove(SUM)


def test_masks_on_what_every_rank_has_are_refused_where_ranks_draw_apart() -> None:
    class Dropped(Scope):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(F.dropout(x, 0.1))

    class Skipped(Scope):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (torch.rand(len(x), 1, 1, dtype=x.dtype) >= 0)

    with pytest.raises(DisprovedError, match="draws on a tensor that is replicated"):
        experiment_of(Dropped(lambda _, y: y)).prove(SUM.replace(drops=True))
    with pytest.raises(DisprovedError, match="draws random numbers for all ranks"):
        experiment_of(Skipped(lambda _, y: y)).prove(SUM.replace(drops=True))
    assert experiment_of(Skipped(lambda _, y: y)).prove(SUM)
    assert types_of(lambda _, h: F.dropout(h, 0.5), PAIR.replace(drops=True)).refusals == []


@pytest.mark.parametrize("requires_grad", [True, False])
def test_a_sum_that_drops_draws_apart_without_gradients_too(requires_grad: bool) -> None:
    class Dropping(Scope):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(F.relu(x @ self.w), 0.5) @ self.v

    experiment = experiment_of(Dropping(lambda _, y: y), requires_grad=requires_grad)
    region = experiment.prove(SUM.replace(drops=True))
    assert experiment.check_types(TensorLayout(regions=(region,))).refusals == []


# -- the search -------------------------------------------------------------------------------------------------------


def layout_of(function: Callable[[Any, Tensor], Tensor]) -> TensorLayout:
    x = torch.randn(2, 4, WIDTH, dtype=torch.float64)
    return Search(Between(function).double(), 2, lambda module: module(x)).layout()


def test_what_is_refused_is_cut_by_itself_with_the_reason() -> None:
    assert set(layout_of(RIGHT["an activation"]).cuts) >= {"up.weight", "down.weight"}
    layout = layout_of(_branch_on_values)
    assert all(region.is_apart for region in layout.regions)
    assert "goes over the sharded dim" in layout.alone["up.weight"]
    assert "test_tensor_types.py" in layout.alone["up.weight"]
