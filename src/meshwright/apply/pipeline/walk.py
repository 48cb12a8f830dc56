"""One stage's forward of one micro-batch: the user's own forward, in which the other stages' part stands still.

Every stage runs the whole forward on the same inputs. A *unit* is a module whose calls are dealt out to stages; what the user's
code does between units is *glue*. A call of a unit that belongs to another stage is not run, and gives stand-ins. Glue runs
on the latest stage that computes one of its tensors; what comes of the inputs alone (masks, positions) every stage computes
for itself. Where something of this stage needs a tensor of another, it is received; where something of another stage needs
a tensor of this one, it is sent. As all stages see the same calls in the same order, sender and receiver agree without a word.

So masks, keyword arguments, skip connections over several stages, tensors in dataclasses, other shapes in each micro-batch
and branches that the inputs decide need nothing of their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from meshwright.apply.pipeline.draws import Draws
from meshwright.apply.pipeline.shapes import Known, Shapes
from meshwright.apply.pipeline.values import (
    Meta,
    StandIn,
    StrayValueError,
    Value,
    mark,
    replace_tensors,
    value_of,
    values_in,
)
from meshwright.apply.tensor.slices import make_whole
from meshwright.comm._torch_private import PlainCheckpoints, current_function_mode, without_function_modes
from meshwright.describe.tree import map_tensors
from meshwright.errors import ApplyError

__all__: list[str] = []


class Mail(Protocol):
    """How a stage sends and receives."""

    def send(self, tensor: Tensor, stage: int) -> None:
        """Send a tensor to another stage."""
        ...

    def receive(self, meta: Meta, stage: int) -> Tensor:
        """Return the next tensor from another stage."""
        ...


_METADATA = {
    "dim",
    "size",
    "stride",
    "numel",
    "nelement",
    "element_size",
    "ndimension",
    "is_floating_point",
    "is_complex",
    "is_contiguous",
    "is_signed",
    "storage_offset",
    "get_device",
    "__len__",
    "__hash__",
    "__repr__",
    "__format__",
    "requires_grad_",
    "register_hook",
}
METADATA = frozenset(
    {
        *(getattr(torch.Tensor, name) for name in _METADATA),
        *(
            getattr(torch.Tensor, name).__get__
            for name in (
                "shape",
                "dtype",
                "device",
                "ndim",
                "requires_grad",
                "layout",
                "is_cuda",
                "is_cpu",
                "is_meta",
                "is_sparse",
                "is_nested",
                "is_quantized",
                "is_mkldnn",
                "is_leaf",
                "itemsize",
                "nbytes",
                "output_nr",
                "_version",
            )
        ),
        torch.is_floating_point,
        torch.is_complex,
        torch.numel,
    }
)
"""What a tensor tells without its values: nothing is exchanged for it."""


_AUGMENTED = frozenset(
    f"__{name}__"
    for name in (
        "setitem",
        "set",
        *(f"i{kind}" for kind in ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow")),
        *(f"i{kind}" for kind in ("and", "or", "xor", "lshift", "rshift")),
    )
)


def writes_to(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the tensor that a function writes over; None for one that makes a new tensor."""
    if kwargs.get("out") is not None:
        return kwargs["out"]
    name = getattr(func, "__name__", "")
    is_in_place = (
        name in _AUGMENTED or (name.endswith("_") and not name.endswith("__")) or kwargs.get("inplace") is True
    )
    if is_in_place and args and isinstance(args[0], Tensor):
        return args[0]
    return None


def _holds_tensors(module: nn.Module) -> bool:
    """Tell whether a module has parameters, here or on another stage, or buffers."""
    return any(
        child._parameters or child._buffers or any(isinstance(item, nn.Parameter) for item in vars(child).values())
        for child in module.modules()
    )


class Walk(TorchFunctionMode):
    """A stage's forward of one micro-batch, under way. The forward runs inside.

    Args:
        stage: The stage.
        stage_of: (unit's name, how many calls of it came before) -> the stage that runs the call.
        shapes: What calls give, of which only the shapes are wanted.
        mail: How to reach the other stages.
        draws: What layers draw from, apart from the code between them.
    """

    def __init__(
        self, stage: int, stage_of: Callable[[str, int], int], shapes: Shapes, mail: Mail, draws: Draws
    ) -> None:
        super().__init__()
        self.stage = stage
        self.sent: list[tuple[Tensor, int]] = []
        """(tensor with its graph, stage it went to), in the order of sending."""
        self.received: list[tuple[Tensor, int]] = []
        """(leaf, stage it came from), in the order of receipt."""
        self.outputs: Any = None
        """What the model has returned, once it has; after that the loss is computed."""
        self._stage_of = stage_of
        self._shapes = shapes
        self._mail = mail
        self._draws = draws
        self._calls: Counter[str] = Counter()
        self.is_paused = False
        self._checkpoints = 0  # of the user's own, around what runs now
        self._plain_checkpoints = PlainCheckpoints(lambda: not self.is_paused, self._note_checkpoint)

    def __enter__(self) -> Walk:
        self._plain_checkpoints.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._plain_checkpoints.__exit__()

    def _note_checkpoint(self, enters: bool) -> None:
        # What it would run again are calls of several stages; each unit of this stage inside is checkpointed by itself.
        self._checkpoints += 1 if enters else -1

    def paused(self) -> _Paused:
        """Run what is inside as if nobody watched."""
        return _Paused(self)

    def pause(self) -> bool:
        """Stop to watch; tell whether this mode was the one on top."""
        self.is_paused = True
        if current_function_mode() is not self:
            return False  # the user's own mode is, and must stay
        super().__exit__(None, None, None)
        return True

    def go_on(self, *, was_on_top: bool) -> None:
        """Watch again."""
        if was_on_top:
            super().__enter__()
        self.is_paused = False

    # -- units --------------------------------------------------------------------------------------------------

    def call_unit(
        self, name: str, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run one call of a unit, or stand in for it."""
        with without_function_modes():  # what is done here with tensors is not the user's code
            values = self._own_values(args, kwargs)
            stage = self._place_of_call(name, module, values)
            if stage != self.stage:
                self._send_all(values, stage)
                known = self._shapes.of_unit(name, module, args, kwargs)
            else:
                known = None
                if any(value.stand_in is not None for value in values):
                    args, kwargs = replace_tensors((args, kwargs), self._real_if_known)
        if known is not None:
            return self._stand_in(known, stage)
        if stage != self.stage:
            with self.paused():
                known = self._shapes.find_of_unit(name, module, forward, args, kwargs)
            return self._stand_in(known, stage)
        with self.paused(), self._draws.inside_layer():
            if self._checkpoints and torch.is_grad_enabled():
                outputs = checkpoint(forward, module, *args, use_reentrant=False, **kwargs)
            else:
                outputs = forward(module, *args, **kwargs)
        return self._mark_own(outputs) if isinstance(outputs, Tensor) else map_tensors(outputs, self._mark_own)

    def _place_of_call(self, name: str, module: nn.Module, values: list[Value]) -> int:
        """Return the stage of the next call of a unit, which takes these."""
        stage = self._stage_of(name, self._calls[name])
        self._calls[name] += 1
        latest = max((value.home for value in values if value.home is not None), default=stage)
        if (latest > stage or self._draws.apart) and not _holds_tensors(module):
            return latest  # a dropout that serves several layers, of which chance may have left some out this time
        if latest > stage:
            raise ApplyError(
                f"'{name}' runs on stage {stage} and takes a tensor that stage {latest} computes; a pipeline runs forward only",
                fix="leave the stages to Meshwright, or give the layers stages in the order in which they run",
            )
        return stage

    @property
    def owes_nothing_to_the_loss(self) -> bool:
        """Whether the model is done and other stages alone have its outputs, so that the loss cannot need this one."""
        if self.outputs is None:
            return False
        homes = [value.home for value in values_in(self.outputs)]
        return bool(homes) and self.stage not in homes and None not in homes

    # -- glue ---------------------------------------------------------------------------------------------------

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.is_paused or func in METADATA:
            return func(*args, **kwargs)
        values = self._own_values(args, kwargs)
        if not values:
            return func(*args, **kwargs)
        home = max((value.home for value in values if value.home is not None), default=None)
        target = writes_to(func, args, kwargs)
        if home == self.stage or (home is None and all(value.real is not None for value in values)):
            if target is not None:
                self._make_writable(target)
            given: Any = (args, kwargs)
            if any(value.stand_in is not None for value in values):
                given = replace_tensors(given, self._real_if_known)
            return self._run_here(func, given[0], given[1], home, target)
        if home is not None:
            self._send_all(values, home)
        if target is not None:
            return self._write_elsewhere(func, target, values, home)
        return self._stand_in(self._shapes.of_function(func, args, kwargs, home), home)

    def _run_here(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], home: int | None, target: Any
    ) -> Any:
        result = func(*args, **kwargs)
        if target is None:
            return replace_tensors(result, lambda tensor: mark(tensor, Value(self, home, tensor, None)))
        known = value_of(target)
        if known is None or known.owner is not self:
            mark(target, Value(self, home, target, None))
        else:
            known.home, known.sent_to = home, set()
        return target if isinstance(result, Tensor) else result

    def _make_writable(self, target: Tensor) -> None:
        """Give a received tensor, which is a leaf, a copy that may be written over."""
        value = value_of(target)
        if value is not None and value.owner is self and value.home != self.stage:
            value.real = self.real(value).clone()

    def _write_elsewhere(self, func: Callable[..., Any], target: Tensor, values: list[Value], home: int | None) -> Any:
        value = value_of(target)
        if value is None or value.owner is not self:
            value = Value(self, home, None, None)
            values.append(value)
            template = Meta.of(target)
        else:
            template = Meta.of(value.any)
        needs_grad = torch.is_grad_enabled() and any(
            known.any.requires_grad for known in values if known.real is not None or known.stand_in is not None
        )
        stand_in = StandIn(Meta(template.shape, template.stride, template.dtype, template.device, needs_grad))
        value.home, value.real, value.stand_in, value.sent_to = home, None, stand_in, set()
        mark(target, value)
        return None if getattr(func, "__name__", "") in ("__setitem__", "__set__") else target

    # -- values -------------------------------------------------------------------------------------------------

    def _own_values(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Value]:
        """Return the values of this forward, and those of parameters that are not here."""
        found = values_in(*args, kwargs) if kwargs else values_in(*args)
        return [value for value in found if value.owner is self or value.home is None]

    def real(self, value: Value) -> Tensor:
        """Return a value's tensor, which is received where another stage computes it."""
        if value.real is None:
            if value.home is None or value.stand_in is None:
                raise ApplyError(
                    f"stage {self.stage} needs a parameter that it does not hold: the forward took another way than with "
                    "the batch by which the stages were cut",
                    fix="pass an example_batch= to apply_plan that takes every branch, or use pp=1",
                )
            meta = Meta.of(value.stand_in)
            leaf = self._mail.receive(meta, value.home)
            if meta.requires_grad and torch.is_grad_enabled():
                leaf.requires_grad_()
            value.real = mark(leaf, value)
            self.received.append((leaf, value.home))
        return value.real

    def _real_if_known(self, tensor: Tensor) -> Tensor:
        value = value_of(tensor)
        if value is not None and (value.owner is self or value.home is None):
            return self.real(value)
        if isinstance(tensor, StandIn):
            raise StrayValueError(f"stage {self.stage}")
        return tensor

    def _mark_own(self, tensor: Tensor) -> Tensor:
        return mark(tensor, Value(self, self.stage, tensor, None))

    def _stand_in(self, known: Known, home: int | None) -> Any:
        """Return stand-ins for the results of a call."""

        def make(meta: Meta) -> Tensor:
            tensor = StandIn(meta)
            return mark(tensor, Value(self, home, None, tensor))

        return known.make(make)

    def _send_all(self, values: list[Value], stage: int) -> None:
        for value in values:
            if value.home == self.stage and stage not in value.sent_to:
                value.sent_to.add(stage)
                tensor = make_whole(value.any)  # what lies in slices over tensor-parallel ranks, too
                self.sent.append((tensor, stage))
                self._mail.send(tensor.detach(), stage)


class _Paused:
    """A context without a generator: one is entered for each call of a layer."""

    __slots__ = ("_walk", "_was_on_top")

    def __init__(self, walk: Walk) -> None:
        self._walk = walk
        self._was_on_top = False

    def __enter__(self) -> None:
        self._was_on_top = self._walk.pause()

    def __exit__(self, *_: object) -> None:
        self._walk.go_on(was_on_top=self._was_on_top)
