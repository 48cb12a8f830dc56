"""What feeds what: one forward of the plain model, watched.

Every call of a torch function goes by here. Of interest are *products*, in which a parameter mixes the entries of a dim (linear,
convolution, embedding): for each tensor it is kept which products it comes from without another product between, its
*sources*. From these follow the pairs that tensor parallelism cuts: the products whose results reach nothing but one other.

Nothing here decides anything: what is missed or misread is proposed wrongly, and then refused by the proof (`proof.py`).
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshwright.apply.tensor.copies import copy_call
from meshwright.comm._torch_private import LINEAR, TURNS, without_function_modes
from meshwright.describe.tree import tensors_in

__all__: list[str] = []

_CONVOLUTIONS: Final = {torch.conv1d, torch.conv2d, torch.conv3d, F.conv1d, F.conv2d, F.conv3d}
_TRANSPOSED_CONVOLUTIONS: Final = {
    F.conv_transpose1d,
    F.conv_transpose2d,
    F.conv_transpose3d,
    torch.conv_transpose1d,
    torch.conv_transpose2d,
    torch.conv_transpose3d,
}
_LINEAR: Final = {F.linear, LINEAR}
_EMBEDDINGS: Final = {F.embedding, torch.embedding}
DROPOUTS: Final = {
    F.dropout,
    F.dropout1d,
    F.dropout2d,
    F.dropout3d,
    F.alpha_dropout,
    F.feature_alpha_dropout,
    torch.dropout,
    torch.dropout_,
    torch.feature_dropout,
    torch.alpha_dropout,
}
_SPLITS: Final = {torch.split, torch.Tensor.split, torch.split_with_sizes, torch.Tensor.split_with_sizes}
_MATMULS: Final = {
    torch.matmul,
    torch.mm,
    torch.bmm,
    torch.Tensor.matmul,
    torch.Tensor.mm,
    torch.Tensor.bmm,
    torch.Tensor.__matmul__,
}
_SWAPS: Final = {torch.transpose, torch.Tensor.transpose, torch.Tensor.swapaxes, torch.swapaxes}
_SAME: Final = {
    torch.Tensor.to,
    torch.Tensor.float,
    torch.Tensor.double,
    torch.Tensor.bfloat16,
    torch.Tensor.half,
    torch.Tensor.type,
    torch.Tensor.type_as,
    torch.Tensor.contiguous,
    torch.Tensor.clone,
}
_ITEMS: Final = {torch.Tensor.__getitem__, torch.Tensor.select, torch.select}

_ELEMENTWISE: Final = {
    "add",
    "radd",
    "iadd",
    "mul",
    "rmul",
    "imul",
    "sub",
    "rsub",
    "div",
    "truediv",
    "where",
    "expand",
    "cat",
}

OUTPUT: Final = -1
"""The successor that stands for what the model returns."""


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
        """What stands for it among the sources of tensors; a weight may be an embedding and a head, which differ here."""
        return -self.parameter if self.kind == "embedding" else self.parameter


@dataclasses.dataclass(kw_only=True)
class Call:
    """The first call of a module."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[int, ...] = ()
    """The ids of the tensors that it returned."""


class Trace(TorchFunctionMode):
    """A forward that is being watched. Run the model inside.

    Args:
        module: The model, or a copy of it that shares its parameters.
    """

    def __init__(self, module: nn.Module) -> None:
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
        self.slices: dict[int, dict[int, set[int]]] = {}
        """For a product: size of the last dim of a tensor that comes from it -> the bounds of slices of it."""
        self.drops: set[int] = set()
        """Products whose results met a dropout that draws."""
        self.drawing: set[str] = set()
        """Names of the modules in which a dropout drew."""
        self.into_cross_entropy: set[int] = set()
        """Products whose results a cross-entropy took."""
        self.calls: dict[str, Call] = {}
        self.num_calls: collections.Counter[str] = collections.Counter()
        self._parameters = {id(parameter): parameter for parameter in module.parameters()}
        self._sources: dict[int, frozenset[int]] = {}
        self._dims: dict[int, tuple[int, list[int | None]]] = {}  # tensors made of a parameter: whose, and which dims
        self._path: list[str] = []
        self._handles: list[Any] = []
        self._alive: list[Any] = []  # an id is only worth something while its tensor lives
        for name, child in module.named_modules():
            self._watch(name, child)
        for parameter in self._parameters.values():
            self._dims[id(parameter)] = (id(parameter), list(range(parameter.dim())))

    def _watch(self, name: str, module: nn.Module) -> None:
        def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._path.append(name)
            self.num_calls[name] += 1
            if name not in self.calls:
                self._alive.append((args, kwargs))
                with without_function_modes():
                    self.calls[name] = Call(args=copy_call(args), kwargs=copy_call(kwargs))

        def leave(_: nn.Module, __: Any, outputs: Any) -> None:
            self._path.pop()
            call = self.calls.get(name)
            if call is not None and not call.results:
                call.results = tuple(id(tensor) for tensor in tensors_in(outputs))

        self._handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
        self._handles.append(module.register_forward_hook(leave))

    def stop(self) -> None:
        """Stop watching the modules."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def finish(self, outputs: Any) -> None:
        """Take note of what the model returned."""
        for tensor in tensors_in(outputs):
            for source in self._sources.get(id(tensor), ()):
                self.successors.setdefault(source, set()).add(OUTPUT)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        outputs = list(_tensors(result))
        if outputs:
            self._alive.append((args, kwargs, outputs))
            self._note(func, args, kwargs, outputs)
        return result

    # -- one call -----------------------------------------------------------------------------------------------

    def _note(self, func: Callable[..., Any], args: Any, kwargs: Any, outputs: list[Tensor]) -> None:
        inputs = [*_tensors(args), *_tensors(kwargs)]
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
        self._note_details(func, args, kwargs, sources)
        mixing = [] if product else [owner for owner, _ in derived if self._mixes(func, owner)]
        for owner in mixing:  # recurrences, attention in one call: what comes out is of their own making
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
            # A function that writes in place gives its own input back, which then comes from both.
            self._sources[id(tensor)] = sources | (
                self._sources.get(id(tensor), frozenset()) if not product else frozenset()
            )
            for source in sources:
                self.sizes.setdefault(source, set()).update(tensor.shape)
        if func is torch.Tensor.__setitem__ and inputs:
            self._sources[id(inputs[0])] = sources

    def _note_details(self, func: Callable[..., Any], args: Any, kwargs: Any, sources: frozenset[int]) -> None:
        if func in _SPLITS and len(args) > 1 and isinstance(args[1], (list, tuple)):
            for source in sources:
                self.splits.setdefault(source, set()).add(tuple(args[1]))
        if func is torch.Tensor.__getitem__ and isinstance(args[1], tuple) and isinstance(args[1][-1], slice):
            size = args[0].shape[-1]
            bounds = {bound for bound in args[1][-1].indices(size)[:2] if 0 < bound < size}
            for source in sources if len(args[1]) in (args[0].dim(), 2) else ():
                self.slices.setdefault(source, {}).setdefault(size, set()).update(bounds)
        if _draws(func, args, kwargs):
            self.drops.update(sources)
            self.drawing.update(self._path)
        if func is F.cross_entropy:
            self.into_cross_entropy.update(sources)

    def _mixes(self, func: Callable[..., Any], owner: int) -> bool:
        """Tell whether a use that is no product may still mix the entries of a dim."""
        shape = self._parameters[owner].shape
        if func in _CONVOLUTIONS:  # one in groups: each output has its own inputs
            return False
        return sum(size > 1 for size in shape) > 1 and getattr(func, "__name__", "").strip("_") not in _ELEMENTWISE

    def _note_derived(self, func: Callable[..., Any], args: Any, outputs: list[Tensor]) -> bool:
        """Follow a parameter through what only turns it or takes a part of it; tell whether that is what happened."""
        first = args[0] if args else None
        if not isinstance(first, Tensor) or id(first) not in self._dims or len(outputs) != 1:
            return False
        owner, dims = self._dims[id(first)]
        if func in TURNS and first.dim() >= 2:
            dims = [*dims[:-2], dims[-1], dims[-2]]
        elif func in _SWAPS and len(args) == 3:
            dims = list(dims)
            dims[args[1]], dims[args[2]] = dims[args[2]], dims[args[1]]
        elif func in _ITEMS and outputs[0].dim() == first.dim() - 1:
            index = args[1]
            if not (func is torch.Tensor.__getitem__ and _is_number(index)) and index != 0:
                return False
            dims = dims[1:]
        elif func not in _SAME:
            return False
        if outputs[0].dim() != len(dims):
            return False
        self._dims[id(outputs[0])] = (owner, dims)
        return True

    def _as_product(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Product | None:
        found = _operands(func, args, kwargs)
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


def _operands(func: Callable[..., Any], args: Any, kwargs: Any) -> tuple[str, Any, Any, int, int] | None:
    """Return (kind, data, weight, the weight's dim of the result's entries, its dim that is summed over) of a product."""
    values = [*args, *kwargs.values()]
    if len(values) < 2:
        return None
    if func in _LINEAR:
        return "linear", values[0], kwargs.get("weight", values[1]), -2, -1
    if func in _CONVOLUTIONS or func in _TRANSPOSED_CONVOLUTIONS:
        is_turned = func in _TRANSPOSED_CONVOLUTIONS
        groups = kwargs.get("groups", args[6] if len(args) > 6 else 1)
        out_place, in_place = (1, 0) if is_turned else (0, 1)
        weight = kwargs.get("weight", values[1])
        return None if groups != 1 else ("conv", values[0], weight, out_place, in_place)
    if func is torch.einsum:
        return _einsum_operands(values)
    if func is torch.Tensor.__getitem__ and isinstance(args[1], Tensor) and not args[1].is_floating_point():
        return ("embedding", args[1], args[0], -1, -2) if args[0].dim() == 2 and args[1].dtype != torch.bool else None
    if func in _EMBEDDINGS:
        pair = (args[0], args[1]) if func is F.embedding else (args[1], args[0])
        return "embedding", *pair, -1, -2
    if func in (torch.addmm, torch.baddbmm) and len(args) >= 3:
        return "linear", args[1], args[2], -1, -2
    if func in _MATMULS and isinstance(args[1], Tensor) and args[1].dim() >= 2:
        return "linear", args[0], args[1], -1, -2
    return None


def _einsum_operands(values: list[Any]) -> tuple[str, Any, Any, int, int] | None:
    """Return what an einsum of data with a parameter is; of several dims that are summed over, or kept, the weight's first."""
    equation, *rest = values
    operands = [tensor for item in rest for tensor in (item if isinstance(item, (list, tuple)) else [item])]
    if not isinstance(equation, str) or "->" not in equation or "." in equation or len(operands) != 2:
        return None
    terms, _, result = equation.replace(" ", "").partition("->")
    data, weight = sorted(
        zip(operands, terms.split(","), strict=True), key=lambda pair: isinstance(pair[0], nn.Parameter)
    )
    kept = [place for place, letter in enumerate(weight[1]) if letter in result and letter not in data[1]]
    summed = [place for place, letter in enumerate(weight[1]) if letter in data[1] and letter not in result]
    return ("linear", data[0], weight[0], kept[0], summed[0]) if kept and summed else None


def _draws(func: Callable[..., Any], args: Any, kwargs: Any) -> bool:
    if func in DROPOUTS:
        p = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
        training = kwargs.get("training", kwargs.get("train", args[2] if len(args) > 2 else True))
        return bool(training) and p > 0
    if func is F.scaled_dot_product_attention:
        return kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0) > 0
    if func is F.multi_head_attention_forward:
        return bool(kwargs.get("training", True)) and (args[9] if len(args) > 9 else 0.0) > 0
    return False


def _is_number(index: Any) -> bool:
    return isinstance(index, int) or (isinstance(index, Tensor) and index.dim() == 0 and index.dtype != torch.bool)


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from _tensors(item)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from _tensors(item)
