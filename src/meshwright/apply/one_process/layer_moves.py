"""Moves of tensors between a model's layers that stand on several devices, and the count of their bytes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from meshwright.apply.modules.hooks import OwnHook
from meshwright.describe.batches import call_model
from meshwright.describe.fakes import Constants, fake_batch, fake_module, make_fake_mode, quiet
from meshwright.describe.layers import find_layers
from meshwright.trees import map_tensors

__all__: list[str] = []


class LayerMoves:
    """Hooks that bring each layer's inputs to its device, every tensor once; autograd brings the gradients back.

    Args:
        module: The model.
        layers: Layer name -> layer of it.
        devices: A device for each stage; one may occur several times.
        record: Called with the bytes of each tensor that is moved, and of each gradient that will come back.
        look_at: Called with the arguments of each forward, before anything moves; it may change what follows.

    Attributes:
        stage_of: Layer name -> stage.
        return_after: Layer name -> stage that its outputs go to, for code that stands outside of layers.
    """

    def __init__(
        self,
        module: nn.Module,
        layers: Mapping[str, nn.Module],
        devices: Sequence[torch.device],
        record: Callable[[int], None],
        look_at: Callable[[tuple[Any, ...], dict[str, Any]], None] = lambda _args, _kwargs: None,
    ) -> None:
        self.stage_of: dict[str, int] = {}
        self.return_after: dict[str, int] = {}
        self._module, self._layers, self._devices = module, layers, devices
        self._record, self._look_at = record, look_at
        self._stage_now = 0
        self._home: WeakIdKeyDictionary = WeakIdKeyDictionary()  # tensor -> stage that it was made on
        self._copies: WeakIdKeyDictionary = WeakIdKeyDictionary()  # tensor -> {stage: its copy there}
        self._hooks: list[Any] = []

    def attach(self) -> None:
        """Register the hooks."""
        self._hooks = [
            self._module.register_forward_pre_hook(OwnHook(self._enter_model), with_kwargs=True, prepend=True),
            self._module.register_forward_hook(OwnHook(self._leave_model), always_call=True),
        ]
        for name, layer in self._layers.items():
            if layer is not self._module:
                self._hooks += self._hook_layer(name, layer)

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Remove the hooks inside of the context, if there are any: the model is copied, and the copy must not move tensors."""
        had_hooks = bool(self._hooks)
        self.close()
        try:
            yield
        finally:
            if had_hooks:
                self.attach()

    def _hook_layer(self, name: str, layer: nn.Module) -> list[Any]:
        def enter(_layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            stage = self.stage_of[name]
            moved = self._bring((args, kwargs), stage)
            self._stage_now = stage
            return moved

        def leave(_layer: nn.Module, _args: Any, outputs: Any) -> Any:
            self._note_home(outputs, self._stage_now)
            if name not in self.return_after:
                return outputs
            self._stage_now = self.return_after[name]
            return self._bring(outputs, self._stage_now)

        return [
            layer.register_forward_pre_hook(OwnHook(enter), with_kwargs=True),
            layer.register_forward_hook(OwnHook(leave)),
        ]

    def _enter_model(
        self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self._look_at(args, kwargs)
        self._stage_now = 0
        args, kwargs = map_tensors((args, kwargs), lambda tensor: tensor.to(self._devices[0]))
        self._note_home((args, kwargs), 0)
        return args, kwargs

    def _leave_model(self, _module: nn.Module, _args: Any, _outputs: Any) -> None:
        self._copies.clear()
        self._home.clear()

    def _note_home(self, tree: Any, stage: int) -> None:
        def note(tensor: torch.Tensor) -> torch.Tensor:
            self._home[tensor] = stage
            return tensor

        map_tensors(tree, note)

    def _bring(self, tree: Any, stage: int) -> Any:
        """Move tensors to a stage's device, each once, and record the bytes moved."""

        def bring(tensor: torch.Tensor) -> torch.Tensor:
            # A tensor that user code made between two layers is on the device of the last layer.
            if self._home.get(tensor, self._stage_now) == stage:
                return tensor.to(self._devices[stage])
            copies: dict[int, torch.Tensor] = self._copies.get(tensor) or {}
            self._copies[tensor] = copies
            if stage not in copies:
                copies[stage] = tensor.to(self._devices[stage], non_blocking=True)
                self._record(tensor.nbytes)
                if tensor.requires_grad and torch.is_grad_enabled():
                    self._record(tensor.nbytes)  # its gradient will come back
            return copies[stage]

        return map_tensors(tree, bring)


def count_moved_bytes(
    module: nn.Module, stage_of: Mapping[str, int], return_after: Mapping[str, int], batch: Any
) -> int:
    """Return what a forward and a backward of a batch move between stages: the same hooks on a copy without numbers [bytes].

    Args:
        module: The model, without hooks of this kind. Nothing in it changes.
        stage_of: Layer name -> stage.
        return_after: Layer name -> stage that its outputs go to, for code that stands outside of layers.
        batch: The batch.

    Raises:
        Exception: Any exception of a model whose forward needs values, not only shapes.
    """
    mode, moved = make_fake_mode(), [0]
    twin = fake_module(module, mode)

    def record(size: int) -> None:
        moved[0] += size

    cpu = torch.device("cpu")
    moves = LayerMoves(twin, dict(find_layers(twin)), [cpu] * (1 + max(stage_of.values(), default=0)), record)
    moves.stage_of, moves.return_after = dict(stage_of), dict(return_after)
    moves.attach()
    inputs = fake_batch(batch, mode, constants=True)
    with torch.random.fork_rng(devices=[]), torch.enable_grad(), quiet(), mode, Constants():
        call_model(twin, inputs)
    return moved[0]
