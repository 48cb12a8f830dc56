"""Guarded view of `optimizer.state`, and of its state dicts, where a rank has a part of the state.

Inside the engine `optimizer.state` is the optimizer's own. In user code it is a view whose tensors have the guarded class
(`shard_class`): functions of each entry reach the state, functions of the whole raise. Entries are wrapped when they are read.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from meshwright.apply.shards.classes import ShardTensor, as_plain, as_shard, known_facts
from meshwright.apply.shards.facts import RunMoment, ShardFacts
from meshwright.errors import ApplyError

__all__: list[str] = []

_FIX = (
    "change it entry by entry, in a loop over the optimizer's param_groups (mul_, zero_); for its values, and for sums of them, "
    "use a plan without {axis}"
)
_FIX_OF_LOAD = (
    "load what this rank's model.optimizer.state_dict() gave under the same plan: save one file per rank, and read it back on "
    "that rank"
)
_MARK = "meshwright"


class OptimizerState:
    """Swaps an optimizer's state for a guarded view, and marks state dicts with their rank.

    Args:
        optimizer: The optimizer.
        module: The module that it trains.
        moment: The phase of the run.
        axes: The settings of the plan that give a rank's optimizer only a part of the state.
        rank: This rank.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, module: nn.Module, moment: RunMoment, axes: Mapping[str, int], rank: int
    ) -> None:
        self._optimizer, self._module, self._moment = optimizer, module, moment
        self._axes = axes
        self.axis = ",".join(f"{name}={size}" for name, size in axes.items())
        self._rank = rank
        self.real: dict[Any, dict[str, Any]] = optimizer.state
        self._view = _View(self)
        self._hooks = [
            optimizer.register_state_dict_post_hook(self._mark),
            optimizer.register_load_state_dict_pre_hook(self._check),
            optimizer.register_load_state_dict_post_hook(self._guard_loaded),
        ]
        self._is_guarded = False

    def guard(self) -> None:
        """Install the view: user code runs next."""
        if self._optimizer.state is not self._view:  # as after an error, which has left it
            self.real = self._optimizer.state
        self._optimizer.state = self._view
        self._is_guarded = True

    def release(self) -> None:
        """Remove the view: the engine runs next."""
        self._is_guarded = False
        state = self._optimizer.state
        if state is self._view:
            self._optimizer.state = self.real  # pyright: ignore[reportAttributeAccessIssue]
            return
        for entry in state.values():  # user code has assigned another state
            for name, value in entry.items():
                if isinstance(value, ShardTensor):
                    entry[name] = as_plain(value)

    def close(self) -> None:
        """Restore the optimizer for good."""
        for hook in self._hooks:
            hook.remove()

    def _guard_loaded(self, _: torch.optim.Optimizer) -> None:
        if self._is_guarded:
            self.release()
            self.guard()

    # -- views of parts ---------------------------------------------------------------------------------------------

    def guarded(self, parameter: Any, name: str, value: Any) -> Any:
        """Return a value in the form that user code sees."""
        if not isinstance(value, Tensor) or not value.dim() or value.layout != torch.strided:
            return value
        facts = self._facts(parameter, name, value)
        return value if facts is None else as_shard(value, facts)

    def _facts(self, parameter: Any, name: str, value: Tensor) -> ShardFacts | None:
        known = known_facts(parameter) if isinstance(parameter, Tensor) else None
        is_part = known is not None and known.is_cut
        if not is_part and "pp" not in self._axes:
            return None
        what = known.name if known is not None else f"a parameter of shape {tuple(parameter.shape)}"
        held = f"a rank's optimizer has its own layers alone ({self.axis})"
        if known is not None and is_part:
            held = known.held
        is_alike = value.shape == parameter.shape
        new = ShardFacts(name="", held="", moment=self._moment, values="shard", key=None, axis=self.axis)
        facts = new if known is None else dataclasses.replace(known)
        facts.name, facts.held, facts.values, facts.is_cut = f"the optimizer's '{name}' of {what}", held, "shard", True
        key = known.key if known is not None else ("state", id(parameter))
        facts.key = key if is_alike else (key, name)
        facts.read = facts.write = self.fix
        facts.elsewhere, facts.saves_as_plain = "", True
        return facts

    @property
    def fix(self) -> str:
        """The fix for errors."""
        return _FIX.format(axis=self.axis)

    def refuse_absent(self, key: Any) -> None:
        """Raise ApplyError if this rank's optimizer does not hold the requested parameter's state, or only pieces of it."""
        if not isinstance(key, Tensor):
            return
        grouped = {id(parameter) for group in self._optimizer.param_groups for parameter in group["params"]}
        if id(key) in grouped:
            return
        name = next((name for name, parameter in self._module.named_parameters() if parameter is key), None)
        if name is None or not key.requires_grad:
            return
        raise ApplyError(
            f"optimizer.state of parameter '{name}' is not whole on this rank: under the plan '{self._moment.plan}' each "
            f"rank's optimizer has some of the parameters, or pieces of them ({self.axis})",
            fix=self.fix,
        )

    # -- state dicts --------------------------------------------------------------------------------------------------

    def _mark(self, _: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        state["state"] = {key: dict(e) if isinstance(e, _Entry) else e for key, e in state["state"].items()}
        state[_MARK] = self._place

    @property
    def _place(self) -> dict[str, Any]:
        return {"plan": self._moment.plan, "rank": self._rank}

    def _check(self, _: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        found = state.get(_MARK)
        if found == self._place or not state.get("state"):
            return
        whose = f"rank {found['rank']} under the plan '{found['plan']}'" if found else "another optimizer"
        raise ApplyError(
            f"the optimizer state to be loaded belongs to {whose}, and this is rank {self._rank} under the plan "
            f"'{self._moment.plan}', whose optimizer has only its own part of the state ({self.axis})",
            fix=_FIX_OF_LOAD,
        )


class _Entry(dict[str, Any]):
    """State of one parameter, with guarded tensors; writes reach the optimizer."""

    def __init__(self, owner: OptimizerState, parameter: Any, real: dict[str, Any]) -> None:
        super().__init__({name: owner.guarded(parameter, name, value) for name, value in real.items()})
        self._owner, self._parameter, self._real = owner, parameter, real

    def __setitem__(self, name: str, value: Any) -> None:
        if isinstance(value, Tensor) and value.dim() and not isinstance(value, ShardTensor):
            facts = self._owner._facts(self._parameter, name, value)
            if facts is not None:
                facts.refuse(f"an assignment of a tensor of shape {tuple(value.shape)}", writes=True)
        super().__setitem__(name, value)
        self._real[name] = as_plain(value) if isinstance(value, ShardTensor) else value

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        del self._real[name]

    def pop(self, name: str, *default: Any) -> Any:
        self._real.pop(name, None)
        return super().pop(name, *default)

    def popitem(self) -> tuple[str, Any]:
        name, value = super().popitem()
        del self._real[name]
        return name, value

    def clear(self) -> None:
        super().clear()
        self._real.clear()

    def update(self, *args: Any, **kwargs: Any) -> None:
        for name, value in dict(*args, **kwargs).items():
            self[name] = value

    def setdefault(self, name: str, default: Any = None) -> Any:
        if name not in self:
            self[name] = default
        return self[name]

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return {name: copy.deepcopy(value, memo) for name, value in self.items()}


class _View(collections.defaultdict[Any, Any]):
    """An optimizer's state as user code sees it."""

    def __init__(self, owner: OptimizerState) -> None:
        super().__init__(dict)
        self._owner = owner

    def _entry(self, key: Any) -> Any:
        found = self._owner.real[key]
        return _Entry(self._owner, key, found) if isinstance(found, dict) else found

    def __getitem__(self, key: Any) -> Any:
        if key not in self._owner.real:
            self._owner.refuse_absent(key)
        return self._entry(key)

    def __contains__(self, key: Any) -> bool:
        if key in self._owner.real:
            return True
        if self._owner._moment.steps:
            self._owner.refuse_absent(key)
        return False

    def get(self, key: Any, default: Any = None) -> Any:
        return self._entry(key) if key in self else default

    def __setitem__(self, key: Any, value: Any) -> None:
        self._owner.refuse_absent(key)
        held = self._owner.real[key] = {}
        _Entry(self._owner, key, held).update(value)

    def __delitem__(self, key: Any) -> None:
        del self._owner.real[key]

    def pop(self, key: Any, *default: Any) -> Any:
        if key not in self and default:
            return default[0]
        found = self._entry(key)
        self._owner.real.pop(key)
        return found

    def popitem(self) -> tuple[Any, Any]:
        key = next(reversed(self._owner.real))
        return key, self.pop(key)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def update(self, *args: Any, **kwargs: Any) -> None:
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def clear(self) -> None:
        self._owner.real.clear()

    def __iter__(self) -> Iterator[Any]:
        return iter(self._owner.real)

    def __reversed__(self) -> Iterator[Any]:
        return reversed(self._owner.real)

    def __len__(self) -> int:
        return len(self._owner.real)

    def __bool__(self) -> bool:
        return bool(self._owner.real)

    def keys(self) -> Any:
        return self._owner.real.keys()

    def values(self) -> Any:
        return [self._entry(key) for key in self._owner.real]

    def items(self) -> Any:
        return [(key, self._entry(key)) for key in self._owner.real]

    def __repr__(self) -> str:
        return f"<the state of {len(self)} parameters, as this rank has it ({self._owner.axis})>"

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def copy(self) -> Any:
        return collections.defaultdict(dict, self.items())

    __copy__ = copy

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        made = {copy.deepcopy(key, memo): copy.deepcopy(value, memo) for key, value in self.items()}
        return collections.defaultdict(dict, made)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        del protocol
        raise ApplyError("optimizer.state is this rank's part, and keyed by tensors", fix=_FIX_OF_LOAD)


def state_of(optimizer: torch.optim.Optimizer | None) -> Any:
    """Return the state of an optimizer itself, also while user code sees the guarded view; None where there is none."""
    state = getattr(optimizer, "state", None)
    return state._owner.real if isinstance(state, _View) else state
