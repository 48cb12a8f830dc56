"""A layout applied to a module: parameters become this rank's shards, modules at a region's edge get their roles; and undone."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.apply.recompute import with_repeated_forward
from meshwright.apply.subclass import with_forward
from meshwright.apply.tensor.attention import attention_forward
from meshwright.apply.tensor.region import Chain, Cut, Region, TensorLayout
from meshwright.apply.tensor.roles import (
    entry_forward,
    layer_forward,
    role_forward,
    scope_forward,
    shared_forward,
)
from meshwright.apply.tensor.running import Drawing, RunningChain, RunningRegion
from meshwright.checkpoint.layout import ShardLayout
from meshwright.comm.communicator import Communicator
from meshwright.nn.shards import take_shard

__all__: list[str] = []


class Cutting:
    """A module on which a layout is in force.

    Args:
        module: The module, whole; its parameters keep their identity and get this rank's shards as values.
        layout: What is cut.
        group: The ranks that share the module.
    """

    def __init__(self, module: nn.Module, layout: TensorLayout, group: Communicator) -> None:
        self.module = module
        self.layout = layout
        self.group = group
        self._drawing = Drawing(group)
        self._running: list[RunningRegion] = []
        self._changes: list[tuple[nn.Module, str, Any, Any]] = []  # owner, attribute, what it was, what it is
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._full_shapes: dict[int, tuple[int, ...]] = {}  # by id: a tied tensor has several names
        self._cut_tensors()
        self._chains = chains = [RunningChain(chain, group, self._drawing) for chain in layout.chains]
        for region in layout.regions:
            self._start(region, next((chain for chain in chains if _lies_in(region, chain.chain)), None))
        for chain in chains:
            self._start_chain(chain)

    # -- tensors ------------------------------------------------------------------------------------------------

    def _cut_tensors(self) -> None:
        with torch.no_grad():
            for name, (region, cut) in self.layout.cuts.items():
                tensor = find_tensor(self.module, name)
                if id(tensor) not in self._full_shapes:
                    self._shapes[name] = self._full_shapes[id(tensor)] = tuple(tensor.shape)
                    tensor.data = take_shard(tensor.data, self._layout(name, region, cut, self.group.group_rank))

    def _layout(self, name: str, region: Region, cut: Cut, part: int) -> ShardLayout:
        return cut.layout(self._shapes[name], region.num_units, self.group.size, part)

    @functools.cached_property
    def layouts(self) -> Mapping[str, list[ShardLayout]]:
        """For each parameter and buffer that is cut, every rank's layout; a tied tensor under its first name."""
        cuts = self.layout.cuts
        return {
            name: [self._layout(name, *cuts[name], part) for part in range(self.group.size)] for name in self._shapes
        }

    def full_shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape that a parameter or buffer of this FQN has on one device; None where it is not cut."""
        return self._full_shapes.get(id(find_tensor(self.module, name)))

    # -- modules ------------------------------------------------------------------------------------------------

    def _start(self, region: Region, chain: RunningChain | None) -> None:
        running = RunningRegion(region, self.group, self._drawing, chain)
        self._running.append(running)
        # A module may have several names.
        integers = {(id(owner := self.module.get_submodule(name)), key): (owner, key) for name, key in region.integers}
        for owner, key in integers.values():
            self._set_integer(owner, key, region)
        takes_whole = set() if chain is None else {id(self.module.get_submodule(n)) for n in chain.chain.whole_inputs}
        roles = {id(child := self.module.get_submodule(name)): (child, role) for name, role in region.roles.items()}
        for child, role in roles.values():
            if role == "attention":
                self._exchange(child, attention_forward(child, running))
            elif role in ("row", "sum", "vocabulary"):  # they hide or change something while the module runs
                make = functools.partial(role_forward, role, running=running)
                self._change(child, "__class__", with_repeated_forward(child, make))
            else:
                self._exchange(child, role_forward(role, child, running, takes_whole=id(child) in takes_whole))
        for name, full_units in region.shared.items():
            child = self.module.get_submodule(name)
            self._exchange(child, shared_forward(child, full_units, running, takes_whole=id(child) in takes_whole))
        if region.inputs or region.resizes or any(result.dim is not None for result in region.results):
            scope = self.module.get_submodule(region.scope)
            self._exchange(scope, scope_forward(scope, running))
        if region.entry is not None and chain is not None:
            entry = self.module.get_submodule(region.entry)
            self._exchange(entry, entry_forward(entry, running))

    def _start_chain(self, chain: RunningChain) -> None:
        last = len(chain.chain.layers) - 1
        for index, name in enumerate(chain.chain.layers):
            layer = self.module.get_submodule(name)
            self._exchange(layer, layer_forward(layer, chain, is_first=index == 0, is_last=index == last))

    def _set_integer(self, owner: nn.Module, attribute: str, region: Region) -> None:
        full = getattr(owner, attribute)
        local = region.local_integer(full, self.group.size, self.group.group_rank)
        self._change(owner, attribute, full if local is None else local)

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Have the modules compute as the plain model does inside: for whole parameters."""
        self._set_back()
        try:
            yield
        finally:
            for owner, attribute, _, changed in self._changes:
                setattr(owner, attribute, changed)

    def _exchange(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self._change(module, "__class__", with_forward(type(module), forward))

    def _change(self, owner: nn.Module, attribute: str, value: Any) -> None:
        self._changes.append((owner, attribute, getattr(owner, attribute), value))
        setattr(owner, attribute, value)

    @property
    def draws_apart(self) -> bool:
        """Whether each rank draws random numbers of its own at the moment."""
        return self._drawing.is_apart

    def forget(self) -> None:
        """Forget forwards that did not end."""
        self._drawing.forget()
        for running in self._running:
            running.forget()

    def streams(self) -> list[tuple[int, tuple[int, ...]]]:
        """Return, for each chain, along which dim and in which sizes its stream lies in slices."""
        return [(chain.dim, chain.sizes) for chain in self._chains]

    def set_streams(self, streams: list[tuple[int, tuple[int, ...]]]) -> None:
        """Take up again what `streams` gave."""
        for chain, (dim, sizes) in zip(self._chains, streams, strict=True):
            chain.dim, chain.sizes = dim, sizes

    def close(self) -> None:
        """Give the modules their own classes and integers back; the parameters stay cut."""
        self._set_back()
        self._changes = []

    def _set_back(self) -> None:
        for owner, attribute, original, _ in reversed(self._changes):
            setattr(owner, attribute, original)

    def fill_with_nan(self) -> None:
        """Give what was cut its full shape again, without values: they are with the ranks that hold them."""
        for name, shape in self._shapes.items():
            tensor = find_tensor(self.module, name)
            tensor.grad = None
            tensor.data = tensor.data.new_full(shape, torch.nan)


def _lies_in(region: Region, chain: Chain) -> bool:
    return any(is_inside(region.scope, layer) for layer in chain.layers)


def is_inside(name: str, outer: str) -> bool:
    """Tell whether a module's name is another's, or that of one inside it."""
    return not outer or name == outer or name.startswith(f"{outer}.")


def find_tensor(module: nn.Module, name: str) -> Tensor:
    """Return the parameter or buffer of this FQN."""
    path, _, own = name.rpartition(".")
    owner = module.get_submodule(path)
    tensor = owner._parameters.get(own)
    if tensor is None:
        tensor = owner._buffers[own]
    if tensor is None:
        raise AttributeError(name)
    return tensor
