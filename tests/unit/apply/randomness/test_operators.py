"""Replaced operators: every draw arrives at one, calls are named by modules, other threads draw as torch does."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from meshwright._torch_private import FakeTensorMode
from meshwright.apply.randomness.forward_draws import DrawNote, ForwardDraws
from meshwright.apply.randomness.names import LOSS, Names
from meshwright.apply.randomness.operators import _KERNELS, _OWN, install_operators
from meshwright.apply.randomness.sample_dims import Call, SiteDims
from meshwright.apply.randomness.sites import StepDraws, in_forward, in_step
from meshwright.errors import ApplyError

N, WIDTH = 6, 64

ROWS = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "dropout in place": lambda x: F.dropout(x.clone(), 0.3, inplace=True),
    "dropout1d": lambda x: F.dropout1d(x[:, :, None], 0.3),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.3, training=True),
    "native_dropout": lambda x: torch.native_dropout(x, 0.3, True)[0],
    "rrelu": lambda x: F.rrelu(-x, training=True),
    "gumbel_softmax": F.gumbel_softmax,
    "rand": lambda x: torch.rand(x.shape),
    "rand of float64": lambda x: torch.rand(x.shape, dtype=torch.float64),
    "rand_like": torch.rand_like,
    "randn": lambda x: torch.randn(x.shape),
    "randn_like": torch.randn_like,
    "randint": lambda x: torch.randint(9, x.shape),
    "randint from": lambda x: torch.randint(-3, 9, x.shape),
    "randint_like": lambda x: torch.randint_like(x, 1000),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "bernoulli of p": lambda x: torch.bernoulli(x, 0.2),
    "bernoulli_": lambda x: torch.empty_like(x).bernoulli_(x.sigmoid()),
    "normal": lambda x: torch.normal(x, 2.0),
    "normal of std": lambda x: torch.normal(0.0, x.abs()),
    "normal of both": lambda x: torch.normal(x, x.abs()),
    "uniform_": lambda x: torch.empty_like(x).uniform_(-1, 1),
    "exponential_": lambda x: torch.empty_like(x).exponential_(2),
    "cauchy_": lambda x: torch.empty_like(x).cauchy_(),
    "log_normal_": lambda x: torch.empty_like(x).log_normal_(0.0, 0.5),
    "geometric_": lambda x: torch.empty_like(x).geometric_(0.3),
    "random_": lambda x: torch.empty_like(x).random_(),
    "multinomial": lambda x: torch.multinomial(x.sigmoid(), 5),
    "multinomial again": lambda x: torch.multinomial(x.sigmoid(), 5, replacement=True),
    "transposed": lambda x: torch.empty(WIDTH, x.shape[0]).T.uniform_(),
    "bernoulli into": lambda x: torch.bernoulli(x.sigmoid(), out=torch.empty(0)),
    "normal into": lambda x: torch.normal(x, 2.0, out=torch.empty_like(x)),
    "multinomial into": lambda x: torch.multinomial(x.sigmoid(), 5, out=torch.empty(0, dtype=torch.int64)),
}


class Model(nn.Module):
    """Calls a function."""

    def __init__(self, run: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.run = run

    def forward(self, x: Tensor) -> Any:
        return self.run(x)


def _run(
    module: nn.Module,
    x: Tensor,
    *,
    first: int = 0,
    dims: dict[Call, SiteDims] | None = None,
    notes: dict[Call, DrawNote] | None = None,
    told: list[str] | None = None,
    backward: bool = False,
) -> Any:
    install_operators()
    step = StepDraws("0/step/0", Names(module), dims or {}, on_unknown=(told if told is not None else []).append)
    forward = ForwardDraws(first, x.shape[0])
    forward.notes = notes
    with in_step(step):
        with in_forward(forward):
            result = module(x)
        if backward:
            result.sum().backward()
    return result


@pytest.mark.parametrize("name", ROWS)
def test_parts_of_a_batch_draw_what_the_whole_draws(name: str) -> None:
    module, x = Model(ROWS[name]), torch.randn(N, WIDTH)
    notes: dict[Call, DrawNote] = {}
    _run(module, x, notes=notes)
    assert list(notes) == [("", 0)], "each of these is one draw"
    dims = {("", 0): SiteDims(0, num_dims=len(notes["", 0].shape))}
    told: list[str] = []
    whole = _run(module, x, dims=dims, told=told)
    parts = [_run(module, x[:2], dims=dims), _run(module, x[2:], first=2, dims=dims)]
    assert torch.equal(torch.cat(parts), whole)
    assert not torch.equal(whole[:1].expand_as(whole), whole)
    assert told == []


def test_moments_are_those_of_torch() -> None:
    torch.manual_seed(0)
    x = torch.ones(4, 50_000)
    for name in (
        "rrelu",
        "randint from",
        "geometric_",
        "exponential_",
        "uniform_",
        "log_normal_",
        "normal",
        "bernoulli of p",
    ):
        draw = ROWS[name]
        ours, theirs = _run(Model(draw), x, dims={("", 0): SiteDims(0, num_dims=2)}), draw(x)
        spread = float(theirs.double().std()) / math.sqrt(x.numel()) * math.sqrt(2)
        assert abs(float(ours.double().mean() - theirs.double().mean())) < 5 * spread, name
        assert float(ours.double().std()) == pytest.approx(float(theirs.double().std()), rel=0.1), name


def test_dropout_inside_of_operators_is_seen() -> None:
    attention = Model(lambda x: F.scaled_dot_product_attention(*[x.view(N, 2, 4, 8)] * 3, dropout_p=0.5))
    notes: dict[Call, DrawNote] = {}
    _run(attention, torch.randn(N, WIDTH), notes=notes)
    assert [note.shape for note in notes.values()] == [(N, 2, 4, 4)]
    recurrence = nn.LSTM(8, 8, 3, dropout=0.5, batch_first=True)
    notes.clear()
    _run(Model(lambda x: recurrence(x.view(N, 8, 8))[0]), torch.randn(N, WIDTH), notes=notes)
    assert [note.shape for note in notes.values()] == [(8, N, 8), (8, N, 8)]


class Nested(nn.Module):
    """Draws in modules and between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Dropout(0.5), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.first(self.second(self.first(F.dropout(x)))))


def test_calls_are_named_by_the_innermost_module_and_counted_in_it() -> None:
    notes: dict[Call, DrawNote] = {}
    _run(Nested(), torch.randn(N, WIDTH), notes=notes)
    assert list(notes) == [("", 0), ("first", 0), ("second.1", 0), ("first", 1), ("", 1)]


def test_code_outside_of_the_model_is_the_loss() -> None:
    install_operators()
    forward = ForwardDraws(0, 1)
    with in_step(StepDraws("", Names(nn.Linear(1, 1)), {})), in_forward(forward):
        torch.rand(3)
    assert forward.counts == {LOSS: 1}


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_a_checkpoint_repeats_its_draws(is_reentrant: bool) -> None:
    layer = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Tanh(), nn.Dropout(0.5))
    gradients = []
    for run in (layer, lambda x: checkpoint(layer, x, use_reentrant=is_reentrant)):
        layer.zero_grad()
        module = Model(lambda x, run=run: F.dropout(run(F.dropout(x))))
        module.layer = layer
        _run(module, torch.ones(N, WIDTH, requires_grad=True), backward=True)
        gradients.append([parameter.grad for parameter in layer.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def test_torch_draws_outside_and_in_other_threads() -> None:
    install_operators()
    seen: list[Tensor] = []

    def draw() -> None:
        torch.manual_seed(0)
        seen.append(torch.rand(3))

    draw()
    with in_step(StepDraws("", Names(nn.Linear(1, 1)), {})), in_forward(ForwardDraws(0, 1)):
        thread = threading.Thread(target=draw)
        thread.start()
        thread.join()
        with in_step(None):
            draw()
    assert all(torch.equal(one, seen[0]) for one in seen)


def test_a_generator_of_ones_own_is_left_alone_and_told() -> None:
    told: list[str] = []
    module = Model(lambda x: torch.rand(x.shape, generator=torch.Generator().manual_seed(1)))
    found = _run(module, torch.ones(N, WIDTH), told=told)
    assert torch.equal(found, torch.rand(N, WIDTH, generator=torch.Generator().manual_seed(1)))


def test_under_vmap_each_entry_draws_its_own() -> None:
    told: list[str] = []
    run = torch.vmap(torch.rand_like, randomness="different")
    found = _run(Model(run), torch.ones(N, WIDTH), told=told)
    assert not torch.equal(found[0], found[1])
    assert any("torch.func" in text for text in told)


@pytest.mark.parametrize(
    "draw", [lambda x: torch.poisson(x.abs()), lambda x: torch.distributions.Gamma(x.abs() + 1, 1.0).sample()]
)
def test_what_is_left_to_torch_is_told(draw: Callable[[Tensor], Tensor]) -> None:
    told: list[str] = []
    _run(Model(draw), torch.randn(N, WIDTH), told=told)
    assert any("left to torch's generator" in text for text in told)


def test_a_call_without_a_known_dim_is_told_and_differs_from_share_to_share() -> None:
    install_operators()
    module, told = Model(ROWS["rand"]), []
    found = []
    for share in ("share 0", "share 1"):
        with (
            in_step(StepDraws("", Names(module), {}, share=share, on_unknown=told.append)),
            in_forward(ForwardDraws(0, N)),
        ):
            found.append(module(torch.ones(N, WIDTH)))
    assert not torch.equal(*found)
    assert len(told) == 2
    assert "has no known sample dim" in told[0]


@pytest.mark.parametrize(
    ("known", "place", "is_told"),
    [
        ({("", 1): SiteDims(0, num_dims=2)}, True, True),  # another draw of the same module
        ({("other", 0): SiteDims(0, num_dims=2)}, True, True),  # all draws of the model
        ({("other", 0): SiteDims(0, num_dims=2), ("third", 0): SiteDims(1, num_dims=2)}, False, True),
        ({("", 0): SiteDims(0, num_dims=3)}, False, True),  # it drew another tensor then
        ({("", 0): SiteDims(0, num_dims=2, kind="uniform_")}, True, False),
        ({("", 0): SiteDims(0, num_dims=2, kind="bernoulli_")}, True, True),  # another call then
    ],
)
def test_a_call_that_the_first_batch_did_not_make(known: dict[Call, SiteDims], place: bool, is_told: bool) -> None:
    module, x, told = Model(ROWS["rand"]), torch.ones(N, WIDTH), []
    whole = _run(module, x, dims=known, told=told)
    parts = torch.cat([_run(module, x[:2], dims=known), _run(module, x[2:], first=2, dims=known)])
    assert torch.equal(parts, whole) is place
    assert bool(told) is is_told


def test_tensors_without_values_draw_nothing() -> None:
    notes: dict[Call, DrawNote] = {}

    def run(x: Tensor) -> Tensor:
        with FakeTensorMode():
            F.dropout(torch.ones(3))
            torch.rand(3)
        return F.dropout(x)

    _run(Model(run), torch.ones(N, WIDTH), notes=notes)
    assert list(notes) == [("", 0)]


def test_autograd_sees_what_is_written() -> None:
    def run(x: Tensor) -> Tensor:
        mask = torch.ones_like(x)
        result = x.exp() * mask
        mask.bernoulli_(0.5)
        return result

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        _run(Model(run), torch.ones(N, WIDTH, requires_grad=True), backward=True)


def test_a_leaf_that_requires_gradients_refuses_as_in_torch() -> None:
    leaf = torch.ones(N, WIDTH, requires_grad=True)
    with pytest.raises(RuntimeError, match="leaf"):
        _run(Model(lambda _: leaf.uniform_()), torch.ones(N, WIDTH))
    with torch.no_grad():
        _run(Model(lambda _: leaf.uniform_()), torch.ones(N, WIDTH))


def test_every_operator_of_torch_that_draws_on_a_cpu_is_replaced_or_told() -> None:
    known = {
        *_KERNELS,
        *_OWN,
        "_fused_sdp_choice",
        "_scaled_dot_product_flash_attention_for_cpu",
    }  # without dropout, there
    missing = []
    for full in torch._C._dispatch_get_all_op_names():
        name = full.removeprefix("aten::")
        base, _, overload = name.partition(".")
        packet = getattr(torch.ops.aten, base, None) if full.startswith("aten::") else None
        operator = getattr(packet, overload or "default", None)
        if operator is None or torch.Tag.nondeterministic_seeded not in operator.tags or name in known:
            continue
        if torch._C._dispatch_has_kernel_for_dispatch_key(full, "CPU"):  # others call such ones
            missing.append(name)
    assert missing == []


def test_complex_numbers_are_drawn_by_place() -> None:
    for draw, variance in ((torch.randn, 1.0), (torch.rand, 1 / 6)):
        module = Model(lambda x, draw=draw: draw(len(x), 20_000, dtype=torch.complex128))
        dims = {("", 0): SiteDims(0, num_dims=3)}
        whole = _run(module, torch.ones(N, 1), dims=dims)
        parts = [_run(module, torch.ones(2, 1), dims=dims), _run(module, torch.ones(4, 1), first=2, dims=dims)]
        assert torch.equal(torch.cat(parts), whole)
        assert float(whole.var(correction=0).abs()) == pytest.approx(variance, rel=0.02)


@pytest.mark.parametrize("draw", [torch.bernoulli, lambda x: torch.normal(x, x), lambda x: torch.normal(x, 2.0)])
def test_arguments_get_the_gradients_that_torch_gives_them(draw: Callable[[Tensor], Tensor]) -> None:
    x = torch.full((N, WIDTH), 0.5, requires_grad=True)
    _run(Model(draw), x, backward=True)
    assert x.grad is not None
    assert not x.grad.any()


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: torch.empty_like(x).bernoulli_(1.5),
        lambda x: torch.bernoulli(x * float("nan")),
        lambda x: torch.empty_like(x).uniform_(2, 1),
        lambda x: torch.empty_like(x).cauchy_(0, -1),
    ],
)
def test_what_torch_refuses_is_refused(draw: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(RuntimeError, match=r"expects|Expected"):
        _run(Model(draw), torch.ones(N, WIDTH))


def test_one_number_is_shared_by_all_samples() -> None:
    module, told = Model(lambda x: torch.rand(()) * x), []
    whole = _run(module, torch.ones(N, WIDTH), told=told)
    assert torch.equal(_run(module, torch.ones(2, WIDTH), first=4), whole[:2])
    assert told == []


def test_a_layer_that_the_first_batch_left_out_draws_as_its_siblings() -> None:
    layers = nn.ModuleList(nn.Dropout(0.5) for _ in range(2))
    module, told = Model(lambda x: layers[1](x.reshape(-1, 8)).reshape(x.shape)), []
    module.layers = layers
    dims = {("layers.0", 0): SiteDims(0, num_dims=2, is_merged=True), ("", 0): SiteDims(1, num_dims=2)}
    whole = _run(module, torch.ones(N, WIDTH), dims=dims, told=told)
    parts = [_run(module, torch.ones(n, WIDTH), first=first, dims=dims) for n, first in ((2, 0), (4, 2))]
    assert torch.equal(torch.cat(parts), whole)
    assert len(told) == 1
    assert "'layers.1'" in told[0]


def test_a_repeated_draw_that_cannot_be_told_from_another_is_refused() -> None:
    class Seeded(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with torch.random.fork_rng():
                torch.manual_seed(0)
                return x * torch.rand(x.shape)

    module = nn.Sequential(Seeded(), Seeded())
    run = Model(lambda x: checkpoint(module[1], checkpoint(module[0], x, use_reentrant=False), use_reentrant=False))
    run.layers = module
    x = torch.ones(N, WIDTH, requires_grad=True)
    with pytest.raises(ApplyError, match="seeds torch's generator"):
        _run(run, x, backward=True)


def test_draws_of_backward_are_told() -> None:
    told: list[str] = []
    x = torch.ones(N, WIDTH, requires_grad=True)
    x.register_hook(lambda gradient: gradient + torch.rand_like(gradient))
    _run(Model(lambda x: 2 * x), x, told=told, backward=True)
    assert any("in backward" in text for text in told)


def test_modules_that_a_forward_makes_are_not_kept() -> None:
    install_operators()
    names = Names(nn.Linear(1, 1))
    made: list[weakref.ref[nn.Module]] = []

    def run(x: Tensor) -> Tensor:
        module = nn.Dropout(0.5)
        made.append(weakref.ref(module))
        return module(x)

    with in_step(StepDraws("", names, {})), in_forward(ForwardDraws(0, N)):
        for _ in range(3):
            run(torch.ones(N, WIDTH))
    assert all(reference() is None for reference in made)
    assert len(names._names) == 1, "the model's own"
