"""Places that a call can write into beside its results: containers and objects among its arguments, and module attributes.

A layer may append to a list that it is given, write into a state object, or keep an auxiliary loss as an attribute. On the stage
that runs the layer this happens by itself. The other stages repeat the writes that a run on fake tensors has made.
"""

from __future__ import annotations

import collections
import dataclasses
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.apply.pipeline.walking.stand_ins import replace_tensors, tensors_of
from meshwright.apply.state.attributes import OF_TORCH
from meshwright.trees import LEAVES

__all__: list[str] = []

Path = tuple[Any, ...]
"""(which argument or module, key, key, ...); the key `VARS` leads to an object's attributes."""

VARS = "__dict__"
_OPAQUE = (
    nn.Module,
    type,
    types.FunctionType,
    types.MethodType,
    types.BuiltinFunctionType,
    types.ModuleType,
    torch.Generator,
)
_DEPTH = 6
DEEP = 8
"""Containers and objects inside each other that a run without numbers restores: a cache of two caches has seven [count]."""


def fields_of(item: Any) -> dict[str, Any] | None:
    """Return the attributes of a plain object that a forward passes on; None where it has none."""
    if isinstance(item, _OPAQUE):
        return None
    found = getattr(item, VARS, None)
    return found if type(found) is dict and found else None


def places_in(roots: Iterable[tuple[Any, Any]], *, opens: bool = True, depth: int = _DEPTH) -> list[tuple[Path, Any]]:
    """Return (path, list or dict) of the lists, dicts and attribute dicts of objects that some roots reach, each once.

    Args:
        roots: (name, object) of the arguments; (name, attributes) of modules.
        opens: Whether to look into attributes of objects.
        depth: Containers and objects inside each other [count].
    """
    found: list[tuple[Path, Any]] = []
    seen: set[int] = set()

    def look(path: Path, item: Any, depth: int) -> None:
        if isinstance(item, Tensor) or type(item) in LEAVES or not depth:
            return
        if isinstance(item, (list, dict)):
            if id(item) in seen:
                return
            seen.add(id(item))
            found.append((path, item))
        if isinstance(item, (list, tuple, dict)):
            for key, value in list(item.items()) if isinstance(item, dict) else enumerate(item):
                look((*path, key), value, depth - 1)
        elif opens:
            look((*path, VARS), fields_of(item), depth - 1)

    for name, root in roots:
        look((name,), root, depth)
    return found


def places_of_call(
    args: tuple[Any, ...], kwargs: dict[str, Any], *, opens: bool = True, depth: int = _DEPTH
) -> list[tuple[Path, Any]]:
    """Return the places that a call can write into through its arguments; usually these are tensors alone, and there is none."""
    roots = [*enumerate(args), *kwargs.items()]
    if all(isinstance(item, Tensor) or type(item) in LEAVES for _, item in roots):
        return []
    return places_in(roots, opens=opens, depth=depth)


def containers_of_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the arguments of a call that it may write into without torch: containers, arrays and objects."""
    items = (*args, *kwargs.values())
    return [item for item in items if not (isinstance(item, (Tensor, *_OPAQUE)) or type(item) in LEAVES)]


def plain_tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor] | None:
    """Return the tensors among a call's arguments, each once; None where another argument may hold tensors.

    Most calls of layers have tensors only, and there are many in a step, so this is the fast path.
    """
    found: list[Tensor] = []
    for item in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(item, Tensor):
            found.append(item)
        elif type(item) not in LEAVES:
            return None
    return found if len(found) < 2 else list({id(tensor): tensor for tensor in found}.values())


def places_of_modules(modules: Iterable[tuple[str, nn.Module]]) -> list[tuple[Path, Any]]:
    """Return the places that code of these modules can write into: their attributes, and the containers in those."""
    found: list[tuple[Path, Any]] = []
    for name, module in modules:
        own = {key: value for key, value in vars(module).items() if key not in OF_TORCH}
        found.append(((("module", name),), vars(module)))
        found += [((("module", name), *path), item) for path, item in places_in(own.items())]
    seen: set[int] = set()
    return [(path, item) for path, item in found if not (id(item) in seen or seen.add(id(item)))]


def _items(place: Any) -> Iterator[tuple[Any, Any]]:
    return enumerate(place) if isinstance(place, list) else iter(list(place.items()))


def _copy(place: Any) -> Any:
    return list(place) if isinstance(place, list) else dict(place)


def _delete(place: dict[Any, Any], key: Any) -> None:
    """Delete a key by the container's own kind: outputs of Hugging Face refuse it, an OrderedDict keeps its keys twice."""
    kind: Any = collections.OrderedDict if isinstance(place, collections.OrderedDict) else dict
    kind.__delitem__(place, key)


def tensors_of_call(args: tuple[Any, ...], kwargs: dict[str, Any], places: Sequence[tuple[Path, Any]]) -> list[Tensor]:
    """Return the tensors among a call's arguments, in an order that is the same on all stages."""
    found: list[Tensor] = []
    for item in (*args, *kwargs.values()):
        if isinstance(item, (Tensor, tuple)):
            found += tensors_of(item)
    for path, place in places:
        if not _is_module(path):
            for _, item in _items(place):
                if isinstance(item, (Tensor, tuple)):
                    found += tensors_of(item)
    return list({id(tensor): tensor for tensor in found}.values())


def _is_module(path: Path) -> bool:
    return isinstance(path[0], tuple) and path[0][0] == "module"


def substitute(places: Sequence[tuple[Path, Any]], function: Callable[[Tensor], Any]) -> None:
    """Replace the tensors in these places in place: every holder of a container sees it."""
    for path, place in places:
        for key, item in _items(place):
            if _is_module(path) and (isinstance(item, nn.Parameter) or (len(path) == 1 and key in OF_TORCH)):
                continue
            if isinstance(item, Tensor):
                new = function(item)
            elif isinstance(item, tuple):
                new = replace_tensors(item, function)
            else:
                continue
            if new is not item:
                place[key] = new


def substitute_call(
    args: tuple[Any, ...], kwargs: dict[str, Any], function: Callable[[Tensor], Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with other tensors; those in lists, dicts and objects are replaced by `substitute`."""

    def new(item: Any) -> Any:
        if isinstance(item, (Tensor, tuple)):
            return replace_tensors(item, function)
        if type(item) in LEAVES or isinstance(item, (list, dict)) or fields_of(item) is not None:
            return item
        return replace_tensors(item, function)

    return tuple(new(item) for item in args), {key: new(item) for key, item in kwargs.items()}


@dataclasses.dataclass(frozen=True, slots=True)
class Effect:
    """One thing that a call wrote beside its results."""

    path: Path
    kind: str
    """"set" a key, "del" a key, or have a list end with other items ("tail": how many stay, and what follows)."""
    key: Any
    tree: Any
    """What was written, with a description in place of each tensor."""

    @property
    def slot(self) -> tuple[str, str] | None:
        """(module, attribute) that was written, or something below it; None where it was an argument of the call."""
        first = self.path[0]
        return (first[1], self.path[1] if len(self.path) > 1 else self.key) if isinstance(first, tuple) else None


class Scene:
    """The places of a call as they were before it.

    Args:
        args: The call's arguments.
        kwargs: Its keyword arguments.
        modules: (name, module) whose attributes it may write.
        depth: Containers and objects inside each other that it may write, among its arguments [count].
        passed_over: (module, attribute) whose writes are none of the effects.
    """

    def __init__(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        modules: Iterable[tuple[str, nn.Module]] = (),
        depth: int = _DEPTH,
        passed_over: Collection[tuple[str, str]] = (),
    ) -> None:
        self._passed_over = passed_over
        self._of_call = places_of_call(args, kwargs, depth=depth)
        self.given = tensors_of_call(args, kwargs, self._of_call)
        self._places = [*self._of_call, *places_of_modules(modules)]
        self._before = [_copy(place) for _, place in self._places]
        self._start = self._before

    def replace(self, function: Callable[[Tensor], Any]) -> None:
        """Put other tensors into the places."""
        substitute(self._places, function)
        self._start = [_copy(place) for _, place in self._places]

    def restore(self) -> None:
        """Restore everything as it was before the call."""
        for (_, place), before in zip(self._places, self._before, strict=True):
            if isinstance(place, list):
                if len(place) != len(before) or any(a is not b for a, b in zip(place, before, strict=True)):
                    place[:] = before
            else:
                for key in [key for key in place if key not in before]:
                    _delete(place, key)
                for key, value in before.items():
                    if key not in place or place[key] is not value:
                        place[key] = value

    def changes(self) -> list[tuple[Path, str, Any, Any]]:
        """Return (path, kind, key, new value) of what differs from the start."""
        found: list[tuple[Path, str, Any, Any]] = []
        for (path, place), start in zip(self._places, self._start, strict=True):
            if isinstance(place, list):
                same = 0
                while same < min(len(place), len(start)) and place[same] is start[same]:
                    same += 1
                if same < len(place) or len(place) < len(start):
                    found.append((path, "tail", same, list(place[same:])))
                continue
            at_top = len(path) == 1 and _is_module(path)
            for key, value in place.items():
                if not (at_top and key in OF_TORCH) and (key not in start or start[key] is not value):
                    found.append((path, "set", key, value))
            found += [(path, "del", key, None) for key in start if key not in place]
        return found

    def plain_changes(self) -> list[tuple[Path, Any]]:
        """Return (path, key) of the writes into module attributes that hold no tensors."""
        changes = [change for change in self.changes() if _is_module(change[0])]
        return [(path, key) for path, kind, key, value in changes if kind == "del" or not holds_tensors(value)]

    def effects(self, encode: Callable[[Any], Any]) -> list[Effect]:
        """Return the writes that other stages must repeat; of module attributes only those that hold tensors."""
        found = []
        for path, kind, key, value in self.changes():
            if not _is_module(path) or (kind != "del" and holds_tensors(value)):
                found.append(Effect(path, kind, key, encode(value)))
        return [effect for effect in found if effect.slot not in self._passed_over]

    @property
    def own(self) -> dict[int, Path]:
        """Return the path of each container among the arguments, by the id of the list, dict or attribute dict."""
        return {id(place): path for path, place in self._of_call}


def tensors_below(item: Any) -> list[Tensor]:
    """Return the tensors in the lists, dicts and plain objects of a value, itself among them."""
    return tensors_of_call((item,), {}, places_in([(0, item)]))


def holds_tensors(value: Any) -> bool:
    """Tell whether there is a tensor in a value, in its containers or in the attributes of plain objects."""
    if isinstance(value, (list, tuple)) and not value:
        return False
    if isinstance(value, Tensor):
        return True
    found = places_in([(0, value)])
    return any(isinstance(item, Tensor) for _, place in found for _, item in _items(place)) or (
        isinstance(value, tuple) and any(holds_tensors(item) for item in value)
    )


def resolve(path: Path, args: tuple[Any, ...], kwargs: dict[str, Any], module_of: Callable[[str], nn.Module]) -> Any:
    """Return the list or dict at a path."""
    first, *rest = path
    if isinstance(first, tuple):
        item: Any = vars(module_of(first[1]))
    else:
        item = args[first] if isinstance(first, int) else kwargs[first]
    for key in rest:
        item = vars(item) if key == VARS and not isinstance(item, dict) else item[key]
    return item


def write(effect: Effect, place: Any, tree: Any) -> None:
    """Repeat an effect in a place; `tree` is what is written, with tensors."""
    if effect.kind == "del":
        place.pop(effect.key, None)
    elif effect.kind == "tail":
        place[effect.key :] = tree
    else:
        place[effect.key] = tree
