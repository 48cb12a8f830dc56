"""Tensors of a batch that share memory: writes into one reach the others, and are counted, as on one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.parity.jobs.textbook_loop import losses_of
from tests.tolerances import FLOAT64
from torch import Tensor, nn
from torch.nn import functional as F

import meshwright as mw
from meshwright import testing
from meshwright.apply.modules.copies import own_copy
from meshwright.describe.batches import split_samples

NUM_SAMPLES, WIDTH = 8, 6


class InPlace(nn.Module):
    """Layers, the first of which writes into the input."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ReLU(inplace=True)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))

    def forward(self, inputs: Tensor) -> Tensor:
        inputs = self.first(inputs)
        for layer in self.layers:
            inputs = inputs + torch.tanh(layer(inputs))
        return inputs


class InPlaceOnAView(InPlace):
    """The same on some columns, of the input that the code after it uses."""

    def forward(self, inputs: Tensor) -> Tensor:
        self.first(inputs[:, :3])
        for layer in self.layers:
            inputs = inputs + torch.tanh(layer(inputs))
        return inputs


class Between(InPlace):
    """The same in the code between the layers."""

    def forward(self, inputs: Tensor) -> Tensor:
        inputs.relu_()
        for layer in self.layers:
            inputs = inputs + torch.tanh(layer(inputs))
        return inputs


class WrittenTooLate(nn.Module):
    """Writes into what backward needs; torch raises where it is told of it."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        outputs = self.one(one)
        other.mul_(2.0)
        return outputs * self.other(other)


def _build(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(2)
    return kind().double()


def _batch(step: int, how: str) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(NUM_SAMPLES, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
    return inputs, {"one": lambda: inputs, "view": lambda: inputs[:, :]}[how]()


def _loss(outputs: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(outputs, batch[1])


def _expected(kind: type[nn.Module], how: str) -> list[float]:
    return losses_of(_build(kind), [_batch(step, how) for step in range(3)], _loss)


def _found(line: str, kind: type[nn.Module], how: str) -> list[float]:
    model = mw.apply_plan(
        lambda: _build(kind), line, loss_fn=_loss, optimizer=lambda given: torch.optim.SGD(given, lr=0.1)
    )
    return [model.step(_batch(step, how)).loss for step in range(3)]


PIPES = [f"pp=2,micro_batches=2{kind}" for kind in ("", ",schedule=interleaved,virtual=2", ",schedule=zbv")]


@pytest.mark.parametrize("line", PIPES)
@pytest.mark.parametrize("kind", [InPlace, Between])
def test_writes_reach_the_targets_that_are_the_inputs(line: str, kind: type[nn.Module]) -> None:
    for found in testing.run_ranks(_found, 2, line, kind, "one"):
        assert found == pytest.approx(_expected(kind, "one"), rel=FLOAT64)


@pytest.mark.parametrize("line", PIPES)
def test_writes_between_layers_reach_views(line: str) -> None:
    for found in testing.run_ranks(_found, 2, line, Between, "view"):
        assert found == pytest.approx(_expected(Between, "view"), rel=FLOAT64)


@pytest.mark.parametrize("line", PIPES)
@pytest.mark.parametrize(("kind", "how"), [(InPlace, "view"), (InPlaceOnAView, "one")])
def test_layers_that_write_where_other_stages_look_are_refused(line: str, kind: type[nn.Module], how: str) -> None:
    with pytest.raises(mw.ApplyError, match="shares its memory"):
        testing.run_ranks(_found, 2, line, kind, how)


def _write_too_late(line: str, how: str) -> Any:
    model = mw.apply_plan(
        lambda: _build(WrittenTooLate),
        line,
        loss_fn=lambda outputs, _: outputs.square().mean(),
        optimizer=lambda given: torch.optim.SGD(given, lr=0.1),
    )
    one, other = _batch(0, how)
    return model.step(mw.split_batch({"one": one, "other": other}, model)).loss


@pytest.mark.parametrize(("line", "ranks"), [("micro_batches=2", 1), ("dp=2", 2), ("dp=2,zero=3,micro_batches=2", 2)])
@pytest.mark.parametrize("how", ["one", "view"])
def test_backward_refuses_what_was_written_through_another_tensor(line: str, ranks: int, how: str) -> None:
    with pytest.raises(Exception, match="modified by an inplace operation"):
        testing.run_ranks(_write_too_late, ranks, line, how)


def test_parts_and_copies_share_memory_as_the_batch_does() -> None:
    table = torch.arange(48.0).reshape(8, 6)
    part = split_samples({"a": table[:, :4], "b": table[:, 2:], "c": table.clone()}, [3, 5])[1]
    copy = own_copy(part)
    copy["a"].zero_()
    assert torch.equal(copy["b"], torch.cat([torch.zeros(5, 2), table[3:, 4:]], 1))
    assert copy["b"]._version == copy["a"]._version > copy["c"]._version
    assert table.min() == 0
    assert torch.equal(part["a"], table[3:, :4])
