"""Facts of results beside the numbers in their tensors, as numbers that are the same in all processes.

Stages compare these: the stage that runs a layer has them from the values, the others have made them up.
"""

from __future__ import annotations

import array
import collections
import contextlib
import enum
import functools
import math
import types
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from meshwright.apply.pipeline.tracing.scene import fields_of
from meshwright.apply.pipeline.walking.stand_ins import Meta
from meshwright.trees import tensors_in

__all__: list[str] = []

_DEPTH = 8  # of containers and objects inside each other
_MOST = 65536
"""Numbers of one result, after which the rest counts as equal [count]."""


def sizes_in(tree: Any, outputs: Any = None) -> Iterator[int]:
    """Yield sizes of tensors that a layer returns or writes; of its outputs whether they require a gradient, and dtypes, too."""
    for tensor in (tree,) if isinstance(tree, Tensor) else tensors_in(tree):
        yield from tensor.shape
    for tensor in (outputs,) if isinstance(outputs, Tensor) else tensors_in(outputs):
        yield from (tensor.requires_grad, _of_dtype(tensor.dtype))


@functools.cache
def _of_dtype(dtype: torch.dtype) -> int:
    return zlib.crc32(str(dtype).encode())


def facts_in(tree: Any) -> tuple[float, ...]:
    """Return what results hold beside tensors: numbers, texts, kinds and lengths of containers, attributes of objects.

    Two results have the same facts where code that reads no number of a tensor cannot tell them apart. Objects that show nothing
    of what they hold (a lock, a generator) count by their class alone.
    """
    return () if isinstance(tree, Tensor) else tuple(_Walk().of(tree))


class _Walk:
    """One walk through a tree. An object that lies in itself is left out there, and no more than `_MOST` numbers are found."""

    def __init__(self) -> None:
        self._open: set[int] = set()
        self._left = _MOST

    def of(self, item: Any) -> Iterator[float]:
        """Yield the numbers of one object."""
        if isinstance(item, Tensor | Meta | nn.Module) or self._left <= 0:  # a plan gives modules classes of its own
            return
        plain = _PLAIN.get(type(item))
        if plain is not None:
            self._left -= 1
            yield from plain(item)
        elif id(item) not in self._open and len(self._open) < _DEPTH:
            self._open.add(id(item))
            self._left -= 1
            yield _named(type(item))
            with contextlib.suppress(Exception):  # what a container of the user's own raises
                yield from self._inside(item)
            self._open.discard(id(item))

    def _inside(self, item: Any) -> Iterator[float]:
        if isinstance(item, (list, tuple, collections.deque)):
            yield len(item)
            for inner in item:
                yield from self.of(inner)
        elif isinstance(item, (set, frozenset)):
            yield from sorted(zlib.crc32(repr(tuple(self.of(inner))).encode()) for inner in item)
        elif isinstance(item, Mapping):
            yield len(item)
            for key in list(item):
                yield from self.of(key)
                yield from self.of(item[key])
        elif isinstance(item, type):
            yield _named(item)
        else:
            for inner in _parts_of(item):
                yield from self.of(inner)


def _parts_of(item: Any) -> Iterator[Any]:
    """Yield what tells an object from others of its class."""
    if isinstance(item, enum.Enum):
        yield from (item.name, item.value)
    elif isinstance(item, (np.generic, np.ndarray)):
        yield from (item.dtype.str, item.shape, item.tolist() if item.dtype.hasobject else item.tobytes())
    elif isinstance(item, (bytes, bytearray, array.array)):
        yield bytes(item)
    elif isinstance(item, str):  # a class of the user's own, as the next one
        yield from (str(item), fields_of(item))
    elif isinstance(item, (int, float, complex)):
        yield from (item.real, item.imag, fields_of(item))
    elif isinstance(item, functools.partial):
        yield from (item.func, item.args, item.keywords)
    elif isinstance(item, types.MethodType):
        yield from (item.__func__, item.__self__)
    elif isinstance(item, types.FunctionType):
        yield from (
            item.__module__,
            item.__qualname__,
            item.__code__.co_firstlineno,
            item.__defaults__,
            item.__kwdefaults__,
        )
        for cell in item.__closure__ or ():
            with contextlib.suppress(ValueError):  # an empty one
                yield cell.cell_contents
    elif isinstance(item, types.BuiltinFunctionType):
        yield from (item.__module__, item.__qualname__)
    elif isinstance(item, types.GeneratorType):
        yield from (item.gi_code.co_qualname, item.gi_frame and (item.gi_frame.f_lasti, dict(item.gi_frame.f_locals)))
    else:
        yield from _attributes_of(item)


def _attributes_of(item: Any) -> Iterator[Any]:
    """Yield an object's attributes by name; of one that has none, what it is copied by: a `Decimal`, a date, an iterator."""
    own = dict(fields_of(item) or {})
    for kind in type(item).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            with contextlib.suppress(AttributeError):
                own[name] = getattr(item, name)
    if own:
        for name in sorted(own, key=str):
            yield from (name, own[name])
        return
    yield from (part for part in item.__reduce_ex__(2)[1:3] if not isinstance(part, type))


@functools.lru_cache(maxsize=1024)
def _named(kind: type) -> float:
    return zlib.crc32(f"{kind.__module__}.{kind.__qualname__}".encode())


def _text(item: str) -> float:
    return zlib.crc32(item.encode(errors="surrogatepass"))


def _of_float(item: float) -> tuple[float, ...]:
    if math.isnan(item):
        return (3,)  # each has a hash of its own
    return (4, -item) if item < 0 else (5, item)  # the hash of -1 is that of -2


_PLAIN: dict[type, Callable[[Any], tuple[float, ...]]] = {
    type(None): lambda _: (0,),
    bool: lambda item: (1, item),
    int: lambda item: (2, item) if item >= 0 else (7, -item),
    float: _of_float,
    complex: lambda item: (8, *_of_float(item.real), *_of_float(item.imag)),
    str: lambda item: (9, _text(item)),
    bytes: lambda item: (10, zlib.crc32(item)),
    type: lambda item: (11, _named(item)),
    range: lambda item: (12, *_PLAIN[int](item.start), *_PLAIN[int](item.stop), *_PLAIN[int](item.step)),
    slice: lambda item: (13, *[n for part in (item.start, item.stop, item.step) for n in _Walk().of(part)]),
    torch.dtype: lambda item: (14, _text(str(item))),
    torch.device: lambda item: (15, _text(str(item))),
    torch.layout: lambda item: (16, _text(str(item))),
}
"""What is known at once."""
