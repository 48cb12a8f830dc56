"""Trace of one forward of the plain model: which products feed which.

Every call of a torch function passes through here. *Products* matter: calls in which a parameter mixes the entries of a dim
(linear, convolution, embedding). For each tensor the trace keeps its *sources*: the products it comes from without another
product between. From these follow the pairs that tensor parallelism cuts: products whose results reach only one other product.

Nothing here decides anything. A missed or misread call leads to a wrong proposal, which the proof (`proof.py`) refuses.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshwright._torch_private import TURNS, without_function_modes
from meshwright.apply.modules.copies import copy_call
from meshwright.apply.tensor.guards.ambient import Ambient, current_ambient, with_gradients
from meshwright.apply.tensor.guards.signatures import call_key
from meshwright.apply.tensor.search.meetings import Meetings
from meshwright.apply.tensor.search.operations import (
    CONVOLUTIONS,
    ELEMENTWISE,
    ITEMS,
    JOINS,
    SAME,
    SPLITS,
    SWAPS,
    counts_ids,
    draws,
    is_number,
    operands,
)
from meshwright.apply.tensor.types.typed_run import READS, SIZES, name_of
from meshwright.trees import arguments_in, tensors_in

__all__: list[str] = []

OUTPUT: Final = -1
"""The successor that stands for what the model returns."""

MAX_CALLS: Final = 8
"""Calls of one module that differ in more than numbers, and are kept [count]."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Product:
    """One call in which a parameter mixes the entries of a dim."""

    parameter: int
    """The id of the parameter."""
    kind: str
    """"linear", "conv" or "embedding"."""
    out_dim: int
    """The parameter's dim whose entries are those of the result."""
    in_dim: int
    """The parameter's dim that is summed over; an embedding's tokens."""
    path: tuple[str, ...]
    """Names of the modules that were running, outermost first."""
    sources: frozenset[int]
    """Keys of the products that its input comes from."""
    data: int
    """The id of its input."""

    @property
    def key(self) -> int:
        """The product's identity among the sources of tensors; a weight may be an embedding and a head, which differ here."""
        return -self.parameter if self.kind == "embedding" else self.parameter


@dataclasses.dataclass(kw_only=True)
class Call:
    """A call of a module."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[int, ...] = ()
    """The ids of the tensors that it returned."""
    ambient: Ambient = dataclasses.field(default_factory=lambda: with_gradients(current_ambient(), wanted=True))
    """What surrounded it."""


_ASKED = READS | SIZES
"""Names of functions that give code a number of a tensor."""


class Trace(TorchFunctionMode):
    """A traced forward. Run the model inside this context.

    Args:
        module: The model, or a copy of it that shares its parameters.
        originals: For a copy: id of a parameter or buffer of the model -> id of the copy's; a loss may read the model's.
    """

    def __init__(self, module: nn.Module, originals: Mapping[int, int] | None = None) -> None:
        super().__init__()
        self.products: dict[int, list[Product]] = {}
        """By key, in the order of the calls."""
        self.successors: dict[int, set[int]] = {}
        self.other_uses: dict[int, set[str]] = {}
        """Functions that used a parameter in another way than a product."""
        self.met: dict[int, set[int]] = {}
        """For a product: other parameters that its result met before the next product (norms, scales, biases)."""
        self.sizes: dict[int, set[int]] = {}
        """For a product: sizes of dims of tensors that come from it."""
        self.splits: dict[int, set[tuple[int, ...]]] = {}
        """For a product: how tensors that come from it were split."""
        self.joins: dict[int, set[tuple[int, ...]]] = {}
        """For a product: sizes of the tensors that were put together, side by side, with one that comes from it."""
        self.slices: dict[int, dict[int, set[int]]] = {}
        """For a product: size of a dim of a tensor that comes from it -> the bounds of slices of it."""
        self.drops: set[int] = set()
        """Products whose results met a dropout, whether it drew or not."""
        self.drawing: set[str] = set()
        """Names of the modules in which a dropout was."""
        self.counting: set[int] = set()
        """Embeddings that do more than look up: they shorten the vectors that are found, or count how often."""
        self.meetings = Meetings()
        """Sources of tensors that meet entry by entry."""
        self.uses: dict[int, dict[tuple[str, ...], set[str]]] = {}
        """Of a parameter or buffer: names of the modules that were running -> the functions that used it there."""
        self.into_cross_entropy: set[int] = set()
        """Products whose results a cross-entropy took."""
        self.calls: dict[str, Call] = {}
        """The first of each module."""
        self.distinct: dict[str, dict[str, Call]] = {}
        """By module and signature, the first of each; at most one more than MAX_CALLS."""
        self.num_calls: collections.Counter[str] = collections.Counter()
        self._work: collections.Counter[str] = collections.Counter()
        self.module = module
        self.names: dict[int, list[str]] = {}
        """id of a parameter -> all its FQNs."""
        self.keys: dict[str, int] = {}
        """FQN of a parameter -> its id."""
        self.parameters: dict[int, nn.Parameter] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            self.names.setdefault(id(parameter), []).append(name)
            self.keys[name] = id(parameter)
            self.parameters[id(parameter)] = parameter
        self.replaced: set[int] = set()
        """Parameters in whose place their layer ran with another tensor (`torch.func.functional_call`)."""
        self._sources: dict[int, frozenset[int]] = {}
        self._dims: dict[int, tuple[int, list[int | None]]] = {}  # tensors made of a parameter: whose, and which dims
        self._parts: dict[int, tuple[int, tuple[int, ...]]] = {}  # tensors put together: along which dim, and sizes
        self._joined: dict[int, set[int]] = {}  # tensors put together from vectors: whose
        self._path: list[str] = []
        self._handles: list[Any] = []
        self._alive: list[Any] = [list(module.buffers())]  # an id identifies a tensor only while the tensor lives
        for name, child in module.named_modules():
            self._watch(name, child)
        for parameter in self.parameters.values():
            self._dims[id(parameter)] = (id(parameter), list(range(parameter.dim())))
        own = [*self.parameters, *(id(buffer) for buffer in module.buffers())]
        self._watched = {**dict(zip(own, own, strict=True)), **(originals or {})}

    def _watch(self, name: str, module: nn.Module) -> None:
        def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._path.append(name)
            self.num_calls[name] += 1
            self._note_replaced(name, module)
            with without_function_modes():
                ambient = current_ambient()
                signature = call_key(args, kwargs, ambient)
            known = self.distinct.setdefault(name, {})
            if signature not in known and len(known) <= MAX_CALLS:
                self._alive.append((args, kwargs))
                with without_function_modes():
                    known[signature] = Call(args=copy_call(args), kwargs=copy_call(kwargs), ambient=ambient)
                self.calls.setdefault(name, known[signature])

        def leave(_: nn.Module, __: Any, outputs: Any) -> None:
            self._path.pop()
            call = self.calls.get(name)
            if call is not None and not call.results:
                call.results = tuple(id(tensor) for tensor in tensors_in(outputs))

        self._handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
        self._handles.append(module.register_forward_hook(leave))

    def _note_replaced(self, name: str, module: nn.Module) -> None:
        prefix = f"{name}." if name else ""
        for own, tensor in module._parameters.items():
            if tensor is not None and id(tensor) not in self.parameters and prefix + own in self.keys:
                self.replaced.add(self.keys[prefix + own])

    def stop(self) -> None:
        """Stop watching the modules."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def finish(self, outputs: Any) -> None:
        """Record the model's outputs."""
        for tensor in tensors_in(outputs):
            for source in self._sources.get(id(tensor), ()):
                self.successors.setdefault(source, set()).add(OUTPUT)
            self._note_uses([tensor], "what the model returns")

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        outputs = list(arguments_in(result))
        if outputs or name_of(func) in _ASKED:
            self._note_uses([*arguments_in(args), *arguments_in(kwargs)], getattr(func, "__name__", str(func)))
        if outputs:
            self._alive.append((args, kwargs, outputs))
            self._work.update(self._path)
            self._note(func, args, kwargs, outputs)
        return result

    def work_of(self, scope: str) -> int:
        """Return the functions that give tensors in one run of each of a module's distinct calls [count].

        It measures what a trial costs, the same on every machine and for every size of tensors.
        """
        return -(-self._work[scope] * len(self.distinct.get(scope, ())) // max(1, self.num_calls[scope]))

    def owner(self, product: Product) -> str:
        """Return the name of the module that owns a product's parameter, the innermost that was running."""
        own = [name.rpartition(".")[0] for name in self.names[product.parameter]]
        return next((path for path in reversed(product.path) if path in own), own[0])

    def is_layer(self, product: Product) -> bool:
        """Tell whether the product is all that its owner computes, as in nn.Linear: no other matrix is there."""
        name = self.owner(product)
        owner = self.module.get_submodule(name)
        call = self.calls.get(name)
        return (
            product.path[-1:] == (name,)
            and not any(True for _ in owner.children())
            and sum(parameter is not None for parameter in owner._parameters.values()) <= 2
            and sum(parameter is not None and parameter.dim() > 1 for parameter in owner._parameters.values()) <= 1
            and call is not None
            and len(call.results) == 1
        )

    # -- one call -----------------------------------------------------------------------------------------------

    def _note_uses(self, inputs: list[Tensor], function: str) -> None:
        for tensor in inputs:
            key = self._watched.get(id(tensor))
            if key is None and id(tensor) in self._dims:
                key = self._dims[id(tensor)][0]
            if key is not None:
                self.uses.setdefault(key, {}).setdefault(tuple(self._path), set()).add(function)

    def _note(self, func: Callable[..., Any], args: Any, kwargs: Any, outputs: list[Tensor]) -> None:
        inputs = [*arguments_in(args), *arguments_in(kwargs)]
        derived = [self._dims[id(tensor)] for tensor in inputs if id(tensor) in self._dims]
        if derived and len({owner for owner, _ in derived}) == 1 and self._note_derived(func, args, outputs):
            return
        product = self._as_product(func, args, kwargs) if derived else None
        sources: frozenset[int] = frozenset().union(*(self._sources.get(id(tensor), ()) for tensor in inputs))
        name = getattr(func, "__name__", str(func))
        for owner in {owner for owner, _ in derived} - ({product.parameter} if product else set()):
            # The bias of a product meets its result.
            for met_by in (product.key,) if product else sources:
                self.met.setdefault(met_by, set()).add(owner)
            self.other_uses.setdefault(owner, set()).add(name)
        self._note_joined(func, inputs, outputs, {owner for owner, _ in derived}, product)
        self._note_details(func, args, kwargs, sources)
        if func in JOINS:
            self._note_parts(args, kwargs, outputs, sources)
        self.meetings.note(func, [] if product else inputs, outputs, self._sources)
        mixing = [] if product else [owner for owner, _ in derived if self._mixes(func, owner)]
        for owner in mixing:  # recurrences, attention in one call: their results have no known sources
            for source in sources:
                self.successors.setdefault(source, set()).add(owner)
            sources = frozenset()
        if product is not None:
            self.products.setdefault(product.key, []).append(product)
            for source in product.sources:
                self.successors.setdefault(source, set()).add(product.key)
            self.successors.setdefault(product.key, set())
            sources = frozenset([product.key])
        for tensor in outputs:
            # An in-place function returns its own input, which then has both sources.
            self._sources[id(tensor)] = sources | (
                self._sources.get(id(tensor), frozenset()) if not product else frozenset()
            )
            for source in sources:
                self.sizes.setdefault(source, set()).update(tensor.shape)
        if func is torch.Tensor.__setitem__ and inputs:
            self._sources[id(inputs[0])] = sources

    def _note_joined(
        self, func: Callable[..., Any], inputs: list[Tensor], outputs: list[Tensor], owners: set[int], product: Any
    ) -> None:
        """Follow vectors that are put together, as biases of queries and values are, to the product that takes them."""
        if product is not None:
            for tensor in inputs:
                self.met.setdefault(product.key, set()).update(self._joined.get(id(tensor), ()))
        elif func in JOINS and all(self.parameters[owner].dim() == 1 for owner in owners):
            self._joined |= {id(tensor): owners for tensor in outputs if owners}

    def _note_details(self, func: Callable[..., Any], args: Any, kwargs: Any, sources: frozenset[int]) -> None:
        if func in SPLITS and len(args) > 1 and isinstance(args[1], (list, tuple)):
            for source in sources:
                self.splits.setdefault(source, set()).add(tuple(args[1]))
        if func is torch.Tensor.__getitem__ and isinstance(args[1], tuple) and isinstance(args[1][-1], slice):
            is_last = len(args[1]) >= args[0].dim() or any(item is Ellipsis or item is None for item in args[1])
            place = -1 if is_last else len(args[1]) - 1
            size = args[0].shape[place]
            bounds = {bound for bound in args[1][-1].indices(size)[:2] if 0 < bound < size}
            for source in sources if len(args[1]) in (args[0].dim(), 2) else ():
                self.slices.setdefault(source, {}).setdefault(size, set()).update(bounds)
        if draws(func, args, kwargs):
            self.drops.update(sources)
            self.drawing.update(self._path)
        if counts_ids(func, args, kwargs):
            weight = args[1] if len(args) > 1 else kwargs["weight"]
            self.counting.update({self._dims[id(weight)][0]} if id(weight) in self._dims else ())
        if func is F.cross_entropy:
            self.into_cross_entropy.update(sources)

    def _note_parts(self, args: Any, kwargs: Any, outputs: list[Tensor], sources: frozenset[int]) -> None:
        tensors = args[0] if args else kwargs["tensors"]
        dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % outputs[0].dim()
        sizes: tuple[int, ...] = ()
        for tensor in tensors:
            along, parts = self._parts.get(id(tensor), (dim, ()))
            sizes += parts if parts and along == dim else (tensor.shape[dim],) if tensor.dim() > dim else ()
        self._parts[id(outputs[0])] = dim, sizes
        for source in sources:
            self.joins.setdefault(source, set()).add(sizes)

    def _mixes(self, func: Callable[..., Any], owner: int) -> bool:
        """Tell whether a use that is not a product may still mix the entries of a dim."""
        shape = self.parameters[owner].shape
        if func in CONVOLUTIONS:  # one in groups: each output has its own inputs
            return False
        return sum(size > 1 for size in shape) > 1 and getattr(func, "__name__", "").strip("_") not in ELEMENTWISE

    def _note_derived(self, func: Callable[..., Any], args: Any, outputs: list[Tensor]) -> bool:
        """Follow a parameter through a transposition or a slice; tell whether the call was one."""
        first = args[0] if args else None
        if not isinstance(first, Tensor) or id(first) not in self._dims or len(outputs) != 1:
            return False
        owner, dims = self._dims[id(first)]
        if func in TURNS and first.dim() >= 2:
            dims = [*dims[:-2], dims[-1], dims[-2]]
        elif func in SWAPS and len(args) == 3:
            dims = list(dims)
            dims[args[1]], dims[args[2]] = dims[args[2]], dims[args[1]]
        elif func in ITEMS and outputs[0].dim() == first.dim() - 1:
            index = args[1]
            if not (func is torch.Tensor.__getitem__ and is_number(index)) and index != 0:
                return False
            dims = dims[1:]
        elif func not in SAME:
            return False
        if outputs[0].dim() != len(dims):
            return False
        self._dims[id(outputs[0])] = (owner, dims)
        return True

    def _as_product(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Product | None:
        found = operands(func, args, kwargs)
        if found is None:
            return None
        kind, data, weight, out_place, in_place = found
        if not isinstance(weight, Tensor) or id(weight) not in self._dims or id(data) in self._dims:
            return None
        owner, dims = self._dims[id(weight)]
        out_dim, in_dim = dims[out_place], dims[in_place]
        if out_dim is None or in_dim is None:
            return None
        return Product(
            parameter=owner,
            kind=kind,
            out_dim=out_dim,
            in_dim=in_dim,
            path=tuple(self._path),
            sources=self._sources.get(id(data), frozenset()),
            data=id(data),
        )
