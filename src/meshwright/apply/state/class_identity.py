"""Code that asks by `is`: for exactly one class of a module, such as `type(layer) is Block`, or for one object.

Most plans give modules a subclass of their class. It is equal to the original, but not the same object, so that such code would
take another branch, on all ranks alike and without a word. It is refused. What is asked is read off the instructions.
"""

from __future__ import annotations

import builtins
import dis
import functools
import importlib.util
import inspect
import sys
import types
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NoReturn

from torch import nn

from meshwright.apply.state.outside import Outside, names_of
from meshwright.apply.state.plain_objects import independent
from meshwright.apply.state.reached_code import names_read
from meshwright.errors import ApplyError
from meshwright.spec import Plan

__all__: list[str] = []

_COMPARISONS = frozenset({"__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__init__"})
"""Methods that compare classes of plain objects, those that dataclasses generate too, and one that runs before the plan."""
_UNKNOWN, _CLASS_OF = object(), object()
_SILENT = frozenset({"CACHE", "PRECALL", "NOP", "EXTENDED_ARG", "RESUME", "KW_NAMES"})


def refuse_class_identity(module: nn.Module, functions: Sequence[Any], plan: Plan) -> None:
    """Raise ApplyError where a forward, a hook or a loss compares a module's class by `is`; other methods raise it once called.

    Args:
        module: The model.
        functions: Further code that runs beside its forward: the loss.
        plan: The plan.
    """
    if plan.recompute == "none" and plan.tp == plan.pp == 1 and plan.mode != "data_parallel":
        return  # modules keep their classes
    outside = Outside(module, functions)
    names = names_read(module, functions, outside) - _COMPARISONS
    kinds = [kind for child in module.modules() for kind in (type(child), getattr(child, "cls_to_become", None))]
    for function in outside.functions:
        if function.__name__ not in names or outside.home.is_foreign(function.__module__):
            continue
        line = next(
            (line for code in _codes_of(function.__code__) for line in _asking_lines(code, function, kinds)), None
        )
        if line is not None and not _is_of_unused_classes(function, module, outside, names):
            text = (
                f"'{function.__qualname__}' ({function.__code__.co_filename}:{line}) asks by `is` which class an object has; "
                f"the plan '{plan}' gives modules a subclass of their class, which is equal to it but not the same object"
            )
            if not _is_guarded(function, module, outside, text):
                raise _refusal(text)


def _is_guarded(function: types.FunctionType, module: nn.Module, outside: Outside, text: str) -> bool:
    """Have a method that no forward names itself raise where it is called, and tell whether that can be.

    A detector's class has methods for predictions, which a step does not call.
    """
    owners, name = outside.classes_of(function), function.__name__
    if len(owners) != 1 or name == "forward" or name.startswith("__") or vars(owners[0]).get(name) is not function:
        return False
    holders = [child for child in module.modules() if isinstance(child, owners[0])]
    if not holders or any(getattr(type(child), name) is not function for child in holders):
        return False
    forwards = (inspect.unwrap(type(child).forward) for child in module.modules())
    if any(name in names_of(own.__code__) for own in forwards if isinstance(own, types.FunctionType)):
        return False  # each step may well call it
    for child in holders:
        vars(child)[name] = functools.partial(_refuse_call, text)
    return True


def _refuse_call(text: str, *_: Any, **__: Any) -> NoReturn:
    raise _refusal(text)


def _refusal(text: str) -> ApplyError:
    return ApplyError(text, fix="compare the classes by `==`, or use isinstance")


def _is_of_unused_classes(function: types.FunctionType, module: nn.Module, outside: Outside, names: set[str]) -> bool:
    """Tell whether a function is a method of modules' classes alone of which the step has no object, and which no code names.

    Args:
        function: The function, found by its name alone: a class beside the model's own may have a method of the same name.
        module: The model.
        outside: What its code reaches.
        names: The names that the step's code looks up.
    """
    owners = outside.classes_of(function)
    if not owners or not all(issubclass(owner, nn.Module) for owner in owners):
        return False
    held = [module, *(vars(child) for child in module.modules()), *(value for _, _, value in outside.variables())]
    if any(issubclass(type(value), tuple(owners)) for value in independent(held, ()).values()):
        return False
    return names.isdisjoint(kind.__name__ for owner in owners for kind in _with_subclasses(owner))


def _with_subclasses(kind: type) -> Iterator[type]:
    yield kind
    for below in kind.__subclasses__():
        yield from _with_subclasses(below)


def find_object_identity(kinds: Iterable[type[Any]]) -> str | None:
    """Return the place of the first comparison by `is` of two objects that are neither constants nor globals, or None.

    Args:
        kinds: Classes of modules, whose forwards are looked at with the methods that those name.
    """
    functions = (function for kind in kinds for function in _methods_of_forward(kind))
    for code in (code for function in functions for code in _codes_of(function.__code__)):
        before, line = "", code.co_firstlineno
        for instruction in dis.get_instructions(code):
            line = (instruction.positions.lineno if instruction.positions else None) or line
            if instruction.opname == "IS_OP" and before not in ("LOAD_CONST", "LOAD_GLOBAL"):
                return f"{code.co_filename}:{line}"
            before = before if instruction.opname in _SILENT else instruction.opname
    return None


def _methods_of_forward(kind: type[Any]) -> Iterator[types.FunctionType]:
    names, seen = ["forward"], set[str]()
    while names:
        name = names.pop()
        found = inspect.unwrap(inspect.getattr_static(kind, name, None))
        is_theirs = isinstance(found, types.FunctionType) and not (found.__module__ or "").startswith("torch.")
        if name not in seen and is_theirs:
            yield found
            names += found.__code__.co_names
        seen.add(name)


def _codes_of(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes_of(constant)


def _asking_lines(code: types.CodeType, function: types.FunctionType, kinds: Sequence[Any]) -> Iterator[int]:
    """Yield the lines of comparisons by `is` in which the class of one of the model's modules may take part.

    Args:
        code: The code of the function, or of one inside of it.
        function: The function.
        kinds: Classes that the modules have, or get (lazy ones): asking for another class is answered alike under a plan.
    """
    values = _Values(function)
    line = code.co_firstlineno
    for instruction in dis.get_instructions(code):
        line = instruction.positions.lineno or line if instruction.positions else line
        left, right = values.top(2)
        if instruction.opname == "IS_OP" and _may_be_asked(left, right, kinds):
            yield line
        if instruction.opname not in _SILENT:
            values.follow(instruction)


def _may_be_asked(left: Any, right: Any, kinds: Sequence[Any]) -> bool:
    is_kind = [isinstance(value, type) and any(value is kind for kind in kinds) for value in (left, right)]
    open_ended = [value is _UNKNOWN or value is _CLASS_OF for value in (left, right)]
    if left is _CLASS_OF or right is _CLASS_OF:
        return all(kind or is_open for kind, is_open in zip(is_kind, open_ended, strict=True))
    return (is_kind[0] and open_ended[1]) or (is_kind[1] and open_ended[0])


class _Values:
    """What the stack holds, as far as it is known, where instructions run one after another.

    Args:
        function: The function whose names they load.
    """

    def __init__(self, function: types.FunctionType) -> None:
        self._stack: list[Any] = []
        self._locals: dict[str, Any] = {}
        self._names = {**vars(builtins), **function.__globals__}
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=False)
        self._cells = {name: _contents(cell) for name, cell in cells}
        self._package = function.__globals__.get("__package__") or ""

    def top(self, count: int) -> list[Any]:
        """Return the uppermost values, the last one last."""
        missing = [_UNKNOWN] * max(0, count - len(self._stack))
        return missing + self._stack[-count:]

    def follow(self, instruction: dis.Instruction) -> None:
        """Take over what an instruction does."""
        name, argument = instruction.opname, instruction.argval
        effect = dis.stack_effect(instruction.opcode, instruction.arg, jump=False)
        if name.startswith("STORE_FAST") and effect == -1:
            self._locals[argument] = self._taken()
        elif name.startswith("LOAD_FAST") and effect == 1:
            self._stack.append(self._locals.get(argument, _UNKNOWN))
        elif name in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CONST"):
            self._load(name, argument, effect)
        elif name in ("LOAD_ATTR", "LOAD_METHOD"):
            owner = self._taken()
            self._stack += [_attribute(owner, argument)] + [_UNKNOWN] * effect
        elif name == "CALL":
            self._call(instruction.arg or 0)
        elif name == "IMPORT_NAME":
            self._import(argument)
        elif name == "IMPORT_FROM":
            self._stack.append(_attribute(self.top(1)[0], argument))
        else:
            self._stack = self._stack[: len(self._stack) + min(effect, 0)] + [_UNKNOWN] * max(effect, 0)
            if effect <= 0 and self._stack:
                self._stack[-1] = _UNKNOWN  # it may be this instruction's result

    def _taken(self) -> Any:
        return self._stack.pop() if self._stack else _UNKNOWN

    def _load(self, name: str, argument: Any, effect: int) -> None:
        if name == "LOAD_CONST":
            value = argument
        else:
            value = (self._cells if name == "LOAD_DEREF" else self._names).get(argument, _UNKNOWN)
        self._stack += [_UNKNOWN] * (effect - 1) + [value]

    def _import(self, name: str) -> None:
        """Follow `from module import ...` inside of a function; a module that is not loaded yet stays unknown."""
        chosen, level = self._taken(), self._taken()
        whole = f"{'.' * level}{name}" if isinstance(level, int) else name
        try:
            module = sys.modules.get(importlib.util.resolve_name(whole, self._package)) if chosen else None
        except (ImportError, ValueError):
            module = None
        self._stack.append(_UNKNOWN if module is None else module)

    def _call(self, num_arguments: int) -> None:
        called = self.top(num_arguments + 2)  # the callable, and its `self` or nothing
        self._stack = self._stack[: max(0, len(self._stack) - len(called))]
        self._stack.append(_CLASS_OF if num_arguments == 1 and any(item is type for item in called[:2]) else _UNKNOWN)


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _UNKNOWN


def _attribute(owner: Any, name: str) -> Any:
    if name == "__class__":
        return _CLASS_OF
    return getattr(owner, name, _UNKNOWN) if isinstance(owner, (types.ModuleType, type)) else _UNKNOWN
