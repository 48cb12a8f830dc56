"""Bytes that one process should move between its devices in a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from meshwright.apply.data.expected_bytes import dense_gradients
from meshwright.apply.forecast import Forecast, SeenStep
from meshwright.apply.one_process.description import describe_undisturbed
from meshwright.describe.batches import model_inputs
from meshwright.traffic import cut_activation_bytes, replica_copy_bytes

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
    """Layers over devices: activations where the model is cut, and their gradients.

    Args:
        module: The user's module.
        stage_of: Gives layer -> stage, which first inputs may change.
    """

    def __init__(self, module: nn.Module, stage_of: Callable[[], Mapping[str, int]]) -> None:
        self._module = module
        self._stage_of = stage_of
        self._step: SeenStep | None = None

    def learn(self, step: SeenStep) -> None:
        self._step = step

    def sent_bytes(self) -> float | None:
        if self._step is None:
            return None
        step = self._step
        per_batch = _cut_bytes(self._module, self._stage_of(), step.batch)
        return None if per_batch is None else per_batch * step.num_samples / step.splitter.count(step.batch)


def _cut_bytes(module: nn.Module, stage_of: Mapping[str, int], batch: Any) -> float | None:
    args, kwargs = model_inputs(batch)
    try:
        chain = describe_undisturbed(module, args, kwargs)
    except Exception:  # noqa: BLE001 - any model may need real values, which the meta device has not
        return None
    names = [layer.name for layer in chain.layers]
    returns: list[int | None] = [None] * len(names)
    for before, fqn in chain.outside_uses:
        owner = next((name for name in names if fqn.startswith(f"{name}.")), None)
        returns[names.index(before)] = stage_of[owner] if owner is not None else 0
    outputs = [layer.output_bytes for layer in chain.layers]  # of the whole batch: b = 1 batch
    return cut_activation_bytes(outputs, [stage_of[name] for name in names], 1, returns)
