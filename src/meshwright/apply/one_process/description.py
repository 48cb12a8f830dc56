"""Costs of a model's layers, found without a trace in the model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from meshwright.apply.state.undisturbed import undisturbed
from meshwright.describe.layers import ChainDescription, describe_chain

__all__: list[str] = []


def describe_undisturbed(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ChainDescription:
    """Return what `describe_chain` does, and restore the model's state.

    A copy of the model is run, but a forward that was replaced on an instance may close over the model itself.

    Raises:
        Exception: Any exception of a model whose forward needs values, not only shapes.
    """
    device = next((tensor.device for tensor in module.parameters()), torch.device("cpu"))
    with undisturbed(module, device):
        return describe_chain(module, args, kwargs)
