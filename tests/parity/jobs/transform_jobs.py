"""Models whose forward runs layers inside of transforms of torch.func or with other parameters than their own, or scripts."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jvp, vmap

import meshwright as mw

FEATURES = 8


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 3))
        self.head = nn.Linear(3, 3)


class Tangents(_Net):
    """Adds a derivative along one direction, by `torch.func.jvp` of all layers."""

    def forward(self, x: Tensor) -> Tensor:
        value, slope = jvp(lambda given: self.head(self.net(given)), (x,), (torch.ones_like(x),))
        return value + slope


class Duals(_Net):
    """The same by `torch.autograd.forward_ad`."""

    def forward(self, x: Tensor) -> Tensor:
        with forward_ad.dual_level():
            result = forward_ad.unpack_dual(self.head(self.net(forward_ad.make_dual(x, torch.ones_like(x)))))
            return result.primal if result.tangent is None else result.primal + result.tangent


class Mapped(_Net):
    """Layers under `vmap`."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(vmap(self.net)(x))


class Slopes(_Net):
    """Gradients for each sample, by `torch.func.grad` under `vmap`."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.net(x)) + vmap(grad(lambda one: self.net(one).sum()))(x)[:, :3]


class Generated(_Net):
    """A layer that runs with weights which another layer has made."""

    def __init__(self) -> None:
        super().__init__()
        self.maker = nn.Linear(2, 12)

    def forward(self, x: Tensor) -> Tensor:
        made = self.maker(torch.ones(2, dtype=x.dtype))
        return functional_call(self.head, {"weight": made[:9].view(3, 3), "bias": made[9:]}, (self.net(x),))


class Shifted(_Net):
    """A layer that runs with its own weight, and again with another one."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.net(x)
        return self.head(h) + functional_call(self.head, {"weight": 2 * self.head.weight}, (h,))


@torch.jit.script
def gated(x: Tensor) -> Tensor:
    """Return x * sigmoid(x), compiled by torch.jit."""
    return x * torch.sigmoid(x)


class Scripted(nn.Module):
    """Calls a function that torch.jit has compiled between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(3))
        self.head = nn.Linear(FEATURES, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = gated(layer(x))
        return self.head(x)


def losses(build: Callable[[], nn.Module], line: str) -> list[float]:
    """Return the losses of three steps in float64."""
    model = mw.apply_plan(
        lambda: build().double(), line, loss_fn=_square, optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)
    )
    found = []
    for step in range(3):
        x = torch.randn(6, FEATURES, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        found.append(model.step(mw.split_batch((x, x[:, :3]), model)).loss)
    model.close()
    return found


def _square(outputs: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (outputs - batch[1]).square().mean()
