"""Models and losses whose character changes after the first batch, and that keep state beside modules; for ranks."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tests.parity.jobs.textbook_loop import losses_of
from torch import Tensor, nn

import meshwright as mw
from meshwright.apply.gradient_sums import sum_gradients
from meshwright.ranks.join import join_world

VOCABULARY = 11
CALLS = [0]
FACTOR = itertools.count(1)


class Block(nn.Module):
    """A block whose input may be scaled by something that is no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)

    def scale(self) -> Any:
        """Return what the input is multiplied by."""
        return 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x * self.scale()))))


class GlobalCounter(Block):
    def scale(self) -> Any:
        CALLS[0] += 1
        return 1 + 0.01 * CALLS[0]


class ClassCounter(Block):
    num_calls = 0

    def scale(self) -> Any:
        ClassCounter.num_calls += 1
        return 1 + 0.01 * ClassCounter.num_calls


class GlobalPython(Block):
    def scale(self) -> Any:
        return 1 + 0.1 * random.random()


class GlobalNumpy(Block):
    def scale(self) -> Any:
        return 1 + 0.1 * np.random.rand()


class OwnPython(Block):
    def __init__(self) -> None:
        super().__init__()
        self.generator = random.Random(5)

    def scale(self) -> Any:
        return 1 + 0.1 * self.generator.random()


class OwnNumpy(Block):
    def __init__(self) -> None:
        super().__init__()
        self.generator = np.random.default_rng(5)

    def scale(self) -> Any:
        return 1 + 0.1 * self.generator.random()


class OwnTorch(Block):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(4)

    def scale(self) -> Any:
        return 1 + 0.1 * torch.rand((), generator=self.generator)


class OwnList(Block):
    def __init__(self) -> None:
        super().__init__()
        self.factors = [1 + 0.01 * k for k in range(400)]

    def scale(self) -> Any:
        return self.factors.pop()


BLOCKS = {kind.__name__: kind for kind in (GlobalCounter, ClassCounter, GlobalPython, GlobalNumpy)}
BLOCKS |= {kind.__name__: kind for kind in (OwnPython, OwnNumpy, OwnTorch, OwnList, Block)}


class Net(nn.Module):
    """An embedding, three blocks and a head; `changed` runs the blocks with other parameters than their own."""

    def __init__(self, block: type[Block]) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, 8)
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.head = nn.Linear(8, VOCABULARY)
        self.changed = False

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for block in self.blocks:
            if self.changed:
                other = {name: p * 0.9 for name, p in block.named_parameters()}
                x = torch.func.functional_call(block, other, (x,))
            else:
                x = block(x)
        return self.head(x)


def build(block: str) -> Net:
    """Build a model, and begin all state beside it anew."""
    CALLS[0] = ClassCounter.num_calls = 0
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(0)
    return Net(BLOCKS[block]).double()


def batch(step: int, *, masked: bool = True) -> tuple[Tensor, Tensor]:
    """Return ids and labels; label 3 is in no batch before step 1."""
    generator = torch.Generator().manual_seed(100 + step)
    ids, labels = (torch.randint(0, VOCABULARY, (4, 6), generator=generator) for _ in range(2))
    return ids, labels if masked and step else labels.where(labels != 3, 4)


def mean(outputs: Tensor, pair: Any) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), pair[1].flatten())


def plain(block: str, num_steps: int) -> tuple[list[float], dict[str, Tensor]]:
    """Train as one plain process."""
    model = build(block)
    losses = losses_of(model, map(batch, range(num_steps)), mean)
    return losses, {name: p.detach().clone() for name, p in model.named_parameters()}


def planned(block: str, plan: str, num_steps: int) -> tuple[list[float], dict[str, Tensor]]:
    """Train under a plan, beside a plain loop whose generators a script has seeded."""
    model = mw.apply_plan(build(block), plan, loss_fn=mean, optimizer=sgd, sentinel_every=2, rng="torch")
    losses = [model.step(mw.split_batch(batch(step), model)).loss for step in range(num_steps)]
    return losses, model.full_state_dict()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def unseeded(plan: str) -> list[list[float]]:
    """Train where each rank's Python and NumPy stand elsewhere; return losses and values."""
    found = []
    for block in ("GlobalPython", "GlobalNumpy"):
        module = build(block)
        random.seed(os.getpid())
        np.random.seed(os.getpid())
        model = mw.apply_plan(module, plan, loss_fn=mean, optimizer=sgd, rng="torch")
        losses = [model.step(batch(step)).loss for step in range(3)]
        found.append([*losses, module.blocks[0].get_parameter("norm.weight").sum().item()])
    return found


# -- losses that change ---------------------------------------------------------------------------------------------------


class Losses:
    """Losses that are means over samples in step 0, and are none later."""

    def __init__(self, name: str) -> None:
        self.step = 0
        self.name = name

    def __call__(self, outputs: Tensor, pair: Any) -> Any:
        return getattr(self, self.name)(outputs, pair[1])

    def weighted(self, outputs: Tensor, labels: Tensor) -> Tensor:
        each = F.cross_entropy(outputs.flatten(0, 1), labels.flatten(), reduction="none")
        weight = (labels.flatten() != 3).double()
        return (each * weight).sum() / weight.sum()

    def selected(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(outputs[labels != 3], labels[labels != 3])

    def in_place(self, outputs: Tensor, labels: Tensor) -> Tensor:
        outputs.div_(2.0)
        return self.weighted(outputs, labels)

    def statistic(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return self.rows(outputs, labels) + 0.1 * self.step * outputs.mean((0, 1)).square().sum()

    def hardest(self, outputs: Tensor, labels: Tensor) -> Tensor:
        each = F.cross_entropy(outputs.flatten(0, 1), labels.flatten(), reduction="none")
        return each.topk(each.numel() // 2).values.mean() if self.step else each.mean()

    def worst(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """The worse half of the samples, of which one sample has none: a loss of one is NaN."""
        each = F.cross_entropy(outputs.transpose(1, 2), labels, reduction="none").mean(1)
        return each.topk(len(each) // 2).values.mean() if self.step else each.mean()

    def dice(self, outputs: Tensor, labels: Tensor) -> Tensor:
        found, there = outputs.softmax(-1)[..., 1], (labels == 1).double()
        if not self.step:
            return self.rows(outputs, labels)
        return 1 - 2 * (found * there).sum() / (found.sum() + there.sum() + 1)

    def rows(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """A mean over samples of each one's own masked mean: right under every plan."""
        weight = (labels != 3).double()
        each = F.cross_entropy(outputs.transpose(1, 2), labels, reduction="none")
        return ((each * weight).sum(1) / weight.sum(1)).mean()

    def smoothed(self, outputs: Tensor, labels: Tensor) -> Tensor:
        outputs[..., 9:] = -5.0
        loss = F.cross_entropy(outputs.flatten(0, 1), labels.flatten(), label_smoothing=0.1)
        return loss + 1e-2 * outputs.logsumexp(-1).square().mean()

    def summed(self, outputs: Tensor, labels: Tensor) -> mw.Loss:
        each = F.cross_entropy(outputs.flatten(0, 1), labels.flatten(), reduction="none")
        weight = (labels.flatten() != 3).double()
        return mw.Loss((each * weight).sum(), weight.sum())


def steps_until_refused(
    name: str, plan: str, num_samples: int = 4, *, evaluates: bool = False, first: int = 1
) -> tuple[int, str]:
    """Return after how many steps a loss is refused, and the message; "" where none of four is.

    Args:
        name: A method of Losses.
        plan: The plan.
        num_samples: Samples in the global batch.
        evaluates: Whether an evaluation meets the batch that differs, not a step.
        first: The first step whose batch has label 3, and in which the loss is another.
    """
    loss = Losses(name)
    model = mw.apply_plan(build("Block"), plan, loss_fn=loss, optimizer=sgd)
    for step in range(first + 3):
        ids, labels = batch(step, masked=step >= first)
        loss.step = max(0, step + 1 - first)
        pair = mw.split_batch((ids[:num_samples], labels[:num_samples]), model)
        before = {key: value.clone() for key, value in model.full_state_dict().items()}
        try:
            model.evaluate(pair) if evaluates and step >= first else model.step(pair)
        except mw.ApplyError as error:
            after = model.full_state_dict()
            return step, error.message if all(torch.equal(after[key], before[key]) for key in before) else "it stepped"
    return first + 3, ""


def terms_on_one_rank() -> list[list[float] | None]:
    """Sum three partial gradients, of which rank 1 has the second alone, and no rank the third."""
    world = join_world()
    parameters = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    parameters[1].grad = torch.full((2,), 1.0 + world.rank)
    if world.rank == 0:
        parameters[0].grad = torch.full((2,), 5.0)
    sum_gradients(parameters, world.default_group)
    return [None if p.grad is None else p.grad.tolist() for p in parameters]


# -- errors on one rank ---------------------------------------------------------------------------------------------------


class RaisesLater:
    """A loss that raises on rank 1, once it is told to."""

    def __init__(self) -> None:
        self.is_on = False

    def __call__(self, outputs: Tensor, pair: Any) -> Tensor:
        if self.is_on and join_world().rank == 1:
            raise ValueError("this batch is no good")
        return mean(outputs, pair)


def raised_on_one_rank(plan: str, *, evaluates: bool) -> None:
    """Have the loss raise on one rank in the second step."""
    loss = RaisesLater()
    model = mw.apply_plan(build("Block"), plan, loss_fn=loss, optimizer=sgd)
    model.step(mw.split_batch(batch(0), model))
    loss.is_on = True
    run: Callable[[Any], Any] = model.evaluate if evaluates else model.step
    run(mw.split_batch(batch(1), model))


def hooked(plan: str, kind: str, *, later: bool) -> None:
    """Clip in a hook of the optimizer."""
    model = mw.apply_plan(build("Block"), plan, loss_fn=mean, optimizer=sgd)

    def clip(optimizer: Any, *_: Any) -> None:
        torch.nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 0.1)

    if later:
        model.step(mw.split_batch(batch(0), model))
    getattr(model.optimizer, f"register_step_{kind}_hook")(clip)
    model.step(mw.split_batch(batch(1), model))


def called_with_others_later(plan: str, *, evaluates: bool) -> None:
    """Run blocks by functional_call from the second step on."""
    module = build("Block")
    model = mw.apply_plan(module, plan, loss_fn=mean, optimizer=sgd)
    model.step(mw.split_batch(batch(0), model))
    module.changed = True
    run: Callable[[Any], Any] = model.evaluate if evaluates else model.step
    run(mw.split_batch(batch(1), model))
