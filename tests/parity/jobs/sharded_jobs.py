"""Functions that ranks import: what the tests of ZeRO run under a plan."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from tests.parity import losses
from torch import Tensor, nn

import gpt
import meshwright as mw
from meshwright import testing
from meshwright.apply.data.sharded import ShardedEngine


class Chain(nn.Module):
    """Layers in a list, as large models have them; the head multiplies by the embedding's weight without calling it."""

    def __init__(self, width: int = 16, depth: int = 3, vocabulary: int = 13) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth))
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.norm(x) @ self.embedding.weight.t()


def build_chain() -> nn.Module:
    return Chain().double()


def language(num_samples: int, seed: int = 0, vocabulary: int = 13, length: int = 5) -> Any:
    ids = torch.randint(vocabulary, (num_samples, length + 1), generator=torch.Generator().manual_seed(seed))
    return ids[:, :-1], ids[:, 1:]


def apply_chain(plan: str, optimizer: Any = None, **options: Any) -> mw.ParallelModel:
    make = optimizer or functools.partial(torch.optim.SGD, lr=0.1)
    return mw.apply_plan(build_chain, plan, loss_fn=losses.cross_entropy, optimizer=make, **options)


def exchanges_of_a_step(plan: str, num_samples: int = 4) -> dict[str, tuple[int, int, float]]:
    """Return (calls, tensor bytes, sent bytes) by collective of one step that is not the first."""
    with apply_chain(plan) as model:
        batch = mw.split_batch(language(num_samples), model)
        model.step(batch)
        with testing.count_collectives(model) as counts:
            model.step(batch)
        kinds = {name for name, _ in counts.entries}
        return {kind: (counts.calls(kind), counts.tensor_bytes(kind), counts.sent_bytes(kind)) for kind in kinds}


def held_bytes(plan: str) -> dict[str, int]:
    """Return the memory of a float32 GPT of 1.3M parameters after two steps of AdamW."""
    build = functools.partial(
        gpt.build_gpt,
        vocabulary_size=512,
        max_length=16,
        num_layers=6,
        num_heads=4,
        num_kv_heads=4,
        hidden_size=128,
        ffn_size=512,
        tie_embeddings=True,
    )
    optimizer = functools.partial(torch.optim.AdamW, lr=1e-3)
    with mw.apply_plan(build, plan, loss_fn=losses.cross_entropy, optimizer=optimizer) as model:
        for seed in range(2):
            model.step(mw.split_batch(language(4, seed, 512, 8), model))
        numel = sum(parameter.numel() for parameter in model.parameters())
        return {"numel": numel, **model.held_bytes()}


def most_at_once(plan: str) -> list[tuple[int, int]]:
    """Return, for each of three steps, the most units that were whole, and that had whole gradients, during backward."""
    found = []
    with mw.apply_plan(lambda: Chain(depth=8), plan, loss_fn=losses.cross_entropy) as model:
        engine = model.engine
        assert isinstance(engine, ShardedEngine)
        most = [0, 0]

        def count(_: Tensor) -> None:
            most[0] = max(most[0], sum(unit.is_whole for unit in engine.units))
            with_gradients = [any(p.grad is not None for p in unit.parameters) for unit in engine.units]
            most[1] = max(most[1], sum(with_gradients))

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(count)
        for seed in range(3):
            most[:] = 0, 0
            model.step(mw.split_batch(language(3, seed), model))
            found.append((most[0], most[1]))
    return found


def train(plan: str, optimizer: Callable[..., Any], num_steps: int = 3) -> dict[str, Tensor]:
    """Return the state after some steps with an optimizer of the caller's choice."""
    with apply_chain(plan, optimizer) as model:
        for seed in range(num_steps):
            model.step(mw.split_batch(language(7, seed), model))
        return model.full_state_dict()


def evaluate_unevenly(plan: str) -> list[float]:
    """Return losses of global batches of different sizes, one of which is smaller than the world."""
    with apply_chain(plan) as model:
        return [model.evaluate(mw.split_batch(language(n, n), model))["loss"] for n in (7, 1, 4)]


def what_is_refused(plan: str) -> dict[str, str]:
    """Return the messages of what cannot be done with a sharded module."""
    found = {}
    with apply_chain(plan) as model:
        for name, call in {
            "state_dict": model.module.state_dict,
            "call": lambda: model.module(language(2)[0]),
        }.items():
            try:
                call()
            except mw.ApplyError as error:
                found[name] = error.message
        found["outputs"] = str(tuple(model(language(2)[0]).shape))
        state = model.full_state_dict()
        found["names"] = ",".join(state)
        found["nan"] = str(any(bool(value.isnan().any()) for value in state.values()))
    found["closed"] = str(bool(model.module(language(2)[0]).isnan().all()))
    return found


def apply_compiled(plan: str, way: str) -> str:
    """Return why a module is refused that is compiled as a whole, in place, by its forward, or after the plan was applied."""
    module: Any = build_chain()
    if way == "whole":
        module = torch.compile(module, backend="eager")
    elif way == "in place":
        module.blocks[1].compile(backend="eager")
    elif way == "forward":
        module.blocks[1].forward = torch.compile(module.blocks[1].forward, backend="eager")
    try:
        with mw.apply_plan(module, plan, loss_fn=losses.cross_entropy) as model:
            if way == "after":
                module.compile(backend="eager")
            model.step(language(2))
    except mw.ApplyError as error:
        return str(error.message)
    return ""


def optimizer_with_state(plan: str) -> str:
    """Return why an optimizer that has stepped is refused."""
    module = build_chain()
    optimizer = torch.optim.AdamW(module.parameters())
    losses.cross_entropy(module(language(2)[0]), language(2)).backward()
    optimizer.step()
    try:
        mw.apply_plan(module, plan, loss_fn=losses.cross_entropy, optimizer=optimizer)
    except mw.ApplyError as error:
        return str(error.message)
    return ""


class Dropping(nn.Module):
    """Layers with dropout, in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.4), nn.Linear(6, 6)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def train_with_dropout(plan: str) -> dict[str, Tensor]:
    """Return the state after three steps of a model with dropout."""
    make = functools.partial(torch.optim.SGD, lr=0.1)
    with mw.apply_plan(lambda: Dropping().double(), plan, loss_fn=losses.square, optimizer=make) as model:
        for seed in range(3):
            x = torch.randn(7, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
            model.step(mw.split_batch((x, x.sin()), model))
        return model.full_state_dict()


class OtherTypes(nn.Module):
    """Layers whose backward reads a parameter as another dtype, conjugated, or negated by a bit of the view."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_OfAnotherType() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


class _OfAnotherType(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pairs = nn.Parameter(torch.randn(6, 2, dtype=torch.float64))
        self.spectrum = nn.Parameter(torch.randn(6, dtype=torch.complex128))
        self.scale = nn.Parameter(torch.rand(6, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        scaled = x * self.scale
        as_complex = (torch.view_as_complex(self.pairs) * torch.fft.fft(scaled)).real
        conjugated = (self.spectrum.conj() * torch.fft.fft(scaled.sin())).real
        negated = self.spectrum.conj().imag * scaled.cos()
        as_real = torch.view_as_real(self.spectrum)[:, 0] * scaled.tanh()
        return (as_complex + conjugated + negated + as_real).tanh()


def train_other_types(plan: str) -> dict[str, Tensor]:
    """Return the state after three steps of layers that read parameters as another dtype."""
    make = functools.partial(torch.optim.SGD, lr=0.1)
    with mw.apply_plan(OtherTypes, plan, loss_fn=losses.square, optimizer=make) as model:
        for seed in range(3):
            x = torch.randn(5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
            model.step(mw.split_batch((x, x.sin()), model))
        return model.full_state_dict()
