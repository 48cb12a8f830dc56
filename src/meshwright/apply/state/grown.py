"""Attributes that classes and functions get while code runs: counters and tables that a first forward makes.

A class of the model's counts its calls in an attribute that the first call sets; a function keeps a table on itself. Nothing of
it is there to be recorded before a trial, so what is new after it is taken away.
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Iterable, Set

__all__: list[str] = []


class Grown:
    """The attributes of classes and functions at one moment.

    Args:
        kinds: Classes.
        names: Names that code looks up; what has another name is left alone.
        functions: Functions; those that have attributes already are left to others.
    """

    def __init__(self, kinds: Iterable[type], names: Set[str], functions: Iterable[types.FunctionType]) -> None:
        self._names = names
        self._kinds = [(kind, {*vars(kind)}) for kind in kinds]
        self._functions = [function for function in functions if not function.__dict__]

    def undo(self) -> None:
        """Take away what is new."""
        for kind, before in self._kinds:
            new = vars(kind).keys() - before if len(vars(kind)) > len(before) else set[str]()
            for name in attributes_among(new, self._names):
                delattr(kind, name)
        for function in self._functions:
            function.__dict__.clear()


def attributes_among(present: Set[str], names: Set[str]) -> set[str]:
    """Return those attributes of a class that code may set which looks up these names; with `setattr`, any.

    >>> sorted(attributes_among({"__doc__", "calls", "other"}, {"calls", "append"}))
    ['calls']
    >>> sorted(attributes_among({"__doc__", "calls", "other"}, {"setattr"}))
    ['calls', 'other']
    """
    if "setattr" in names:  # whose names may be computed
        return {name for name in present if not name.startswith("__")}
    return {*names} & present


@functools.lru_cache(maxsize=4096)
def makes_attributes(code: types.CodeType) -> bool:
    """Tell whether code sets attributes of something else than its own object: of a class or a function, perhaps new ones.

    >>> def own(self): self.calls = 1
    >>> def others(self): type(self).calls = 1
    >>> makes_attributes(own.__code__), makes_attributes(others.__code__)
    (False, True)
    """
    own = [name for name in code.co_varnames[: min(code.co_argcount, 1)] if name != "cls"]
    before = ""
    for step in dis.get_instructions(code):
        if step.opname == "STORE_ATTR" and before not in own:
            return True
        if step.opname.startswith(("LOAD_FAST", "LOAD_DEREF")):
            # From Python 3.13 on, one instruction may load two.
            before = step.argval[-1] if isinstance(step.argval, tuple) else step.argval
        elif step.opname != "EXTENDED_ARG":
            before = ""
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return "setattr" in code.co_names or any(map(makes_attributes, inner))
