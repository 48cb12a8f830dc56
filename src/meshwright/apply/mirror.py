"""Attributes of a module and of its copies in other threads: what a script sets goes to all, what a forward leaves can be read.

A script writes to the original between steps (a temperature, a dropout's p, a hook), and a replica takes it over before it
runs. What a replica's forward leaves on its copy (an auxiliary loss, a counter) is read through the original: in its own
thread, where its loss is computed, as that replica has it; elsewhere as the first one has it.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from meshwright.apply.attributes import OF_TORCH, fingerprint
from meshwright.apply.subclass import with_forward

__all__: list[str] = []

_HOOKS = tuple(name for name in OF_TORCH if name.endswith("_hooks") and "state_dict" not in name)


class Mirror:
    """One copy of a module, and what it has taken over of the original.

    Args:
        pairs: (module of the original, its twin in the copy), the root first.
        shared: The attributes that are read from copies, common to all copies.
    """

    def __init__(self, pairs: Sequence[tuple[nn.Module, nn.Module]], shared: LeftByForward) -> None:
        self._pairs = list(pairs)
        self._shared = shared
        self.twins = {id(original): twin for original, twin in self._pairs}
        self._memo = {id(original): twin for original, twin in self._pairs}
        self._seen = [self._read(original) for original, _ in self._pairs]
        self._given = [self._read(twin) for _, twin in self._pairs]
        root = self._pairs[0][1]
        plain = type(root)

        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            outputs = plain.forward(module, *args, **kwargs)
            self._give()
            return outputs

        root.__class__ = with_forward(plain, forward)

    @staticmethod
    def _read(module: nn.Module) -> dict[str, Any]:
        own = vars(module)
        found = {name: fingerprint(value) for name, value in own.items() if name not in OF_TORCH and name != "training"}
        return found | {name: tuple(map(id, own[name].values())) for name in _HOOKS if name in own}

    def refresh(self) -> None:
        """Take over what was set on the original since the last time."""
        for place, (original, twin) in enumerate(self._pairs):
            own, now, seen = vars(original), self._read(original), self._seen[place]
            forced = self._shared.names.get(id(original), ())
            for name, print_ in now.items():
                if name in _HOOKS and seen.get(name) != print_:
                    hooks = vars(twin)[name]
                    hooks.clear()
                    hooks.update(own[name])
                elif name not in _HOOKS and (name in forced or seen.get(name) != print_):
                    vars(twin)[name] = self._copy(own[name])
            for name in seen.keys() - now.keys() - set(forced):
                vars(twin).pop(name, None)
            self._seen[place] = now
            self._given[place] = self._read(twin)

    def _copy(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.detach().clone()
        try:
            return copy.deepcopy(value, dict(self._memo))
        except Exception:  # noqa: BLE001 - whatever an object's own copying raises; it is then shared
            return value

    def _give(self) -> None:
        """Have what this copy's forward has left be read from the copies from now on."""
        for place, (original, twin) in enumerate(self._pairs):
            now, given = self._read(twin), self._given[place]
            left = [name for name, print_ in now.items() if name not in _HOOKS and given.get(name) != print_]
            if left:
                self._shared.take(original, left)


class LeftByForward:
    """Names of attributes that forwards of copies leave, and where they are read."""

    def __init__(self) -> None:
        self.names: dict[int, set[str]] = {}
        self.mirrors: list[Mirror] = []
        self._changed: list[tuple[nn.Module, type[nn.Module]]] = []
        self._thread = threading.local()
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def reading(self, mirror: Mirror) -> Iterator[None]:
        """Have this thread read what this copy has."""
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

        members = {"__getattr__": look_up, "__module__": plain.__module__, "__doc__": plain.__doc__}
        return type(plain.__name__, (plain,), members)

    def twin(self, original: nn.Module) -> nn.Module:
        """Return the copy of a module that this thread reads."""
        mirror = getattr(self._thread, "mirror", None) or self.mirrors[0]
        return mirror.twins[id(original)]

    def refresh(self) -> None:
        """Have all copies take over what was set on the original."""
        for mirror in self.mirrors:
            mirror.refresh()
        for original, _ in self._changed:
            for name in self.names[id(original)] & vars(original).keys():
                vars(original).pop(name)

    def close(self) -> None:
        """Give the original its classes and attributes back."""
        for original, plain in self._changed:
            found = vars(self.mirrors[0].twins[id(original)])
            original.__class__ = plain
            for name in self.names[id(original)]:
                if name in found:
                    vars(original).setdefault(name, found[name])
        self._changed = []
