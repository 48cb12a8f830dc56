"""One call of a torch function, as a rule sees it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import Tensor

from meshwright.apply.tensor.types.lattice import PARTIAL, REPLICATED, Kind, RefusedError, Type, Typed, shard

__all__: list[str] = []

_FIRST = ("input", "query", "tensors", "self")
"""Names of first arguments, for code that names each of them."""


@dataclasses.dataclass(eq=False)
class Operation:
    """A call that has run, with the types of its arguments."""

    name: str
    """The function's plain name."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    _: dataclasses.KW_ONLY
    inputs: list[Typed]
    """The tensors among its arguments."""
    outputs: list[Tensor]
    wholes: list[tuple[int, ...]] | None = None
    """The outputs' shapes in the whole run; None where they are not known."""
    integers: dict[int | str, int] = dataclasses.field(default_factory=dict[int | str, int])
    """The integer arguments in the whole run."""

    def __post_init__(self) -> None:
        named = next((name for name in _FIRST if name in self.kwargs), None)
        if not self.args and named is not None:
            self.args = (self.kwargs[named],)
            self.kwargs = {name: value for name, value in self.kwargs.items() if name != named}
        self._types = {id(value.tensor): value.type for value in self.inputs}

    def type(self, value: Any) -> Type:
        """Return the type of an argument; anything but a tensor is the same on every rank."""
        return self._types.get(id(value), REPLICATED) if isinstance(value, Tensor) else REPLICATED

    def argument(self, place: int, *names: str, default: Any = None) -> Any:
        """Return an argument by its position, or one of its names."""
        for name in names:
            if name in self.kwargs:
                return self.kwargs[name]
        return self.args[place] if len(self.args) > place else default

    def groups(self, place: int, name: str) -> tuple[int, int]:
        """Return the number of groups of channels, on this rank and in the whole run."""
        own = int(self.argument(place, name, default=1))
        return own, self.integers.get(name, self.integers.get(place, own))

    def check_groups(self, place: int, name: str, data: Tensor, dim: int) -> None:
        """Refuse channels in parts, along this dim of the data, where the groups are not divided like them."""
        own, whole = self.groups(place, name)
        full = next(value.full[dim] for value in self.inputs if value.tensor is data)
        if whole * data.shape[dim] != own * full:
            raise RefusedError("has as many groups on shards as the whole: its groups would be other channels")

    @property
    def is_replicated(self) -> bool:
        """Whether all its arguments are replicated."""
        return all(value.type.kind == "replicated" for value in self.inputs)

    def has(self, kind: Kind) -> bool:
        """Tell whether an argument is of this kind."""
        return any(value.type.kind == kind for value in self.inputs)

    # -- building blocks of rules ---------------------------------------------------------------------------------

    def differing(self, index: int) -> list[int]:
        """Return the dims in which an output differs in size from the whole run's."""
        if self.wholes is None:
            raise RefusedError("its shape in the whole run is not known")
        if len(self.wholes) != len(self.outputs):
            raise RefusedError(f"gives {len(self.outputs)} tensors on shards, {len(self.wholes)} of the whole")
        own, whole = tuple(self.outputs[index].shape), self.wholes[index]
        if len(own) != len(whole):
            raise RefusedError(f"gives a tensor of shape {list(own)} on shards, {list(whole)} of the whole")
        return [dim for dim, (mine, theirs) in enumerate(zip(own, whole, strict=True)) if mine != theirs]

    def by_shapes(self) -> list[Type]:
        """Return the outputs' types where each is a shard of the whole run's, along the one dim that differs.

        Raises:
            RefusedError: None differs, or several do.
        """
        found: list[Type] = []
        for index in range(len(self.outputs)):
            dims = self.differing(index)
            if len(dims) == 1:
                self._check_share(index, dims[0])
            else:
                what = "the same shape as the whole" if not dims else f"a shape that differs in the dims {dims}"
                raise RefusedError(f"takes {self.told()} and gives {what}: it reads across the parts")
            found.append(shard(dims[0]))
        return found

    def _check_share(self, index: int, dim: int) -> None:
        """Refuse an output whose share of the whole is not that of a sharded argument."""
        own, whole = self.outputs[index].shape[dim], (self.wholes or [])[index][dim]
        parts = [value for value in self.inputs if value.type.dim is not None]
        shares = [(value.tensor.shape[value.type.dim or 0], value.full[value.type.dim or 0]) for value in parts]
        if parts and not any(own * full == whole * mine for mine, full in shares):
            raise RefusedError(
                f"takes {self.told()} and gives {own} entries where the whole gives {whole}: another share"
            )

    def all(self, of: Type) -> list[Type]:
        """Return one type for each output."""
        return [of] * len(self.outputs)

    def linear(self) -> list[Type] | None:
        """Return partial for each output where every argument is a term of a sum, or zeros; None where none is a term."""
        if not self.has("partial"):
            return None
        for value in self.inputs:
            if value.type.kind != "partial" and not value.type.is_zero:
                raise RefusedError(mixing(value))
        return self.all(PARTIAL)

    def refuse_partial(self) -> None:
        """Refuse arguments that are terms of a sum."""
        if self.has("partial"):
            raise RefusedError("is not linear, and takes a term of a sum (partial): f(a) + f(b) is not f(a + b)")

    def refuse_others(self, *allowed: Any) -> None:
        """Refuse tensors that are not replicated, besides those named."""
        known = {id(value) for value in allowed}
        for value in self.inputs:
            if id(value.tensor) not in known and value.type.kind != "replicated":
                raise RefusedError(f"takes {value.type} where it must have a replicated tensor")

    def told(self) -> str:
        """Return the arguments' types, for a message."""
        return ", ".join(str(value.type) for value in self.inputs) or "nothing"


def mixing(value: Typed) -> str:
    """Return why something must not be combined with a term of a sum."""
    if value.type.kind == "replicated":
        return "adds a replicated tensor to a term of a sum (partial): over all ranks it would be added once for each"
    return f"mixes {value.type} with a term of a sum (partial)"


def words(text: str) -> frozenset[str]:
    """Return the names in a text."""
    return frozenset(text.split())


def normal(dim: int, num_dims: int) -> int:
    """Return a dim counted from 0."""
    return dim + num_dims if dim < 0 else dim


def chosen(dims: Any, num_dims: int) -> set[int]:
    """Return the dims that an argument names, one or several, counted from 0; None names all of them."""
    if dims is None or dims == ():
        return set(range(num_dims))
    return {normal(dim, num_dims) for dim in (dims if isinstance(dims, (tuple, list)) else (dims,))}


Rule = Callable[[Operation], list[Type]]
