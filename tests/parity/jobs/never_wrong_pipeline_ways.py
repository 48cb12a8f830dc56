"""Models whose forward keeps a state, follows chance or the batch, or does what a pipeline refuses."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from tests.parity.jobs.never_wrong_pipeline_states import (
    WIDTH,
    Leaves,
    Stack,
    rows,
    tanh_block,
)
from torch import Tensor, nn

# -- state of the model's own forward --------------------------------------------------------------------------------


class OwnState(nn.Module):
    """Buffers and counters that the code between layers moves."""

    def __init__(self, *, reads_later: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Counts() for _ in range(4))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("ema", torch.zeros(WIDTH))
        self.register_buffer("fresh", torch.zeros(WIDTH))
        self.calls = 0
        self.reads_later = reads_later

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.mean.mul_(0.5).add_(0.5 * x.detach().mean(0))
        x = x + self.mean + 0.1 / self.calls
        for place, block in enumerate(self.blocks):
            x = block(x)
            if place == 0:
                self.ema.mul_(0.5).add_(x.detach().mean(0))
                self.fresh = 0.5 * self.fresh + x.detach().mean(0)
            if place == 2 and self.reads_later:
                x = x + self.ema + self.fresh
        return x + self.ema


class RaisesWhenTried(nn.Module):
    """Counts in an attribute and in a list, and ends in a layer for the rows of a micro-batch alone.

    The counts make later steps try parts of a micro-batch, which raises once the earlier stages have run.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(tanh_block() for _ in range(4))
        self.last = ThreeRows(WIDTH, WIDTH)
        self.calls, self.log = 0, [1.0]

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.log.append(0.1)
        x = x * (1 + 0.1 / self.calls) / sum(self.log)
        for block in self.blocks:
            x = block(x)
        return self.last(x) * (1 + 0.1 * self.calls)


class ThreeRows(nn.Linear):
    """Looks at numbers, so that it raises on its own stage alone."""

    def forward(self, x: Tensor) -> Tensor:
        if len(x) != 3 and x.any():
            raise ValueError(f"made for 3 rows, and {len(x)} came")
        return super().forward(x)


class SharedExperts(nn.Module):
    """Calls a mixture of experts again and again, each a part of tensor parallelism around layers that a stage may not run."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = tanh_block(), nn.Linear(WIDTH, WIDTH)
        self.gate = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(Kept() for _ in range(2))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        h = self.stem(x) / (1 + 0.05 * self.calls)
        self.mean = h.detach().mean(0)  # on the stages that do not compute it, without values until the forward ends
        for _ in range(2):
            weights = self.gate(h).softmax(-1)
            h = h + sum(weights[:, i : i + 1] * expert(h) for i, expert in enumerate(self.experts))
        return self.head(h)


class Kept(nn.Sequential):
    """Two layers and what came of them, kept between forwards."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, 4), nn.GELU(), nn.Linear(4, WIDTH))
        self.seen: Any = None

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.seen = y.detach()
        return y


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(WIDTH, WIDTH)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return torch.tanh(self.line(x)) * (1 + 1 / self.calls)


class CountsTwice(nn.Module):
    """Calls one layer again and again, which counts its calls in an attribute and follows that count."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Counts(), tanh_block()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(self.first(x))
        return self.last(self.first(self.first(x)))


# -- chance -------------------------------------------------------------------------------------------------------------


class PythonChance(nn.Module):
    """Leaves layers out by Python's own random numbers, seeded by the test."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(tanh_block() for _ in range(4))
        self.way = ""

    def forward(self, x: Tensor) -> Tensor:
        self.way = ""
        for block in self.blocks:
            keeps = not self.training or random.random() < 0.6
            self.way += str(int(keeps))
            if keeps:
                x = x + block(x)
        return x


class LateDrop(nn.Module):
    """Draws between its layers in training alone."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.training and torch.rand(()) < 0.5:
                continue
            x = x + block(x)
        return x


# -- other ways -----------------------------------------------------------------------------------------------------------


class OtherPaths(nn.Module):
    """Its depth, the calls of a shared block, and the form of its inputs follow the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(tanh_block() for _ in range(4))
        self.shared = tanh_block()

    def forward(self, x: Tensor, depth: Tensor, mask: Tensor) -> Tensor:
        number = int(depth[0])
        if number % 2:
            mask = mask[..., None].squeeze(-1)
        x = x * mask
        for place, block in enumerate(self.blocks[:number]):
            x = x + block(x)
            for _ in range(number - place):
                x = self.shared(x)
            if number == 3 and place == 1:
                with torch.no_grad():
                    x = x + self.blocks[0](x)
        return x


def ways_batch(seed: int) -> Any:
    number = (4, 1, 3, 4, 2)[seed % 5]
    return (rows(seed), torch.full((6,), number), (rows(seed + 7)[:, :1] > 0).double()), rows(seed + 100)


class AsksDtype(nn.Module):
    """Asks layers for their parameters between them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(tanh_block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x.to(next(block.parameters()).dtype))
        return x.to(next(self.blocks[0][0].parameters()).dtype)  # pyright: ignore


class Detached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(tanh_block() for _ in range(4))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        with torch.no_grad():
            target = self.blocks[3](self.blocks[1](self.blocks[0](x)))
        h = self.blocks[1](self.blocks[0](x))
        y = self.blocks[2](h.detach()) + self.blocks[3](h) * (h.detach() > 0)
        return {"y": y - target, "h": h}


def reads_inside(outputs: dict[str, Tensor], batch: Any) -> Tensor:
    return outputs["y"].square().mean() + F.mse_loss(outputs["h"], batch[1])


class Patched(nn.Module):
    """A library has set other forwards on instances of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Counts() for _ in range(4))
        for block in self.blocks:
            block.forward = _doubled(block.forward)

    forward = Stack.forward


def _doubled(forward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x: forward(x) * 2


class Hooked(nn.Module):
    """A hook on each block reads a number; another one changes the result."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(tanh_block() for _ in range(4))
        self.log: list[float] = []
        for block in self.blocks:
            block.register_forward_pre_hook(lambda _, args: self.log.append(args[0].mean().item()))
            block.register_forward_hook(lambda _m, _i, out: self.log.append(out.abs().max().item()))
            block.register_forward_hook(lambda _m, _i, out: out * 1.5)

    forward = Stack.forward


class Captured(nn.Module):
    """Registers hooks in its first forward, and a flag that says so; they collect what blocks give, which the result uses."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(tanh_block() for _ in range(4))
        self.has_hooks = False
        self.found: list[Tensor] | None = None

    def _keep(self, _module: nn.Module, _given: Any, out: Tensor) -> None:
        if self.found is not None:
            self.found.append(out)

    def forward(self, x: Tensor) -> Tensor:
        if not self.has_hooks:
            for block in self.blocks:
                block.register_forward_hook(self._keep)
            self.has_hooks = True
        self.found = found = [x]
        for block in self.blocks:
            x = block(x)
        self.found = None
        return x + sum(0.1 * place * item for place, item in enumerate(found))


class Conjugated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(tanh_block().double() for _ in range(4))
        self.phase = nn.Parameter(
            torch.view_as_complex(torch.linspace(0.1, 0.9, 2 * WIDTH).double().view(WIDTH, 2)).conj()
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return (x * self.phase).abs()


class LateMean(nn.Module):
    """Its first layer takes what the last one gave in the micro-batch before."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(tanh_block() for _ in range(4))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mean
        for block in self.blocks:
            x = block(x)
        self.mean.mul_(0.5).add_(x.detach().mean(0))
        return x


class ChosenRows(nn.Module):
    """Layers get the rows that the layer before has made positive: how many there are, its numbers say."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(tanh_block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            chosen = torch.where(x[:, 0] > 0)[0]
            x = x.index_add(0, chosen, block(x[chosen]))
        return x


class _InBackward(torch.autograd.Function):
    """Runs layers without a graph, and again in backward, as reversible networks do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, blocks: nn.ModuleList) -> Tensor:
        ctx.save_for_backward(x)
        ctx.blocks = blocks
        return _through(blocks, x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            y = _through(ctx.blocks, x)
        torch.autograd.backward(y, grads[0])
        return x.grad, None


def _through(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    for block in blocks:
        x = block(x)
    return x


class RunsInBackward(nn.Module):
    """Its layers are called inside of one Function."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(tanh_block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return _InBackward.apply(self.first(x), self.blocks)  # pyright: ignore[reportReturnType]


class Leaks(nn.Module):
    """A layer hands a tensor to another one by an object that no module holds."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Leaves() for _ in range(4))
        found: list[Tensor] = []
        self.last = lambda: found[-1]
        self.blocks[1].line.register_forward_hook(lambda _m, _i, out: found.append(out))  # pyright: ignore

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x + self.last()


def compiled_block() -> nn.Module:
    model = Stack()
    model.blocks[1] = torch.compile(model.blocks[1], backend="eager")  # pyright: ignore
    return model
