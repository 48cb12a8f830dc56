"""Record of one forward: the operators of each layer, what they read and write, and what autograd keeps for backward."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from typing import Any, Final

import torch
from torch import Tensor, nn

from meshwright._torch_private import storage_id
from meshwright.describe.fakes import Constants
from meshwright.describe.memory_runs import memory_runs
from meshwright.describe.product_sizes import EMBEDDINGS, LOOKUPS, SAVES_RESULT, Sizes, products_of
from meshwright.spec.operator import CAST, Dtype
from meshwright.trees import arguments_in, tensors_in

__all__: list[str] = []

_READS_VALUES: Final = (
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
)
"""Operators whose result is a number, or whose shape depends on values."""

_DTYPES: Final[dict[torch.dtype, Dtype]] = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclasses.dataclass(slots=True, kw_only=True)
class Step:
    """One operator call of a forward; views are none."""

    function: str
    layer: str
    """The layer that was running, or the one before; the first that runs, where none has run."""
    module: str
    """The innermost module that was running."""
    products: tuple[Sizes, ...]
    is_lookup: bool
    """Whether it looks up rows of a parameter."""
    saves_result: bool
    weights: tuple[str, ...]
    """Parameters that it uses, by name."""
    weight_factor: int | None
    """Which factor of the product is made of parameters alone: 0, 1 or neither."""
    weight: str
    """The one parameter that this factor is made of; empty where there are several or none."""
    is_constant: bool
    """Whether it uses parameters alone."""
    read_bytes: list[int]
    written_bytes: list[int]
    shape: tuple[int, ...]
    """Of its first result."""
    num_runs: int
    """Runs of memory that it walks; 0 where it is not elementwise [count]."""
    inputs: tuple[int, ...]
    """Places of the steps whose results it reads."""
    reads: frozenset[int]
    """Memories that it reads."""
    writes: frozenset[int]
    dtype: Dtype
    """Of its first result, as `OperatorSpec` names it."""
    casts: list[int]
    """Elements of each weight that was cast for it."""
    saved_bytes: list[int] = dataclasses.field(default_factory=list)
    """Sizes of the memories that are kept for its backward and that nobody before it keeps."""
    saved_casts: list[int] = dataclasses.field(default_factory=list)
    """The same of copies that casts of weights have made."""


@dataclasses.dataclass(slots=True, kw_only=True)
class LayerCall:
    """What is known of a layer's calls."""

    outputs: list[tuple[int, ...]] = dataclasses.field(default_factory=list)
    """Shapes of what its last call returned."""
    output_bytes: list[int] = dataclasses.field(default_factory=list)
    output_sizes: list[int] = dataclasses.field(default_factory=list)
    """The same in elements."""
    num_calls: int = 0


class ForwardRecorder(Constants):
    """Records a forward that runs inside this context. Use it once.

    Args:
        module: The module that will run; hooks are put on it.
        layers: Names of its layers.
        constants: Whether small integer tensors are computed, above a fake mode.
        is_cast: Whether the forward runs under autocast: casts of weights then belong to what uses them first.
    """

    def __init__(self, module: nn.Module, layers: Iterable[str], *, constants: bool, is_cast: bool = False) -> None:
        super().__init__(is_on=constants)
        self.steps: list[Step] = []
        self.calls: dict[str, LayerCall] = {}
        """By layer, in the order of the first calls."""
        self.issued: defaultdict[str, Counter[str]] = defaultdict(Counter)
        """Layer -> what it has the host issue, calls by kind as `HostCalls` has them; "" before all layers."""
        self.names: dict[int, str] = {}
        """Memory of a parameter -> its first name."""
        self.outputs: frozenset[int] = frozenset()
        """Places of the steps whose results the model returns."""
        self.where: str = ""
        """The innermost module that is running."""
        self.reads_between: str = ""
        """The module whose code, between the layers, has read values that layers compute; "the model itself" for the root."""
        self._last_read = -1  # place of the last step whose values the code between the layers has read
        self._layers = set(layers)
        self._in_turn: list[str] = []  # a layer for each call
        self._whole = LayerCall(num_calls=1)
        self._stack: list[str] = []
        self._layer_stack: list[str] = []
        self._last_layer = ""
        self._producers: dict[int, int] = {}
        self._differentiated: set[int] = set()  # memories with a gradient
        self._made_of: dict[int, frozenset[str]] = {}  # memories that are made of parameters alone
        self._kept: set[int] = set()
        self._held: list[Any] = []  # a memory's id identifies it only while it lives
        self._unplaced: list[tuple[int, int]] = []  # kept since the last step: memory, size
        self._is_cast = is_cast
        self._copies: dict[int, int] = {}  # memories of weights' copies -> elements, 0 where somebody has used them
        for name, parameter in module.named_parameters():
            self.names[storage_id(parameter)] = name
            self._made_of[storage_id(parameter)] = frozenset([name])
            self._kept.add(storage_id(parameter))
            if parameter.requires_grad:
                self._differentiated.add(storage_id(parameter))
        self._kept.update(storage_id(buffer) for buffer in module.buffers())
        for name, child in module.named_modules():
            self._watch(name, child)
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._keep, lambda tensor: tensor)

    def __enter__(self) -> ForwardRecorder:
        super().__enter__()
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)
        super().__exit__(*error)
        self._place_kept(None)
        if not self.calls:  # its layers' parameters were used, and not their forwards
            self.calls[""] = self._whole
        for step in self.steps:
            step.layer = step.layer or next(iter(self.calls), "")

    def finish(self, outputs: Any) -> None:
        """Note what the model returns."""
        found = {self._producers.get(storage_id(tensor)) for tensor in tensors_in(outputs)}
        self.outputs = frozenset(place for place in found if place is not None)

    def _watch(self, name: str, module: nn.Module) -> None:
        is_layer = name in self._layers

        def enter(*_: Any) -> None:
            self._stack.append(name)
            self.where = name
            self.issued[name if is_layer else self._layer_now]["modules"] += 1
            if is_layer:
                self._layer_stack.append(name)
                self.calls.setdefault(name, LayerCall()).num_calls += 1
                self._in_turn.append(name)

        def leave(_: nn.Module, __: Any, outputs: Any) -> None:
            self._stack.pop()
            self.where = self._stack[-1] if self._stack else ""
            if is_layer:
                self._layer_stack.pop()
                self._last_layer = name
            if is_layer or not name:
                memories = {storage_id(tensor): tensor for tensor in tensors_in(outputs)}
                call = self.calls[name] if is_layer else self._whole
                call.outputs = [tuple(tensor.shape) for tensor in memories.values()]
                call.output_bytes = [tensor.nbytes for tensor in memories.values()]
                call.output_sizes = [tensor.numel() for tensor in memories.values()]

        module.register_forward_pre_hook(enter, prepend=True)
        module.register_forward_hook(leave)

    # -- one operator -------------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.__name__.partition(".")[0] in _READS_VALUES and not self._layer_stack and self.where != "loss":
            self._note_read(args)
        result = self.run(func, args, kwargs)
        if func.namespace != "prim":
            outputs = list(arguments_in(result))
            inputs = [*arguments_in(args), *arguments_in(kwargs)]
            if outputs:
                self._note(func, args, kwargs, result, inputs=inputs, outputs=outputs)
        return result

    def _note(
        self, func: Any, args: Any, kwargs: Any, result: Any, *, inputs: list[Tensor], outputs: list[Tensor]
    ) -> None:
        reads = {storage_id(tensor): tensor for tensor in inputs}
        writes = {storage_id(tensor): tensor for tensor in outputs}
        is_written = func._schema.is_mutable
        self._count_issued(reads, outputs, is_view=not is_written and writes.keys() <= reads.keys())
        if not is_written and writes.keys() <= reads.keys():
            return  # a view
        made_of = [self._made_of.get(memory, frozenset[str]()) for memory in reads]
        is_constant = bool(made_of) and all(made_of)
        weights = frozenset[str]().union(*made_of)
        for memory in writes:
            if memory in self.names:
                continue
            self._made_of.pop(memory, None)
            self._copies.pop(memory, None)
            if is_constant:
                self._made_of[memory] = weights
        if func.__name__.startswith(("empty", "new_empty")):
            for memory in writes:
                self._producers.pop(memory, None)
            return
        if self._is_cast and is_constant and _is_cast(func, inputs, outputs):
            self._copies[storage_id(outputs[0])] = outputs[0].numel()
            return
        place = len(self.steps)
        is_lookup = func in LOOKUPS
        products = products_of(func, args, kwargs, result)
        factor, weight = self._weight_of(products)
        step = Step(
            function=func.__name__.partition(".")[0],
            layer=self._layer_now,
            module=self.where,
            products=tuple(dataclasses.replace(product, factors=()) for product in products),
            is_lookup=func in EMBEDDINGS and bool(weights),
            saves_result=func in SAVES_RESULT,
            weights=tuple(sorted(weights)),
            weight_factor=factor,
            weight=weight,
            is_constant=is_constant,
            read_bytes=[t.nbytes for t in outputs] if is_lookup else [],
            written_bytes=[_touched_bytes(tensor) for tensor in outputs],
            shape=tuple(outputs[0].shape),
            num_runs=memory_runs(func, inputs, outputs),
            inputs=tuple({self._producers[memory] for memory in reads if memory in self._producers}),
            reads=frozenset(reads),
            writes=frozenset(writes),
            dtype=_DTYPES.get(outputs[0].dtype, ""),
            casts=[size for memory in reads if (size := self._copies.get(memory, 0))],
        )
        step.read_bytes += [_touched_bytes(tensor) for tensor in (inputs[1:] if is_lookup else inputs)]
        for memory in writes:
            self._producers[memory] = place
        self._copies.update((memory, 0) for memory in reads if memory in self._copies)
        self._place_kept(step)
        self.steps.append(step)

    @property
    def _layer_now(self) -> str:
        """The layer that is running, or the one before."""
        return self._layer_stack[-1] if self._layer_stack else self._last_layer

    def _count_issued(self, reads: Iterable[int], outputs: list[Tensor], *, is_view: bool) -> None:
        """Count a call of the host, and follow which memories have a gradient."""
        issued, has_gradient = self.issued[self._layer_now], not self._differentiated.isdisjoint(reads)
        issued["between"] += not self._layer_stack
        has_gradient = has_gradient and any(tensor.is_floating_point() or tensor.is_complex() for tensor in outputs)
        if is_view:
            issued["views"] += 1
            issued["differentiated_views"] += has_gradient
            return
        issued["operators"] += 1
        issued["differentiated"] += has_gradient
        memories = map(storage_id, outputs)
        (self._differentiated.update if has_gradient else self._differentiated.difference_update)(memories)

    def _weight_of(self, products: tuple[Sizes, ...]) -> tuple[int | None, str]:
        """Return which factor of a product is made of parameters alone, and of which one."""
        if not products:
            return None, ""
        made_of = [self._made_of.get(storage_id(factor), frozenset[str]()) for factor in products[0].factors]
        if bool(made_of[0]) == bool(made_of[1]):
            return None, ""
        factor = 1 if made_of[1] else 0
        return factor, next(iter(made_of[factor])) if len(made_of[factor]) == 1 else ""

    def _note_read(self, args: Any) -> None:
        """Note that code between the layers reads values, where a step with parameters has computed them."""
        waiting = [
            self._producers[storage_id(tensor)]
            for tensor in arguments_in(args)
            if storage_id(tensor) in self._producers
        ]
        seen: set[int] = set()
        while waiting:
            place = waiting.pop()
            if place not in seen:
                seen.add(place)
                waiting += self.steps[place].inputs
        weighted = [place for place in seen if self.steps[place].weights]
        if weighted:
            self.reads_between = self.where or "the model itself"
            self._last_read = max(self._last_read, *weighted)

    @property
    def reads_until(self) -> str:
        """The last layer whose values the code between the layers has read."""
        return self.steps[self._last_read].layer

    def spans_of(self, layers: Collection[str]) -> list[tuple[str, str]]:
        """Return the first and the last layer of what runs from each of these layers' first call to its last."""
        order = list(self.calls)
        found: list[tuple[str, str]] = []
        for name in layers:
            turns = [turn for turn, layer in enumerate(self._in_turn) if layer == name]
            if len(turns) > 1:
                places = [order.index(layer) for layer in self._in_turn[turns[0] : turns[-1] + 1]]
                if min(places) < max(places):
                    found.append((order[min(places)], order[max(places)]))
        return found

    # -- what is kept -------------------------------------------------------------------------------------------

    def _keep(self, tensor: Tensor) -> Tensor:
        memory = storage_id(tensor)
        if memory not in self._kept:
            self._kept.add(memory)
            self._held.append(tensor.untyped_storage())
            self._unplaced.append((memory, tensor.untyped_storage().nbytes()))
        return tensor

    def _place_kept(self, following: Step | None) -> None:
        """Assign what autograd has kept since the last step to that step or to the one that follows."""
        last = self.steps[-1] if self.steps else None
        for memory, size in self._unplaced:
            is_read = following is not None and memory in following.reads
            is_made = last is not None and memory in last.writes
            owner = following if is_read and not (is_made and last is not None and last.saves_result) else last
            if owner is None:
                owner = following
            if owner is not None:
                (owner.saved_casts if memory in self._copies else owner.saved_bytes).append(size)
        self._unplaced = []


def _is_cast(func: Any, inputs: list[Tensor], outputs: list[Tensor]) -> bool:
    is_copy = func.__name__.partition(".")[0] == CAST
    return is_copy and inputs[0].is_floating_point() and inputs[0].dtype != outputs[0].dtype


def _touched_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor's distinct entries; an expanded one has fewer than its shape says."""
    entries = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        entries *= size if stride else min(size, 1)
    return entries * tensor.element_size()
