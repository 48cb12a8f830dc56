"""model_parallel: one process with the model's layers spread over several devices.

The layers stay in the user's module. Hooks move a layer's inputs to its device, and autograd moves the gradients back. One device
computes at a time; this is for models that do not fit on one.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from meshwright.apply.engine import Engine
from meshwright.apply.forecast import Forecast
from meshwright.apply.one_process.description import describe_undisturbed
from meshwright.apply.one_process.expected_bytes import LayersForecast
from meshwright.apply.one_process.layer_moves import LayerMoves, count_moved_bytes
from meshwright.apply.state.undisturbed import undisturbed
from meshwright.comm.communicator import Communicator
from meshwright.describe.layers import ChainDescription, find_layers
from meshwright.errors import ApplyError
from meshwright.schedule.balance import balance_layers

__all__: list[str] = []

_log = logging.getLogger(__name__)


class LayersEngine(Engine):
    """Layers over devices.

    The first cut balances parameters. The first inputs show the layers' cost and order; then the cut is made again by
    parameters and FLOPs, before anything has run.

    Args:
        module: The user's module.
        group: A group of this one process.
        devices: A device for each stage; one may occur several times.
        stages: Layer name -> stage, to override the balance.
    """

    def __init__(
        self,
        module: nn.Module,
        group: Communicator,
        devices: Sequence[torch.device],
        *,
        stages: dict[str, int] | None = None,
    ) -> None:
        super().__init__(module, group, devices[0])
        self.devices = list(devices)
        self.layers = dict(find_layers(module))
        self._given = stages or {}
        _refuse_unknown(self._given, self.layers, len(self.devices))
        self._is_described = False
        self._moves = LayerMoves(module, self.layers, self.devices, self._record, self.look_at)
        self._place(list(self.layers), [self._parameter_share(layer) for layer in self.layers.values()])
        self._moves.attach()

    @property
    def stage_of(self) -> dict[str, int]:
        """Layer name -> stage."""
        return self._moves.stage_of

    def _record(self, size: int) -> None:
        self.group.ledger.record("to", "pp", size, 2)

    def _parameter_share(self, layer: nn.Module) -> float:
        total = sum(parameter.nbytes for parameter in self.parameters)
        return sum(parameter.nbytes for parameter in layer.parameters()) / max(total, 1)

    def _place(self, order: Sequence[str], costs: Sequence[float]) -> None:
        """Cut the layers, in this order, into stages and move them to their devices."""
        owners = self._owners(order)
        merged = dict.fromkeys(order, 0.0)
        for name, cost in zip(order, costs, strict=True):
            merged[owners[name]] += cost
        balanced = dict(zip(order, balance_layers(list(merged.values()), len(self.devices)), strict=True))
        chosen = {name: self._given.get(name, stage) for name, stage in balanced.items()}
        self._moves.stage_of = {name: chosen[owners[name]] for name in order}
        for name, stage in self.stage_of.items():
            self.layers[name].to(self.devices[stage])
        # Tensors of no layer (a parameter of the model itself) live on the device of the inputs.
        in_layers = {id(t) for layer in self.layers.values() for t in (*layer.parameters(), *layer.buffers())}
        for tensor in (*self.parameters, *self.module.buffers()):
            if id(tensor) not in in_layers:
                tensor.data = tensor.data.to(self.devices[0])

    def _owners(self, order: Sequence[str]) -> dict[str, str]:
        """Return, for each layer, the first layer that shares a parameter with it: both must be on one stage."""
        first: dict[int, str] = {}
        owners: dict[str, str] = {}
        for name in order:
            owners[name] = name
            for parameter in self.layers[name].parameters():
                owner = first.setdefault(id(parameter), name)
                owners[name] = owners[owner] if owner != name else owners[name]
        return owners

    def forecast(self) -> Forecast:
        return LayersForecast(self.count_moved_bytes)

    def count_moved_bytes(self, batch: Any) -> int:
        """Return what a forward and a backward of a batch move between devices [bytes].

        Raises:
            Exception: Any exception of a model whose forward needs values, not only shapes.
        """
        with self._moves.aside(), undisturbed(self.module, self.devices[0]):
            return count_moved_bytes(self.module, self.stage_of, self._moves.return_after, batch)

    def look_at(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Balance the layers by these inputs, unless inputs have been seen before."""
        if not self._is_described:
            self._describe(args, kwargs)

    def _describe(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Balance again by the layers' FLOPs, now that inputs are known."""
        self._is_described = True
        try:
            with self._moves.aside():
                chain = describe_undisturbed(self.module, args, kwargs)
        except Exception as error:  # noqa: BLE001 - any model may need real values; parameters are a fair second best
            _log.info("layers are balanced by parameters alone: the model does not run on shapes (%r)", error)
            return
        called = {cost.name for cost in chain.layers}
        order = [cost.name for cost in chain.layers] + [name for name in self.layers if name not in called]
        self._place(order, self._costs(chain, order))
        for layer_name, fqn in chain.outside_uses:
            owner = next((name for name in order if fqn.startswith(f"{name}.")), None)
            self._moves.return_after[layer_name] = self.stage_of[owner] if owner else 0

    def _costs(self, chain: ChainDescription, order: Sequence[str]) -> list[float]:
        """Return each layer's share of parameters plus its share of FLOPs: memory and time both count."""
        flops = {cost.name: cost.forward_flops for cost in chain.layers}
        total = max(sum(flops.values()), 1)
        return [self._parameter_share(self.layers[name]) + flops.get(name, 0) / total for name in order]

    def close(self) -> None:
        self._moves.close()


def _refuse_unknown(stages: dict[str, int], layers: dict[str, nn.Module], num_stages: int) -> None:
    for name, stage in stages.items():
        if name not in layers:
            raise ApplyError(
                f"the plan puts '{name}' on stage {stage}, and the model cannot be cut there",
                fix=f"use names among {sorted(layers)}",
            )
        if not 0 <= stage < num_stages:
            raise ApplyError(
                f"the plan puts '{name}' on stage {stage}, and there are {num_stages} stages",
                fix=f"use stages 0 to {num_stages - 1}",
            )
