"""Fake tensors: modules and batches with shapes and dtypes, and without memory.

Small integer tensors are an exception where they are wanted: they are computed. So positions, lengths and masks have values, and
a forward that asks whether a mask is full takes the way that it takes in training.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import Tensor, nn

from meshwright._torch_private import (
    GROUPED_MM,
    FakeTensor,
    FakeTensorError,
    TorchDispatchMode,
    fake_mode_without_addresses,
    storage_id,
    without_dispatch_modes,
)
from meshwright.describe.function_caches import no_cached_tensors
from meshwright.trees import arguments_in, map_tensors

__all__: list[str] = []

CONSTANT_BYTES: Final = 1 << 26
"""Integer tensors of at most this size have values [bytes]."""

_SETTING_ENTRIES: Final = 1024
"""While a module is built, floating-point tensors of at most this size have values: drop rates, frequencies [elements]."""

_LOGGER = logging.getLogger("torch._subclasses.fake_tensor")


class WritesConstantError(Exception):
    """A tensor that has values was to be written with a tensor that has none."""


def make_fake_mode() -> Any:
    """Return a mode in which tensors are made without memory; real tensors may be mixed in."""
    return fake_mode_without_addresses()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence torch's log of a call that fails on fake tensors: we say it in our words."""
    was_disabled, _LOGGER.disabled = _LOGGER.disabled, True
    try:
        yield
    finally:
        _LOGGER.disabled = was_disabled


class Constants(TorchDispatchMode):
    """Computes small tensors for real where all their inputs are real. It stands above a fake mode.

    Args:
        floats: Whether small floating-point tensors are computed too, as while a module is built.
        is_on: Whether anything is computed.
    """

    def __init__(self, *, floats: bool = False, is_on: bool = True) -> None:
        super().__init__()
        self.made: dict[int, Any] = {}
        """Memories that were computed while a module was built."""
        self._floats = floats
        self._is_on = is_on

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return an operator's result, fake or real."""
        if func is GROUPED_MM and isinstance(args[0], FakeTensor):
            return _grouped_mm_shape(*args[:2])
        if not self._is_on or func.namespace == "prim":
            return func(*args, **kwargs)
        inputs = [*arguments_in(args), *arguments_in(kwargs)]
        is_real = not any(isinstance(tensor, FakeTensor) for tensor in inputs)
        if not is_real:
            if func._schema.is_mutable and _written_constants(func, args, kwargs):
                raise WritesConstantError(str(func))
            return func(*args, **kwargs)
        try:
            result = func(*args, **kwargs)
        except FakeTensorError:
            if not inputs:
                raise
        else:
            outputs = list(arguments_in(result))
            if outputs and not all(map(self._may_have_values, outputs)):
                return result
        with without_dispatch_modes():
            result = func(*args, **kwargs)
        if self._floats:
            self.made.update((storage_id(tensor), tensor.untyped_storage()) for tensor in arguments_in(result))
        return result

    def _may_have_values(self, tensor: Tensor) -> bool:
        if tensor.device.type != "cpu" or tensor.dtype.is_complex:
            return False
        if tensor.dtype.is_floating_point:
            return self._floats and tensor.numel() <= _SETTING_ENTRIES
        return tensor.numel() * tensor.element_size() <= CONSTANT_BYTES


def _written_constants(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors with values that an operator writes."""
    written: list[Any] = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written += [args[place]] if place < len(args) else [kwargs.get(argument.name)]
    return [tensor for tensor in arguments_in(written) if not isinstance(tensor, FakeTensor)]


def _grouped_mm_shape(first: Tensor, second: Tensor) -> Tensor:
    # torch knows the shape for bfloat16 alone.
    if first.dim() == 2 and second.dim() == 3:
        return first.new_empty((first.shape[0], second.shape[2]))
    if first.dim() == 3:
        return first.new_empty((first.shape[0], first.shape[1], second.shape[-1]))
    raise WritesConstantError("a grouped product whose number of groups is a value")


def fake_module(module: nn.Module, mode: Any) -> nn.Module:
    """Return a copy of a module whose parameters and buffers are fake; the module itself is not changed.

    Raises:
        Exception: Whatever copying one of its attributes raises.
    """
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        memo[id(parameter)] = nn.Parameter(_fake(parameter, mode), requires_grad=parameter.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = _fake(buffer, mode)
    return copy.deepcopy(module, memo)


def with_fake_tensors(module: nn.Module, mode: Any) -> nn.Module:
    """Replace a new module's parameters and buffers that have values, in place, and return it."""
    made: dict[int, Tensor] = {}
    for child in module.modules():
        for tensors in (child._parameters, child._buffers):
            for name, tensor in tensors.items():
                if tensor is None or isinstance(tensor, FakeTensor):
                    continue
                if id(tensor) not in made:
                    fake = _fake(tensor, mode)
                    is_parameter = isinstance(tensor, nn.Parameter)
                    made[id(tensor)] = nn.Parameter(fake, requires_grad=tensor.requires_grad) if is_parameter else fake
                tensors[name] = made[id(tensor)]  # pyright: ignore[reportArgumentType]
    return module


def _fake(tensor: Tensor, mode: Any) -> Tensor:
    with mode:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")


def build_fake(build_model: Callable[[], Any], mode: Any) -> tuple[Any, bool]:
    """Call a function that builds a module, without memory for its tensors.

    Returns:
        What it returned, and whether all tensors of the module were made now.
    """
    constants = Constants(floats=True)
    with no_cached_tensors(), torch.random.fork_rng(devices=[]), quiet(), mode, constants:
        built = build_model()
    tensors = [*built.parameters(), *built.buffers()] if isinstance(built, nn.Module) else []
    is_new = all(isinstance(tensor, FakeTensor) or storage_id(tensor) in constants.made for tensor in tensors)
    return built, is_new


def sized_batch(batch: Any, have: int, wanted: int) -> Any:
    """Return a batch of another number of samples: its own, repeated. Tensors that are not samples stay."""

    def resize(tensor: Tensor) -> Tensor:
        if tensor.dim() == 0 or tensor.shape[0] != have or have == wanted:
            return tensor
        if tensor.is_meta or isinstance(tensor, FakeTensor):
            return tensor.new_empty((wanted, *tensor.shape[1:]))
        if tensor.is_floating_point():
            return torch.empty(
                (wanted, *tensor.shape[1:]), dtype=tensor.dtype, device="meta"
            )  # its values are not read
        return tensor[torch.arange(wanted) % have]

    return map_tensors(batch, resize)


def fake_batch(batch: Any, mode: Any, *, constants: bool) -> Any:
    """Return a batch of fake tensors; with `constants`, small integer tensors keep their values."""

    def convert(tensor: Tensor) -> Tensor:
        is_whole = not tensor.is_floating_point() and not tensor.is_complex()
        has_values = not tensor.is_meta and not isinstance(tensor, FakeTensor)
        if constants and is_whole and has_values and tensor.nbytes <= CONSTANT_BYTES:
            return tensor.detach().cpu()
        with mode:
            made = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        return made.requires_grad_(tensor.requires_grad)

    return map_tensors(batch, convert)
