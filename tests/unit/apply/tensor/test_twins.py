"""Proofs that one scope passes on to its twins: only where an experiment with one would be, bit for bit, that with the other."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.parity import cases
from torch import Tensor, nn

from meshwright.apply.tensor.proof.place_reads import PlaceReads
from meshwright.apply.tensor.proof.proof import Experiment
from meshwright.apply.tensor.proof.scope_values import ScopeValues
from meshwright.apply.tensor.proof.twins import Sameness, sameness
from meshwright.apply.tensor.search.passed_on import PassedOn
from meshwright.apply.tensor.search.search import Search
from meshwright.apply.tensor.search.trace import Call
from meshwright.apply.tensor.tensor_layout import TensorLayout
from meshwright.describe.batches import call_model

WIDTH, HIDDEN = 6, 8


class Settings:
    """A configuration of a layer's own."""

    def __init__(self) -> None:
        self.power = 1.0


class Block(nn.Module):
    """Two layers with an activation between them."""

    def __init__(self, index: int = 0, act: Callable[[Tensor], Tensor] = F.relu) -> None:
        super().__init__()
        self.layer_idx = index
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.act = act
        self.settings = Settings()
        self.table: Any = [1.0, 2.0]
        self.scale: Any = nn.Buffer(torch.ones(1))
        self.shift: Any = torch.zeros(1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(x)) ** self.settings.power * self.scale + self.shift * self.table[0])


class Reader(Block):
    """A block whose position decides the activation."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        return x + self.down(hidden.softmax(-1) if self.layer_idx % 2 else hidden.relu())


class Opener(Block):
    """The same, read where no attribute is asked for."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        return x + self.down(hidden.softmax(-1) if self.__dict__["layer_idx"] % 2 else hidden.relu())


def call(**kwargs: Any) -> Call:
    return Call(args=(torch.randn(2, 4, WIDTH, requires_grad=True),), kwargs=kwargs)


def compare(one: nn.Module, other: nn.Module, first: Call | None = None, second: Call | None = None) -> Sameness:
    return sameness(one, [first or call()], other, [second or call()])


def test_other_weights_make_no_difference_and_neither_do_other_activations() -> None:
    assert compare(Block(), Block()) is Sameness.SAME
    assert compare(Block(0), Block(1)) is Sameness.BUT_PLACES


def scaled(factor: float) -> Callable[[Tensor], Tensor]:
    return lambda hidden: hidden * factor


def _change_act(block: Block) -> None:
    block.act = F.gelu


def _change_setting(block: Block) -> None:
    block.settings.power = 2.0


def _change_entry(block: Block) -> None:
    block.table[0] = 0.5


def _change_buffer(block: Block) -> None:
    block.scale[0] = 2.0


def _change_tensor(block: Block) -> None:
    block.shift[0] = 2.0


def _change_mode(block: Block) -> None:
    block.up.eval()


def _change_flag(block: Block) -> None:
    block.up.weight.requires_grad = False


def _change_dtype(block: Block) -> None:
    block.up.bfloat16()


def _change_type(block: Block) -> None:
    block.layer_idx = True


def _doubled(_: nn.Module, __: Any, result: Tensor) -> Tensor:
    return result * 2.0


def _add_hook(block: Block) -> None:
    block.down.register_forward_hook(_doubled)


def _add_attribute(block: Any) -> None:
    block.gain = 1.0


def _tie(block: Block) -> None:
    block.scale = block.shift = torch.ones(1)


def _patch(block: Block) -> None:
    block.forward = lambda x: x


def _hold_a_generator(block: Block) -> None:
    block.table = torch.Generator()


@pytest.mark.parametrize(
    "change",
    [
        _change_act,
        _change_setting,
        _change_entry,
        _change_buffer,
        _change_tensor,
        _change_mode,
        _change_flag,
        _change_dtype,
        _change_type,
        _add_hook,
        _add_attribute,
        _tie,
        _patch,
        _hold_a_generator,
    ],
)
def test_whatever_an_experiment_depends_on_makes_a_difference(change: Callable[[Block], None]) -> None:
    one, other = Block(), Block()
    change(other)
    assert compare(one, other) is Sameness.DIFFERENT
    assert compare(other, one) is Sameness.DIFFERENT


def test_functions_are_compared_with_what_they_close_over() -> None:
    assert compare(Block(act=scaled(2.0)), Block(act=scaled(2.0))) is Sameness.SAME
    assert compare(Block(act=scaled(2.0)), Block(act=scaled(3.0))) is Sameness.DIFFERENT
    soft = functools.partial(F.softmax, dim=-1)
    assert compare(Block(act=soft), Block(act=functools.partial(F.softmax, dim=-1))) is Sameness.SAME
    assert compare(Block(act=soft), Block(act=functools.partial(F.softmax, dim=0))) is Sameness.DIFFERENT


def test_two_zeros_of_different_sign_and_two_equal_numbers_of_different_types_differ() -> None:
    for mine, other in ((0.0, -0.0), (1, 1.0), (True, 1)):
        one, two = Block(), Block()
        one.settings.power, two.settings.power = mine, other
        assert compare(one, two) is Sameness.DIFFERENT


def test_a_parameter_used_twice_is_not_two_parameters() -> None:
    one, other = Block(), Block()
    one.table, other.table = [one.up.weight, one.up.weight], [other.up.weight, other.up.weight]
    assert compare(one, other) is Sameness.SAME
    other.table = [other.up.weight, copy.deepcopy(other.up.weight)]
    assert compare(one, other) is Sameness.DIFFERENT


def test_arguments_without_gradient_count_by_their_values() -> None:
    mask = torch.tensor([True, False])
    for other, expected in ((mask.clone(), Sameness.SAME), (~mask, Sameness.DIFFERENT), (None, Sameness.DIFFERENT)):
        assert compare(Block(), Block(), call(mask=mask), call(mask=other)) is expected


def test_code_that_opens_all_attributes_may_read_a_position() -> None:
    assert compare(Opener(0), Opener(0)) is Sameness.SAME
    assert compare(Opener(0), Opener(1)) is Sameness.DIFFERENT


@pytest.mark.parametrize(("kind", "is_read"), [(Block, False), (Reader, True)])
def test_a_read_of_a_position_is_noticed_and_the_class_is_as_before(kind: type[Block], is_read: bool) -> None:
    block, before = kind(1), dict(vars(kind))
    reads = PlaceReads(block)
    with reads.watched():
        copy.deepcopy(block)(torch.randn(2, WIDTH))
        assert type(block) is kind
    assert reads.was_read is is_read
    assert dict(vars(kind)) == before
    assert block.layer_idx == 1
    assert reads.was_read is is_read


def test_writes_of_a_position_and_positions_that_are_missing_count_as_reads() -> None:
    block = Block(3)
    for action in (
        lambda: setattr(block, "layer_idx", 4),
        lambda: delattr(block, "layer_idx"),
        lambda: hasattr(block, "layer_idx"),
    ):
        reads = PlaceReads(Block(3))
        with reads.watched():
            action()
        assert reads.was_read
    assert "layer_idx" not in vars(block)


class Shy:
    """An object that raises where it is looked into."""

    def __getattribute__(self, name: str) -> Any:
        if name == "__dict__":
            raise RuntimeError("it is nobody's business")
        return super().__getattribute__(name)


def test_what_cannot_be_looked_into_is_proven_each() -> None:
    model = nn.Sequential(Block(), Block())
    block: Any
    for block in model:
        block.settings = Shy()
    trace: Any = SimpleNamespace(module=model, distinct={})
    passed = PassedOn(trace)
    passed.keep("it", "0", "right", PlaceReads(model[0]))
    assert passed.find("it", "0") == "right"
    assert passed.find("it", "1") is None
    model[1].settings = model[0].settings
    passed = PassedOn(trace)
    passed.keep("it", "0", "right", PlaceReads(model[0]))
    assert passed.find("it", "1") == "right"
    assert passed.num_passed == 1


# -- in a search ------------------------------------------------------------------------------------------------------


class _Counted(Experiment):
    """Counts the runs of shards."""

    num_runs = 0

    def _run_shards(self, layout: TensorLayout) -> Any:
        _Counted.num_runs += 1
        return super()._run_shards(layout)


def search(monkeypatch: pytest.MonkeyPatch, blocks: list[nn.Module]) -> tuple[TensorLayout, int]:
    """Return the layout of these blocks in a row, and how many runs of shards it took."""
    monkeypatch.setattr("meshwright.apply.tensor.proof.conditions.Experiment", _Counted)
    _Counted.num_runs = 0
    x = torch.randn(2, 4, WIDTH, dtype=torch.float64, requires_grad=True)
    return Search(nn.Sequential(*blocks).double(), 2, lambda module: module(x)).layout(), _Counted.num_runs


def test_equal_blocks_are_proven_once(monkeypatch: pytest.MonkeyPatch) -> None:
    _, alone = search(monkeypatch, [Block(0)])
    layout, together = search(monkeypatch, [Block(index) for index in range(4)])
    assert together == alone
    assert {f"{index}.up.weight" for index in range(4)} <= layout.cuts.keys()
    assert [chain.layers for chain in layout.chains] == [("0", "1", "2", "3")]
    assert len({layout.proven[f"{index}"] for index in range(4)}) == 4  # each with its own position


def test_each_block_more_takes_as_many_look_ups_and_no_values(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[tuple[int, int]] = []
    for num_blocks in (4, 8, 12):
        with monkeypatch.context() as patch:
            lookups, drawn = _count(patch, nn.Module, "get_submodule"), _count(patch, ScopeValues, "__init__")
            search(patch, [Block(index) for index in range(num_blocks)])
            found.append((len(lookups), len(drawn)))
    (four, values), (eight, _), (twelve, _) = found
    assert twelve - eight == eight - four
    assert {more for _, more in found} == {values}


def _count(patch: pytest.MonkeyPatch, kind: type, name: str) -> list[None]:
    """Return a list that gets an entry for each call of a method."""
    calls: list[None] = []
    method = getattr(kind, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        return method(*args, **kwargs)

    patch.setattr(kind, name, counted)
    return calls


@pytest.mark.parametrize("kind", [Reader, Opener])
def test_blocks_that_read_their_position_are_proven_each(monkeypatch: pytest.MonkeyPatch, kind: type[Block]) -> None:
    layout, _ = search(monkeypatch, [kind(index) for index in range(4)])
    rows = {name for region in layout.regions for name, role in region.roles.items() if role == "row"}
    assert rows == {"0.down", "2.down"}


@pytest.mark.parametrize("name", ["split_fused", "vit"])
def test_a_proof_that_is_passed_on_says_what_one_of_its_own_says(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    case = cases.find(f"style_{name}")
    batch = case.batch(2, 0)

    def layout() -> TensorLayout:
        torch.manual_seed(0)
        return Search(case.build(), 2, lambda module: call_model(module, batch)).layout()

    found = layout()
    monkeypatch.setattr("meshwright.apply.tensor.search.passed_on._MAX_ASKED", 0)
    assert layout() == found
