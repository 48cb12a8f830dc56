"""Recompute runs a layer twice: what the layer leaves beside its results is that of one forward, bit for bit."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.apply.recompute.kept import UnseenWrites, keeping_contexts
from meshwright.apply.state.attributes import Attributes


class Leaves(nn.Module):
    """A block that leaves all that layers are known to leave."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("ema", torch.zeros(6))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64), persistent=False)
        self.mean = torch.zeros(6, dtype=torch.float64)  # a tensor that is no buffer
        self.calls = 0
        self.history: list[int] = []
        self.stats = {"sum": [0.0]}
        self.aux: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.history.append(self.calls)
        h = torch.tanh(self.norm(self.lin(x))) * (1 + 0.1 * self.calls + 0.01 * self.stats["sum"][0]) + self.mean
        with torch.no_grad():
            self.stats["sum"][0] += float(h.sum())
            self.ema = 0.5 * self.ema + 0.5 * h.mean(0)  # another tensor each time
            self.seen += len(x)  # the same one
            self.mean.mul_(0.5).add_(0.1 * h.mean(0))
        self.aux = h.square().mean() + (0.0 if self.aux is None else 0.1 * self.aux.detach())
        return h + self.ema


class Model(nn.Module):
    """Two such blocks, one of them called twice, whose auxiliary losses are added up."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Leaves(), Leaves()])
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in (*self.blocks, self.blocks[0]):
            x = block(x)
        return self.head(x) + sum(block.aux for block in self.blocks)


def _build() -> nn.Module:
    return Model().double()


def _square(outputs: Tensor, batch: Any) -> mw.Loss:
    # The model's numbers go by all samples of its batch: a Loss lets micro-batches decide for themselves.
    return mw.Loss((outputs - batch[1]).square().sum(), outputs.numel())


def _steps(plan: str) -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    found: list[Any] = []
    optimizer = functools.partial(torch.optim.SGD, lr=0.1)
    with mw.apply_plan(_build, plan, loss_fn=_square, optimizer=optimizer) as model:
        for _ in range(3):
            batch = tuple(torch.randn(8, size, generator=generator, dtype=torch.float64) for size in (6, 3))
            result = model.step(batch)
            found += [result.loss, result.grad_norm, model.evaluate(batch)["loss"]]
        found += [*model.full_state_dict().values()]
        for block in model.module.blocks:
            found += [block.calls, list(block.history), block.stats["sum"], block.mean, block.seen, block.aux.detach()]
    return found


def _same(left: Any, right: Any) -> bool:
    return torch.equal(left, right) if isinstance(left, Tensor) else left == right


@pytest.mark.parametrize("kind", ["full", "selective"])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_recompute_leaves_what_one_forward_leaves(kind: str, micro_batches: int) -> None:
    without = _steps(f"single,micro_batches={micro_batches}")
    found = _steps(f"single,micro_batches={micro_batches},recompute={kind}")
    assert [index for index, pair in enumerate(zip(found, without, strict=True)) if not _same(*pair)] == []


def test_a_moment_is_put_back_and_taken_away_again() -> None:
    layer = Leaves().double()
    attributes = Attributes(layer)
    before = attributes.take()
    names, buffers = list(vars(layer)), dict(layer.named_buffers())
    layer(torch.ones(4, 6, dtype=torch.float64))
    attributes.forward_is_over(before)
    now = dict(layer.named_buffers())
    aux, history = layer.aux, layer.history
    with attributes.as_of(before):
        assert (layer.calls, layer.aux, layer.history, layer.stats) == (0, None, [], {"sum": [0.0]})
        assert torch.equal(layer.seen, torch.zeros_like(layer.seen))
        assert torch.equal(layer.norm.running_mean, torch.zeros(6, dtype=torch.float64))
        layer.calls, layer.extra = 7, 1
        layer.history.append(5)
        layer.norm.running_mean.fill_(3.0)
    assert (layer.calls, layer.history, hasattr(layer, "extra")) == (1, [1], False)
    assert layer.aux is aux
    assert layer.history is history
    assert list(vars(layer)) == names
    assert all(tensor is now[name] for name, tensor in layer.named_buffers())
    assert list(buffers) == [name for name, _ in layer.named_buffers()]


def test_no_graph_of_an_earlier_call_is_kept() -> None:
    layer = Leaves().double()
    attributes = Attributes(layer)
    layer(torch.ones(4, 6, dtype=torch.float64))
    layer.aux.register_hook(lambda gradient: gradient)
    graph = layer.aux.grad_fn
    moment = attributes.take()
    with attributes.as_of(moment):
        assert layer.aux.is_leaf
        assert layer.aux.requires_grad
    assert layer.aux.grad_fn is graph


def test_a_later_write_into_a_large_tensor_is_refused() -> None:
    layer = nn.Module()
    layer.register_buffer("table", torch.zeros(2**15))
    attributes = Attributes(layer)
    moment = attributes.take()
    attributes.forward_is_over(moment)
    with attributes.as_of(moment):
        assert layer.table.sum() == 0
    layer.table += 1
    with pytest.raises(mw.ApplyError, match="a later forward of the same layer wrote"), attributes.as_of(moment):
        pass


class Overwrites(nn.Module):
    """A block that writes over a product in place: by itself, through a view that has a version counter of its own, or later."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.weight = nn.Parameter(torch.randn(6, 6))
        self.bias = nn.Parameter(torch.randn(6))
        self.first = nn.Sequential(nn.Tanh())  # has children, so a block is a layer

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        if self.way == "input":
            x = x.relu_() if scale is None else x.mul_(scale).relu_()
            return torch.matmul(x, self.weight.t()) + self.bias
        h = torch.matmul(torch.tanh(x), self.weight.t())
        if self.way == "add_":
            h.add_(self.bias)
        elif self.way == "part":
            h[..., 1:3] *= 2.0
        elif self.way == "data":
            h.data.mul_(0.5)
        elif self.way == "out":
            with torch.no_grad():
                torch.mul(h.detach(), 0.5, out=h.detach())
        return h if self.way == "later" else torch.tanh(h) * h


class Overwritten(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.stem = nn.Linear(6, 6)
        self.blocks = nn.ModuleList([Overwrites(way), Overwrites(way)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            h = block(x * 1.0) if self.way != "input" else block(x, scale=x.detach().cos())
            x = x + (h.mul_(0.3) if self.way == "later" else h)  # where the layer wrote its input, x is what it left
        return x[..., :3]


def _overwrite(plan: str, way: str, shape: tuple[int, ...]) -> list[Any]:
    generator = torch.Generator().manual_seed(1)

    def build() -> nn.Module:
        torch.manual_seed(0)
        return Overwritten(way).double()

    found: list[Any] = []
    with mw.apply_plan(build, plan, loss_fn=_square, optimizer=functools.partial(torch.optim.SGD, lr=0.1)) as model:
        for _ in range(2):
            x = torch.randn(*shape, 6, generator=generator, dtype=torch.float64)
            result = model.step((x, torch.ones(*shape, 3, dtype=torch.float64)))
            found += [result.loss, result.grad_norm]
        found += [*model.full_state_dict().values()]
    return found


@pytest.mark.parametrize("kind", ["full", "selective"])
@pytest.mark.parametrize("way", ["add_", "part", "data", "out", "later", "input"])
@pytest.mark.parametrize("shape", [(4,), (4, 5)])
def test_what_is_written_over_in_place_is_computed_again(kind: str, way: str, shape: tuple[int, ...]) -> None:
    without = _overwrite("single,micro_batches=2", way, shape)
    found = _overwrite(f"single,micro_batches=2,recompute={kind}", way, shape)
    assert [index for index, pair in enumerate(zip(found, without, strict=True)) if not _same(*pair)] == []


class WritesLater(nn.Module):
    """A block that writes over its input from its second forward on, or a model that does so after the block."""

    def __init__(self, by_model: bool) -> None:
        super().__init__()
        self.lin = nn.Linear(6, 3)
        self.by_model = by_model
        self.calls = 0

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        self.calls += 1
        return self.lin(x + shift.relu_() if self.calls > 1 and not self.by_model else x + shift)


class CallsWritesLater(nn.Module):
    def __init__(self, by_model: bool) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 6)
        self.block = WritesLater(by_model)
        self.by_model = by_model
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        shift = h * 2.0
        y = self.block(h, shift=shift)
        self.calls += 1
        if self.by_model and self.calls > 1:
            shift.add_(1.0)
        return y


@pytest.mark.parametrize("by_model", [False, True])
def test_a_later_write_into_an_input_is_refused(by_model: bool) -> None:
    def build() -> nn.Module:
        return CallsWritesLater(by_model).double()

    optimizer = functools.partial(torch.optim.SGD, lr=0.1)
    batch = (torch.ones(4, 6, dtype=torch.float64), torch.ones(4, 3, dtype=torch.float64))
    word = "in place after its forward" if by_model else "over its inputs in place"
    with mw.apply_plan(build, "single,recompute=full", loss_fn=_square, optimizer=optimizer) as model:
        while model.module.calls < 1:
            model.step(batch)
        with pytest.raises(mw.ApplyError, match=word):
            model.step(batch)


@pytest.mark.parametrize(("way", "is_unseen"), [("add_", False), ("part", False), ("later", False), ("data", True)])
def test_only_layers_that_write_unseen_run_under_a_mode(way: str, is_unseen: bool) -> None:
    layer = Overwrites(way).double()
    writes = UnseenWrites()
    kinds = []
    for _ in range(2):
        keeping, _ = keeping_contexts(writes)
        kinds.append(type(keeping).__name__)
        with keeping:
            layer(torch.randn(2, 3, 6, dtype=torch.float64))
    assert kinds == ["_Keeping", "_Keeping" if is_unseen else "_KeepingByKey"]


@pytest.mark.parametrize("sees_all", [True, False])
def test_a_repetition_that_does_something_else_is_refused(sees_all: bool) -> None:
    writes = UnseenWrites()
    writes.are_known = True
    keeping, giving = keeping_contexts(writes, sees_all=sees_all)
    left = torch.ones(2, 3)
    with keeping:
        left @ left.t()
    with giving, pytest.raises(mw.ApplyError, match="mm, call 0 of it, has inputs"):
        left.t() @ left
    with giving, pytest.raises(mw.ApplyError, match="was not called then"):
        _ = left @ left.t(), left @ left.t()


class AsksAboutInputs(nn.Module):
    """A block that goes another way for one tensor in two places, and for one with gaps, as attention and products do."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(6, 6)

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        h = torch.tanh(self.lin(one))
        if one is other:
            h = h.sin()
        return h if other.is_contiguous() else h.exp() * h


class Asked(nn.Module):
    """Such a block for one tensor in two places, with gaps and without."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 12)
        self.block = AsksAboutInputs()

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)[..., :6]
        for _ in range(2):  # the first call is given copies
            h = self.block(h, h) + self.block(h, h.clone()) + self.first(x)[..., 6:]
            h = torch.cat([h, h], -1)[..., :6]
        return h


@pytest.mark.parametrize("kind", ["full", "selective"])
def test_a_repetition_is_given_inputs_of_the_same_identity_and_strides(kind: str) -> None:
    x = torch.randn(5, 6, dtype=torch.float64)
    found = []
    for words in ("single", f"single,recompute={kind}"):
        torch.manual_seed(0)
        model = mw.apply_plan(Asked().double(), words, loss_fn=lambda out, batch: (out - batch[1]).square().mean())
        with model:
            result = model.step((x, x))
            found.append([result.loss, *[p.grad.clone() for p in model.parameters() if p.grad is not None]])
    assert len(found[0]) == 5
    for one, other in zip(*found, strict=True):
        assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))


class Cache:
    """Keys of earlier calls, which a decoder's layers hand on."""

    def __init__(self) -> None:
        self.keys: dict[int, Tensor] = {}
        self.filled: set[int] = set()


class Cached(nn.Module):
    """A layer that computes keys where the cache has none, and puts them there."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self.place, self.key, self.out = place, nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        if self.place not in cache.filled:
            cache.keys[self.place] = torch.tanh(self.key(x))
            cache.filled.add(self.place)
        return x + self.out(cache.keys[self.place]) + sum(cache.keys.values()).sin()  # type: ignore[union-attr]


class Decoder(nn.Module):
    """Two such layers over one cache."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Cached(0), Cached(1)])

    def forward(self, x: Tensor) -> Tensor:
        cache = Cache()
        for block in self.blocks:
            x = block(x, cache)
        return x + sum(cache.keys.values())


def test_a_repetition_gets_objects_as_they_were() -> None:
    found = []
    for plan in ("single", "recompute=full", "recompute=selective"):
        with mw.apply_plan(lambda: Decoder().double(), plan, loss_fn=lambda out, _: out.square().mean()) as model:
            model.step((torch.linspace(-1, 1, 18, dtype=torch.float64).reshape(3, 6), None))
            found.append(list(model.full_gradients().values()))
    for gradients in found[1:]:
        assert all(torch.equal(*pair) for pair in zip(gradients, found[0], strict=True))
