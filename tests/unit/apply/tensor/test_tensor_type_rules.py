"""Rules for types of tensors over the tp axis: what a rule accepts is true of random numbers, and wrong programs are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from meshwright.apply.tensor.types.lattice import PARTIAL, REPLICATED, ZERO, RefusedError, Type, Typed, shard
from meshwright.apply.tensor.types.marked import Size
from meshwright.apply.tensor.types.operation import Operation
from meshwright.apply.tensor.types.rules import result_types
from meshwright.apply.tensor.types.typed_run import name_of
from meshwright.trees import arguments_in

RANKS = 2
S0, S1, S2 = shard(0), shard(1), shard(2)


class LastCall(TorchFunctionMode):
    """Keeps the call that came last, as a checker sees it."""

    call: Any = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if list(arguments_in(result)) or name_of(func) == "setitem":
            self.call = (func, args, kwargs or {}, result)
        return result


def tensors_of(shape: tuple[int, ...], kind: Type, generator: torch.Generator) -> tuple[Tensor, list[Tensor]]:
    """Return a whole tensor and what each rank has of it."""
    whole = torch.rand(shape, generator=generator, dtype=torch.float64) + 0.5
    if kind.is_zero:
        whole = whole * 0
    if kind.kind == "partial":
        first = torch.randn(shape, generator=generator, dtype=torch.float64)
        return whole, [first, whole - first]
    if kind.dim is not None:
        return whole, [part.clone() for part in whole.chunk(RANKS, kind.dim)]
    return whole, [whole.clone() for _ in range(RANKS)]


def follow(function: Callable[..., Any], given: list[tuple[tuple[int, ...], Type]]) -> list[Type]:
    """Return the types of what a function gives, once they have been seen to be true."""
    generator = torch.Generator().manual_seed(0)
    made = [tensors_of(shape, kind, generator) for shape, kind in given]
    wholes = list(arguments_in(function(*(whole.clone() for whole, _ in made))))
    found: list[Type] = []
    results: list[list[Tensor]] = []
    for rank in range(RANKS):
        local = [parts[rank] for _, parts in made]
        with LastCall() as watched:
            function(*local)
        func, args, kwargs, result = watched.call
        typed = [
            Typed(part, kind, tuple(whole.shape))
            for (whole, _), part, (_, kind) in zip(made, local, given, strict=True)
        ]
        outputs = list(arguments_in(result))
        shapes = [tuple(tensor.shape) for tensor in wholes]
        found = result_types(Operation(name_of(func), args, kwargs, inputs=typed, outputs=outputs, wholes=shapes))
        results.append(outputs)
    for index, (kind, whole) in enumerate(zip(found, wholes, strict=True)):
        parts = [outputs[index] for outputs in results]
        if kind.kind == "replicated":
            joined = parts[0]
            assert torch.equal(parts[0], parts[1])
        else:
            joined = parts[0] + parts[1] if kind.kind == "partial" else torch.cat(parts, kind.dim)
        assert torch.allclose(joined.double(), whole.double(), rtol=1e-12, atol=1e-12)
    return found


A = (2, 4, 6)
IDS = torch.tensor([[0, 2], [1, 1]])

RIGHT: dict[str, tuple[Callable[..., Any], list[tuple[tuple[int, ...], Type]], Type]] = {
    "nonlinear of a part": (F.gelu, [(A, S2)], S2),
    "parts of one dim meet": (lambda a, b: a * b, [(A, S2), (A, S2)], S2),
    "a part and a vector in parts": (lambda a, b: a + b, [(A, S2), ((6,), S0)], S2),
    "a part and a whole vector beside it": (lambda a, b: a * b, [(A, S1), ((6,), REPLICATED)], S1),
    "a part and one for all": (lambda a, b: a * b, [(A, S1), ((2, 1, 6), REPLICATED)], S1),
    "terms are added": (torch.add, [(A, PARTIAL), (A, PARTIAL)], PARTIAL),
    "zeros are added to a term": (torch.add, [(A, PARTIAL), (A, ZERO)], PARTIAL),
    "a term is scaled": (lambda a, b: a * b, [(A, PARTIAL), ((6,), REPLICATED)], PARTIAL),
    "a term is divided": (lambda a, b: a / b, [(A, PARTIAL), ((6,), REPLICATED)], PARTIAL),
    "a term is masked": (lambda a, b: a.masked_fill(b > 1, 0.0), [(A, PARTIAL), ((6,), REPLICATED)], PARTIAL),
    "heads are split off": (lambda a: a.unflatten(-1, (-1, 1)), [(A, S2)], S2),
    "transposed": (lambda a: a.transpose(1, 2), [(A, S2)], S1),
    "permuted": (lambda a: a.permute(2, 0, 1), [(A, S2)], S0),
    "halves of another dim": (lambda a: a.chunk(2, -1), [(A, S1)], S1),
    "one of another dim": (lambda a: a[:, 0], [(A, S2)], S1),
    "a slice of another dim": (lambda a: a[..., 1:3], [(A, S1)], S1),
    "every other entry of parts of whole turns": (lambda a: a[..., 1::2], [((2, 4, 8), S2)], S2),
    "a new dim before": (lambda a: a[None, :, :, None], [(A, S1)], S2),
    "a term is reshaped": (lambda a: a.reshape(8, 6), [(A, PARTIAL)], PARTIAL),
    "joined beside": (lambda a, b: torch.cat([a, b], -1), [(A, S1), (A, S1)], S1),
    "stacked": (lambda a, b: torch.stack([a, b]), [(A, S1), (A, S1)], S2),
    "terms are joined": (lambda a, b: torch.cat([a, b], -1), [(A, PARTIAL), (A, ZERO)], PARTIAL),
    "rolled along another dim": (lambda a: a.roll(1, 1), [(A, S2)], S2),
    "padded along another dim": (lambda a: F.pad(a, (1, 0)), [(A, S1)], S1),
    "a column": (F.linear, [(A, REPLICATED), ((8, 6), S0), ((8,), S0)], S2),
    "a row": (F.linear, [(A, S2), ((8, 6), S1)], PARTIAL),
    "a row with a bias that is a term": (F.linear, [(A, S2), ((8, 6), S1), ((8,), PARTIAL)], PARTIAL),
    "a row of positions": (F.linear, [(A, S1), ((8, 6), REPLICATED), ((8,), REPLICATED)], S1),
    "a term through a layer": (F.linear, [(A, PARTIAL), ((8, 6), REPLICATED)], PARTIAL),
    "scores of heads": (torch.matmul, [((2, 4, 3, 5), S1), ((2, 4, 5, 3), S1)], S1),
    "a matrix for each": (torch.matmul, [((2, 4, 3, 5), S1), ((5, 7), REPLICATED)], S1),
    "a batch of products": (torch.bmm, [((4, 2, 3), S0), ((4, 3, 2), S0)], S0),
    "summed over": (torch.matmul, [(A, S2), ((6, 3), S0)], PARTIAL),
    "addmm": (torch.addmm, [((3,), ZERO), ((5, 6), S1), ((6, 3), S0)], PARTIAL),
    "einsum keeps": (lambda x, w: torch.einsum("btc,hcd->bhtd", x, w), [(A, REPLICATED), ((4, 6, 3), S0)], S1),
    "einsum sums": (lambda y, w: torch.einsum("bhtd,hdc->btc", y, w), [((2, 4, 3, 5), S1), ((4, 5, 6), S0)], PARTIAL),
    "einsum with dots": (lambda x, w: torch.einsum("...c,dc->...d", x, w), [(A, S2), ((3, 6), S1)], PARTIAL),
    "channels out": (F.conv2d, [((2, 3, 5, 5), REPLICATED), ((4, 3, 3, 3), S0), ((4,), S0)], S1),
    "channels in": (F.conv2d, [((2, 4, 5, 5), S1), ((3, 4, 3, 3), S1)], PARTIAL),
    "turned": (F.conv_transpose2d, [((2, 4, 5, 5), REPLICATED), ((4, 6, 2, 2), S1)], S1),
    "attention over heads": (F.scaled_dot_product_attention, [((2, 4, 3, 5), S1)] * 3, S1),
    "attention over samples": (F.scaled_dot_product_attention, [((2, 4, 3, 5), S0)] * 3, S0),
    "queries in parts": (
        F.scaled_dot_product_attention,
        [((2, 4, 6, 5), S2), ((2, 4, 6, 5), REPLICATED), ((2, 4, 6, 5), REPLICATED)],
        S2,
    ),
    "softmax over another dim": (lambda a: a.softmax(-1), [(A, S1)], S1),
    "a sum over the parts": (lambda a: a.sum(-1), [(A, S2)], PARTIAL),
    "a sum over all": (torch.sum, [(A, S2)], PARTIAL),
    "a mean over another dim": (lambda a: a.mean(0), [(A, S2)], S1),
    "a mean that keeps dims": (lambda a: a.mean(-1, keepdim=True), [(A, S1)], S1),
    "a mean of a term": (lambda a: a.mean(-1), [(A, PARTIAL)], PARTIAL),
    "sorted along another dim": (lambda a: a.sort(-1), [(A, S1)], S1),
    "topk along another dim": (lambda a: a.topk(2, -1), [(A, S1)], S1),
    "norm over another dim": (lambda a: a.norm(dim=-1), [(A, S1)], S1),
    "cumulated along another dim": (lambda a: a.cumsum(0), [(A, S1)], S1),
    "a weight with a size for each part": (torch._weight_norm, [((4, 3), S0), ((4, 1), S0)], S0),
    "layer_norm of positions": (lambda a, w: F.layer_norm(a, (6,), w), [(A, S1), ((6,), REPLICATED)], S1),
    "batch_norm of channels": (
        lambda a, w, b: F.batch_norm(a, None, None, w, b, training=True),
        [((2, 4, 5), S1), ((4,), S0), ((4,), S0)],
        S1,
    ),
    "pooling": (lambda a: F.max_pool2d(a, 2), [((2, 4, 6, 6), S1)], S1),
    "a table in columns": (lambda w: F.embedding(IDS, w), [((3, 4), S1)], S2),
    "picked along another dim": (lambda a: a.index_select(1, torch.tensor([0, 2])), [(A, S2)], S2),
    "gathered along another dim": (
        lambda a, b: a.gather(1, b.long()),
        [(A, S2), ((2, 1, 6), S2)],
        S2,
    ),
    "terms are written": (
        lambda a, b: a.index_add(0, torch.tensor([1, 0]), b),
        [((3, 4), ZERO), ((2, 4), PARTIAL)],
        PARTIAL,
    ),
    "copied into parts": (lambda a, b: a.copy_(b), [(A, S1), ((4, 6), S0)], S1),
    "one for all parts is copied": (lambda a, b: a.copy_(b), [(A, S1), ((6,), REPLICATED)], S1),
    "terms are copied into zeros": (lambda a, b: a.copy_(b), [(A, ZERO), (A, PARTIAL)], PARTIAL),
    "expanded in this rank's size": (lambda a, b: a.expand(-1, b.shape[1], -1), [((2, 1, 6), REPLICATED), (A, S1)], S1),
    "a cast to another's dtype": (lambda a, b: a.type_as(b), [((2, 1), REPLICATED), (A, S1)], REPLICATED),
    "the larger of two": (torch.max, [(A, S1), (A, S1)], S1),
    "new zeros": (lambda a: a.new_zeros(2, 3), [(A, S1)], REPLICATED),
    "ones in this rank's size": (torch.ones_like, [(A, S1)], S1),
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_a_rule_says_is_true(name: str) -> None:
    function, given, expected = RIGHT[name]
    found = follow(function, given)
    assert found
    assert [(kind.kind, kind.dim) for kind in found] == [(expected.kind, expected.dim)] * len(found)


WRONG: dict[str, tuple[Callable[..., Any], list[tuple[tuple[int, ...], Type]], str]] = {
    "nonlinear of a term": (F.gelu, [(A, PARTIAL)], "not linear"),
    "product of terms": (torch.mul, [(A, PARTIAL), (A, PARTIAL)], "not linear"),
    "divided by a term": (torch.div, [(A, REPLICATED), (A, PARTIAL)], "not linear"),
    "a bias on every rank": (torch.add, [(A, PARTIAL), ((6,), REPLICATED)], "added once for each"),
    "a number on every rank": (lambda a: a + 1.0, [(A, PARTIAL)], "added once for each"),
    "a row with its bias": (F.linear, [(A, S2), ((8, 6), S1), ((8,), REPLICATED)], "added once for each"),
    "a term and a part": (torch.add, [(A, PARTIAL), ((2, 1, 1), S0)], "mixes"),
    "parts of different dims": (torch.add, [((4, 4), S0), ((2, 2), S1)], "different dims"),
    "a part and a whole of its size": (torch.add, [((4, 6), S1), ((4, 3), REPLICATED)], "in parts"),
    "masked with another number": (lambda a: a.masked_fill(torch.ones(6).bool(), 1.0), [(A, PARTIAL)], "not linear"),
    "rolled along the parts": (lambda a: a.roll(1, 2), [(A, S2)], "rolls"),
    "padded along the parts": (lambda a: F.pad(a, (1, 0)), [(A, S2)], "pads"),
    "turned round": (lambda a: a.flip(2), [(A, S2)], "place"),
    "one entry of the parts": (lambda a: a[..., 0], [(A, S2)], "number in the sharded dim"),
    "every other entry of the parts": (lambda a: a[..., ::2], [(A, S2)], "every 2th"),
    "every other entry up to one": (lambda a: a[..., :6:2], [((2, 4, 8), S2)], "every 2th"),
    "joined with what is whole": (
        lambda a, b: torch.cat([a, b], 1),
        [((2, 4), S1), ((2, 3), REPLICATED)],
        "another share",
    ),
    "two sharded dims": (F.linear, [(A, S1), ((8, 6), S0)], "two sharded dims"),
    "products of terms": (torch.matmul, [((4, 4), PARTIAL), ((4, 4), PARTIAL)], "not linear"),
    "softmax over the parts": (lambda a: a.softmax(-1), [(A, S2)], "goes over the sharded dim"),
    "F.softmax over the parts": (lambda a: F.softmax(a, dim=2), [(A, S2)], "goes over the sharded dim"),
    "mean over the parts": (lambda a: a.mean(-1), [(A, S2)], "goes over the sharded dim"),
    "mean over all": (torch.mean, [(A, S1)], "goes over the sharded dim"),
    "maximum over the parts": (lambda a: a.amax((1, 2)), [(A, S1)], "goes over the sharded dim"),
    "norm over all": (torch.norm, [(A, S1)], "goes over the sharded dim"),
    "argmax over all": (torch.argmax, [(A, S1)], "goes over the sharded dim"),
    "topk of the parts": (lambda a: a.topk(2), [(A, S2)], "goes over the sharded dim"),
    "cumulated along the parts": (lambda a: a.cumsum(1), [(A, S1)], "goes over the sharded dim"),
    "a weight with sizes over the parts": (
        torch._weight_norm,
        [((4, 6), S1), ((4, 1), REPLICATED)],
        "goes over all dims but 0",
    ),
    "layer_norm over the parts": (lambda a: F.layer_norm(a, (3,)), [((2, 6), S1)], "goes over"),
    "batch_norm over samples": (lambda a: F.batch_norm(a, None, None, training=True), [((4, 3), S0)], "samples"),
    "a loss": (F.mse_loss, [(A, S1), (A, S1)], "loss"),
    "attention over lengths": (F.scaled_dot_product_attention, [((2, 4, 6, 5), S2)] * 3, "sums over"),
    "heads and whole keys": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        [((2, 8, 3, 5), S1), ((2, 4, 3, 5), REPLICATED), ((2, 4, 3, 5), REPLICATED)],
        "pairs heads",
    ),
    "places of an image": (lambda a: F.max_pool2d(a, 2), [((2, 4, 8, 8), S2)], "places"),
    "a table in rows": (lambda w: F.embedding(IDS * 0, w), [((6, 4), S0)], "looks up"),
    "picked from the parts": (lambda a: a.index_select(2, torch.tensor([0])), [(A, S2)], "number in the sharded dim"),
    "places of what is not zero": (torch.nonzero, [(A, S1)], "depends on all values"),
    "random numbers for a part": (torch.rand_like, [(A, S1)], "draws"),
    "a function without a rule": (torch.special.i0e, [(A, S1)], "no rule"),
    "copied along another dim": (lambda a, b: a.copy_(b), [((2, 4, 4), S1), ((2, 2, 8), S2)], "along another dim"),
    "a whole copied into parts": (lambda a, b: a.copy_(b), [((2, 8, 6), S1), ((2, 4, 6), REPLICATED)], "into a part"),
    "a whole copied into a term": (lambda a, b: a.copy_(b), [(A, PARTIAL), (A, REPLICATED)], "added once for each"),
    "a part copied into a whole": (lambda a, b: a.copy_(b), [((2, 2, 6), REPLICATED), (A, S1)], "writes"),
    "a part in a whole": (lambda a, b: a.__setitem__(slice(0, 2), b), [((4,), REPLICATED), ((4,), S0)], "writes"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_operations_are_refused(name: str) -> None:
    function, given, text = WRONG[name]
    with pytest.raises(RefusedError, match=text):
        refuse(function, given)


def refuse(function: Callable[..., Any], given: list[tuple[tuple[int, ...], Type]]) -> None:
    """Follow a function on the last rank alone."""
    generator = torch.Generator().manual_seed(0)
    made = [tensors_of(shape, kind, generator) for shape, kind in given]
    local = [parts[-1] for _, parts in made]
    with LastCall() as watched:
        function(*local)
    func, args, kwargs, result = watched.call
    outputs = list(arguments_in(result))
    typed = [Typed(p, k, tuple(w.shape)) for (w, _), p, (_, k) in zip(made, local, given, strict=True)]
    shapes: list[tuple[int, ...]] | None
    try:
        shapes = [tuple(tensor.shape) for tensor in arguments_in(function(*(whole for whole, _ in made)))] or None
    except (RuntimeError, IndexError):  # only parts can be put together so
        shapes = None
    result_types(Operation(name_of(func), args, kwargs, inputs=typed, outputs=outputs, wholes=shapes))


def test_sizes_compute_as_integers_and_notice_comparisons() -> None:
    told: list[bool] = []
    size = Size(4, 8, lambda: told.append(True))
    assert isinstance(size // 2, Size)
    assert (size // 2).full == 4
    assert (2 * size).full == 16
    assert (9 - size).full == 1
    assert (1 / size, size**0.5) == (0.25, 2.0)
    assert torch.zeros(3, size).view(size, -1).expand(size, 3).shape == (4, 3)
    assert size > 3
    assert size == Size(4, 8, size.told)
    assert size < Size(5, 7, size.told)
    assert not told
    assert not size > 6
    assert told == [True]
    assert {size: 1}[4] == 1
