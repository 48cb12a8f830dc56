"""Attributes of a module mirrored on its copies in other threads, and attributes that copies leave, read through the original.

A script writes to the original between steps (a temperature, a dropout's p, a hook), and each replica takes that over before it
runs. What a replica's forward leaves on its copy (an auxiliary loss, a counter) is read through the original. In the replica's
thread, where its loss is computed, that gives the replica's own value; elsewhere it gives the first replica's.

Some objects are referred to by modules and refer to no module: a schedule, a configuration, a recorder. The script may hold them
too, so it shares them with the first replica. The other replicas have copies that follow.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from meshwright.apply.modules.copies import HOOKS, rebind, rebound
from meshwright.apply.modules.forwards import subclass_with
from meshwright.apply.state.attributes import OF_TORCH
from meshwright.apply.state.plain_objects import independent, rows_of, tensors_reached

__all__: list[str] = []


class Mirror:
    """One copy of a module, and the state that it has taken over from the original.

    Args:
        original: The module.
        memo: id of each parameter and buffer of it -> the copy's.
        shared: The attributes that are read from copies, common to all copies; the first copy made is the first replica's.
        is_near: Whether the copy is on the module's own device.
    """

    def __init__(self, original: nn.Module, memo: dict[int, Any], shared: LeftByForward, *, is_near: bool) -> None:
        self._shared, self._is_near = shared, is_near
        self._is_first = not shared.mirrors
        self._own = {id(child) for child in original.modules()} | memo.keys()
        attributes = [value for child in original.modules() for value in _attributes(child).values()]
        hooks = [hook for child in original.modules() for name in HOOKS for hook in vars(child).get(name, {}).values()]
        shares = independent(hooks, self._own) | self._shares(attributes)
        self.module: nn.Module = copy.deepcopy(original, {**shares, **memo})
        self.pairs = list(zip(original.modules(), self.module.modules(), strict=True))
        self.twins = {id(child): twin for child, twin in self.pairs}
        self._memo = self.twins | memo
        if (
            not self._is_first
        ):  # an object shared with the first one may come from its forward, and so refer to its modules
            first = shared.mirrors[0]
            self._memo |= {id(first._memo[key]): mine for key, mine in self._memo.items()}
        rebind(self.module, dict(self._memo))
        self._seen = [self._read(child) for child, _ in self.pairs]
        self._given = [self._read(twin) for _, twin in self.pairs]
        shared.mirrors.append(self)
        plain = type(self.module)

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            outputs = plain.__call__(module, *args, **kwargs)
            self._give()
            return outputs

        # Not its forward, which may be an attribute of the module itself.
        self.module.__class__ = subclass_with(plain, {"__call__": call})

    def _shares(self, values: Sequence[Any]) -> dict[int, Any]:
        """Return the objects that this copy shares with the script, by id."""
        found = independent(values, self._own)
        if self._is_first and self._is_near:
            return found
        others = [value for value in found.values() if isinstance(value, nn.Module)]
        return independent(others, self._own) if self._is_near else {}

    @staticmethod
    def _read(module: nn.Module, known: dict[int, Any] | None = None) -> dict[str, Any]:
        known = {} if known is None else known
        found: dict[str, Any] = {}
        for name, value in _attributes(module).items():
            if id(value) not in known:
                known[id(value)] = rows_of(value)
            found[name] = known[id(value)]
        return found | {name: tuple(map(id, vars(module)[name].values())) for name in HOOKS if name in vars(module)}

    def refresh(self) -> None:
        """Take over changes of the original since the last time."""
        of_originals: dict[int, Any] = {}
        of_twins: dict[int, Any] = {}
        for place, (original, twin) in enumerate(self.pairs):
            own, now = vars(original), self._read(original, of_originals)
            seen = self._seen[place] | self._shared.put_back.get(id(original), {})
            for name, print_ in now.items():
                if seen.get(name) == print_:
                    continue
                if name in HOOKS:
                    hooks = vars(twin)[name]
                    hooks.clear()
                    hooks.update({key: rebound(hook, dict(self._memo)) for key, hook in own[name].items()})
                else:
                    vars(twin)[name] = self._copy(own[name])
            for name in seen.keys() - now.keys():
                vars(twin).pop(name, None)
            self._seen[place] = now
            self._given[place] = self._read(twin, of_twins)

    def _copy(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return value if self._is_first and self._is_near else value.detach().clone()
        own = rebound(value, dict(self._memo))
        if own is not value:
            return own
        memo = self._shares([value])
        memo |= {id(tensor): tensor.detach().clone() for tensor in tensors_reached(value) if not tensor.is_leaf}
        memo |= self._memo
        try:
            return copy.deepcopy(value, memo)
        except Exception:  # noqa: BLE001 - whatever an object's own copying raises; it is then shared
            return value

    def _give(self) -> None:
        """Redirect reads of the attributes that this copy's forward has left to the copies."""
        known: dict[int, Any] = {}
        for (original, twin), given in zip(self.pairs, self._given, strict=True):
            now = self._read(twin, known)
            left = [name for name, print_ in now.items() if name not in HOOKS and given.get(name) != print_]
            if left:
                self._shared.take(original, left)


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in OF_TORCH and name != "training"}


class LeftByForward:
    """Names of attributes that forwards of copies leave, and the copies they are read from."""

    def __init__(self) -> None:
        self.names: dict[int, set[str]] = {}
        self.mirrors: list[Mirror] = []
        self.put_back: dict[int, dict[str, Any]] = {}
        """What attributes of the original were (`rows_of`) when they were put there after the copies' forwards."""
        self._changed: list[tuple[nn.Module, type[nn.Module]]] = []
        self._thread = threading.local()
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Run copies inside the context; afterwards the original has what the first one has left."""
        for original, _ in self._changed:
            for name in self.put_back.get(id(original), ()):
                vars(original).pop(name, None)
        try:
            yield
        finally:
            for original, _ in self._changed:
                own, found = vars(original), vars(self.mirrors[0].twins[id(original)])
                names = self.names[id(original)] - own.keys()  # set by the loss itself, so it is the script's
                own.update({name: found[name] for name in names & found.keys()})
                self.put_back[id(original)] = {name: rows_of(own[name]) for name in names & found.keys()}

    @contextlib.contextmanager
    def reading(self, mirror: Mirror) -> Iterator[None]:
        """Let this thread read this copy's attributes inside the context."""
        self._thread.mirror = mirror
        try:
            yield
        finally:
            self._thread.mirror = None

    def take(self, original: nn.Module, names: Sequence[str]) -> None:
        """Read these attributes of a module from its copies."""
        with self._lock:
            if id(original) not in self.names:
                self.names[id(original)] = set()
                self._changed.append((original, type(original)))
                original.__class__ = self._reading_class(type(original))
            self.names[id(original)].update(names)
            for name in names:
                vars(original).pop(name, None)

    def _reading_class(self, plain: type[nn.Module]) -> type[nn.Module]:
        shared = self

        def look_up(module: nn.Module, name: str) -> Any:
            if name in shared.names.get(id(module), ()):
                found = vars(shared.twin(module))
                if name in found:
                    return found[name]
            return plain.__getattr__(module, name)

        return subclass_with(plain, {"__getattr__": look_up})

    def twin(self, original: nn.Module) -> nn.Module:
        """Return the copy of a module that this thread reads."""
        mirror = getattr(self._thread, "mirror", None) or self.mirrors[0]
        return mirror.twins[id(original)]

    def refresh(self) -> None:
        """Give all copies the changes of the original."""
        for mirror in self.mirrors:
            mirror.refresh()

    def close(self) -> None:
        """Restore the original's classes."""
        for original, plain in self._changed:
            original.__class__ = plain
        self._changed = []
