"""Models whose first call does not show what they do later, and what ranks run with them.

Each is a class of program for which a layout that was proven with one call, in one mode or for one block was wrong.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshwright as mw
from meshwright.apply.tensor.search.search import Search
from meshwright.apply.tensor.tensor_layout import TensorLayout
from meshwright.describe.batches import call_model

WIDTH, HIDDEN, LENGTH = 8, 12, 6


def normalised(x: Tensor) -> Tensor:
    """Return an activation that sees all hidden units."""
    return torch.softmax(x, -1)


class Mlp(nn.Module):
    """A feed-forward layer; how it is activated is decided by what neither shapes nor classes show."""

    def __init__(
        self, activation: Callable[[Tensor], Tensor] = F.gelu, *, temperature: float = 0.0, index: int = 0
    ) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.activation = activation
        self.temperature = temperature
        self.layer_idx = index

    def forward(self, x: Tensor, *, last: bool = False) -> Tensor:
        h = self.up(x)
        if self.temperature or self.layer_idx % 2:
            h = normalised(h)
        h = self.activation(h)
        return self.down(F.normalize(h, dim=-1) if last else h)


class EvalMlp(Mlp):
    """Mixes its hidden units in eval mode alone."""

    def forward(self, x: Tensor, *, last: bool = False) -> Tensor:
        h = F.gelu(self.up(x))
        return self.down(h if self.training else h / h.abs().amax(-1, keepdim=True))


class Block(nn.Module):
    """A norm and a feed-forward layer, on slices of the sequence where nothing speaks against it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = Mlp()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Residual(nn.Module):
    """Layers one after the other, with a layer before and a head."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x) if isinstance(layer, Block) else x + layer(x)
        return self.head(x).mean(1)


class Twice(Residual):
    """Calls one layer twice, the second time in another way."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = x + self.layers[0](x)
        return self.head(x + self.layers[0](x, last=True)).mean(1)


class ManyWays(Residual):
    """Calls one layer with more kinds of arguments than are proven."""

    def forward(self, x: Tensor) -> Tensor:
        for length in range(1, 11):
            x = x + F.pad(
                self.layers[0](x[:, : min(length, LENGTH)].repeat(1, length, 1)).mean(1, keepdim=True), (0, 0)
            )
        return self.head(x).mean(1)


class OverSamples(Block):
    """Mixes samples: wrong on slices of the batch, and right where one slice holds the only sample."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(0))


class OverPositions(Block):
    """Mixes positions: right on slices of a sequence of one position."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(1, keepdim=True))


class Aux(Block):
    """Keeps an auxiliary loss of what it sees, for whoever adds it."""

    aux: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.aux = (x.mean((0, 1)) ** 2).sum()
        return super().forward(x)


class HiddenAux(Mlp):
    """Keeps an auxiliary loss of its hidden units, which would be cut."""

    aux: Tensor

    def forward(self, x: Tensor, *, last: bool = False) -> Tensor:
        h = F.gelu(self.up(x))
        self.aux = (h.mean((0, 1)) ** 2).sum()
        return self.down(h)


class Average(Block):
    """Keeps a running average of what it sees in a buffer."""

    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.average.mul_(0.9).add_(x.mean((0, 1)), alpha=0.1)
        return super().forward(x - self.average)


class Counting(Block):
    """Counts its calls: the same on shards as of the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class Dropping(Mlp):
    """Drops hidden units, and what comes out."""

    def __init__(self, p: float = 0.2) -> None:
        super().__init__()
        self.drop = nn.Dropout(p)

    def forward(self, x: Tensor, *, last: bool = False) -> Tensor:
        return self.drop(self.down(self.drop(F.gelu(self.up(x)))))


class Words(nn.Module):
    """An embedding of its own kind, and blocks."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.words = nn.Embedding(20, WIDTH, **options)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).mean(1)


class SquareWeight(nn.Module):
    """A matrix with as many elements as there are hidden units in a layer beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.square = nn.Parameter(torch.randn(4, 4))
        self.up = nn.Linear(WIDTH, 16)
        self.down = nn.Linear(16, WIDTH)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.cat([x[..., :4] @ self.square.exp(), x[..., 4:]], -1)
        return self.head(x + self.down(F.gelu(self.up(x)))).mean(1)


class Encoder(nn.Module):
    """torch's own encoder, which in eval mode computes a layer in one kernel."""

    def __init__(self, num_heads: int = 2) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, num_heads, 4 * WIDTH, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=num_heads % 2 == 0)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x)).mean(1)


class ByHand(nn.Module):
    """Weights that functions use: the bias comes before a scale, so that one rank's term of the sum has it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.scale = nn.Parameter(0.5 * torch.ones(WIDTH))
        self.act = nn.PReLU()

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(F.linear(x, self.first.weight, self.first.bias))
        return torch.matmul(h, self.second.weight.t()).add_(self.second.bias) * self.scale


MODELS: dict[str, Callable[[], nn.Module]] = {
    "by_hand": lambda: Residual([ByHand(), ByHand()]),
    "activations": lambda: Residual([Mlp(F.gelu), Mlp(normalised), Mlp(F.gelu)]),
    "temperatures": lambda: Residual([Mlp(), Mlp(temperature=0.5)]),
    "indices": lambda: Residual([Mlp(index=index) for index in range(3)]),
    "twice": lambda: Twice([Mlp()]),
    "many_ways": lambda: ManyWays([Mlp()]),
    "eval": lambda: Residual([EvalMlp()]),
    "plain": lambda: Residual([Block(), Block()]),
    "samples": lambda: Residual([OverSamples(), OverSamples()]),
    "positions": lambda: Residual([OverPositions(), OverPositions()]),
    "aux": lambda: Residual([Aux(), Aux()]),
    "hidden_aux": lambda: Residual([HiddenAux(), HiddenAux()]),
    "average": lambda: Residual([Average(), Average()]),
    "counting": lambda: Residual([Counting(), Counting()]),
    "dropping": lambda: Residual([Dropping(), Dropping()]),
    "not_yet_dropping": lambda: Residual([Dropping(0.0), Dropping(0.0)]),
    "max_norm": lambda: Words(max_norm=1.0),
    "by_frequency": lambda: Words(scale_grad_by_freq=True),
    "sparse": lambda: Words(sparse=True),
    "square": SquareWeight,
    "encoder": Encoder,
    "encoder_of_one_head": lambda: Encoder(1),
}


def build(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(3)
    return MODELS[name]().to(dtype)


def batch_of(name: str, num_samples: int, seed: int = 0, length: int = LENGTH) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(3, (num_samples,), generator=generator)
    if name in ("max_norm", "by_frequency", "sparse"):
        return torch.randint(20, (num_samples, length), generator=generator), targets
    return torch.randn(num_samples, length, WIDTH, generator=generator, dtype=torch.float64), targets


def loss(outputs: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(outputs, batch[1])


def layout_of(model: nn.Module, batch: Any, num_parts: int = 2, loss_fn: Any = loss) -> TensorLayout:
    """Return what the search finds, in this process."""

    def run(module: nn.Module) -> Any:
        outputs = call_model(module, batch)
        loss_fn(outputs, batch)
        return outputs

    return Search(model, num_parts, run).layout()


def frozen_first(model: nn.Module, names: tuple[str, ...]) -> None:
    """Freeze the parameters that have one of these words in their names, and no other."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(word in name for word in names))


def penalised(model: nn.Module) -> Callable[[Any, Any], Tensor]:
    """Return a loss with a penalty on the norms of a model's weights, which is not the sum of those of their slices."""

    def loss_fn(outputs: Tensor, batch: Any) -> Tensor:
        norms = [p.norm() for name, p in model.named_parameters() if name.endswith("up.weight")]
        return loss(outputs, batch) + 0.1 * torch.stack(norms).sum()

    return loss_fn


def penalised_everywhere(model: nn.Module) -> Callable[[Any, Any], Tensor]:
    """Return a loss with a penalty on every parameter."""

    def loss_fn(outputs: Tensor, batch: Any) -> Tensor:
        return loss(outputs, batch) + 0.1 * torch.stack([p.norm() for p in model.parameters()]).sum()

    return loss_fn


def with_aux(model: nn.Module) -> Callable[[Any, Any], Tensor]:
    """Return a loss that adds what the layers left in attributes."""

    def loss_fn(outputs: Tensor, batch: Any) -> Tensor:
        return loss(outputs, batch) + sum(layer.aux for layer in model.get_submodule("layers"))  # pyright: ignore

    return loss_fn


LOSSES: dict[str, Callable[[nn.Module], Callable[[Any, Any], Tensor]]] = {
    "plain": lambda _: loss,
    "penalised": penalised,
    "every": penalised_everywhere,
    "aux": with_aux,
}

Seen = tuple[list[float], list[float], dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]
"""Losses of steps and of evaluations, the last gradients, the last parameters, the last buffers."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Script:
    """How a model is trained."""

    loss: str = "plain"
    sizes: tuple[tuple[int, int], ...] = ((4, LENGTH),) * 3
    """Samples and length of each step's batch."""
    frozen: tuple[str, ...] = ()
    """Words in the names of parameters that are frozen in the first step."""
    evaluates_first: bool = False


def train(name: str, plan: str, script: Script) -> Seen:
    """Train a model under a plan; an evaluation stands before each step but the first."""
    model = build(name)
    frozen_first(model, script.frozen)
    losses, evaluated = [], []
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    with mw.apply_plan(model, plan, seed=0, loss_fn=LOSSES[script.loss](model), optimizer=sgd) as applied:
        for step, (num_samples, length) in enumerate(script.sizes):
            batch = batch_of(name, num_samples, step, length)
            if step or script.evaluates_first:
                evaluated.append(applied.evaluate(batch)["loss"])
            losses.append(applied.step(batch).loss)
            if not step:
                frozen_first(applied.module, ())
        gradients = {key: value for key, value in applied.full_gradients().items() if value is not None}
        state = applied.full_state_dict()
    names = dict(model.named_buffers())
    buffers = {key: value for key, value in state.items() if key in names}
    return losses, evaluated, gradients, {key: value for key, value in state.items() if key not in names}, buffers


def train_plainly(name: str, script: Script) -> Seen:
    """Train a model as a textbook loop does."""
    model = build(name)
    frozen_first(model, script.frozen)
    loss_fn = LOSSES[script.loss](model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, evaluated = [], []
    for step, (num_samples, length) in enumerate(script.sizes):
        batch = batch_of(name, num_samples, step, length)
        if step or script.evaluates_first:
            model.eval()
            with torch.no_grad():
                evaluated.append(loss_fn(model(batch[0]), batch).item())
            model.train()
        optimizer.zero_grad()
        value = loss_fn(model(batch[0]), batch)
        value.backward()
        optimizer.step()
        losses.append(value.item())
        if not step:
            frozen_first(model, ())
    gradients = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
    parameters = {key: p.detach() for key, p in model.named_parameters()}
    return losses, evaluated, gradients, parameters, dict(model.named_buffers())


def raising_loss(outputs: Tensor, batch: Any) -> Tensor:
    raise ValueError("the loss is wrong")


def first_step_that_raises(plan: str) -> float:
    with mw.apply_plan(build("plain"), plan, loss_fn=raising_loss) as model:
        return model.step(batch_of("plain", 4)).loss


def drawn_after_evaluation(plan: str) -> dict[str, Tensor]:
    """Return this rank's parameters after steps with dropout that an evaluation came before."""
    model = build("dropping")
    with mw.apply_plan(
        model, plan, loss_fn=loss, optimizer=functools.partial(torch.optim.SGD, lr=0.1), seed=0
    ) as applied:
        applied.evaluate(batch_of("dropping", 3, 9))
        for step in range(3):
            applied.step(batch_of("dropping", 3, step))
        return applied.full_state_dict()
