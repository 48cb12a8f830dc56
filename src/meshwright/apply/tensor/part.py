"""Part of a cut model, and the ways to run a call of it: on shards, on slices of the stream, or as on one device.

A part is the smallest module around regions that has a proof. It is a layer of a chain with all its regions, the scope of any
other region, or an embedding or head of a cut vocabulary. Its guard knows the calls for which the proof holds. Any other call
runs whole: each rank gathers the part's parameters for the call and computes what one device computes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn

from meshwright._torch_private import PlainCheckpoints, cached_weights_of, current_function_mode, without_function_modes
from meshwright.apply.finding import Finding
from meshwright.apply.modules.forwards import users_class, with_forward
from meshwright.apply.recompute.checkpointing import with_repeated_forward
from meshwright.apply.shards.switch import Entry, ShardSwitch
from meshwright.apply.tensor.inspection import compare_runs, is_inspecting
from meshwright.apply.tensor.lost_writes import LostWrites
from meshwright.apply.tensor.masks import Mask
from meshwright.apply.tensor.region_state import RunningChain, RunningRegion
from meshwright.apply.tensor.roles import change_stream
from meshwright.apply.tensor.slices import make_whole, plain_values
from meshwright.apply.tensor.whole import replaced_tensors
from meshwright.errors import ApplyError
from meshwright.trees import tensors_in

__all__: list[str] = []

_WHOLE: Final = "whole"
_WAY: Final = "meshwright_way"
"""The keyword by which a call tells its repetition in backward in which way it ran."""

Forward = Callable[..., Any]


class CallGuard(Protocol):
    """A part's guard, as the part uses it (`guards/part_guard.py`)."""

    reasons: list[str]
    """Why calls ran whole; each once."""

    def refresh(self) -> None:
        """Take over what was changed on the module since the last step."""
        ...

    def allows(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Tell whether shards are proven to equal the whole for this call."""
        ...


class Part:
    """One part of a model, on one rank.

    Args:
        name: Its FQN.
        module: The module, cut.
        regions: Its regions.
        chain: The chain whose layer it is, or None.
        values: Returns the whole tensors, by name from the module on, with which it runs as on one device.
        take_buffer: Takes what such a run has left in a whole buffer: its name, the whole one, and this rank's part.
        attributes: (id of a module, attribute) -> its value in the whole model, where the shard has another.
        guard: Knows the proven calls; None during the part's own proof.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        *,
        regions: Sequence[RunningRegion],
        chain: RunningChain | None,
        values: Callable[[], Mapping[str, Tensor]],
        take_buffer: Callable[[str, Tensor, Tensor], None],
        attributes: Mapping[tuple[int, str], Any],
        guard: CallGuard | None,
    ) -> None:
        self.name = name
        self.module = module
        self.guard = guard
        self.is_inspected = False
        """Whether the next call is compared with what one device computes."""
        self.findings: list[Finding] = []
        self.masks: list[Mask] = []
        """Of the call that was compared: what its dropout would draw from on shards."""
        self._regions = regions
        self._chain = chain
        self._values = values
        self._take_buffer = take_buffer
        self._attributes = attributes
        self._class: type[nn.Module] | None = None
        kinds = dict.fromkeys(users_class(type(child)) for child in module.modules())
        self._forwards = [(kind, kind.forward) for kind in kinds]
        self._is_patched = "forward" in vars(module)
        self._switch: ShardSwitch | None = None
        self._own: list[Entry] = []
        self._hooks: dict[str, Any] = {}
        """Hooks that the code of the last whole call has registered on whole weights: name -> the weight's table of them."""
        for region in regions if guard is not None else ():
            region.is_open = False

    def install(self, change: Callable[[nn.Module, str, Any], None]) -> None:
        """Wrap the module's forward in the part's; `change` sets an attribute and can undo it."""
        module = self.module
        # The way to run a call is decided once; backward's repetition makes the same changes.
        change(module, "__class__", with_repeated_forward(module, self._repeated))
        change(module, "__class__", with_forward(type(module), self._guarded(type(module).forward)))

    def _guarded(self, original: Forward) -> Forward:
        guard = self.guard

        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            with self._open():
                return run(module, *args, **kwargs)

        def run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if guard is not None and not guard.allows(args, kwargs):
                return self._run_whole(original, module, args, kwargs)
            # Not while each function call is followed: a pipeline's stages would see calls that the others do not make.
            if self.is_inspected and current_function_mode() is None:
                self._inspect(original, module, args, kwargs)
            outputs = self._run_cut(original, module, args, kwargs)
            if self._hooks:
                self._refuse_lost_hooks({})
            return outputs

        return forward

    def use_switch(self, switch: ShardSwitch) -> None:
        """Set the switch that guards the part's parameters while other code runs."""
        tensors = [*self.module.parameters(), *self.module.buffers()]
        self._switch, self._own = switch, switch.entries_of(tensors)

    @contextlib.contextmanager
    def _open(self) -> Iterator[None]:
        switch = self._switch
        opened = [] if switch is None or switch.state == "plain" else switch.open_part(self._own)
        before = [region.is_open for region in self._regions]
        for region in self._regions:
            region.is_open = True
        try:
            with cached_weights_of("shards"):
                yield
        finally:
            if opened:
                ShardSwitch.close_part(opened)
            for region, was in zip(self._regions, before, strict=True):
                region.is_open = was

    def refuse_patched(self) -> None:
        """Raise ApplyError if the module's forward was replaced after the cut, so that its calls are not guarded."""
        if self._class is None:
            self._class = type(self.module)
        is_patched = ("forward" in vars(self.module)) != self._is_patched
        later = next((kind.__name__ for kind, forward in self._forwards if kind.forward is not forward), None)
        if type(self.module) is not self._class or is_patched or later is not None:
            name = f"'{self.name or 'the model itself'}'" if later is None else f"class '{later}'"
            raise ApplyError(
                f"the forward of {name} was replaced after the plan was applied, and the new one "
                "is not proven to give one device's numbers on shards",
                fix="replace it before apply_plan",
            )

    def _repeated(self, module: nn.Module) -> Forward:
        original = type(module).forward

        def forward(self_: nn.Module, *args: Any, **kwargs: Any) -> Any:
            way = kwargs.pop(_WAY, None)
            if way is None:
                return original(self_, *args, **kwargs)
            with self._as_whole() if way == _WHOLE else self._on_slices(*way):
                return original(self_, *args, **kwargs)

        return forward

    def _run_cut(self, original: Forward, module: nn.Module, args: Any, kwargs: Any) -> Any:
        chain = self._chain
        if chain is None:
            return original(module, *args, **kwargs)
        taken: list[tuple[Tensor, Tensor]] = []

        def take(stream: Tensor) -> Tensor:
            taken.append((stream, chain.take(stream)))
            return taken[0][1]

        args, kwargs = change_stream((args, kwargs), take)
        way = chain.dim, chain.sizes
        with chain.drawing_apart(module, next(tensors_in((args, kwargs))).device):
            outputs = original(module, *args, **kwargs, **{_WAY: way})
        give = chain.gather if chain.chain.layers[-1] == self.name else chain.hand_on

        def hand_on(stream: Tensor) -> Tensor:
            for whole, local in taken:
                if stream is local:
                    return whole  # who writes over what a layer that was left out gives writes over what it was given
                if _is_view_of(stream, local):
                    return whole.view_as(whole)
            return give(stream, *way)

        return change_stream(outputs, hand_on)

    def _run_whole(self, original: Forward, module: nn.Module, args: Any, kwargs: Any) -> Any:
        args, kwargs = make_whole((args, kwargs))
        return original(module, *args, **kwargs, **{_WAY: _WHOLE})

    def _on_slices(self, dim: int, sizes: tuple[int, ...]) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._chain is None else self._chain.running(dim, sizes)

    @contextlib.contextmanager
    def _as_whole(self) -> Iterator[None]:
        owners = {id(child): child for child in self.module.modules()}
        own = [(owners[owner], key, full) for (owner, key), full in self._attributes.items() if owner in owners]
        kept = [(owner, key, getattr(owner, key)) for owner, key, _ in own]
        before = [region.is_whole for region in self._regions]
        values = self._values()
        writes = LostWrites(self.module, values, is_first=False)
        try:
            for owner, key, full in own:
                setattr(owner, key, full)
            for region in self._regions:
                region.is_whole = True
            # A checkpoint inside would repeat its forward in backward, after these changes are undone.
            with (
                replaced_tensors(self.module, values, self._take_buffer, in_containers=True),
                PlainCheckpoints(lambda: True, lambda _: None),
                cached_weights_of("whole"),
            ):
                yield
                if not is_inspecting():  # which throws away what its runs write
                    writes.refuse(self.name)
            self._refuse_lost_hooks(values)
        finally:
            for region, was in zip(self._regions, before, strict=True):
                region.is_whole = was
            for owner, key, local in kept:
                setattr(owner, key, local)

    def _refuse_lost_hooks(self, values: Mapping[str, Tensor]) -> None:
        """Raise ApplyError where a hook hangs on a whole weight of an earlier call, and none on this one's."""
        if not torch.is_grad_enabled():
            return
        with without_function_modes():  # a pipeline stage would see code that uses buffers
            hooks = {name: own._backward_hooks for name, own in values.items() if own._backward_hooks}
        before, self._hooks = self._hooks, hooks
        for name in before.keys() - self._hooks.keys():
            if before[name]:
                raise ApplyError(
                    f"a hook that the forward of '{self.name or 'the model itself'}' has registered once on '{name}' is not "
                    "called any more: that call ran whole, on a weight that was gathered for it alone",
                    fix="register it in each forward, and remove the one of the forward before",
                )

    def _inspect(self, original: Forward, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.is_inspected = False
        given = plain_values((args, kwargs))
        with torch.no_grad():  # as the comparison is made
            if self.guard is not None and not self.guard.allows(*given):
                return
        findings, masks = compare_runs(
            module,
            self.name,
            given,
            cut=lambda given: self._run_cut(original, module, *given),
            whole=lambda given: self._run_whole(original, module, *given),
        )
        self.findings += findings
        self.masks += masks


def _is_view_of(tensor: Tensor, other: Tensor) -> bool:
    """Tell whether a tensor is a view of all of another one's memory."""
    with without_function_modes():  # whoever follows what is called would see what the layer does not do
        base = tensor._base
        if base is None or base is not (other if other._base is None else other._base):
            return False
        same_place = tensor.storage_offset() == other.storage_offset()
        return tensor.shape == other.shape and tensor.stride() == other.stride() and same_place
