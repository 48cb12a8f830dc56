"""Bytes that one process should move between its devices in a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from meshwright.apply.data.expected_bytes import dense_gradients
from meshwright.apply.forecast import Forecast, SeenStep
from meshwright.traffic import replica_copy_bytes

__all__: list[str] = []


class ReplicasForecast(Forecast):
    """Replicas: values to the other devices, gradients back.

    Args:
        module: The user's module, on the first device.
        devices: A device per replica; those on the first one share its memory.
    """

    def __init__(self, module: nn.Module, devices: Sequence[torch.device]) -> None:
        self._module = module
        self._others = sum(device != devices[0] for device in devices)

    def learn(self, step: SeenStep) -> None:
        del step
        parameters = sum(parameter.nbytes for parameter in self._module.parameters())
        gradients = sum(parameter.nbytes for parameter in dense_gradients(self._module).values())
        self.learned_bytes = float(replica_copy_bytes(parameters, gradients, self._others))


class LayersForecast(Forecast):
    """Layers over devices: what passes from a layer to one on another device, and the gradients of it.

    Args:
        count_moved_bytes: Gives what a forward and a backward of a batch move, where the layers are by then.
    """

    def __init__(self, count_moved_bytes: Callable[[Any], int]) -> None:
        self._count = count_moved_bytes
        self._step: SeenStep | None = None

    def learn(self, step: SeenStep) -> None:
        self._step = step

    def sent_bytes(self) -> float | None:
        if self._step is None:
            return None
        step = self._step
        try:
            moved = sum(map(self._count, step.splitter.cut(step.batch, step.plan.micro_batches)))
        except Exception:  # noqa: BLE001 - any model may need real values, which a fake tensor has not
            return None
        return moved * step.num_samples / step.splitter.count(step.batch)
