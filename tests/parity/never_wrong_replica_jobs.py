"""Jobs of replicas in threads, and of layers that run again in backward."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

import meshwright as mw
from parity.never_wrong_data_jobs import Sgd, batches, plain, planned, square

# -- replicas in threads -------------------------------------------------------------------------------------------------


class Auxiliary(nn.Module):
    """Keeps what its loss adds up, counts its calls, and scales by what the script sets."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(6, 4)
        self.tau = 1.0
        self.options = {"shift": 0.0}
        self.calls = 0
        self.aux: Any = 0.0
        self.shown: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out = self.lin(x) * self.tau + self.options["shift"] + 0.01 * self.calls
        self.aux = out.square().mean()
        return out


class Outer(nn.Module):
    """A model around it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Auxiliary()

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x))


def build_outer() -> nn.Module:
    return Outer().double()


class WithAuxiliary:
    """A loss that reads an attribute which the forward has left on the module."""

    def __init__(self) -> None:
        self.module: Any = None

    def __call__(self, outputs: Tensor, batch: Any) -> Tensor:
        return square(outputs, batch) + self.module.inner.aux + 0.01 * self.module.inner.calls


def anneal(module: nn.Module, step: int) -> None:
    module.inner.tau = 1.0 / (1 + step)
    module.inner.options["shift"] = 0.1 * step
    module.inner.aux = 0.0
    if step == 2:
        module.inner.register_forward_hook(_double)


def _double(_: nn.Module, __: Any, outputs: Tensor) -> Tensor:
    return 2 * outputs


def annealed(plan: str | None) -> tuple[list[float], dict[str, Tensor], list[Any]]:
    """Return losses, values and what can be read off the module afterwards."""
    loss_fn = WithAuxiliary()
    seen: list[Any] = []

    def change(_: Any, module: nn.Module, __: Any, step: int) -> None:
        loss_fn.module = module
        seen.append(module.inner.calls)
        anneal(module, step)

    run = functools.partial(planned, build_outer, plan) if plan else functools.partial(plain, build_outer)
    losses, state = run(change, loss_fn=loss_fn)
    return losses, state, [*seen, loss_fn.module.inner.calls, hasattr(loss_fn.module.inner, "aux")]


# -- recompute -----------------------------------------------------------------------------------------------------------


class Normed(nn.Module):
    """A block with running statistics, a power iteration and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))
        self.norm = nn.BatchNorm1d(6)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + torch.tanh(self.norm(self.lin(x))) * (1 + 0.1 * self.calls)


def build_normed() -> nn.Module:
    return nn.Sequential(*(Normed() for _ in range(4)), nn.Linear(6, 4)).double()


def normed(plan: str) -> list[Any]:
    """Return losses, values, buffers and counters of this rank's own part."""
    with mw.apply_plan(build_normed, plan, loss_fn=square, optimizer=Sgd) as model:
        losses = [model.step(mw.split_batch(batch, model)).loss for batch in batches(3, 8)]
        calls = [block.calls for block in model.module if isinstance(block, Normed)]
        return [losses, calls, list(model.full_state_dict().values())]
