"""Names of a model's modules by which draws are known: the innermost module whose forward is running."""

from __future__ import annotations

import functools
import re
import sys
import types
import weakref
import zlib
from collections import Counter
from collections.abc import Iterator

from torch import Tensor, nn
from torch.nn import functional as F

from meshwright._torch_private import MODULE_CALL

__all__: list[str] = []

_ATTENTION = F.multi_head_attention_forward.__code__
_SITE_MODULES = 3
_PASSED_OVER = ("torch", __name__.partition(".")[0])
LOSS = "<loss>"
"""The name of code outside of the model's modules."""


class Names:
    """FQNs of a model's modules, by the module.

    Args:
        module: The model.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._names: dict[int, tuple[weakref.ref[nn.Module], str | None]] = {}

    @functools.cached_property
    def shared(self) -> frozenset[str]:
        """Names of modules that stand at several places of the model, as one dropout of all its layers does."""
        places = Counter(id(child) for _, child in self._module.named_modules(remove_duplicate=False))
        return frozenset(name for name, child in self._module.named_modules() if places[id(child)] > 1)

    @property
    def is_training(self) -> bool:
        """Whether the model is in training mode."""
        return self._module.training

    def runs_in_place_of(self, name: str) -> bool:
        """Tell whether a module does not run, and one does that has its name but for numbers: the same part of another layer."""
        running = set(self.running())
        return name not in running and series_of(name) in map(series_of, running)

    def running(self) -> Iterator[str]:
        """Yield the names of the model's modules whose forwards are running, the innermost first."""
        frame = sys._getframe(1)
        while frame is not None:
            if frame.f_code is MODULE_CALL:
                name = self._name_of(frame.f_locals["self"])
                if name is not None:
                    yield name
            frame = frame.f_back

    def given(self) -> Iterator[Tensor]:
        """Yield the tensors that modules were called with whose forwards are running, the innermost's first."""
        frame = sys._getframe(1)
        while frame is not None:
            if frame.f_code is MODULE_CALL:
                values = frame.f_locals
                given = (*values["args"], *values["kwargs"].values())
                yield from (value for value in given if type(value) is Tensor)
            frame = frame.f_back

    def site(self) -> int:
        """Return a number for the place in the user's code that runs, inside of the three innermost modules; never 0.

        Code of torch and of this package is passed over, since wrapped calls (a checkpoint) are the same place; so is code that
        calls the model, for a step or an evaluation. Lines count from the outermost function of the same file: what is written
        above a model, an import say, must not change the numbers of a run that goes on.
        """
        frame, num_modules, places, num_inside = sys._getframe(1), 0, list[tuple[types.CodeType, int]](), 0
        while frame is not None and num_modules < _SITE_MODULES:
            code = frame.f_code
            if code is MODULE_CALL:
                num_modules += 1
                num_inside = len(places)
            elif str(frame.f_globals.get("__name__")).partition(".")[0] not in _PASSED_OVER:
                places.append((code, frame.f_lasti))
            frame = frame.f_back
        del places[num_inside:]
        top = {code.co_filename: code.co_firstlineno for code, _ in places}  # the outermost is the last
        named = [(code.co_qualname, code.co_firstlineno - top[code.co_filename], at) for code, at in places]
        return zlib.crc32(repr(named).encode()) + 1

    def _name_of(self, module: nn.Module) -> str | None:
        """Return a module's name; None for one that is not the model's, a loss for example."""
        key = id(module)
        found = self._names.get(key)
        if found is None or found[0]() is not module:  # a forward may make modules, whose memory later ones get
            self._names[key] = (weakref.ref(module, lambda _: self._names.pop(key, None)), None)
            self._names.update({id(child): (weakref.ref(child), name) for name, child in self._module.named_modules()})
            found = self._names[key]
        return found[1]

    def find(self) -> str:
        """Return the name of the innermost of the model's modules whose forward is running, `LOSS` outside of all."""
        return next(self.running(), LOSS)


def batch_of_attention() -> int | None:
    """Return the samples of torch's attention that runs now, whose heads lie inside of each [count]; None: none runs."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not MODULE_CALL:
        if frame.f_code is _ATTENTION:
            return frame.f_locals.get("bsz")
        frame = frame.f_back
    return None


@functools.lru_cache(maxsize=4096)
def series_of(name: str) -> str:
    """Return a name without its numbers, which layers of one kind share."""
    return ".".join(re.sub(r"\d+$", "*", part) for part in name.split("."))


def called(name: str) -> str:
    """Return how messages call a module of this name."""
    return "the loss" if name == LOSS else f"'{name}'" if name else "the model itself"


def draw_called(call: tuple[str, int]) -> str:
    """Return how messages call a draw: by its module, and its number among that module's draws."""
    return f"draw {call[1]} of {called(call[0])}"
