"""Functions that ranks import: what the tests of compression run under a plan."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from tests.parity import cases, harness, losses
from torch import Tensor, nn

import meshwright as mw
from meshwright import testing
from meshwright.comm.compression import blockwise, power_sgd


@contextlib.contextmanager
def small_ones_too() -> Iterator[None]:
    """Have every matrix compressed: those of the tests' models are so small that it would not be worth it."""
    with mock.patch.object(blockwise, "_WORTH_IT", math.inf), mock.patch.object(power_sgd, "_WORTH_IT", math.inf):
        yield


def run_case(name: str, plan: str, setting: harness.Setting) -> list[testing.StepRecord]:
    with small_ones_too():
        return harness.run_case(name, plan, setting)


class Chain(nn.Module):
    """Matrices of several shapes, vectors, and a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 24)
        self.layers = nn.ModuleList([nn.Linear(24, 56), nn.Linear(56, 24), nn.Linear(24, 24)])
        self.norm = nn.LayerNorm(24)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        x = x + self.layers[1](torch.tanh(self.layers[0](x)))
        return self.norm(x + self.layers[2](x)) @ self.embedding.weight.t()


def language(num_samples: int, seed: int) -> Any:
    """Sequences that count upwards, with some noise: a loss that cannot reach zero."""
    generator = torch.Generator().manual_seed(seed)
    start = torch.randint(40, (num_samples, 1), generator=generator)
    ids = (start + torch.arange(9)) % 40
    noise = torch.rand(ids.shape, generator=generator) < 0.2
    ids = torch.where(noise, torch.randint(40, ids.shape, generator=generator), ids)
    return ids[:, :-1], ids[:, 1:]


def digest(tensors: Mapping[str, Any]) -> str:
    found = hashlib.sha256()
    for name in sorted(tensors):
        found.update(name.encode())
        if tensors[name] is not None:
            found.update(tensors[name].detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return found.hexdigest()


def apply(
    plan: str, build: Callable[[], nn.Module] = Chain, optimizer: Any = "sgd", **options: Any
) -> mw.ParallelModel:
    make = functools.partial(torch.optim.SGD, lr=0.3) if optimizer == "sgd" else optimizer
    return mw.apply_plan(build, plan, loss_fn=losses.cross_entropy, optimizer=make, **options)


# -- error feedback -----------------------------------------------------------------------------------------------------


def sums_of_gradients(plan: str, num_steps: int) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
    """Return each step's summed gradients while nothing is learned, and what this rank has not sent in the end."""
    found = []
    with apply(plan, lambda: Chain().double(), optimizer=None) as model:
        for seed in range(num_steps):
            model.step(mw.split_batch(language(6, seed % 3), model))
            found.append({name: g.clone() for name, g in model.full_gradients().items() if g is not None})
        state = {name: tensor.clone() for name, tensor in model.engine.compression_state().items()}
    return found, state


# -- training -----------------------------------------------------------------------------------------------------------


def last_losses(plan: str, num_steps: int) -> tuple[float, str]:
    """Return the mean loss of the last 20 steps, and a digest of the parameters."""
    optimizer = functools.partial(torch.optim.AdamW, lr=3e-3)
    with small_ones_too(), apply(plan, optimizer=optimizer) as model:
        found = [model.step(mw.split_batch(language(16, seed), model)).loss for seed in range(num_steps)]
        return sum(found[-20:]) / 20, digest(model.full_state_dict())


# -- bytes --------------------------------------------------------------------------------------------------------------


class OneMatrix(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1024, 1024))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def bytes_of_a_step(plan: str) -> float:
    """Return what this rank sends in a step that updates nothing."""
    with mw.apply_plan(OneMatrix, plan, loss_fn=losses.square) as model:
        x = torch.randn(4, 1024, generator=torch.Generator().manual_seed(0))
        batch = mw.split_batch((x, x), model)
        model.step(batch)
        with testing.count_collectives(model) as counts:
            model.step(batch)
        return counts.sent_bytes()


# -- state --------------------------------------------------------------------------------------------------------------


def train_in_two_parts(plan: str, stop_after: int, num_steps: int, num_samples: int) -> tuple[str, list[float]]:
    """Train, with everything taken away and put back after some steps (0: never); return a digest and the losses."""
    found: list[float] = []
    parameters: dict[str, Any] | None = None
    state: dict[str, Tensor] = {}
    legs = [range(num_steps)] if not stop_after else [range(stop_after), range(stop_after, num_steps)]

    def build() -> nn.Module:
        model = Chain()
        if parameters is not None:
            model.load_state_dict(parameters)
        return model

    with small_ones_too():
        for leg in legs:
            with apply(plan, build) as model:
                model.engine.load_compression_state(state)
                for seed in leg:
                    found.append(model.step(mw.split_batch(language(num_samples, seed), model)).loss)
                parameters = model.full_state_dict()
                state = {name: tensor.clone() for name, tensor in model.engine.compression_state().items()}
    return digest(parameters or {}), found


def load_wrong_state(plan: str, other: str) -> list[str]:
    """Return what is said to a state of another plan."""
    with apply(other) as model:
        model.step(mw.split_batch(language(6, 0), model))
        state = model.engine.compression_state()
    said = []
    for wrong in (state, {name: torch.zeros(3) for name in state}):
        with apply(plan) as model:
            try:
                model.engine.load_compression_state(wrong)
                model.step(mw.split_batch(language(6, 0), model))
            except mw.ApplyError as error:
                said.append(error.message)
    return said


# -- what is not finite, frozen, or not there -----------------------------------------------------------------------------


def skip_a_step(plan: str, bad: float) -> tuple[list[bool], bool, str, int]:
    """Return which of four steps were skipped, whether all that is kept is finite, a digest, and what was kept at the skip."""

    is_hit: list[bool] = []

    def loss_fn(outputs: Tensor, batch: Any) -> Tensor:
        return losses.cross_entropy(outputs, batch) * (bad if is_hit and int(batch[0][0, 0]) == 39 else 1.0)

    make = functools.partial(torch.optim.SGD, lr=0.3)
    skipped = []
    kept = 0
    with small_ones_too(), mw.apply_plan(Chain, plan, loss_fn=loss_fn, optimizer=make, non_finite="skip") as model:
        for seed in range(4):
            ids, labels = language(6, seed)
            ids[:, 0] = 39 if seed == 2 else 3
            is_hit[:] = [] if model.dp_rank else [True]  # one rank alone has it
            skipped.append(model.step(mw.split_batch((ids, labels), model)).skipped)
            kept = len(model.engine.compression_state()) if seed == 2 else kept
        finite = all(bool(tensor.isfinite().all()) for tensor in model.engine.compression_state().values())
        return skipped, finite, digest(model.full_state_dict()), kept


def freeze_between_steps(plan: str) -> tuple[list[str], list[str], str]:
    """Return the names of what is kept before and after a layer is frozen, and a digest."""
    with small_ones_too(), apply(plan) as model:
        names = []
        for seed in range(3):
            if seed == 2:
                model.module.get_submodule("layers.0").requires_grad_(False)
            model.step(mw.split_batch(language(6, seed), model))
            names.append(sorted(model.engine.compression_state()))
        return names[1], names[2], digest(model.full_state_dict())


def in_dtype(plan: str, dtype: torch.dtype) -> tuple[str, float, set[torch.dtype], float]:
    """Return a digest, the last loss, the dtypes of what is kept, and the bytes of a step."""
    with small_ones_too(), apply(plan, lambda: Chain().to(dtype)) as model:
        for seed in range(3):
            with testing.count_collectives(model) as counts:
                loss = model.step(mw.split_batch(language(6, seed), model)).loss
        kept = {tensor.dtype for tensor in model.engine.compression_state().values()}
        return digest(model.full_state_dict()), loss, kept, counts.sent_bytes()


def complex_model(plan: str) -> tuple[str, list[str]]:
    """Return a digest of a model with complex parameters, and the names of what is kept."""

    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(30, 30, dtype=torch.complex64))
            self.bias = nn.Parameter(torch.randn(30, dtype=torch.complex64))

        def forward(self, x: Tensor) -> Tensor:
            return torch.view_as_real(x.to(torch.complex64) @ self.weight + self.bias).flatten(1)

    make = functools.partial(torch.optim.SGD, lr=0.1)
    with small_ones_too(), mw.apply_plan(Complex, plan, loss_fn=losses.square, optimizer=make) as model:
        for seed in range(2):
            x = torch.randn(6, 30, generator=torch.Generator().manual_seed(seed))
            model.step(mw.split_batch((x, torch.cat([x, x.sin()], 1)), model))
        return digest(model.full_state_dict()), sorted(model.engine.compression_state())


def reasons_of(plan: str) -> tuple[str, ...]:
    with apply(plan) as model:
        model.step(mw.split_batch(language(6, 0), model))
        return model.plan.reasons


def held_bytes(plan: str) -> dict[str, int]:
    with small_ones_too(), apply(plan) as model:
        model.step(mw.split_batch(language(6, 0), model))
        return model.held_bytes()


def branches_alone(plan: str) -> list[tuple[bool, float]]:
    """Take the branch that uses nothing of a layer on all ranks; return whether it has a gradient, and what is kept of it."""
    case = cases.find("branches")
    found = []
    with small_ones_too(), mw.apply_plan(case.build, plan, loss_fn=case.loss_fn) as model:
        for seed in range(3):
            model.step(mw.split_batch(case.batch(6, seed), model))
            unused = [name for name, gradient in model.full_gradients().items() if gradient is None]
            kept = model.engine.compression_state()
            names = [key for key in kept if key.split("[")[0].removesuffix("/unsent") in unused]
            found.append((bool(unused), float(sum(kept[key].abs().sum() for key in names))))
    return found
