"""Models whose backward is code of their own, or that keep something of one batch for the next."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


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


class CountedApart(Base):
    """Counts of calls in a NumPy array, an object and an iterator, by which the results are scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.array, self.counts, self.iterator = np.zeros(2), Counts(), iter(range(1000))

    def change(self, h: Tensor) -> Tensor:
        self.array += 1
        self.counts.calls += 1
        return h * (1 + 0.01 * (float(self.array[0]) + self.counts.calls + next(self.iterator)))


class Counts:
    """A number of calls."""

    def __init__(self) -> None:
        self.calls = 0


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


KINDS = {kind.__name__: kind for kind in [*Base.__subclasses__(), LaterObject, DrawnKept]} | {"Base": Base}
