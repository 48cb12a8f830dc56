"""Gradients that a script has written since `model.backward` left them: ranks of a batch's shares must have written the same."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from meshwright.apply.engine import Engine
from meshwright.errors import ApplyError
from meshwright.run.agreement import Saying
from meshwright.run.sentinels.circles import Circle
from meshwright.run.sentinels.digest import digest_of, digest_text
from meshwright.spec import Plan

__all__: list[str] = []

TOPIC = "gradient"


class WrittenGradients:
    """What `model.backward` has left in `.grad`, to tell a script's own gradients from it.

    Clipping by torch or a projection of two gradients gives every rank the same. A gradient that a rank has computed from its
    own share does not, and nothing would exchange it.

    Args:
        engine: The strategy.
        plan: Its plan.
    """

    def __init__(self, engine: Engine, plan: Plan) -> None:
        self._engine = engine
        self._plan = plan
        has_ranks = engine.everyone.size > 1
        self._circle = Circle.over(plan.mesh, engine.everyone.rank, "dp", "cp") if has_ranks else None
        self._left: dict[int, tuple[torch.Tensor, int]] = {}

    def leave(self) -> None:
        """Take note of the gradients as they are now: they are the whole batch's."""
        if self._circle is None or self._circle.is_alone:
            return
        holders = self._engine.gradient_holders()
        self._left = {id(holder): (holder.grad, holder.grad._version) for holder in holders if holder.grad is not None}

    def _written(self) -> list[tuple[str, torch.Tensor]]:
        """Return (FQN, gradient) of those that were written since, where every rank has the whole ones."""
        names = {id(parameter): name for name, parameter in self._engine.module.named_parameters()}
        found: list[tuple[str, torch.Tensor]] = []
        for holder in self._engine.gradient_holders():
            name, grad = names.get(id(holder)), holder.grad
            if name is None or grad is None:
                continue
            before = self._left.get(id(holder))
            if before is None or before[0] is not grad or before[1] != grad._version:
                found.append((name, grad))
        return found

    def are_written(self) -> bool:
        """Whether the script has written any since."""
        return self._circle is not None and not self._circle.is_alone and bool(self._written())

    def sayings(self) -> list[Saying]:
        """Return what the ranks that hold the same parameters must have alike; one topic, or none, on every rank."""
        circle = self._circle
        if circle is None or circle.is_alone:
            return []
        written = self._written()
        digest = 0
        if written:
            digest = digest_of([grad.coalesce().values() if grad.is_sparse else grad for _, grad in written])
            digest += digest_text(",".join(name for name, _ in written))
        return [Saying(TOPIC, circle, digest & 2**63 - 1)]

    def explain(self, topics: Sequence[str]) -> None:
        """Raise where ranks have written different gradients; called on every rank.

        Raises:
            ApplyError: They have.
        """
        if TOPIC not in topics:
            return
        told = self._engine.everyone.all_gather_json([name for name, _ in self._written()], device=self._engine.device)
        names = list(dict.fromkeys(name for rank in told for name in rank))
        raise ApplyError(
            f"the script has written gradients of {len(names)} parameters, '{names[0]}' for example, since model.backward(), and "
            f"not the same on all ranks of the plan '{self._plan}': each would train on its own share of the batch",
            fix="have model.backward(loss, weight=n) make the gradient, and change it alike on every rank; a copy of the model "
            "that takes steps of its own (MAML) needs the whole batch on every rank, or the plan tp=N",
        )
