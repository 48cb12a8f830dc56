"""Users' hooks on gradients, which in backward may get a shard of one device's gradient, or a term of it.

A hook that scales gradients, or zeroes parts of them, is right on a term, because it is linear. A hook that divides by a norm
is not: it gets a gradient that refuses such functions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from typing import Any, Self

import torch
from torch import Tensor, nn

from meshwright.apply.engine import Engine
from meshwright.apply.shards.classes import (
    ShardTensor,
    as_plain,
    as_shard,
    facts_of,
    known_facts,
    set_facts,
    whole_class,
)
from meshwright.apply.shards.facts import ShardFacts
from meshwright.apply.shards.switch import ShardSwitch
from meshwright.apply.state.hook_tables import is_ours

__all__: list[str] = []


_RUNNING_SUM = "a hook that waits for it is called after each micro-batch, with the sum of those before"


class UserHook:
    """A user's hook, in a wrapper that distinguishes it from ours."""

    def __init__(self, hook: Callable[..., Any], switch: ShardSwitch) -> None:
        self.hook = hook
        self.switch = switch
        self.__module__ = getattr(hook, "__module__", None) or ""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.switch.user_hook():
            return self.hook(*args, **kwargs)


class _TensorHook(UserHook):
    """A hook on a tensor: it takes a gradient and may return another."""

    def __init__(self, hook: Callable[..., Any], switch: ShardSwitch, facts: ShardFacts) -> None:
        super().__init__(hook, switch)
        self._facts = facts.of_gradient()

    def __call__(self, gradient: Tensor) -> Tensor | None:
        with self.switch.user_code():
            result = self.hook(as_shard(gradient, self._facts))
            if isinstance(result, ShardTensor):
                kept = facts_of(result)
                if (kept.key, kept.values) != (self._facts.key, self._facts.values):
                    self._facts.refuse("a hook that returns another gradient in place")
                return as_plain(result)
            if isinstance(result, Tensor) and torch.count_nonzero(result):
                self._facts.refuse("a hook that returns a tensor of its own in place")
        return result


class _AccumulateHook(UserHook):
    """A hook after accumulation: it takes the parameter."""

    def __init__(self, hook: Callable[..., Any], switch: ShardSwitch, facts: ShardFacts) -> None:
        super().__init__(hook, switch)
        self._facts = facts

    def __call__(self, parameter: Tensor) -> None:
        with self.switch.user_code():
            now, known = type(parameter), known_facts(parameter)
            set_facts(parameter, self._facts)
            if not issubclass(now, ShardTensor):
                parameter.__class__ = whole_class(now)
            try:
                self.hook(parameter)
            finally:
                parameter.__class__ = now
                set_facts(parameter, known)


class GradientHooks:
    """Guards the user's hooks on the gradients of a module.

    Args:
        module: The module, laid out.
        switch: Guards its tensors.
        terms: Ids of parameters whose gradients are terms in backward: of sums over ranks, or over micro-batches.
        accumulates: Whether a step may run backward more than once, so that `.grad` is a running sum meanwhile.
    """

    def __init__(
        self, module: nn.Module, switch: ShardSwitch, terms: Collection[int], *, accumulates: bool = False
    ) -> None:
        self._switch = switch
        self._accumulates = accumulates
        self._parameters: list[tuple[Tensor, ShardFacts]] = []
        for name, parameter in module.named_parameters():
            facts = self._facts(name, parameter, is_term=id(parameter) in terms)
            if facts is not None:
                self._parameters.append((parameter, facts))
        self._seen: list[list[Any]] = [[] for _ in self._parameters]
        """Hooks on the gradient of each when they were last looked at: in nearly every step they are the same."""

    @classmethod
    def of(cls, engine: Engine, *, accumulates: bool) -> Self:
        """Return the guard of an engine's hooks; `accumulates` tells whether a step may run backward more than once."""
        terms = {id(p) for p in engine.module.parameters()} if accumulates else engine.gradient_terms()
        # Replicas in threads guard hooks themselves.
        guarded = terms if engine.num_replicas == 1 else ()
        return cls(engine.module, engine.switch, guarded, accumulates=accumulates)

    def _facts(self, name: str, parameter: Tensor, *, is_term: bool) -> ShardFacts | None:
        known = known_facts(parameter)
        is_cut = known is not None and known.is_cut_inside
        if not is_term and not is_cut:
            return None
        what = "a hook in backward sees one term of it, which is summed over ranks or micro-batches afterwards"
        held = known.held if known is not None and is_cut else what
        return ShardFacts(
            name=f"parameter '{name}'",
            held=f"{held}; {what}" if is_cut and is_term else held,
            moment=self._switch.moment,
            values="share" if is_term else "shard",
            key=known.key if known is not None and is_cut else ("gradient", name),
            is_cut=is_cut,
        )

    def guard(self) -> None:
        """Wrap hooks registered since the last call, so that each gets a gradient marked as shard or term."""
        for index, (parameter, facts) in enumerate(self._parameters):
            hooks = parameter._backward_hooks
            if hooks and [*hooks.values()] != self._seen[index]:
                _wrap(hooks, lambda hook, facts=facts: _TensorHook(hook, self._switch, facts))  # pyright: ignore
                self._seen[index] = [*hooks.values()]
            hooks = parameter._post_accumulate_grad_hooks  # pyright: ignore[reportAttributeAccessIssue]
            if hooks:
                if self._accumulates:  # later micro-batches would add to what it has already scaled
                    facts = dataclasses.replace(facts, values="none", held=_RUNNING_SUM)
                _wrap(hooks, lambda hook, facts=facts: _AccumulateHook(hook, self._switch, facts))

    def close(self) -> None:
        """Restore the parameters' own hooks."""
        for parameter, _ in self._parameters:
            for hooks in (parameter._backward_hooks, parameter._post_accumulate_grad_hooks):  # pyright: ignore
                unwrap(hooks or {})


def _wrap(hooks: dict[Any, Any], wrap: Callable[[Any], UserHook]) -> None:
    for key, hook in hooks.items():
        if not isinstance(hook, UserHook) and not is_ours(hook):
            hooks[key] = wrap(hook)


def unwrap(hooks: dict[Any, Any]) -> None:
    """Restore the user's own hooks."""
    for key, hook in hooks.items():
        if isinstance(hook, UserHook):
            hooks[key] = hook.hook


def guard_step_hooks(optimizer: Any, switch: ShardSwitch) -> None:
    """Show shards as guarded tensors to the user's hooks around an optimizer's step."""
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        hooks = getattr(optimizer, name, None)
        if hooks:
            _wrap(hooks, lambda hook: UserHook(hook, switch))


def release_step_hooks(optimizer: Any) -> None:
    """Restore an optimizer's own hooks."""
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        unwrap(getattr(optimizer, name, None) or {})
