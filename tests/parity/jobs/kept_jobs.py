"""Models and losses whose backward is code of their own, or that keep something of one batch for the next; for ranks."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import meshwright as mw

NUM_SAMPLES, STEPS = 8, 4


class _Function(torch.autograd.Function):
    """A function that gives its input back; subclasses change the gradient."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        del ctx
        return x.clone()


class Sign(_Function):
    """The sign of each entry: not linear, and by each entry alone."""

    @staticmethod
    def backward(ctx, slope: Tensor) -> Tensor:
        del ctx
        return slope.sign() * 0.01


class Centre(_Function):
    """The gradient less its mean over samples: linear, and not by each sample alone."""

    @staticmethod
    def backward(ctx, slope: Tensor) -> Tensor:
        del ctx
        return slope - slope.mean(0, keepdim=True)


class Base(nn.Module):
    """A small model, whose subclasses do something between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.mid, self.down = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.kept: Any = 0.0
        self.history: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        h = self.change(torch.tanh(self.up(x)))
        return self.down(h + torch.tanh(self.mid(h)))

    def change(self, h: Tensor) -> Tensor:
        """Do something with an activation."""
        return h


class ScaledSlopes(Base):
    """A hook that divides a gradient by its norm over all samples."""

    def change(self, h: Tensor) -> Tensor:
        if h.requires_grad:
            h.register_hook(lambda slope: slope / (slope.norm() + 1e-6))
        return h


class DroppedSlopes(Base):
    """The same in training alone, behind dropout: trials in eval mode do not see it."""

    def change(self, h: Tensor) -> Tensor:
        h = F.dropout(h, 0.2, self.training)
        if self.training and h.requires_grad:
            h.register_hook(lambda slope: slope / (slope.norm() + 1e-6))
        return h


class NodeHook(Base):
    """A hook on a node of the graph, which no call of a tensor shows."""

    def change(self, h: Tensor) -> Tensor:
        if h.grad_fn is not None:
            h.grad_fn.register_prehook(lambda slopes: tuple(slope / (slope.norm() + 1e-6) for slope in slopes))
        return h


class InCheckpoint(Base):
    """A hook inside of a reentrant checkpoint, which gives no gradients on request."""

    def change(self, h: Tensor) -> Tensor:
        return checkpoint(self.scaled, h, use_reentrant=True) if h.requires_grad else self.scaled(h)

    def scaled(self, h: Tensor) -> Tensor:
        """Return a part with a hook."""
        out = torch.tanh(h)
        if out.requires_grad:
            out.register_hook(lambda slope: slope / (slope.norm() + 1e-6))
        return out * h


class LaterSlopes(Base):
    """A hook from the third call on."""

    def change(self, h: Tensor) -> Tensor:
        self.kept += 1
        if self.kept > 2 and h.requires_grad:
            h.register_hook(lambda slope: slope / (slope.norm() + 1e-6))
        return h


class ReadSlope(Base):
    """A gradient of the last batch's activation, which the next batch is scaled by."""

    def change(self, h: Tensor) -> Tensor:
        last = self.kept if isinstance(self.kept, Tensor) else None
        out = h if last is None or last.grad is None else h * (1 + last.grad.norm().item())
        if h.requires_grad:
            h.retain_grad()
            self.kept = h
        return out


class CentredSlopes(Base):
    """A function with a backward over all samples."""

    def change(self, h: Tensor) -> Tensor:
        return Centre.apply(h)


class LayerHook(Base):
    """A backward hook of a layer, by the largest entry of all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.mid.register_full_backward_hook(lambda _, slopes, __: (slopes[0] / (slopes[0].abs().max() + 1e-6),))


class WeightSlopes(Base):
    """A function with a backward that is not linear, of a weight: it sees sums over samples."""

    def change(self, h: Tensor) -> Tensor:
        return F.linear(h, Sign.apply(self.mid.weight))


class ClippedSlopes(Base):
    """A hook that clips each entry: of each sample alone."""

    def change(self, h: Tensor) -> Tensor:
        if h.requires_grad:
            h.register_hook(lambda slope: slope.clamp(-0.01, 0.01))
        return h


class SignedSlopes(Base):
    """A function of each sample's gradient alone."""

    def change(self, h: Tensor) -> Tensor:
        return Sign.apply(h)


class KeptTensor(Base):
    """An average in a tensor that is no buffer, which the next batch is scaled by."""

    def change(self, h: Tensor) -> Tensor:
        out = h * (1 + self.kept)
        if self.training:
            self.kept = 0.9 * self.kept + 0.1 * h.detach().mean()
        return out


class KeptNumbers(Base):
    """A list of numbers, one for each batch."""

    def change(self, h: Tensor) -> Tensor:
        out = h * (1 + self.history[-1]) if self.history else h
        self.history.append(float(h.detach().mean()))
        return out


class KeptSlope(Base):
    """A number that a hook keeps in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.mid.register_full_backward_hook(self.note)

    def note(self, layer: nn.Module, _: Any, slopes: Any) -> None:
        """Keep the size of the gradient."""
        del layer
        self.kept = 0.9 * self.kept + 0.1 * float(slopes[0].norm())

    def change(self, h: Tensor) -> Tensor:
        return h * (1 + self.kept)


class Rows(Base):
    """The state of each sample, as of a recurrent model that is trained on pieces of sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = None

    def change(self, h: Tensor) -> Tensor:
        h = h + 0.5 * (torch.zeros_like(h) if self.kept is None else self.kept)
        self.kept = h.detach()
        return h


class Counted(Base):
    """A number of calls that the next call is scaled by."""

    def change(self, h: Tensor) -> Tensor:
        self.kept += 1
        return h / self.kept


class DrawnKept(KeptTensor):
    """The same behind dropout, which eval mode leaves out, as it does the average."""

    def change(self, h: Tensor) -> Tensor:
        return super().change(F.dropout(h, 0.2, self.training))


class Noisy(Base):
    """Draws whenever it runs."""

    def change(self, h: Tensor) -> Tensor:
        return h + 0.1 * torch.randn_like(h)


class CountedHook(Base):
    """A backward hook of a layer, with a count in a variable of its file."""

    def __init__(self) -> None:
        super().__init__()
        COUNTS["calls"] = 0
        self.mid.register_full_backward_hook(_by_count)


class LaterHook(Base):
    """A layer that gets a backward hook over all samples between steps."""

    def between(self, step: int) -> None:
        """Set what begins with a later step."""
        if step == 2:
            self.mid.register_full_backward_hook(lambda _, slopes, __: (slopes[0] / (slopes[0].abs().max() + 1e-6),))


class LaterOption(Base):
    """An entry of a configuration, by which samples are centred, that is set between steps."""

    def __init__(self) -> None:
        super().__init__()
        self.options = {"centred": False}

    def change(self, h: Tensor) -> Tensor:
        return h - h.mean(0, keepdim=True) if self.options["centred"] else h

    def between(self, step: int) -> None:
        """Set what begins with a later step."""
        self.options["centred"] = step >= 2


class LaterObject(LaterOption):
    """The same in an object."""

    def __init__(self) -> None:
        super().__init__()
        self.options = _Options()

    def change(self, h: Tensor) -> Tensor:
        return h - h.mean(0, keepdim=True) if self.options.centred else h

    def between(self, step: int) -> None:
        self.options.centred = step >= 2


class LaterFunction(Base):
    """A function that is put in the place of another between steps."""

    def __init__(self) -> None:
        super().__init__()
        self.act: Any = torch.tanh

    def change(self, h: Tensor) -> Tensor:
        return self.act(h)

    def between(self, step: int) -> None:
        """Set what begins with a later step."""
        if step == 2:
            self.act = _centred


class NormBefore(Base):
    """A hook that divides a gradient by the norms of those before it: the first batch's is as it was."""

    def change(self, h: Tensor) -> Tensor:
        if h.requires_grad:
            h.register_hook(self.divide)
        return h

    def divide(self, slope: Tensor) -> Tensor:
        """Divide, and then take note of the norm."""
        before, self.kept = self.kept, 0.5 * self.kept + 5 * float(slope.norm())
        return slope / (1 + before)


COUNTS = {"calls": 0}


class _Options:
    def __init__(self) -> None:
        self.centred = False
        self.whole = self  # as a part that knows what it is a part of


def _by_count(_: nn.Module, slopes: Any, __: Any) -> Any:
    COUNTS["calls"] += 1
    return (slopes[0] / COUNTS["calls"],)


def _centred(h: Tensor) -> Tensor:
    return h - h.mean(0, keepdim=True)


class Annealed:
    """A loss with a penalty that grows by a count of its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, outputs: Tensor, given: Any) -> Tensor:
        self.calls += 1
        return pairs(outputs, given) + min(1.0, self.calls / 10) * outputs.square().mean()


def pairs(outputs: Tensor, given: Any) -> Tensor:
    """Return the mean of squared differences."""
    return (outputs - given[1]).square().mean()


def as_sum(outputs: Tensor, given: Any) -> mw.Loss:
    """Return the same as a sum."""
    return mw.Loss((outputs - given[1]).square().mean(1).sum(), len(outputs))


def balanced(outputs: Tensor, given: Any) -> Tensor:
    """Return two losses, each by the size of its gradient, which is there in training alone."""
    terms = [(outputs[:, column] - given[1][:, column]).square().mean() for column in (0, 1)]
    if not outputs.requires_grad:
        return terms[0] + terms[1]
    sizes = [torch.autograd.grad(term, outputs, retain_graph=True)[0].norm().detach() for term in terms]
    return terms[0] / sizes[0] + terms[1] / sizes[1]


class Averaged:
    """A loss by a running average of itself."""

    def __init__(self) -> None:
        self.average: Tensor | None = None

    def __call__(self, outputs: Tensor, given: Any) -> Tensor:
        loss = pairs(outputs, given)
        now = loss.detach()
        self.average = now if self.average is None else 0.9 * self.average + 0.1 * now
        return loss / self.average


class Centring(nn.Module):
    """A loss with a centre of all outputs, as DINO's, in a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(3, dtype=torch.float64))

    def forward(self, outputs: Tensor, given: Any) -> Tensor:
        loss = (outputs - given[1] - self.centre).square().mean()
        self.centre = 0.9 * self.centre + 0.1 * outputs.detach().mean(0)
        return loss


class Logging:
    """A loss that keeps its values for people alone."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def __call__(self, outputs: Tensor, given: Any) -> Tensor:
        loss = pairs(outputs, given)
        self.values.append(loss.item())
        return loss


KINDS = {kind.__name__: kind for kind in [*Base.__subclasses__(), LaterObject, DrawnKept]} | {"Base": Base}
LOSSES = {"pairs": lambda: pairs, "as_sum": lambda: as_sum, "balanced": lambda: balanced}
LOSSES |= {"Averaged": Averaged, "Centring": Centring, "Logging": Logging, "Annealed": Annealed}


def build(kind: str) -> nn.Module:
    """Return a model in float64."""
    torch.manual_seed(0)
    return KINDS[kind]().double()


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Return the global batch of a step."""
    made = torch.Generator().manual_seed(step)
    x = torch.randn(NUM_SAMPLES, 6, generator=made, dtype=torch.float64)
    return x, torch.randn(NUM_SAMPLES, 3, generator=made, dtype=torch.float64)


sgd = functools.partial(torch.optim.SGD, lr=0.3)


def plainly(kind: str, loss: str) -> dict[str, Tensor]:
    """Return the state after a plain loop."""
    module, loss_fn = build(kind), LOSSES[loss]()
    optimizer = sgd(module.parameters())
    for step in range(STEPS):
        _between(module, step)
        found = loss_fn(module(batch(step)[0]), batch(step))
        (found.sum / found.weight if isinstance(found, mw.Loss) else found).backward()
        optimizer.step()
        optimizer.zero_grad()
    return module.state_dict()


def _trained(kind: str, loss: str, line: str) -> mw.ParallelModel:
    model = mw.apply_plan(functools.partial(build, kind), line, loss_fn=LOSSES[loss](), optimizer=sgd)
    for step in range(STEPS):
        _between(model.module, step)
        model.step(mw.split_batch(batch(step), model))
    return model


def _between(module: nn.Module, step: int) -> None:
    change = getattr(module, "between", None)
    if change is not None:
        change(step)


def short(line: str) -> tuple[str, ...]:
    """Train on a batch of one sample, and return what is told."""
    model = mw.apply_plan(functools.partial(build, "Counted"), line, loss_fn=pairs, optimizer=sgd)
    model.step(mw.split_batch(tuple(tensor[:1] for tensor in batch(0)), model))
    model.step(mw.split_batch(batch(1), model))
    return model.plan.reasons


def uneven(kind: str, line: str, num_samples: int) -> None:
    """Train on a first batch of this many samples."""
    model = mw.apply_plan(functools.partial(build, kind), line, loss_fn=pairs, optimizer=sgd)
    model.step(mw.split_batch(tuple(tensor[:num_samples] for tensor in batch(0)), model))


def noted() -> list[str]:
    """Keep a note on a layer on one rank, and return the warnings of the package."""

    def between(model: mw.ParallelModel, _: int) -> None:
        if model.dp_rank == 0:
            layer: Any = model.module.mid
            layer.largest = float(layer.weight.detach().abs().max())

    return _warnings("Base", "dp=2", between)


def warned(kind: str, line: str) -> list[str]:
    """Train with an evaluation after each step, and return the warnings of the package."""
    return _warnings(kind, line, lambda model, step: model.evaluate(mw.split_batch(batch(step), model)))


def _warnings(kind: str, line: str, between: Callable[[mw.ParallelModel, int], Any]) -> list[str]:
    model = mw.apply_plan(functools.partial(build, kind), line, loss_fn=pairs, optimizer=sgd)
    heard: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = heard.append
    logging.getLogger("meshwright").addHandler(handler)
    try:
        for step in range(3):
            model.step(mw.split_batch(batch(step), model))
            between(model, step)
    finally:
        logging.getLogger("meshwright").removeHandler(handler)
    return [record.getMessage() for record in heard]


def train(kind: str, loss: str, line: str) -> dict[str, Tensor]:
    """Train under a plan."""
    return _trained(kind, loss, line).full_state_dict()


def told(kind: str, loss: str, line: str) -> tuple[str, ...]:
    """Train under a plan, and return what it tells."""
    return _trained(kind, loss, line).plan.reasons


class Unfreezing(Base):
    """A forward that unfreezes a layer in its second call."""

    def __init__(self) -> None:
        super().__init__()
        self.mid.requires_grad_(False)

    def change(self, h: Tensor) -> Tensor:
        self.kept += self.training
        if self.kept == 2:
            self.mid.requires_grad_(True)
        return h


class ByHand(Base):
    """A hook that adds a number to another parameter's gradient."""

    def change(self, h: Tensor) -> Tensor:
        if h.requires_grad:
            h.register_hook(self._add)
        return h

    def _add(self, _: Tensor) -> None:
        bias = self.up.bias
        added = torch.full_like(bias, 0.1)
        bias.grad = added if bias.grad is None else bias.grad + added


class Fussy(Base):
    """A hook that raises where there are gradients of nothing yet."""

    def change(self, h: Tensor) -> Tensor:
        if h.requires_grad and self.training:
            h.register_hook(self._look)
        return h

    def _look(self, slope: Tensor) -> None:
        if not self.kept:
            raise RuntimeError("not yet")
        del slope


KINDS |= {"Unfreezing": Unfreezing, "ByHand": ByHand, "Fussy": Fussy}


def fussy(line: str) -> tuple[str, ...]:
    """Apply a plan, run the trials of a first step whose backward raises, and return what is told."""
    model = mw.apply_plan(functools.partial(build, "Fussy"), line, loss_fn=pairs, optimizer=sgd)
    try:
        model.step(mw.split_batch(batch(0), model))
    except RuntimeError:
        return model.plan.reasons
    return ()
