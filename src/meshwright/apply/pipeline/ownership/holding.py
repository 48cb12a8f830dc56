"""Parameters of other stages, removed from the module at the cut and restored when it is whole or closed."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.apply.pipeline.walking.stand_ins import Meta, StageValue, StandIn, mark, unmark
from meshwright.apply.shards.facts import RunMoment, ShardFacts

__all__: list[str] = []


class Holding:
    """The parameters of a module of which this rank holds only some.

    What it does not hold stops being a parameter of its module, so that engines, optimizers and `named_parameters()` see this
    rank's part alone. It stays where it was as a plain attribute without values: code between the layers may ask for a weight's
    dtype or device.

    Args:
        module: The user's module, whole.
        holders: FQN -> the stages that use the parameter.
        own: The stages of this rank.
    """

    def __init__(self, module: nn.Module, holders: Mapping[str, tuple[int, ...]], own: tuple[int, ...]) -> None:
        self._module = module
        self.all = dict(module.named_parameters())
        """FQN -> parameter, of the whole model."""
        self.absent = {name: p for name, p in self.all.items() if not set(holders[name]) & set(own)}
        """FQN -> parameter that this rank does not hold."""
        ids = {id(parameter) for parameter in self.absent.values()}
        self._slots = [
            _ModuleParameters(owner, ids)
            for owner in module.modules()
            if any(id(parameter) in ids for parameter in owner._parameters.values())
        ]
        self._all, self._own = [slot.all for slot in self._slots], [slot.own for slot in self._slots]
        self._seen_all, self._seen_own = _ids(self._all), _ids(self._own)
        self._elsewhere: dict[str, Any] = {}
        self._is_out = False
        self._let_go()
        self._take_out()
        self._show_as_attributes()

    def _let_go(self) -> None:
        for parameter in self.absent.values():
            mark(parameter, StageValue(None, None, None, StandIn(Meta.of(parameter))))
            dtype = parameter.dtype
            nothing = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
            parameter.grad = None
            parameter.data = torch.full((), nothing, dtype=dtype, device=parameter.device).expand(parameter.shape)

    def _take_out(self) -> None:
        if _ids(self._all) != self._seen_all:
            for slot in self._slots:
                slot.take_over_in_own()
        for slot in self._slots:
            slot.attributes["_parameters"] = slot.own
        self._is_out = True

    def _put_back(self) -> None:
        if _ids(self._own) != self._seen_own:
            for slot in self._slots:
                slot.all.update(slot.own)
        for slot in self._slots:
            slot.attributes["_parameters"] = slot.all
        self._is_out = False

    def _show_as_attributes(self, *, shown: bool = True) -> None:
        for slot in self._slots:
            for name in slot.absent:
                if shown:
                    slot.attributes[name] = slot.all[name]
                else:
                    slot.attributes.pop(name, None)

    def on_state(self, state: str) -> None:
        """List the whole model's parameters while user code runs between steps: it may count them, or freeze some by position.

        What is not held stands there without values (`held_parts`), in the order of one device.
        """
        if (state == "between") == self._is_out and state != "whole":
            if self._is_out:
                self._put_back()
            else:
                self._take_out()

    def held_values(self, parts: Sequence[tuple[Tensor, ShardFacts]]) -> dict[str, str]:
        """Return, for the other stages, the shard or term that this rank holds of each of its parameters, by FQN; whole ones
        are left out.
        """
        known = {id(tensor): facts.values for tensor, facts in parts if facts.values != "whole"}
        return {name: known[id(p)] for name, p in self.all.items() if name not in self.absent and id(p) in known}

    def learn(self, told: Sequence[Mapping[str, str]]) -> None:
        """Record what the ranks of other stages hold of their parameters, from their `held_values`."""
        self._elsewhere = {name: values for states in told for name, values in states.items()}

    def held_parts(self, moment: RunMoment) -> list[tuple[Tensor, ShardFacts]]:
        """Return the parameters of other stages with what is known of them."""
        return [
            (
                parameter,
                ShardFacts(
                    name=f"parameter '{name}'",
                    held="its values are with the ranks of another stage (pp)",
                    moment=moment,
                    values="none",
                    key=("pp", name),
                    axis="pp",
                    elsewhere=self._elsewhere.get(name, "whole"),
                    gradient_is_elsewhere=lambda: True,
                ),
            )
            for name, parameter in self.absent.items()
        ]

    def set_trainable(self, states: Mapping[str, bool]) -> None:
        """Set `requires_grad` of the parameters that this rank does not hold as the ranks that hold them report it."""
        for name, parameter in self.absent.items():
            parameter.requires_grad_(states.get(name, parameter.requires_grad))
            mark(parameter, StageValue(None, None, None, StandIn(Meta.of(parameter))))

    @contextlib.contextmanager
    def whole(self, values: Mapping[str, Tensor]) -> Iterator[None]:
        """Make the module whole inside the context, with these values for the parameters that this rank does not hold."""
        kept = {name: parameter.data for name, parameter in self.absent.items()}
        for name, parameter in self.absent.items():
            parameter.data = values[name]
        self._put_back()
        self._show_as_attributes(shown=False)
        try:
            yield
        finally:
            self._take_out()
            self._show_as_attributes()
            for name, parameter in self.absent.items():
                parameter.data = kept[name]

    def close(self) -> None:
        """Register all parameters again; those of other stages are filled with NaN."""
        self._put_back()
        self._show_as_attributes(shown=False)
        for parameter in self.absent.values():
            parameter.data = parameter.data.contiguous()
            unmark(parameter)


class _ModuleParameters:
    """The parameters of one module, in two dicts: all of them, and those that this rank holds."""

    __slots__ = ("absent", "all", "attributes", "own", "seen")

    def __init__(self, owner: nn.Module, absent: Collection[int]) -> None:
        self.attributes = owner.__dict__
        self.all: dict[str, nn.Parameter | None] = owner._parameters
        self.own = {name: parameter for name, parameter in self.all.items() if id(parameter) not in absent}
        self.absent = [name for name in self.all if name not in self.own]
        self.seen = dict(self.all)

    def take_over_in_own(self) -> None:
        """Copy parameters that the user replaced or added into this rank's own dict, where the model's guard sees them."""
        self.own.update({name: now for name, now in self.all.items() if self.seen.get(name, self) is not now})


def _ids(found: Sequence[dict[str, Any]]) -> list[int]:
    return list(map(id, itertools.chain.from_iterable(map(dict.values, found))))


def keep_only(optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> None:
    """Remove from an optimizer the parameters that other ranks update."""
    held = {id(parameter) for parameter in parameters}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in held:
                optimizer.state.pop(parameter, None)
        group["params"] = [parameter for parameter in group["params"] if id(parameter) in held]
