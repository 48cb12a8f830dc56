"""Models whose layers leave things beside their results, or write in place; what trains them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import meshwright as mw

WIDTH = 6


def tanh_block(width: int = WIDTH) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.Tanh())


def rows(seed: int, num: int = 6, width: int = WIDTH) -> Tensor:
    return torch.randn(num, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def square(outputs: Any, _: Any) -> Tensor:
    return outputs.square().mean()


def squares(outputs: Any, _: Any) -> mw.Loss:
    """Return `square` as a Loss: micro-batches count for themselves, whatever samples see of one another."""
    return mw.Loss(outputs.square().sum(), outputs.numel())


def plain_batch(seed: int) -> Any:
    return rows(seed), rows(seed + 100)


# -- shapes of the code between layers that values decide -----------------------------------------------------------


class Unpadded(nn.Module):
    """Keeps the rows that a mask names, and the columns that lengths leave."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(tanh_block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        h = x.unsqueeze(-1) * torch.ones(WIDTH, dtype=x.dtype)
        for block in self.blocks[:2]:
            h = block(h)
        h = h[:, : lengths.max()]
        h = h[torch.arange(h.shape[1])[None] < lengths[:, None]]
        for block in self.blocks[2:]:
            h = block(h)
        return self.head(h)


def lengths_batch(seed: int) -> Any:
    lengths = torch.randint(1, WIDTH, (6,), generator=torch.Generator().manual_seed(seed))
    return (rows(seed), lengths), rows(seed + 100)


def sum_over_samples(outputs: Tensor, batch: Any) -> Any:
    return mw.Loss(outputs.square().sum(), len(batch[1]))


def mean_over_samples(outputs: Tensor, batch: Any) -> Tensor:
    return outputs.square().sum() / len(batch[1])


# -- requires_grad switched between steps -------------------------------------------------------------------------------


class Stack(nn.Module):
    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(tanh_block() for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def freeze(names: Sequence[int], module: nn.Module, *, trains: bool) -> None:
    blocks: Any = module.get_submodule("blocks")
    for place in names:
        for parameter in blocks[place].parameters():
            parameter.requires_grad_(trains)


def gradual(step: int, module: nn.Module) -> None:
    """Freeze the first stage for a step, then let it train again."""
    if step == 0:
        freeze((0, 1), module, trains=False)
    if step == 1:
        freeze((1,), module, trains=True)
    if step == 2:
        freeze((0,), module, trains=True)


def switch_everywhere(step: int, module: nn.Module) -> None:
    if step == 1:
        freeze((0, 3), module, trains=False)
    if step == 2:
        freeze((0, 1), module, trains=False)
        freeze((3,), module, trains=True)


def freeze_last(step: int, module: nn.Module) -> None:
    if step == 1:
        freeze((2, 3), module, trains=False)


def freeze_own_weights(step: int, module: nn.Module) -> None:
    """Reach the weights by name, which works on ranks that do not hold them, too."""
    for place in (0, 3):
        module.blocks[place][0].weight.requires_grad_(step == 1)  # pyright: ignore


# -- tensors that layers leave beside their results -------------------------------------------------------------------


class Leaves(nn.Module):
    """A block that keeps what it has seen, for the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(WIDTH, WIDTH)
        self.aux: Any = None
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.line(x))
        self.calls += 1
        self.aux = (y**2).mean(0).sum()
        self.seen = {"mean": y.detach().mean(), "list": [y]}
        return x + y


class Auxiliary(nn.Module):
    """Adds up in its forward what its blocks have left."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Leaves() for _ in range(4))

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        aux = sum(block.aux for block in self.blocks) + self.blocks[0].seen["list"][0].mean()  # pyright: ignore
        return {"x": x, "aux": aux}


def with_aux(outputs: Any, _: Any) -> Tensor:
    return outputs["x"].square().mean() + 0.1 * outputs["aux"]


class Collects(nn.Module):
    """Its blocks append to a list that the model gives them, and write into a state."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Appends() for _ in range(4))

    def forward(self, x: Tensor) -> Any:
        state: dict[str, Any] = {"x": x, "aux": [], "steps": 0}
        for block in self.blocks:
            block(state)
        return {"x": state["x"] * state["steps"], "aux": torch.stack(state["aux"]).sum()}


class Appends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(WIDTH, WIDTH)

    def forward(self, state: dict[str, Any]) -> None:
        state["x"] = torch.tanh(self.line(state["x"]))
        state["aux"].append(state["x"].square().mean())
        state["steps"] += 1


class Holder:
    """A state of the user's own, no container that torch knows."""

    def __init__(self, x: Tensor) -> None:
        self.x = x
        self.parts: list[Tensor] = []


class HandsOn(nn.Module):
    """A state object goes through the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(WritesState() for _ in range(4))

    def forward(self, x: Tensor) -> Any:
        state = Holder(x)
        for block in self.blocks:
            state = block(state)
        return {"x": state.x, "aux": sum(state.parts)}


class WritesState(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(WIDTH, WIDTH)

    def forward(self, state: Holder) -> Holder:
        state.x = torch.tanh(self.line(state.x))
        state.parts.append(state.x.mean())
        return state


class Memory(nn.Module):
    """Keeps a hidden state for the next batch, in the model and in a block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(tanh_block() for _ in range(4))
        self.mem: Any = None

    def forward(self, x: Tensor) -> Tensor:
        for place, block in enumerate(self.blocks):
            x = block(x)
            if place == 1:
                x = x if self.mem is None else x + self.mem
                self.mem = x.detach().mean(0)
        return x


# -- code in place --------------------------------------------------------------------------------------------------


class InPlaceCnn(nn.Module):
    def __init__(self, norm: str) -> None:
        super().__init__()

        def normed(width: int) -> nn.Module:
            return nn.GroupNorm(2, width) if norm == "group" else nn.BatchNorm2d(width)

        self.stem = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = normed(4)
        self.act = nn.ReLU(inplace=True)
        self.layer1 = nn.Sequential(Residual(4, normed), Residual(4, normed))
        self.layer2 = nn.Sequential(Residual(4, normed), Residual(4, normed))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.reshape(len(x), 1, 2, 3)
        x = self.act(self.norm(self.stem(x)))
        return self.fc(torch.flatten(self.pool(self.layer2(self.layer1(x))), 1))


class Residual(nn.Module):
    def __init__(self, width: int, normed: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn1 = normed(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = normed(width)

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += x
        return self.relu(out)


class Written(nn.Module):
    """Blocks that write over what they are given, which is used afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(WritesInput() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = x * 1.0
        for block in self.blocks:
            y = block(h)
            h = h * 0.5 + y
        return h


class WritesInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x += 0.25
        x.mul_(1.5)
        return torch.tanh(self.line(x))


class Activations(nn.Module):
    """A plain sequence with activations in place, VGG-like."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for _ in range(4):
            layers += [nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)]
        self.features = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.features(x)


class Skips(nn.Module):
    """Skip connections that are written over after they were sent, and views that are written."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        first = self.blocks[0](x)
        keep = self.blocks[1](first) * 1.0
        second = self.blocks[2](keep * 0.5)
        keep += second * 0.1
        keep[:, 0] = keep[:, 0] * 2
        third = self.blocks[3](second + 0.5)
        third += keep
        third[:, 1:].mul_(0.5)
        return third + first


class SentThenWritten(nn.Module):
    """A tensor is sent, written over where it was made, and used again elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        first = self.blocks[0](x)
        keep = self.blocks[1](first) + 0.0
        second = self.blocks[2](keep + 0.0)
        third = second + keep
        keep.mul_(0.5)
        return self.blocks[3](third) + keep


class StaleView(nn.Module):
    """A part of a tensor was taken before the whole is written over by a later stage."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        keep = self.blocks[1](self.blocks[0](x)) + 0.0
        part = keep[:, 0]
        last = self.blocks[3](self.blocks[2](keep + 0.0))
        keep += last.detach()
        return last * part[:, None] + keep


class Identity(nn.Module):
    """Layers that return what they are given: a dropout that drops nothing, a tuple with the mask."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Passes() for _ in range(4))
        self.drop = nn.Dropout(0.0)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        first = x
        for block in self.blocks:
            y, mask, kept = block(x, mask)
            x = self.drop(y + kept * 0.5 + x * mask)
        return x + first * mask


class Passes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Any:
        return torch.tanh(self.line(x)) * mask, mask, x


def masked_batch(seed: int) -> Any:
    return (rows(seed), (rows(seed + 7)[:, :1] > 0).double()), rows(seed + 100)
