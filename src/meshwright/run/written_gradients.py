"""Gradients that a script has written since `model.backward` left them: ranks of a batch's shares must have written the same."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from meshwright.apply.engine import Engine
from meshwright.apply.norm import values_of
from meshwright.apply.shards.classes import known_facts
from meshwright.errors import ApplyError
from meshwright.run.agreement import Saying
from meshwright.run.gradient_scales import NO_FACTOR, PieceNorms, differ, tolerance_of
from meshwright.run.sentinels.circles import Circle
from meshwright.run.sentinels.digest import digest_of, digest_text
from meshwright.spec import Plan

__all__: list[str] = []

TOPIC = "gradient"
SCALE = "gradient scale"
NAMES = "names of gradients"
DONE = "done to gradients"
_EARLIER = "earlier calls"
_ZEROED = "zero_grad(set_to_none=False)"
_MOST_DONE = 16
"""Calls before a step that are kept in words [count]."""


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
        self._sharing = Circle.over(plan.mesh, engine.everyone.rank, "tp") if has_ranks else None
        self._everyone = Circle(tuple(engine.everyone.ranks), engine.everyone.rank)
        self._done: list[str] = []
        """What was done to the gradients since the last step that ranks must have done alike, in words and in order."""
        self._num_left = 0
        self._left: dict[int, tuple[torch.Tensor, int]] = {}
        self._written_before: set[str] = set()
        """FQNs of gradients that were written before a later backward added to them."""
        self._norms: PieceNorms | None = None
        self._factor_before = 1.0
        self._num_zeroed = 0
        """How often the script has set pieces to zero before a later backward added to them [count]."""

    def leave(self) -> None:
        """Take note of the gradients as they are now: they are the whole batch's."""
        self._num_left = self._num_there()
        if self._everyone.is_alone:
            return
        holders = self._engine.gradient_holders()
        self._left = {id(holder): (holder.grad, holder.grad._version) for holder in holders if holder.grad is not None}
        self._norms = PieceNorms(self._pieces())

    def zero(self, *, set_to_none: bool) -> None:
        """Drop all gradients; or set them to zero, so that the optimizer steps parameters that get none, as in torch."""
        holders = self._engine.gradient_holders()
        if set_to_none:
            for holder in holders:
                holder.grad = None
            self._engine.drop_gradients()
            return
        self._engine.drop_cleared_gradients()
        self.note(_ZEROED)
        for holder in holders:
            if holder.grad is not None:
                values_of(holder.grad).zero_()
        self.leave()  # whatever the script has written is gone

    def keep(self) -> None:
        """Remember what the script has written so far: a backward is about to add to it."""
        # A rank that holds no gradient, of a model with fewer entries than ranks, takes it that nobody has zeroed.
        has_earlier = self._num_there() if self._engine.gradient_holders() else "backward" in self._done
        self._done += self._dropped() if has_earlier else self._cleared()
        self.note("backward on earlier gradients" if has_earlier else "backward")
        self._done = self._shortened()
        if self._everyone.is_alone:
            return
        self._written_before |= {name for name, _ in self._written()}
        if self._circle is None or self._circle.is_alone:
            return
        factor = self._factor()
        self._num_zeroed += factor == 0
        self._factor_before = self._factor_before * factor if factor else 1.0  # zeroed: what was before is gone

    def forget(self) -> None:
        """Forget what was written before: the optimizer has used it."""
        self._written_before.clear()
        self._done.clear()
        self._factor_before, self._num_zeroed = 1.0, 0
        self._norms = None

    def are_pending(self) -> bool:
        """Whether a backward has come since the optimizer's last step, and its gradients are there."""
        zeroed = [place for place, done in enumerate(self._done) if done == _ZEROED]
        done = self._done[zeroed[-1] + 1 :] if zeroed else self._done
        return any(word in entry for entry in done for word in ("backward", _EARLIER)) and self._num_there() > 0

    def note(self, done: str) -> None:
        """Note in words what this rank does to the gradients by itself; ranks must do the same before a step."""
        self._done.append(done)

    def _shortened(self) -> list[str]:
        """Return what was done, with a window of many backwards as one entry: its text stays short."""
        if len(self._done) < _MOST_DONE:
            return self._done
        return [f"{_EARLIER} (digest {digest_text(', '.join(self._done)):x})"]

    def _num_there(self) -> int:
        return sum(holder.grad is not None for holder in self._engine.gradient_holders())

    def _all_done(self) -> list[str]:
        """Return what was done, and whether gradients that were left are gone."""
        return [*self._done, *self._dropped()]

    def _dropped(self) -> list[str]:
        """Return in words which gradients that were left are gone."""
        now = self._num_there()
        if now >= self._num_left:
            return self._cleared()
        names = {id(parameter): name for name, parameter in self._engine.module.named_parameters()}
        whole = [names[id(held)] for held in self._engine.gradient_holders() if held.grad is None and id(held) in names]
        gone = f"of {len(whole)} parameters, '{whole[0]}' first" if now and whole else "of some" if now else "all"
        return [*self._cleared(), f"gradients dropped: {gone}"]

    def _cleared(self) -> list[str]:
        """Return in words which parameters' ``.grad`` the script has set to None where ranks have pieces of the gradient.

        A rank without a piece of such a gradient holds nothing that would be missing, and has said so all the same.
        """
        found = [name for name, held in self._engine.module.named_parameters() if _is_cleared(held)]
        if not found:
            return []
        return [f"parameter.grad = None of {len(found)}, '{found[0]}' first (digest {digest_text(','.join(found)):x})"]

    def _pieces(self) -> list[torch.Tensor]:
        """Return the gradients of which this rank has a piece, whatever the parameter's name."""
        names = {id(parameter) for parameter in self._engine.module.parameters()}
        grads = [holder.grad for holder in self._engine.gradient_holders() if id(holder) not in names]
        return [grad for grad in grads if grad is not None and not grad.is_sparse and grad.numel()]

    def _factor(self) -> float:
        """Return by what the script has multiplied all pieces since they were left; 1 where it has written none."""
        pieces = self._pieces()
        if self._norms is not None and not pieces:
            return NO_FACTOR  # a rank without a piece knows nothing of what the script did to those of others
        return 1.0 if self._norms is None or self._norms.are_of(pieces) else self._norms.factor_to(pieces)

    def _written(self) -> list[tuple[str, torch.Tensor]]:
        """Return (FQN, gradient) of those that were written since, where every rank has the whole ones."""
        names = {id(parameter): name for name, parameter in self._engine.module.named_parameters()}
        found: list[tuple[str, torch.Tensor]] = []
        for holder in self._engine.gradient_holders():
            name, grad = names.get(id(holder)), holder.grad
            if name is None or grad is None:
                continue
            before = self._left.get(id(holder))
            is_left = before is not None and before[0] is grad and before[1] == grad._version
            if not is_left or name in self._written_before:
                found.append((name, grad))
        return found

    def are_written(self) -> bool:
        """Whether the script has written any since."""
        if self._everyone.is_alone:
            return False
        return bool(self._written()) or not (self._norms is None or self._norms.are_of(self._pieces()))

    def sayings(self) -> list[Saying]:
        """Return what ranks must have alike; the same topics on every rank."""
        circle = self._circle
        if self._everyone.is_alone:
            return []
        said = [Saying(DONE, self._everyone, digest_text(", ".join(self._all_done())) & 2**63 - 1)]
        written = self._written()
        if self._sharing is not None and not self._sharing.is_alone:
            names = digest_text(",".join(name for name, _ in written)) if written else 0
            said.append(Saying(NAMES, self._sharing, names & 2**63 - 1))
        if circle is None or circle.is_alone:
            return said
        digest = 0
        if written:
            digest = digest_of([grad.coalesce().values() if grad.is_sparse else grad for _, grad in written])
            digest += digest_text(",".join(name for name, _ in written))
        factor = self._factor_before * self._factor()
        scale = 0 if math.isnan(factor) else round(factor * 2**20) + 1 + self._num_zeroed * 2**50
        return [Saying(TOPIC, circle, digest & 2**63 - 1), Saying(SCALE, circle, scale & 2**63 - 1), *said]

    def explain(self, topics: Sequence[str]) -> None:
        """Raise where ranks have written different gradients; called on every rank.

        Raises:
            ApplyError: They have, or have clipped or dropped them in other ways.
        """
        if DONE in topics:
            self._explain_done()
        if SCALE in topics:
            self._explain_scale()
        if NAMES in topics and TOPIC not in topics:
            self._explain_names()
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

    def _explain_done(self) -> None:
        everyone = self._engine.everyone
        told = everyone.all_gather_json(self._all_done(), device=self._engine.device)
        rows = [f"rank {rank}: {', '.join(done) or 'nothing'}" for rank, done in zip(everyone.ranks, told, strict=True)]
        raise ApplyError(
            f"ranks have not done the same to the gradient since the last step ({'; '.join(rows[:8])}): each would move its part "
            "of the model in another way",
            fix="make the same calls with the same limits on every rank: model.backward, clip_grad_norm, zero_grad",
        )

    def _explain_names(self) -> None:
        """Raise where a rank has written a gradient of which another one has a part, and not written it there."""
        engine = self._engine
        names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
        holders = [holder for holder in engine.gradient_holders() if holder.grad is not None and holder.grad.numel()]
        held = [names[id(holder)] for holder in holders if id(holder) in names]
        told = engine.everyone.all_gather_json([[name for name, _ in self._written()], held], device=engine.device)
        for place, (written, _) in enumerate(told):
            for name in written:
                idle = [r for r, (w, h) in zip(engine.everyone.ranks, told, strict=True) if name in h and name not in w]
                if idle:
                    raise ApplyError(
                        f"the script has written the gradient of '{name}' on rank {engine.everyone.ranks[place]} since "
                        f"model.backward(), and not on rank(s) {idle}, which have a part or a copy of it (plan: {self._plan})",
                        fix="change gradients alike on every rank",
                    )

    def _explain_scale(self) -> None:
        """Raise where ranks have multiplied their pieces by different numbers; nothing where roundings differ."""
        engine = self._engine
        mine = [repr(self._factor_before * self._factor()), tolerance_of(self._pieces()), self._num_zeroed]
        told = engine.everyone.all_gather_json(mine, device=engine.device)
        factors = [float(factor) for factor, _, _ in told]
        zeroed = {
            r: row[2]
            for r, row, factor in zip(engine.everyone.ranks, told, factors, strict=True)
            if not math.isnan(factor)
        }
        if len(set(zeroed.values())) > 1:
            raise ApplyError(
                f"the script has set gradients to zero before a later model.backward() on some ranks of the plan '{self._plan}' "
                f"alone (how often, by rank: {zeroed}; rule: each rank has a piece of one gradient)",
                fix="zero gradients on every rank alike: model.zero_grad()",
            )
        if not differ(factors, max(tolerance for _, tolerance, _ in told)):
            return
        shown = ", ".join("?" if math.isnan(factor) else f"{factor:.6g}" for factor in factors)
        raise ApplyError(
            f"the script has multiplied gradients by different numbers on the ranks of the plan '{self._plan}', since "
            f"model.backward(): {shown} (rank {engine.everyone.ranks[0]} first; rule: each rank has a piece of one gradient)",
            fix="change gradients alike on every rank; model.clip_grad_norm(...) clips by the norm of the whole gradient",
        )


def _is_cleared(parameter: torch.Tensor) -> bool:
    facts = known_facts(parameter)
    if facts is None or facts.gradient_is_elsewhere is None or facts.cleared_in != facts.moment.steps:
        return False
    return facts.gradient_is_elsewhere()
