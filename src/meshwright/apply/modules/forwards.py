"""Another behaviour for one module: its class is replaced by a subclass, as FSDP2 does.

Names, parameters, hooks, `isinstance` and copies of the module stay right. The subclass is equal to the user's class and has its
hash, so that tables by class and comparisons with `==` and `in` find what they find on one device. `is` cannot be answered for;
code that uses it is refused (`apply/state/class_identity.py`).
"""

from __future__ import annotations

import copyreg
import functools
import threading
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from meshwright.errors import ApplyError

__all__: list[str] = []

_USERS = "_meshwright_users_class"
_PICKLES = "_meshwright_pickles_as_users"


class _Questions(threading.local):
    """(class of the user's, other class) of the questions that a thread is about to answer, by ids."""

    def __init__(self) -> None:
        self.under_way: set[tuple[int, int]] = set()


_QUESTIONS = _Questions()


def with_forward(original: type[nn.Module], forward: Callable[..., Any], *, is_whole: bool = False) -> type[nn.Module]:
    """Return a subclass with another forward, for a module's `__class__`.

    Args:
        original: Its class.
        forward: The forward.
        is_whole: Whether such a module has all that one device has, so that it may be pickled as one of the user's class.
    """
    return subclass_with(original, {"forward": forward, _PICKLES: is_whole and _is_pickled_as_users(original)})


def subclass_with(original: type[Any], members: Mapping[str, Any]) -> type[Any]:
    """Return a subclass with these members, for an object's `__class__`; it is equal to its original."""
    names = {name: getattr(original, name) for name in ("__module__", "__qualname__", "__doc__")}
    kind = _metaclass(type(original))
    return kind(original.__name__, (original,), {**members, **names, _USERS: users_class(original)})


def present_forward(kind: type[nn.Module]) -> Callable[..., Any]:
    """Return a function that runs the forward that a class has when it is called; a script may assign another one."""

    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return kind.forward(module, *args, **kwargs)

    return forward


def users_class(kind: type[Any]) -> type[Any]:
    """Return the class that the user wrote, of which this one may be a subclass made here."""
    return vars(kind).get(_USERS, kind) if isinstance(kind, type) else kind


@functools.cache
def _metaclass(plain: Any) -> Any:
    """Return a metaclass whose classes are equal to the user's classes."""
    if _USERS in vars(plain):
        return plain

    def equal(kind: type[Any], other: Any) -> Any:
        return users_class(kind) is users_class(other) if isinstance(other, type) else NotImplemented

    def hashed(kind: type[Any]) -> int:
        return hash(users_class(kind)) if _USERS in vars(kind) else plain.__hash__(kind)

    def has_instance(kind: type[Any], item: Any) -> bool:
        return isinstance(item, users_class(kind)) if _USERS in vars(kind) else plain.__instancecheck__(kind, item)

    def has_subclass(kind: type[Any], other: type[Any]) -> bool:
        if _USERS not in vars(kind):
            return plain.__subclasscheck__(kind, other)
        users = users_class(kind)
        question = id(users), id(other)
        if question in _QUESTIONS.under_way:
            return type.__subclasscheck__(kind, other)  # an abstract class of the user's asks each of its subclasses
        _QUESTIONS.under_way.add(question)
        try:
            return issubclass(other, users)
        finally:
            _QUESTIONS.under_way.discard(question)

    members = {
        "__eq__": equal,
        "__hash__": hashed,
        "__instancecheck__": has_instance,
        "__subclasscheck__": has_subclass,
        _USERS: plain,
    }
    made = type(plain)(plain.__name__, (plain,), members)
    copyreg.pickle(made, _reduce_class)  # copies do not ask it: they take a class for itself
    return made


def _is_pickled_as_users(kind: type[Any]) -> bool:
    return users_class(kind) is kind or vars(kind).get(_PICKLES, False)


def _reduce_class(kind: Any) -> Any:
    """Pickle a class that was made here as the user's.

    Raises:
        ApplyError: Modules of it have what one rank has.
    """
    users = users_class(kind)
    if users is kind:
        return kind.__qualname__  # pickle's own way
    if not _is_pickled_as_users(kind):
        raise ApplyError(
            f"a pickle of a {kind.__name__} would not be the model's: the plan cuts its layers, and a rank has a part",
            fix="save model.full_state_dict(); or pickle it inside `with model.whole_parameters():`, which every rank enters",
        )
    return users_class, (users,)
