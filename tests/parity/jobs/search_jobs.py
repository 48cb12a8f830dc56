"""What ranks and one process run with models whose first call does not show what they do later."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.parity.jobs.textbook_loop import losses_of, steps_of
from tests.parity.models.search_models import LENGTH, batch_of, build
from torch import Tensor, nn

import meshwright as mw
from meshwright.apply.tensor.search.search import Search
from meshwright.apply.tensor.tensor_layout import TensorLayout
from meshwright.describe.batches import call_model


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
    batches = [batch_of(name, num_samples, step, length) for step, (num_samples, length) in enumerate(script.sizes)]
    losses, evaluated, steps = [], [], steps_of(model, batches, loss_fn)
    for step, batch in enumerate(batches):
        if step or script.evaluates_first:
            model.eval()
            with torch.no_grad():
                evaluated.append(loss_fn(model(batch[0]), batch).item())
            model.train()
        losses.append(next(steps))
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


def normalising_model() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 5)]
    return nn.Sequential(*layers).double()


def vectors(num_samples: int, seed: int) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(seed)
    return torch.randn(num_samples, 6, dtype=torch.float64, generator=source), torch.arange(num_samples) % 5


def evaluated_on_one_sample_first(plan: str) -> tuple[list[float], list[float]]:
    """Return the losses of an evaluation of one sample and of two steps, under the plan and in a textbook loop."""
    model, module = normalising_model(), normalising_model()
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    one, batches = vectors(1, 9), [vectors(4, seed) for seed in range(2)]
    module.eval()
    with torch.no_grad():
        expected = [loss(module(one[0]), one).item()]
    expected += losses_of(module.train(), batches, loss)
    with mw.apply_plan(model, plan, loss_fn=loss, optimizer=sgd, seed=0) as applied:
        found = [applied.evaluate(one)["loss"], *(applied.step(batch).loss for batch in batches)]
    return found, expected


class NormalisedBlock(nn.Module):
    """Convolutions and BatchNorms beside a shortcut, as in ResNet."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Conv2d(6, 8, 3, padding=1, bias=False), nn.Conv2d(8, 6, 3, padding=1, bias=False)
        self.inner, self.outer = nn.BatchNorm2d(8), nn.BatchNorm2d(6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.outer(self.down(torch.relu(self.inner(self.up(x))))))


def trained_with_batch_norm(plan: str) -> tuple[list[float], list[float]]:
    """Return the losses of four steps under the plan, and of a textbook loop over its two micro-batches."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        blocks = [NormalisedBlock() for _ in range(4)]
        return nn.Sequential(nn.Conv2d(2, 6, 3), *blocks, nn.Flatten(), nn.Linear(6 * 16, 5)).double()

    def batch(seed: int) -> tuple[Tensor, Tensor]:
        source = torch.Generator().manual_seed(seed)
        return torch.randn(6, 2, 6, 6, dtype=torch.float64, generator=source), torch.arange(6) % 5

    plain = build()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    expected = []
    for seed in range(4):
        inputs, targets = batch(seed)
        optimizer.zero_grad()
        terms = [loss(plain(inputs[i : i + 3]), (None, targets[i : i + 3])) / 2 for i in (0, 3)]
        sum(terms).backward()  # pyright: ignore
        optimizer.step()
        expected.append(sum(term.item() for term in terms))
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    with mw.apply_plan(build(), plan, loss_fn=loss, optimizer=sgd, seed=0, sentinel_every=2) as model:
        return [model.step(batch(seed)).loss for seed in range(4)], expected


class HalvesOnAllRanksBut:
    """Cuts a batch by halves, and raises on one rank where it shall cut at all."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def __call__(self, batch: tuple[Tensor, Tensor], num_parts: int) -> list[tuple[Tensor, Tensor]]:
        if num_parts > 1 and dist.get_rank() == self._rank:
            raise ValueError("this batch cannot be cut")
        return list(zip(batch[0].chunk(num_parts), batch[1].chunk(num_parts), strict=True))


def steps_with_a_batch_that_one_rank_cannot_cut(plan: str, rank: int) -> list[float]:
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    split = HalvesOnAllRanksBut(rank)
    with mw.apply_plan(normalising_model(), plan, loss_fn=loss, optimizer=sgd, seed=0, split=split) as applied:
        return [applied.step(vectors(4, seed)).loss for seed in range(2)]


class TrimmingModel(nn.Module):
    """Cuts a batch to its longest sample, which is not among the first ones."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 8)
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        self.head = nn.Linear(8, 11)

    def forward(self, tokens: Tensor, lengths: Tensor, labels: Tensor) -> Tensor:
        del labels  # the loss has them
        return self.head(self.layers(self.embedding(tokens[:, : int(lengths.max())])))


def trimmed_loss(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(outputs.flatten(0, 1), batch["labels"].flatten())


def cut_to_the_longest(plan: str) -> tuple[list[float], list[float]]:
    """Return losses under the plan and in a textbook loop, of batches whose labels end with the longest of all samples."""
    lengths = torch.tensor([2, 3, 2, 3, 2, 3, 4, 5])
    source = torch.Generator().manual_seed(1)
    batches = [
        {
            "tokens": torch.randint(11, (8, 6), generator=source),
            "lengths": lengths,
            "labels": torch.randint(11, (8, 5), generator=source),
        }
        for _ in range(2)
    ]
    model, module = TrimmingModel().double(), TrimmingModel().double()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    expected: list[float] = []
    for batch in batches:
        optimizer.zero_grad()
        value = trimmed_loss(module(**batch), batch)
        value.backward()
        optimizer.step()
        expected.append(value.item())

    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    with mw.apply_plan(model, plan, loss_fn=trimmed_loss, optimizer=sgd, seed=0) as applied:
        return [applied.step(batch).loss for batch in batches], expected


class Quantizer(nn.Module):
    """Maps a stream to a few codes and back, by methods: nobody calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Conv1d(8, 64, 1), nn.Conv1d(64, 8, 1)

    def encode(self, x: Tensor) -> Tensor:
        found = self.enter(x)
        return found + (found.round() - found).detach()

    def decode(self, codes: Tensor) -> Tensor:
        return self.leave(codes)


class Codec(nn.Module):
    """Codes a signal after an encoder, and decodes it; the layers between them are declared last."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Sequential(nn.Conv1d(3, 32, 3, padding=1), nn.GELU(), nn.Conv1d(32, 8, 3, padding=1))
        self.middle = nn.Conv1d(8, 8, 1)
        widths = [8, 32, 32, 32]
        layers = [nn.Conv1d(a, b, 3, padding=1) for a, b in itertools.pairwise(widths)]
        self.decoder = nn.Sequential(*(part for layer in layers for part in (layer, nn.GELU())), nn.Conv1d(32, 5, 3))
        self.quantizer = Quantizer()

    def forward(self, x: Tensor) -> Tensor:
        latents = self.middle(self.encoder(x))
        return self.decoder(self.quantizer.decode(self.quantizer.encode(latents))).mean(-1)


def coded(plan: str) -> tuple[list[float], list[float]]:
    """Return losses under the plan and in a textbook loop, of a model with layers whose methods run between the others."""
    batches = [
        (torch.randn(4, 3, 8, generator=torch.Generator().manual_seed(seed)).double(), torch.arange(4))
        for seed in range(3)
    ]
    expected = losses_of(Codec().double(), batches, loss)
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    with mw.apply_plan(Codec().double(), plan, loss_fn=loss, optimizer=sgd, seed=0) as model:
        return [model.step(batch).loss for batch in batches], expected
