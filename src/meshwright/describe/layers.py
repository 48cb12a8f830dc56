"""Layers of a sequential-shaped model: the possible cuts, the order of the layers, and the cost of each.

Costs come from one forward on the meta device: shapes only, nothing is allocated or computed.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from meshwright._torch_private import TorchDispatchMode
from meshwright.describe.flop_counter import make_flop_counter
from meshwright.trees import map_tensors, tree_bytes

__all__: list[str] = []

_CHAINS = (nn.Sequential, nn.ModuleList)


def find_layers(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return (name, module) of the pieces between which the model can be cut, in registration order.

    The children of the model itself are pieces; a child that is, or mostly consists of, an nn.Sequential or nn.ModuleList
    is opened. The inside of a block stays together, since a block's forward may add and branch.
    """
    layers: list[tuple[str, nn.Module]] = []

    def visit(piece: nn.Module, name: str, *, is_entry: bool) -> None:
        opens = isinstance(piece, _CHAINS) or not name or (not is_entry and _is_mostly_a_chain(piece))
        if not opens or not any(True for _ in piece.children()):
            layers.append((name, piece))
            return
        for child_name, child in piece.named_children():
            path = f"{name}.{child_name}" if name else child_name
            visit(child, path, is_entry=isinstance(piece, _CHAINS))

    visit(module, "", is_entry=False)
    return layers


def _is_mostly_a_chain(module: nn.Module) -> bool:
    total = sum(parameter.numel() for parameter in module.parameters())
    chains = [child for child in module.modules() if isinstance(child, _CHAINS) and len(child) > 1]
    return any(2 * sum(p.numel() for p in chain.parameters()) > total for chain in chains)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerCost:
    """Cost of one layer in one forward of one batch."""

    name: str
    """The layer's name in the user's model."""
    forward_flops: int
    """Floating-point operations of the forward, 1 multiply-add = 2 [FLOPs]."""
    output_bytes: int
    """Bytes of the tensors that it returns [bytes]."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChainDescription:
    """Layers of a model in the order of one run."""

    layers: tuple[LayerCost, ...]
    """In the order in which they were first called."""
    outside_uses: tuple[tuple[str, str], ...]
    """(layer that ran before, FQN): parameters that were used outside every layer, a tied head for example."""


def describe_chain(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ChainDescription:
    """Run the model once on the meta device and record the cost of each layer.

    Returns:
        The layers that were called. Those that were not are missing.

    Raises:
        Exception: Any exception of a model whose forward needs values, not only shapes.
    """
    twin = _meta_copy(module)
    observer = _LayerObserver(twin)
    meta = torch.device("meta")
    meta_args, meta_kwargs = map_tensors((args, kwargs), lambda tensor: tensor.detach().to(meta))
    with torch.random.fork_rng(devices=[]), torch.no_grad(), observer.counter, observer:
        twin(*meta_args, **meta_kwargs)
    return ChainDescription(layers=tuple(observer.costs.values()), outside_uses=tuple(observer.outside_uses))


def _meta_copy(module: nn.Module) -> nn.Module:
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), requires_grad=False)
    for buffer in module.buffers():
        memo[id(buffer)] = buffer.detach().to("meta")
    return copy.deepcopy(module, memo)


class _LayerObserver(TorchDispatchMode):
    """Records, for each layer, FLOPs and outputs, and the parameters used while no layer runs."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.counter = make_flop_counter()
        self.costs: dict[str, LayerCost] = {}
        self.outside_uses: list[tuple[str, str]] = []
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._active = 0
        self._last = ""
        for name, layer in find_layers(module):
            self._watch(name, layer)

    def _watch(self, name: str, layer: nn.Module) -> None:
        flops_at_start: list[int] = []

        def enter(_module: nn.Module, _inputs: Any) -> None:
            self._active += 1
            flops_at_start.append(self.counter.get_total_flops())

        def leave(_module: nn.Module, _inputs: Any, outputs: Any) -> None:
            self._active -= 1
            self._last = name
            flops = self.counter.get_total_flops() - flops_at_start.pop()
            before = self.costs.get(name)
            self.costs[name] = LayerCost(
                name=name,
                forward_flops=flops + (before.forward_flops if before else 0),
                output_bytes=tree_bytes(outputs),
            )

        layer.register_forward_pre_hook(enter)
        layer.register_forward_hook(leave)

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not self._active and self._last:
            for value in args:
                fqn = self._names.get(id(value))
                if fqn is not None and (self._last, fqn) not in self.outside_uses:
                    self.outside_uses.append((self._last, fqn))
        return func(*args, **(kwargs or {}))
