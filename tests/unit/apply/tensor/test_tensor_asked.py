"""Which sizes and numbers code asks for: those alone have to be proven anew."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.apply.tensor.guards import asked_shapes
from meshwright.apply.tensor.guards.asked import Asked
from meshwright.apply.tensor.proof.proof import Experiment
from meshwright.apply.tensor.search.trace import Call

SAMPLES, LENGTH, WIDTH, HEADS = 3, 5, 8, 2


class Layer(nn.Module):
    def __init__(self, function: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.flag = torch.zeros(())
        self.count: Tensor
        self.register_buffer("count", torch.zeros(()))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (y.view(b, t, HEADS, c // HEADS).transpose(1, 2) for y in self.qkv(x).split(c, 2))
        scores = q @ k.transpose(-2, -1) / math.sqrt(k.size(-1))
        scores = scores.masked_fill(torch.ones(t, t, device=x.device).triu(1).bool(), -math.inf)
        y = (scores.softmax(-1) @ v).transpose(1, 2).reshape(b, t, -1)
        given = self.function(self, x)
        return self.out(y) + (given if isinstance(given, Tensor) else 0.0)


def _asked(function: Callable[[Any, Tensor], Any]) -> Asked:
    torch.manual_seed(0)
    x = torch.randn(SAMPLES, LENGTH, WIDTH).double().requires_grad_()
    return Experiment(Layer(function).double(), Call(args=(x,), kwargs={}), 2).asks()


NOT_ASKED: dict[str, Callable[[Any, Tensor], Any]] = {
    "nothing": lambda _, x: None,
    "views": lambda _, x: x.reshape(x.shape[0] * x.shape[1], -1).view(*x.shape[:-1], -1),
    "a tensor of as many": lambda _, x: torch.arange(x.shape[1]).view(1, x.size(1), 1) * x,
    "a mean": lambda _, x: x.sum(1, keepdim=True) / x.shape[1],
    "sizes of tensors": lambda _, x: F.pad(x, (0, 0, 0, x.shape[1]))[:, : x.shape[1]] * x.new_ones(x.shape[1], 1),
    "more than one": lambda _, x: x * 2 if x.shape[1] > 1 else x,
    "two that differ": lambda _, x: x * 2 if x.shape[0] == x.shape[1] else x,
    "heads": lambda _, x: x * 0.5 if x.view(*x.shape[:2], HEADS, -1).shape[-1] > 3 else x,
}
ASKED: dict[str, Callable[[Any, Tensor], Any]] = {
    "float": lambda _, x: x * float(x.shape[1]),
    "division": lambda _, x: x * (1.0 / x.shape[1]),
    "power": lambda _, x: x * x.shape[1] ** -0.5,
    "range": lambda _, x: x * len(list(range(x.shape[1]))),
    "rows": lambda _, x: sum(row[:, None] for row in x.unbind(1)),
    "iteration": lambda _, x: sum(1 for _ in x.transpose(0, 1)),
    "parts": lambda _, x: x * len(x.split(2, 1)),
    "minimum": lambda _, x: x[:, : min(x.shape[1], 4)].sum(1, keepdim=True),
    "remainder": lambda _, x: x * 2 if x.shape[1] % 2 else x,
    "text": lambda _, x: x * len(f"{x.shape[1]:02d}"),
    "a number of as many": lambda _, x: x * torch.ones(x.shape[1]).sum().item(),
    "after padding": lambda _, x: x * 2 if F.pad(x, (0, 0, 1, 1)).size(1) > 6 else x,
    "every other": lambda _, x: x * 2 if x[:, ::2].shape[1] > 2 else x,
    "a product": lambda _, x: x * 2 if x.flatten(0, 1).shape[0] > 12 else x,
    "all entries": lambda _, x: x * 2 if x.numel() > 100 else x,
    "a step of memory": lambda _, x: x * 2 if x.contiguous().stride(0) > 30 else x,
    "a constant's": lambda _, x: x * 2 if (torch.arange(x.shape[1]) > torch.tensor(3)).any() else x,
    "a table of lists": lambda _, x: x * [0.0, 1.0, 2.0, 3.0, 4.0, 5.0][x.shape[1]],
}


@pytest.mark.parametrize("name", NOT_ASKED)
def test_shapes_ask_for_no_length(name: str) -> None:
    asked = _asked(NOT_ASKED[name])
    assert asked.sizes <= {WIDTH}  # which no call has otherwise
    assert asked.values == 0
    assert asked.is_same


@pytest.mark.parametrize("name", ASKED)
def test_a_length_that_is_anything_but_a_shape_counts(name: str) -> None:
    assert LENGTH in _asked(ASKED[name]).sizes


@pytest.mark.parametrize(
    ("function", "values"),
    [
        (lambda layer, x: x * 2 if layer.count > 1 else x, 1),
        (lambda layer, x: x * 2 if layer.flag > 1 else x, 2),
        (lambda layer, x: x * 2 if (layer.count + torch.tensor(2.0)) > 1 else x, 1),
        (lambda layer, x: x * layer.count, 0),
    ],
    ids=["a buffer", "an attribute", "computed of a buffer", "no branch"],
)
def test_numbers_that_decide_count(function: Callable[[Any, Tensor], Any], values: int) -> None:
    assert _asked(function).values == values


def test_what_gradients_decide_is_told() -> None:
    assert not _asked(lambda _, x: x * 2 if torch.is_grad_enabled() else x).is_same


@pytest.mark.parametrize(
    ("function", "is_known"),
    [
        (lambda _, x: x * float(x.shape[1]), True),
        (lambda layer, x: x * float(x.shape[1]) if layer.training else x.relu() * 2.0, False),
    ],
)
def test_what_sizes_follow_from_is_found_once_for_modes_that_call_the_same(
    function: Callable[[Any, Tensor], Any], is_known: bool
) -> None:
    torch.manual_seed(0)
    x = torch.randn(SAMPLES, LENGTH, WIDTH).double().requires_grad_()
    layer, call = Layer(function).double(), Call(args=(x,), kwargs={})
    first = Experiment(layer, call, 2).asks()
    layer.eval()
    again, alone = Experiment(layer, call, 2).asks(None, first.followed), Experiment(layer, call, 2).asks()
    assert (again.sizes, again.values, again.is_same) == (alone.sizes, alone.values, alone.is_same)
    assert (again.followed is first.followed) is is_known


def test_a_size_that_another_mode_reads_counts_where_both_call_the_same() -> None:
    torch.manual_seed(0)
    x = torch.randn(SAMPLES, LENGTH, WIDTH).double().requires_grad_()

    def scaled(layer: Any, x: Tensor) -> Tensor:
        length = x.shape[1]
        return x * (float(length) if layer.training else 3.0)

    layer, call = Layer(scaled).double(), Call(args=(x,), kwargs={})
    layer.eval()
    first = Experiment(layer, call, 2).asks()
    layer.train()
    assert LENGTH not in first.sizes
    assert LENGTH in Experiment(layer, call, 2).asks(None, first.followed).sizes


RESIZED: dict[str, tuple[Callable[[Any, Tensor], Any], bool]] = {
    "heads and widths": (lambda _, x: x.view(*x.shape[:2], HEADS, -1).flatten(2).split(WIDTH // 2, 2)[0].mean(), False),
    "a slice of widths": (lambda _, x: x[..., :4].sum(), False),
    "a last token": (lambda _, x: x[:, -1:], False),
    "at most so many tokens": (lambda _, x: x[:, :4].sum(), True),
    "a table by length": (lambda layer, x: layer.qkv.weight[: x.shape[1], :WIDTH], True),
    "chunks of time": (lambda _, x: x.split(4, dim=1)[0].sum(), True),
    "time behind an open dim": (lambda _, x: x.sum(2).view(-1, x.shape[1]), True),
    "time by itself": (lambda _, x: x.unflatten(1, (x.shape[1], 1)).squeeze(2), True),
}


@pytest.mark.parametrize("name", RESIZED)
def test_a_length_counts_by_which_sizes_would_be_translated(name: str) -> None:
    # A length that is a multiple of the units by chance would be taken for a width, and cut.
    function, counts = RESIZED[name]
    torch.manual_seed(0)
    x = torch.randn(SAMPLES, LENGTH, WIDTH).double().requires_grad_()
    experiment = Experiment(Layer(lambda layer, x: function(layer, x).sum()).double(), Call(args=(x,), kwargs={}), 2)
    assert (LENGTH in experiment.asks(resizes=True).sizes) is counts
    assert name == "chunks of time" or LENGTH not in experiment.asks().sizes  # as many results


@pytest.mark.parametrize("name", [*NOT_ASKED, *ASKED])
def test_runs_that_compute_shapes_alone_show_the_same(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    function = {**NOT_ASKED, **ASKED}[name]
    asked = _asked(function)
    monkeypatch.setattr(asked_shapes, "_WORTH", 1)
    alone = _asked(function)
    assert (alone.sizes, alone.values) == (asked.sizes, asked.values)
    assert alone.followed == asked.followed


def test_another_size_is_run_without_numbers_where_tensors_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[bool] = []

    def note(_: Any, x: Tensor) -> Tensor:
        given.append(x.is_meta)
        return x * 0.0

    _asked(note)
    assert not any(given)
    monkeypatch.setattr(asked_shapes, "_WORTH", 1)
    given.clear()
    _asked(note)
    # Samples and length; a layer takes no other width, which is found out with numbers.
    assert given.count(True) == 2
