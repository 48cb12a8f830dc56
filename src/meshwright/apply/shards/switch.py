"""Switch of tensor classes: plain while the engine computes, guarded while user code runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from torch import Tensor, nn

from meshwright.apply.shards.classes import ShardTensor, set_facts, shard_class, whole_class
from meshwright.apply.shards.facts import RunMoment, ShardFacts
from meshwright.apply.shards.optimizer_state import OptimizerState

__all__: list[str] = []

State = Literal["plain", "between", "inside", "whole"]
"""The engine's own code; the user's between steps and in hooks of the optimizer; the user's inside of a step, beside the parts;
the user's where all parameters are whole."""

Where = Literal["between", "step", "hook"]
_WHERE: dict[State, Where] = {"inside": "step", "between": "hook"}

Entry = tuple[Tensor, type[Tensor], type[Tensor]]
"""A tensor, its plain class and its guarded one."""


class ShardSwitch:
    """Switches the classes of a model's tensors of which this rank has a part."""

    def __init__(self, plan: str = "") -> None:
        self.moment = RunMoment(plan)
        self.state: State = "plain"
        self.on_state: Callable[[State], None] | None = None
        """Called with each new state, to switch other things too."""
        self.optimizer: OptimizerState | None = None
        """The optimizer's state, where ranks have parts of it."""
        self._entries: dict[State, list[Entry]] = {"plain": [], "between": [], "inside": [], "whole": []}
        self._suspended = 0

    def adopt(self, parts: Sequence[tuple[Tensor, ShardFacts]]) -> None:
        """Guard these tensors from now on, instead of the previous ones."""
        before, self.state = self.state, "plain"
        self._forget()
        for tensor, facts in parts:
            if isinstance(tensor, ShardTensor) or not _is_ordinary(type(tensor)):
                continue  # a subclass with functions of its own
            plain = type(tensor)
            set_facts(tensor, facts)
            shard, whole = shard_class(plain), whole_class(plain)
            self._entries["plain"].append((tensor, plain, plain))
            self._entries["between"].append((tensor, plain, whole if facts.values == "whole" else shard))
            if isinstance(tensor, nn.Parameter):
                self._entries["whole"].append((tensor, plain, shard if facts.is_piece else whole))
            if facts.is_cut_inside:
                self._entries["inside"].append((tensor, plain, shard))
        self._set(before)

    def entries_of(self, tensors: Sequence[Tensor]) -> list[Entry]:
        """Return the entries of these tensors that are guarded inside a step, for `open_part`."""
        ids = {id(tensor) for tensor in tensors}
        return [entry for entry in self._entries["inside"] if id(entry[0]) in ids]

    def open_part(self, entries: Sequence[Entry]) -> list[Entry]:
        """Make these tensors plain, and return those that were guarded, for `close_part`."""
        opened = [entry for entry in entries if entry[0].__class__ is not entry[1]]
        for tensor, plain, _ in opened:
            tensor.__class__ = plain
        return opened

    @staticmethod
    def close_part(opened: Sequence[Entry]) -> None:
        """Guard again what `open_part` returned."""
        for tensor, _, guarded in opened:
            tensor.__class__ = guarded

    def _set(self, state: State) -> None:
        if state == self.state:
            return
        if self.state != "plain":
            for tensor, plain, _ in self._entries[self.state]:
                tensor.__class__ = plain
        if self.optimizer is not None and "plain" in (state, self.state):
            self.optimizer.release() if state == "plain" else self.optimizer.guard()
        self.state = state
        if state != "plain":
            for tensor, _, guarded in self._entries[state]:
                tensor.__class__ = guarded
        if self.on_state is not None:
            self.on_state(state)

    def plain(self) -> contextlib.AbstractContextManager[None]:
        """Return a context for the engine's own code."""
        return _Within(self, "plain")

    def user_code(self) -> contextlib.AbstractContextManager[None]:
        """Return a context for user code inside a step, outside the parts with a proof."""
        return _Within(self, "inside")

    def user_hook(self) -> contextlib.AbstractContextManager[None]:
        """Return a context for a user's hook inside a step."""
        return _Within(self, "between")

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Run user code that sees whole parameters inside the context."""
        with self.suspended(), _Within(self, "whole", always=True):
            yield

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Guard nothing inside the context: everything is whole."""
        self._suspended += 1
        try:
            yield
        finally:
            self._suspended -= 1

    @property
    def is_between_steps(self) -> bool:
        """Whether the user's code runs between two steps, with parameters as the ranks hold them."""
        return self.state == "between" and self.moment.where == "between" and not self._suspended

    @property
    def runs_users_code(self) -> bool:
        """Whether a script runs outside of a step, with parameters as the ranks hold them or whole."""
        return self.state in ("between", "whole") and self.moment.where == "between"

    def begin(self) -> None:
        """Guard from here on: user code may reach the tensors, except inside `plain`."""
        self._set("between")

    def close(self) -> None:
        """Restore all tensors' own classes."""
        self._set("plain")
        self.on_state = None
        if self.optimizer is not None:
            self.optimizer.close()
            self.optimizer = None
        self._forget()

    def _forget(self) -> None:
        for tensor, *_ in self._entries["plain"]:
            set_facts(tensor, None)
        self._entries = {"plain": [], "between": [], "inside": [], "whole": []}


class _Within:
    """A context with another state."""

    __slots__ = ("_always", "_before", "_state", "_switch", "_where")

    def __init__(self, switch: ShardSwitch, state: State, *, always: bool = False) -> None:
        self._switch, self._always = switch, always
        self._state: State = state
        self._before: State | None = None
        self._where: Where = "between"

    def __enter__(self) -> None:
        switch = self._switch
        if self._always or self._state == "plain" or not switch._suspended:
            self._before, self._where = switch.state, switch.moment.where
            switch.moment.where = _WHERE.get(self._state, "between")
            switch._set(self._state)

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            self._switch.moment.where = self._where
            self._switch._set(self._before)


def _is_ordinary(plain: type[Tensor]) -> bool:
    own = [base for base in plain.__mro__ if "__torch_function__" in vars(base)]
    return all(base in (Tensor, nn.Parameter) or base.__module__.startswith("torch.") for base in own)
