"""Layers whose arguments are written, and layers of operators whose shapes torch does not know without running them."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
import torch.nn.functional as F
from tests.parity.jobs.textbook_loop import steps_of
from torch import Tensor, nn

import meshwright as mw
from meshwright.describe.fakes import make_fake_mode


class Cache:
    """What layers hand on beside the stream, as Hugging Face's caches are: it grows with each call."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.sums: Tensor | None = None

    def add(self, keys: Tensor) -> Tensor:
        self.keys.append(keys)
        total = keys.sum(-1)
        self.sums = total if self.sums is None else torch.cat([self.sums, total], dim=0)
        return self.sums.mean(0)


class Caching(nn.Module):
    """Writes into its argument, and into an object among its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8)

    def forward(self, x: Tensor, scale: Tensor, cache: Cache) -> Tensor:
        hidden = torch.tanh(self.up(x))
        past = cache.add(x.detach())
        out = x + self.down(hidden) * scale.clone() + 0.1 * past.mean()
        scale *= 1.5
        return out


class CachingStack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Caching() for _ in range(3))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        cache, scale = Cache(), torch.ones(8, dtype=x.dtype)
        for layer in self.layers:
            x = layer(x, scale, cache)
        return self.head(x) + 0.1 * len(cache.keys)


class KeysOfLayer:
    """The keys of one layer, joined with those of earlier calls."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None

    def update(self, keys: Tensor) -> Tensor:
        self.keys = keys if self.keys is None else torch.cat([self.keys, keys])
        return self.keys


class Keys:
    def __init__(self, count: int) -> None:
        self.layers = [KeysOfLayer() for _ in range(count)]


class TwoCaches:
    """An encoder's and a decoder's cache in one object."""

    def __init__(self, count: int) -> None:
        self.own, self.other = Keys(count), Keys(count)


@dataclasses.dataclass
class Settings:
    """Settings that refuse to be asked for a field in which layers differ."""

    scale: float = 0.5
    width_of_layer: int = 12

    def __getattribute__(self, name: str) -> Any:
        if name == "width_of_layer":
            raise AttributeError("it differs from layer to layer")
        return super().__getattribute__(name)


class UpAndDown(nn.Module):
    """Two layers at a place in a stack."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self.up, self.down, self.place = nn.Linear(8, 12), nn.Linear(12, 8), place


class Remembering(UpAndDown):
    """Keeps its hidden features in a cache deep inside an argument."""

    def forward(self, x: Tensor, caches: TwoCaches, settings: Settings) -> Tensor:
        hidden = caches.own.layers[self.place].update(torch.tanh(self.up(x)))
        return x + settings.scale * self.down(hidden[-len(x) :])


class RememberingStack(nn.Module):
    """Layers that are given one cache."""

    layer: type[UpAndDown] = Remembering

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.layer(place) for place in range(3))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        given = self.given()
        for layer in self.layers:
            x = layer(x, *given)
        return self.head(x)

    def given(self) -> tuple[Any, ...]:
        """Return what layers take beside the stream."""
        return TwoCaches(3), Settings()


class Sliding(UpAndDown):
    """Keeps its hidden features in a cache of all layers, and takes a number from there that is no layer's."""

    def forward(self, x: Tensor, cache: dict[str, Any]) -> Tensor:
        hidden = cache["keys"][self.place].update(torch.tanh(self.up(x)))
        return x + cache["windows"][self.place].rate.to(x.dtype) * self.down(hidden)


class Window:
    """The window of one layer."""

    def __init__(self) -> None:
        self.rate = torch.tensor(0.75)


class SlidingStack(RememberingStack):
    layer = Sliding

    def given(self) -> tuple[Any, ...]:
        return ({"keys": [KeysOfLayer() for _ in range(3)], "windows": [Window() for _ in range(3)]},)


@functools.lru_cache
def factors(width: int) -> Tensor:
    """Factors that are computed once for each width."""
    return torch.linspace(0.5, 1.0, width, dtype=torch.float64)


class Factored(nn.Module):
    """A model whose code caches a tensor for the whole process."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.head = nn.Linear(8, 12), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.up(x)) * factors(12))


class FactoredLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)) * factors(8))


class FactoredStack(nn.Module):
    """Layers of several stages that take a tensor from one cache."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(FactoredLayer() for _ in range(4)))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x))


def train_with_a_cache(plan: str) -> list[tuple[float, float]]:
    """Train on ranks whose cache is empty."""
    factors.cache_clear()
    return run_planned("factored_stack", plan)


def step_after_a_trial() -> list[tuple[float, float]]:
    """Train on one rank whose cache an earlier trial without values has filled."""
    factors.cache_clear()
    try:
        if (world := mw.current_world()) is not None and world.rank == 1:
            with make_fake_mode():
                factors(12)
        return run_planned("factored", "dp=2,zero=3")
    finally:
        factors.cache_clear()


class Grouped(nn.Module):
    """Experts in one product, which torch's fake tensors know for bfloat16 alone."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.gate = nn.Linear(16, 4, bias=False)
        self.weight = nn.Parameter(torch.randn(4, 16, 16) / 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        chosen = self.gate(h).softmax(-1)
        weight, expert = chosen.max(-1)
        order = expert.argsort(stable=True)
        offsets = torch.bincount(expert, minlength=4).cumsum(0).to(torch.int32)
        products = F.grouped_mm(h[order], self.weight, offs=offsets)
        return x + weight[:, None] * torch.zeros_like(products).index_copy(0, order, products)


class GroupedStack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Grouped() for _ in range(4)))
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.calls = nn.Linear(8, 12), nn.Linear(12, 8), nn.Buffer(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + self.down(torch.tanh(self.up(x))) / self.calls


class PatchedStack(nn.Module):
    """Its last layer's forward is replaced by one that calls it, as acceleration libraries do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(8), Layer()) for _ in range(3))
        self.head = nn.Linear(8, 3)
        inner = self.layers[-1].forward

        def forward(*args: Any) -> Any:
            return inner(*args)

        self.layers[-1].forward = forward  # pyright: ignore

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


BUILD: dict[str, tuple[type[nn.Module], int, torch.dtype]] = {
    "caching": (CachingStack, 8, torch.float64),
    "remembering": (RememberingStack, 8, torch.float64),
    "sliding": (SlidingStack, 8, torch.float64),
    "factored": (Factored, 8, torch.float64),
    "factored_stack": (FactoredStack, 8, torch.float64),
    "grouped": (GroupedStack, 16, torch.float32),
    "patched": (PatchedStack, 8, torch.float64),
}


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    kind, _, dtype = BUILD[name]
    return kind().to(dtype)


def batch(name: str, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    _, width, dtype = BUILD[name]
    return torch.randn(6, width, generator=generator, dtype=dtype), torch.randn(6, 3, generator=generator, dtype=dtype)


def loss_fn(outputs: Tensor, batch: Any) -> Tensor:
    return F.mse_loss(outputs, batch[1])


def run_plain(name: str) -> list[tuple[float, float]]:
    """Return loss and gradient norm of each step of a plain loop."""
    module = build(name)
    batches = [batch(name, step) for step in range(3)]
    found = []
    for loss in steps_of(module, batches, loss_fn):
        grads = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
        found.append((loss, torch.cat([grad.flatten() for grad in grads]).norm().item()))
    return found


def run_planned(name: str, plan: str) -> list[tuple[float, float]]:
    """Return the same under a plan, with a sentinel in each step."""
    optimizer = functools.partial(torch.optim.SGD, lr=0.1)
    build_it = functools.partial(build, name)
    with mw.apply_plan(build_it, plan, loss_fn=loss_fn, optimizer=optimizer, sentinel_every=1) as model:
        results = [model.step(batch(name, step)) for step in range(3)]
        return [(result.loss, result.grad_norm) for result in results]


def divide_outputs(plan: str) -> Tensor:
    """Call the model by hand, and write over what it gives."""
    with mw.apply_plan(functools.partial(build, "caching"), plan, loss_fn=loss_fn, optimizer=torch.optim.SGD) as model:
        outputs = model(batch("caching", 0)[0])
        outputs.div_(2.0)
        return outputs.detach()


def plain_outputs() -> Tensor:
    return build("caching")(batch("caching", 0)[0]).detach()
