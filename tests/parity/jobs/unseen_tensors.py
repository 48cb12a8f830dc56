"""Models whose tensors in slices are hooked, written over or given out, and scripts that call parts of layers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from tests.parity.jobs.unseen_calls import HIDDEN, WIDTH, Block, Net, Script, entropy, mixed
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

# -- gradients of tensors in slices -------------------------------------------------------------------------------


def _norm_of(gradient: Tensor) -> Tensor:
    return gradient / gradient.norm()


class HookInLoss(Script):
    """A hook on logits of which cross-entropy took the slices before."""

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        loss = entropy(outputs, batch)
        if outputs.requires_grad:
            outputs.register_hook(_norm_of)
        return loss


class _LateHooks(Net):
    def forward(self, ids: Tensor) -> Tensor:
        x, states = self.emb(ids), []
        for layer in self.layers:
            x = layer(x)
            states.append(x)
        outputs = self.head(x)
        for state in states:
            state.register_hook(_norm_of)
        return outputs


class LateHooks(Script):
    """Hooks on what layers gave, after the next ones took it."""

    def build(self) -> nn.Module:
        return _LateHooks(Block(), Block(), Block())


class _Kept(Net):
    """The gradient of what a layer gave, kept and taken: both scale the next step's outputs."""

    scale = 1.0
    state: Tensor | None = None

    def forward(self, ids: Tensor) -> Tensor:
        x = self.layers[0](self.emb(ids))
        outputs = self.head(self.layers[1](x))
        x.retain_grad()
        self.state = x
        (gradient,) = torch.autograd.grad(outputs.square().mean(), x, retain_graph=True)
        return outputs * self.scale + gradient.norm()


class Kept(Script):
    def build(self) -> nn.Module:
        return _Kept(Block(), Block(), Block())

    def before(self, step: int, module: Any) -> None:
        if step:
            module.scale = 1.0 + float(module.state.grad.norm())


def _scaled_gradient(_: nn.Module, gradients: Any, __: Any) -> Any:
    return tuple(None if gradient is None else _norm_of(gradient) for gradient in gradients)


class BackwardHooks(Script):
    """Backward hooks on modules inside of a layer, from the second step on."""

    def before(self, step: int, module: Any) -> None:
        if step == 1:
            for layer in module.layers:
                layer.down.register_full_backward_hook(_scaled_gradient)


# -- memory -------------------------------------------------------------------------------------------------------


class _Skipped(Block):
    skip = False

    def forward(self, x: Tensor) -> Tensor:
        return x if self.skip else super().forward(x)


class _SkippedView(_Skipped):
    def forward(self, x: Tensor) -> Tensor:
        return x[:] if self.skip else super().forward(x)


class _WritesOver(Net):
    """Writes over what layers give, and then uses what it gave them."""

    def forward(self, ids: Tensor) -> Tensor:
        x, given = self.emb(ids) * 1.0, []
        for layer in self.layers:
            y = layer(x)
            y = y.mul_(1.5) if layer.skip else y * 1.5
            given.append(x)
            x = y
        return self.head(x + sum(given))


class Skipped(Script):
    """Layers that give what they were given, in the second step."""

    def __init__(self, layer: type[nn.Module] = _Skipped) -> None:
        self._layer = layer

    def build(self) -> nn.Module:
        return _WritesOver(self._layer(), self._layer(), self._layer())

    def before(self, step: int, module: Any) -> None:
        for layer in module.layers:
            layer.skip = step == 1


class SkippedViews(Skipped):
    def __init__(self) -> None:
        super().__init__(_SkippedView)


class _WritesData(Net):
    def __init__(self, *layers: nn.Module, late: bool) -> None:
        super().__init__(*layers)
        self.late = late

    def forward(self, ids: Tensor) -> Tensor:
        x = self.layers[0](self.emb(ids))
        data = x.data
        if not self.late:
            data[:, 0] = 0.0
        y = self.layers[1](x)
        if self.late:
            data[:, 0] = 0.0
        return self.head(x + y)


class WritesData(Script):
    """Writes through .data, before the next layer takes the tensor or after."""

    def __init__(self, *, late: bool) -> None:
        self._late = late

    def build(self) -> nn.Module:
        return _WritesData(Block(), Block(), late=self._late)


class _Scaled(Block):
    def __init__(self) -> None:
        super().__init__()
        self.scale: Tensor
        self.register_buffer("scale", torch.ones(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.ln(x)) * self.scale))


class NewBuffer(Script):
    """A buffer over the hidden entries, for which whole ones are put in."""

    shape = HIDDEN

    def build(self) -> nn.Module:
        return Net(_Scaled(), _Scaled())

    def before(self, step: int, module: Any) -> None:
        for layer in module.layers if step else ():
            layer.scale = torch.arange(1, self.shape + 1).double() * 0.1 * step


class WrittenBuffer(NewBuffer):
    """The same, written into the buffer that is there."""

    def before(self, step: int, module: Any) -> None:
        for layer in module.layers if step else ():
            layer.scale.copy_(torch.arange(1, self.shape + 1).double() * 0.1 * step)


class OddBuffer(NewBuffer):
    shape = HIDDEN + 1


# -- ways to call -------------------------------------------------------------------------------------------------


class _Checkpointed(Net):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.emb(ids)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True)
        return self.head(x)


class Reentrant(Script):
    """Layers in checkpoints of the kind that runs a backward inside of backward."""

    def build(self) -> nn.Module:
        return _Checkpointed(Block(), Block())


class _Inner(Net):
    inner = False

    def forward(self, ids: Tensor) -> Tensor:
        x = self.emb(ids)
        layers: Any = self.layers
        for layer in layers:
            x = x + layer.down(mixed(layer.up(layer.ln(x)))) if self.inner else layer(x)
        return self.head(x)


class InnerCalls(Script):
    """Modules inside of layers that the model calls itself, from the second step on."""

    def build(self) -> nn.Module:
        return _Inner(Block(), Block())

    def before(self, step: int, module: Any) -> None:
        module.inner = step > 0


class OwnCalls(Script):
    """A module inside of a layer that the script calls between steps."""

    def before(self, step: int, module: Any) -> None:
        if step:
            module.layers[0].up(torch.ones(1, 2, WIDTH).double())
