"""Layout applied to a module and undone: parameters become this rank's shards, modules at a region's edge get their roles."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from meshwright._torch_private import without_function_modes
from meshwright.apply.modules.copies import copy_module
from meshwright.apply.modules.forwards import with_forward
from meshwright.apply.recompute.checkpointing import with_repeated_forward
from meshwright.apply.shards.facts import RunMoment, ShardFacts
from meshwright.apply.tensor.held_buffers import HeldBuffer
from meshwright.apply.tensor.part import CallGuard, Part
from meshwright.apply.tensor.placement import is_in_place
from meshwright.apply.tensor.region_state import Drawing, RunningChain, RunningRegion
from meshwright.apply.tensor.roles import (
    entry_forward,
    role_forward,
    scope_forward,
    shared_forward,
    unless_whole,
)
from meshwright.apply.tensor.stored import forget_graphs
from meshwright.apply.tensor.tensor_layout import Chain, Region, TensorLayout, is_inside
from meshwright.apply.tensor.whole import assign_values, gather_parameter, share
from meshwright.comm.communicator import Communicator
from meshwright.layout import ShardLayout
from meshwright.nn.shards import one_block, take_shard

__all__: list[str] = []


class Cutting:
    """A module to which a layout is applied.

    Args:
        module: The module, whole; its parameters keep their identity and get this rank's shards as values.
        layout: The layout.
        group: The ranks that share the module.
        shares_memory: Whether a shard may lie in the whole tensor's memory, where it is one block of it: nobody writes into it.
        make_guard: Gives the guard of a part, from (this, its name, its layout, its copy from before the cut, whose parameters
            have no values); None where something is being proven, and nothing else may run.
    """

    def __init__(
        self,
        module: nn.Module,
        layout: TensorLayout,
        group: Communicator,
        *,
        shares_memory: bool = False,
        make_guard: Callable[[Cutting, str, TensorLayout, nn.Module], CallGuard] | None = None,
    ) -> None:
        self.module = module
        self._shares_memory = shares_memory
        self.layout = layout
        self.group = group
        self._drawing = Drawing(group)
        self._running: list[RunningRegion] = []
        self._changes: list[tuple[nn.Module, str, Any, Any]] = []  # owner, attribute, what it was, what it is
        self._tensors: list[Tensor] = []  # what was cut
        self._versions: list[int] = []
        self._cuts: dict[str, Callable[[int], ShardLayout]] = {}  # name -> the layout of a rank, by its number
        self.attributes: dict[tuple[int, str], Any] = {}
        """(id of a module, attribute) -> its value in the whole model, where the shard has another."""
        own = layout.parts() if make_guard is not None or layout.chains else {}
        self._make_guard = make_guard
        self.misplaced: list[str] = []
        """FQNs of what the ranks' shards, put together, are not: they were cut wrong."""
        # From before the cut: a proof is made on the whole module.
        templates = {name: _without_values(module.get_submodule(name)) for name in own} if make_guard else {}
        self._buffers: list[HeldBuffer] = []
        self._cut_tensors()
        self._chains = chains = [RunningChain(chain, group, self._drawing) for chain in layout.chains]
        for region in layout.regions:
            self._start(region, next((chain for chain in chains if _lies_in(region, chain.chain)), None))
        self._leave_torchs_fast_path()
        self.parts = [self._part(name, part, templates.get(name)) for name, part in own.items()]
        for part in self.parts:
            part.install(self._change)

    # -- tensors ------------------------------------------------------------------------------------------------

    def _cut_tensors(self) -> None:
        rank, known = self.group.group_rank, dict[int, Callable[[int], ShardLayout]]()
        with torch.no_grad():
            for name, (region, cut) in self.layout.cuts.items():
                tensor = find_tensor(self.module, name)
                if id(tensor) not in known:  # a tied tensor has several names
                    whole = tensor.data
                    layout = functools.partial(cut.layout, tuple(whole.shape), region.num_units, self.group.size)
                    self._cuts[name] = known[id(tensor)] = layout
                    block = one_block(whole, layout(rank)) if self._shares_memory else None
                    assign_values(tensor, take_shard(whole, layout(rank)) if block is None else block)
                    self._tensors.append(tensor)
                    self._versions.append(tensor._version)
                    if self._make_guard is not None:
                        layouts = [layout(part) for part in range(self.group.size)]
                        if not is_in_place(whole, tensor.data, layouts, self.group):
                            self.misplaced.append(name)
                path, _, own = name.rpartition(".")
                slots = self.module.get_submodule(path)._buffers
                if own in slots:
                    self._buffers.append(HeldBuffer(name, slots, own, tensor, known[id(tensor)](rank)))

    @functools.cached_property
    def layouts(self) -> Mapping[str, list[ShardLayout]]:
        """FQN of each parameter and buffer that is cut -> every rank's layout; a tied tensor under its first name."""
        return {name: [layout(part) for part in range(self.group.size)] for name, layout in self._cuts.items()}

    def layouts_by_id(self) -> dict[int, list[ShardLayout]]:
        """Return every rank's layout by the id of the parameter or buffer that is cut now; it may have several names."""
        found: dict[int, list[ShardLayout]] = {}
        for name, layouts in self.layouts.items():
            with contextlib.suppress(KeyError, AttributeError):  # a script has deleted it, which its next step refuses
                found[id(find_tensor(self.module, name))] = layouts
        return found

    def own_blocks(self) -> dict[str, ShardLayout]:
        """Return this rank's block of each parameter and buffer that is cut, by each of its names."""
        by_id = self.layouts_by_id()
        named = [
            *self.module.named_parameters(remove_duplicate=False),
            *self.module.named_buffers(remove_duplicate=False),
        ]
        return {name: by_id[id(tensor)][self.group.group_rank] for name, tensor in named if id(tensor) in by_id}

    def take_writes(self, shards: Mapping[str, Tensor], whole: Mapping[str, Tensor]) -> None:
        """Copy what was written into whole values, alike on all ranks, into the shards; every rank calls it."""
        rank, names = self.group.group_rank, list(whole)
        own = [take_shard(whole[name], self.layouts[name][rank]) for name in names]
        changed = [float(not torch.equal(new, shards[name])) for name, new in zip(names, own, strict=True)]
        if not names:
            return
        # On every rank or on none, since sentinels compare the ranks' states.
        told = torch.tensor(changed, device=own[0].device)
        self.group.all_reduce(told, "max")
        with torch.no_grad():
            for name, new, is_changed in zip(names, own, told.tolist(), strict=True):
                if is_changed:
                    shards[name].copy_(new)

    def held_parts(self, moment: RunMoment) -> Iterator[tuple[Tensor, ShardFacts]]:
        """Yield each tensor that is cut, with the facts about it."""
        rank = self.group.group_rank
        for name, layouts in self.layouts.items():
            own, tensor = layouts[rank], find_tensor(self.module, name)
            if all(layout.is_whole for layout in layouts):
                continue
            kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
            ranges = ", ".join(f"{start}:{stop}" for start, stop in own.ranges) or "nothing"
            yield (
                tensor,
                ShardFacts(
                    name=f"{kind} '{name}'",
                    held=f"each of {self.group.size} ranks has a part of it, rank {self.group.rank} has {ranges} along dim "
                    f"{own.dim} of {list(own.shape)}",
                    moment=moment,
                    values="shard",
                    key=("tp", own.shape, own.dim, tuple(layout.ranges for layout in layouts)),
                    axis="tp",
                    is_cut_inside=True,
                ),
            )

    def share_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Cut the state that an elementwise optimizer keeps of a parameter before its first step, such as Adagrad's sums."""
        for name, layouts in self.layouts.items():
            tensor = find_tensor(self.module, name)
            state = optimizer.state.get(tensor, {})
            for key, value in state.items():
                if isinstance(value, Tensor) and tuple(value.shape) == layouts[0].shape:
                    state[key] = take_shard(value, layouts[self.group.group_rank])

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
            if role == "stored":
                forget_graphs(child)
            if role in ("row", "sum", "vocabulary", "stored"):  # these roles change attributes while the module runs
                self._change(
                    child, "__class__", with_repeated_forward(child, functools.partial(_repeated, role, running))
                )
            else:
                whole = id(child) in takes_whole
                self._exchange(child, role_forward(role, child, running, takes_whole=whole), running)
        for name, full_units in region.shared.items():
            child = self.module.get_submodule(name)
            whole = id(child) in takes_whole
            self._exchange(child, shared_forward(child, full_units, running, takes_whole=whole), running)
        if region.inputs or region.resizes or region.results:
            scope = self.module.get_submodule(region.scope)
            self._exchange(scope, scope_forward(scope, running), running)
        if region.entry is not None and chain is not None:
            entry = self.module.get_submodule(region.entry)
            self._exchange(entry, entry_forward(entry, running), running)

    def _part(self, name: str, layout: TensorLayout, template: nn.Module | None) -> Part:
        make = None if layout.is_stored else self._make_guard
        chain = next((chain for chain in self._chains if name in chain.chain.layers and layout.chains), None)
        running = [
            running
            for running in self._running
            if any(_is_same(running.region, own.above(name)) for own in layout.regions)
        ]
        return Part(
            name,
            self.module.get_submodule(name),
            regions=running,
            chain=chain,
            values=functools.partial(self._whole_values, name, layout),
            take_buffer=self._take_whole_buffer,
            attributes=self._attributes_of(running),
            guard=None if make is None or template is None else make(self, name, layout, template),
        )

    def _attributes_of(self, regions: Sequence[RunningRegion]) -> dict[tuple[int, str], Any]:
        """Return the whole model's values of these regions' integers; a part inside another one stays cut then."""
        keys = {(id(self.module.get_submodule(n)), key) for running in regions for n, key in running.region.integers}
        return {key: full for key, full in self.attributes.items() if key in keys}

    def _whole_values(self, name: str, layout: TensorLayout) -> dict[str, Tensor]:
        """Return the tensors with which this module runs whole, by name from there: gathered, with gradients shared out."""
        by_id, module = self.layouts_by_id(), self.module.get_submodule(name)
        names = dict.fromkeys([path for region in layout.regions for path in region.cuts])
        values = {path: gather_parameter(t := find_tensor(module, path), by_id[id(t)], self.group) for path in names}
        # In one order on all ranks, which backward's exchanges follow.
        partial = [path for path in sorted(layout.partial) if find_tensor(module, path).is_floating_point()]
        return values | {path: share(find_tensor(module, path), self.group.size) for path in partial}

    def _take_whole_buffer(self, _: str, whole: Tensor, own: Tensor) -> None:
        """Copy this rank's part of a whole buffer, which a forward may have written, into the rank's own."""
        layouts = self.layouts_by_id().get(id(own))
        if layouts is not None:
            with without_function_modes(), torch.no_grad():
                own.copy_(take_shard(whole, layouts[self.group.group_rank]))

    def _leave_torchs_fast_path(self) -> None:
        """Disable the fast path of torch's encoders in eval mode, whose single kernel expects whole weights."""
        for child in self.module.modules():
            if isinstance(child, nn.TransformerEncoderLayer):
                self._set_attribute(child, "activation_relu_or_gelu", 0)
            elif isinstance(child, nn.TransformerEncoder):
                self._set_attribute(child, "use_nested_tensor", False)

    def _set_attribute(self, owner: nn.Module, attribute: str, value: Any) -> None:
        self.attributes[id(owner), attribute] = getattr(owner, attribute)
        self._change(owner, attribute, value)

    def _set_integer(self, owner: nn.Module, attribute: str, region: Region) -> None:
        full = getattr(owner, attribute)
        local = region.local_integer(full, self.group.size, self.group.group_rank)
        self._set_attribute(owner, attribute, full if local is None else local)

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Run the modules as the plain model's inside the context, for whole parameters."""
        self._set_back()
        try:
            yield
        finally:
            for owner, attribute, _, changed in self._changes:
                setattr(owner, attribute, changed)

    def _exchange(self, module: nn.Module, forward: Callable[..., Any], running: RunningRegion) -> None:
        chosen = unless_whole(type(module).forward, running, forward)
        self._change(module, "__class__", with_forward(type(module), chosen))

    def _change(self, owner: nn.Module, attribute: str, value: Any) -> None:
        self._changes.append((owner, attribute, getattr(owner, attribute), value))
        setattr(owner, attribute, value)

    @property
    def draws_apart(self) -> bool:
        """Whether each rank is drawing random numbers of its own."""
        return self._drawing.is_apart

    def begin_step(self) -> None:
        """Tell the guards what was changed on the module since the last step."""
        for held in self._buffers:
            held.take_replacement()
        for part in self.parts:
            part.refuse_patched()
            if part.guard is not None:
                part.guard.refresh()

    def forget(self, device: torch.device) -> None:
        """Drop the state of forwards that did not end."""
        self._drawing.together(device)
        for running in self._running:
            running.forget()

    def streams(self) -> list[tuple[int, tuple[int, ...]]]:
        """Return for each chain the dim and the sizes of its stream's slices."""
        return [(chain.dim, chain.sizes) for chain in self._chains]

    def set_streams(self, streams: list[tuple[int, tuple[int, ...]]]) -> None:
        """Restore what `streams` returned."""
        for chain, (dim, sizes) in zip(self._chains, streams, strict=True):
            chain.dim, chain.sizes = dim, sizes

    def close(self) -> None:
        """Restore the modules' own classes and integers; the parameters stay cut."""
        self._set_back()
        self._changes = []

    def _set_back(self) -> None:
        for owner, attribute, original, _ in reversed(self._changes):
            setattr(owner, attribute, original)

    def were_written(self) -> bool:
        """Tell whether anything that was cut has been written into since."""
        return [tensor._version for tensor in self._tensors] != self._versions

    def drop_values(self) -> None:
        """Free the memory of what was cut; the module cannot be used any more."""
        for tensor in self._tensors:
            tensor.data = tensor.data.new_empty(0)

    def fill_with_nan(self) -> None:
        """Restore the full shape of what was cut, filled with NaN: other ranks hold the values."""
        for name, layouts in self.layouts.items():
            try:
                tensor = find_tensor(self.module, name)
            except (KeyError, AttributeError):  # a script has deleted it
                continue
            tensor.grad = None
            tensor.data = tensor.data.new_full(layouts[0].shape, torch.nan)


def _lies_in(region: Region, chain: Chain) -> bool:
    return any(is_inside(region.scope, layer) for layer in chain.layers)


def _repeated(role: str, running: RunningRegion, module: nn.Module) -> Callable[..., Any]:
    return unless_whole(type(module).forward, running, role_forward(role, module, running))


def _is_same(region: Region, other: Region) -> bool:
    """Tell whether two regions are equal, or the first is one module of the second."""
    return region.cuts.keys() >= other.cuts.keys() and region.roles.keys() >= other.roles.keys()


def _without_values(module: nn.Module) -> nn.Module:
    """Return a copy whose parameters have no values; buffers are copied, since code may decide by them."""

    def empty(tensor: Tensor) -> Tensor:
        has_values = not isinstance(tensor, nn.Parameter) or not tensor.is_floating_point()
        return tensor.detach().clone() if has_values else torch.empty_like(tensor, device="meta")

    return copy_module(module, empty).requires_grad_()


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
