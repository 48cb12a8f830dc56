"""Memory of buffers between two forwards: a buffer that another stage computes is given real memory again."""

from __future__ import annotations

import torch
from torch import nn

from meshwright.apply.pipeline.walking.stand_ins import StandIn, mark, value_of

__all__: list[str] = []


class Buffers:
    """The buffers of a model. They are looked up again only after a module inside was replaced."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._owners: list[tuple[nn.Module, dict[str, nn.Module | None]]] = []

    def settle(self) -> None:
        """Give every buffer real memory; one that another stage computes is a stand-in until the next forward."""
        if not self._owners or [None for owner, children in self._owners if owner._modules != children]:
            self._owners = [(owner, dict(owner._modules)) for owner in self._module.modules()]
        for owner, _ in self._owners:
            if owner._buffers:
                _settle(owner._buffers)


def _settle(buffers: dict[str, torch.Tensor | None]) -> None:
    for name, buffer in buffers.items():
        if isinstance(buffer, StandIn):
            value = value_of(buffer)
            settled = torch.zeros(buffer.meta.shape, dtype=buffer.meta.dtype, device=buffer.meta.device)
            buffers[name] = settled if value is None else mark(settled, value)
