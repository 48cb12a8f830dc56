"""Models whose code between layers reads values, writes into parts of its own tensors, or changes the model once."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from tests.parity.jobs.never_wrong_pipeline_states import WIDTH, tanh_block
from torch import Tensor, nn


class FirstReads(nn.Module):
    """Reads the first layer's numbers in several ways; each result depends on them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(tanh_block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.blocks[0](x)
        keep = h[:, 0] > 0
        h = h * torch.tensor([1.0 + 0.5 * flag for flag in keep.tolist()], dtype=h.dtype)[:, None]
        h = h.index_add(0, torch.nonzero(keep)[:, 0], self.blocks[1](h[keep]))
        times = 1 + keep.long()
        h = torch.repeat_interleave(h, times, dim=0)[times.cumsum(0) - 1]
        h = self.blocks[2](h)
        rows = torch.where(keep)[0]
        return self.blocks[3](h.index_add(0, rows, h[rows]))


class ReadsTheLast(nn.Module):
    """Reads the last layer's numbers: no later stage is left that could be told."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(tanh_block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return -x if bool((x > 9).all()) else x


class _Routed(nn.Module):
    """Reads, between its own layers, how many rows the first one has chosen."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.expert, self.out = nn.Linear(WIDTH, 2), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        choice = self.router(x).argmax(-1)
        sizes = torch.bincount(choice, minlength=2).tolist()
        order = choice.argsort(stable=True)
        first, second = x[order].split(sizes)
        mixed = torch.cat([first, 2 * second])
        return x + torch.zeros_like(x).index_copy(0, order, self.out(self.expert(mixed).tanh()))


class ReadsInside(nn.Module):
    """Heavy layers that would be opened, and read values inside: each stays in one piece."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(_Routed() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


class WritesParts(nn.Module):
    """Multiplies parts of a tensor of its own by layers' results, and then takes all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(tanh_block() for _ in range(4))
        self.table = nn.Parameter(torch.linspace(0.1, 0.9, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            ones = torch.ones(len(x), WIDTH, dtype=x.dtype)
            waves = torch.sin(self.table)[None].repeat(len(x), 1)
            left = ones[:, :2]
            x = block(x)
            waves[..., : WIDTH // 2] *= x[..., :1]
            waves[..., WIDTH // 2 :] *= x[..., 1:2]
            left += x[:, 2:4]
            x = x + waves + 0.1 * ones
        return x


class Unchanged(nn.Module):
    """Takes a tensor's dtype and layout, of which another one has them already: functions give their very argument back."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(tanh_block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(len(x), 1, dtype=x.dtype)
        h = self.blocks[0](x)
        inner, same = mask.type_as(h), h.contiguous()
        h = self.blocks[1](h * inner)
        h = self.blocks[2](h + same) + self.blocks[0](same)
        return self.blocks[3](h + same * mask) * mask


class _Kept:
    """An object of a user's class, with whatever it is given."""

    def __init__(self, **parts: Any) -> None:
        self.__dict__.update(parts)


class _Keeps(nn.Module):
    """Adds its input to what a cache deep inside of an argument has for it, and then reads a number."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self.line, self.place = nn.Linear(WIDTH, WIDTH), place

    def forward(self, x: Tensor, cache: Any) -> Tensor:
        own = cache.first.layers[self.place]
        own.keys = x if own.keys is None else torch.cat([own.keys, x], -1)
        return self.line(own.keys if x.sum().item() < 9e9 else -own.keys).tanh()


class DeepCache(nn.Module):
    """Layers that need numbers, and write into a cache of caches before they do: it is as before when they run again."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Keeps(place) for place in range(4))

    def forward(self, x: Tensor) -> Tensor:
        cache = _Kept(first=_Kept(layers=[_Kept(keys=None) for _ in self.blocks]))
        for block in self.blocks:
            x = block(x, cache)
        return x


class _Marked(nn.Embedding):
    """An embedding in which one token has a vector of its own, a parameter that `.to()` gives back as it is."""

    def __init__(self, extra: nn.Parameter) -> None:
        super().__init__(8, WIDTH)
        self.extra = extra

    def forward(self, input: Tensor) -> Tensor:
        out = super().forward(input)
        out[input == 3] = self.extra.to(out.dtype)
        return out


class SharedVector(nn.Module):
    """Two layers that share a parameter and take it by a function that returns it."""

    def __init__(self) -> None:
        super().__init__()
        extra = nn.Parameter(torch.ones(WIDTH))
        self.encoder, self.block = _Marked(extra), tanh_block()
        self.decoder, self.last = _Marked(extra), tanh_block()

    def forward(self, x: Tensor) -> Tensor:
        ids = (x.abs() * 4).long().clamp(max=7)
        h = self.block(self.encoder(ids).mean(1))
        return self.last(h + self.decoder(ids).mean(1))


class _Slow(nn.Module):
    """Attention of another kind, which the first batch replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.line(x).tanh()


class _Fast(_Slow):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.line(x).tanh()


class _Chooses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kind, self.inner, self.out = "slow", _Slow(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.inner(x))


class Replaces(nn.Module):
    """Replaces a layer inside of each block when it meets its first batch; the parameters stay."""

    def __init__(self) -> None:
        super().__init__()
        self.kind, self.calls = "slow", 0
        self.blocks = nn.ModuleList(_Chooses() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.kind == "slow" and x.shape[1] < 100:
            self.kind = "fast"
            for block in self.blocks:
                assert isinstance(block, _Chooses)
                inner = _Fast()
                inner.line = block.inner.line
                block.kind, block.inner = "fast", inner
        for block in self.blocks:
            x = block(x)
        return x


class ReplacesWithItsOwn(nn.Module):
    """Replaces a layer by one with parameters of its own when it meets its first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.is_new = True

    def forward(self, x: Tensor) -> Tensor:
        if self.is_new:
            self.first, self.is_new = nn.Linear(WIDTH, WIDTH).to(x.dtype), False
        return self.second(self.first(x).relu())


def replaced_when_built() -> nn.Module:
    """Build the model that replaces layers, and run it once, as refusals say."""
    module = Replaces()
    with torch.no_grad():
        module(torch.zeros(2, WIDTH))
    return module


def _double(_module: nn.Module, _inputs: Any, output: Any) -> Any:
    return 2 * output


class _Installs(nn.Module):
    """Registers a hook on its child in its first forward, and keeps a flag on the child that says so."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.other = tanh_block(), tanh_block()

    def forward(self, x: Tensor) -> Tensor:
        if not getattr(self.inner, "is_installed", False):
            self.inner.register_forward_hook(_double)
            self.inner.is_installed = True  # pyright: ignore[reportArgumentType] - of user code's kind
        return self.other(self.inner(x))


class Installs(nn.Module):
    """Looks at such a flag between its layers, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = _Installs(), _Installs()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if not getattr(self.first.inner, "is_installed", False):
            raise RuntimeError("not installed")
        return self.last(x)


class InstallsIdly(Installs):
    """The same beside a layer that gives back what it is given: no unit of a pipeline, so that the forward is looked at twice."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.idle(super().forward(x))


class _Table(nn.Module):
    """Keeps a table of positions in a buffer, and how much of it there is."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(64), persistent=False)
        self.length = 0

    def forward(self, size: int) -> Tensor:
        if size > self.length:
            self.table[:size] = torch.arange(size) / 10
            self.length = size
        return self.table[:size].clone()


class _Placed(nn.Module):
    """A block that adds positions."""

    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.table, self.inner = table, tanh_block()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x + self.table(x.shape[1]))


class SharedTable(nn.Module):
    """Two layers share such a table, which the first of them fills; others follow (rotary-embedding-torch)."""

    def __init__(self) -> None:
        super().__init__()
        table = _Table()
        self.blocks = nn.Sequential(_Placed(table), _Placed(table), tanh_block(), tanh_block())

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


class _Grid(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.arange(x.shape[1], dtype=x.dtype, device=x.device) - 1


class SizedGrid(nn.Module):
    """A layer without state that takes the last layer's tensor for its size alone; code after it reads what it gives."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.grid = nn.ModuleList(tanh_block() for _ in range(3)), _Grid()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        near = torch.where(self.grid(x).abs() < 2)[0]
        return x[:, near] * float(self.grid(x).max())


class _SwapsLate(nn.Module):
    """Replaces its activation at the end of its first forward, which has used the old one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.act = nn.Linear(WIDTH, WIDTH), nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.inner(x))
        if isinstance(self.act, nn.Tanh):
            self.act = nn.Sigmoid()
        return x


def build_swapping() -> nn.Module:
    """Return a model whose first forward is another than the later ones."""
    torch.manual_seed(0)
    return nn.Sequential(_SwapsLate(), tanh_block(), tanh_block()).double()


def build_old_spectral_norm() -> nn.Module:
    """Spectral norm by a hook that writes its vectors by the layer's weight, on the last stage."""
    torch.manual_seed(0)
    layers = [tanh_block(), tanh_block(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # deprecated, and in many discriminators
        layers[2] = nn.utils.spectral_norm(layers[2])
    return nn.Sequential(*layers).double()
