"""Replicas of modules whose attributes and hooks are functions that refer to the model: each runs on its own copy."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.parity.harness import cut
from torch import Tensor, nn

import meshwright as mw

WIDTH, NUM_SAMPLES, NUM_STEPS, NUM_REPLICAS = 5, 8, 3, 2


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.adapter = nn.Linear(WIDTH, WIDTH)
        self.aux: Any = None

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.first(x)).tanh()
        self.aux = hidden.square().mean()
        return hidden


def _patch_block(model: Layers) -> None:
    inner = model.norm.forward
    model.norm.forward = types.MethodType(lambda self, x: inner(x) + 0 * self.weight, model.norm)


def _patch_model(model: Layers) -> None:
    inner = model.forward

    def forward(x: Tensor) -> Tensor:
        return inner(x) + model.adapter(x)

    model.forward = forward


def _hook_of_another_layer(model: Layers) -> None:
    model.first.register_forward_hook(lambda _, args, out: out + model.adapter(args[0]))


def _default(model: Layers) -> None:
    model.first.register_forward_hook(lambda _, args, out, adapter=model.adapter: out + adapter(args[0]))


def _named_default(model: Layers) -> None:
    def hook(_: nn.Module, args: Any, out: Tensor, *, norm: nn.Module = model.norm) -> Tensor:
        return out + norm(args[0])

    model.first.register_forward_hook(hook)


def _in_containers(model: Layers) -> None:
    norm, held = model.norm, {"layers": [model.adapter]}
    model.calls = {"each": (lambda x: 2.0 * norm(x),)}  # type: ignore[assignment]
    model.first.register_forward_hook(
        lambda _, args, out: out + held["layers"][0](args[0]) + model.calls["each"][0](out)
    )  # type: ignore[index]


def _recursive(model: Layers) -> None:
    def one(x: Tensor, depth: int) -> Tensor:
        return other(x, depth - 1) if depth else model.norm(x)

    def other(x: Tensor, depth: int) -> Tensor:
        return one(x, depth)

    model.first.register_forward_hook(lambda _, args, out: out + one(args[0], 2))


PATCHES = {"block": _patch_block, "model": _patch_model, "hook": _hook_of_another_layer}
PATCHES |= {"default": _default, "named": _named_default, "containers": _in_containers, "recursive": _recursive}


def _build(patch: Callable[[Layers], None] | None) -> Layers:
    torch.manual_seed(2)
    model = Layers().double()
    if patch is not None:
        patch(model)
    return model


def _batches() -> list[tuple[Tensor, Tensor]]:
    source = torch.Generator().manual_seed(4)
    shape = (NUM_SAMPLES, WIDTH)
    return [
        tuple(torch.randn(shape, generator=source, dtype=torch.float64) for _ in range(2)) for _ in range(NUM_STEPS)
    ]


def _state(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def _plain(patch: Callable[[Layers], None], *, is_late: bool) -> dict[str, Tensor]:
    model = _build(None if is_late else patch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, batch in enumerate(_batches()):
        if is_late and step == 1:
            patch(model)
        optimizer.zero_grad()
        for place, (x, y) in enumerate(cut(batch, [NUM_SAMPLES // NUM_REPLICAS] * NUM_REPLICAS)):
            before = {name: buffer.clone() for name, buffer in model.named_buffers()}
            (((model(x) - y).square().mean() + model.aux) / NUM_REPLICAS).backward()
            if place:  # statistics are the first replica's
                for name, buffer in model.named_buffers():
                    buffer.copy_(before[name])
        optimizer.step()
    return _state(model)


@pytest.mark.parametrize("is_late", [False, True], ids=["before", "between_steps"])
@pytest.mark.parametrize("name", PATCHES)
def test_each_replica_runs_on_its_own_copy(name: str, is_late: bool) -> None:
    model = _build(None if is_late else PATCHES[name])
    plan = mw.Plan(mode="data_parallel", dp=NUM_REPLICAS)

    def loss_fn(outputs: Tensor, batch: Any) -> Tensor:
        return (outputs - batch[1]).square().mean() + model.aux

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mw.apply_plan(model, plan, optimizer=optimizer, loss_fn=loss_fn, devices=["cpu"] * NUM_REPLICAS) as parallel:
        for step, batch in enumerate(_batches()):
            if is_late and step == 1:
                PATCHES[name](model)
            parallel.step(batch)
    found, expected = _state(model), _plain(PATCHES[name], is_late=is_late)
    for key, value in expected.items():
        assert torch.allclose(found[key], value, rtol=1e-11, atol=1e-13), key


@pytest.mark.parametrize("is_late", [False, True], ids=["before", "between_steps"])
def test_hooks_on_parameters_see_whole_gradients(is_late: bool) -> None:
    # Clamping a part of each replica would not give the clamped sum.
    def watch(model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient.clamp(-0.02, 0.02))

    def build() -> nn.Module:
        torch.manual_seed(2)
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).double()

    def loss_fn(outputs: Tensor, batch: Any) -> Tensor:
        return (outputs - batch[1]).square().mean()

    plain, model = build(), build()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    plan = mw.Plan(mode="data_parallel", dp=NUM_REPLICAS, micro_batches=2)
    if not is_late:
        watch(plain)
        watch(model)
    devices = ["cpu"] * NUM_REPLICAS
    with mw.apply_plan(model, plan, optimizer=optimizers[1], loss_fn=loss_fn, devices=devices) as parallel:
        for step, batch in enumerate(_batches()):
            if is_late and step == 1:
                watch(plain)
                watch(model)
            optimizers[0].zero_grad()
            loss_fn(plain(batch[0]), batch).backward()
            optimizers[0].step()
            parallel.step(batch)
    for key, value in _state(plain).items():
        assert torch.allclose(_state(model)[key], value, rtol=1e-11, atol=1e-13), key
