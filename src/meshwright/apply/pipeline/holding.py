"""Parameters of other stages leave the module, and come back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from meshwright.apply.pipeline.values import Meta, StandIn, Value, mark, unmark
from meshwright.apply.shard_facts import Moment, ShardFacts

__all__: list[str] = []


class Holding:
    """The parameters of a module of which this rank holds a part.

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
            (owner, dict(owner._parameters))
            for owner in module.modules()
            if any(id(parameter) in ids for parameter in owner._parameters.values())
        ]
        self._ids = ids
        self._is_out = False
        self._let_go()
        self._take_out()

    def _let_go(self) -> None:
        for parameter in self.absent.values():
            mark(parameter, Value(None, None, None, StandIn(Meta.of(parameter))))
            dtype = parameter.dtype
            nothing = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
            parameter.grad = None
            parameter.data = torch.full((), nothing, dtype=dtype, device=parameter.device).expand(parameter.shape)

    def _take_out(self) -> None:
        for owner, parameters in self._slots:
            for name, parameter in parameters.items():
                # Another one there was put by the user, which the guard of the model notices.
                if id(parameter) in self._ids and dict.get(owner._parameters, name) is parameter:
                    del owner._parameters[name]
                    owner.__dict__[name] = parameter
        self._is_out = True

    def on_state(self, state: str) -> None:
        """List the whole model's parameters where user code runs between steps: it may count them, or freeze some by place.

        What is not held stands there without values (`held_parts`), in the order of one device.
        """
        if (state == "between") == self._is_out and state != "whole":
            if self._is_out:
                self._put_back()
            else:
                self._take_out()

    def held_parts(self, moment: Moment) -> list[tuple[Tensor, ShardFacts]]:
        """Return the parameters of other stages, and what is known of them."""
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
                    ignores_writes=True,
                    gradient_is_elsewhere=lambda: True,
                ),
            )
            for name, parameter in self.absent.items()
        ]

    def _put_back(self) -> None:
        for owner, parameters in self._slots:
            for name, parameter in parameters.items():
                if parameter is not None and id(parameter) in self._ids:
                    owner.__dict__.pop(name, None)
            now = {**owner._parameters}
            owner._parameters.clear()
            owner._parameters.update({name: now.get(name, parameter) for name, parameter in parameters.items()})
            owner._parameters.update({name: parameter for name, parameter in now.items() if name not in parameters})
        self._is_out = False

    def set_trainable(self, states: Mapping[str, bool]) -> None:
        """Have `requires_grad` of the parameters that this rank does not hold as the ranks have it that do."""
        for name, parameter in self.absent.items():
            parameter.requires_grad_(states.get(name, parameter.requires_grad))
            mark(parameter, Value(None, None, None, StandIn(Meta.of(parameter))))

    @contextlib.contextmanager
    def whole(self, values: Mapping[str, Tensor]) -> Iterator[None]:
        """Have the module whole inside, with these values for what this rank does not hold."""
        kept = {name: parameter.data for name, parameter in self.absent.items()}
        for name, parameter in self.absent.items():
            parameter.data = values[name]
        self._put_back()
        try:
            yield
        finally:
            self._take_out()
            for name, parameter in self.absent.items():
                parameter.data = kept[name]

    def close(self) -> None:
        """Make all parameters parameters again; those of other stages read as NaN."""
        self._put_back()
        for parameter in self.absent.values():
            parameter.data = parameter.data.contiguous()
            unmark(parameter)


def keep_only(optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> None:
    """Take from an optimizer what other ranks update."""
    held = {id(parameter) for parameter in parameters}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in held:
                optimizer.state.pop(parameter, None)
        group["params"] = [parameter for parameter in group["params"] if id(parameter) in held]
