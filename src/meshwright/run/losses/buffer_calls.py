"""Buffers, parameters and counts that each micro-batch's forward changes, where one device's forward changes them once a step.

A centre of outputs, a codebook's averages, the vectors of a spectral norm, a count of calls: with micro-batches they move once
for each, and the later ones see what the earlier ones left. Statistics of torch's norms are known for it; of others a reason
tells. A forward that writes into a parameter by its batch is refused before; here is one that writes by the parameters alone.
"""

from __future__ import annotations

import types
from collections.abc import Iterator

from torch import nn

from meshwright.apply.engine import Engine
from meshwright.apply.state.buffers import buffer_digests
from meshwright.apply.state.kept_parameters import parameter_digests
from meshwright.errors import some_of
from meshwright.run.losses.loss import LossRule
from meshwright.run.losses.moved_state import MovedState, moved_in, text_of

__all__: list[str] = []

_TIMES = 3
"""How many steps are looked at [count]."""
_MOST_SHOWN = 4


class BufferCalls:
    """Finds such buffers in the first steps.

    Args:
        engine: The strategy that runs the micro-batches.
        rule: Has the reasons.
        is_cut: Whether the plan cuts a rank's share into micro-batches; the same on every rank.
    """

    def __init__(self, engine: Engine, rule: LossRule, *, is_cut: bool) -> None:
        self._engine = engine
        self._rule = rule
        self._left = _TIMES if is_cut and engine.num_replicas == 1 else 0
        self._left_of_ranks = self._left_of_short = _TIMES if engine.num_shares > 1 and engine.num_replicas == 1 else 0
        self._last: dict[str, str] | None = None
        self._found: dict[str, None] = {}
        self._counts: list[tuple[str, nn.Module, str]] | None = None
        self._elsewhere: MovedState | None = None

    def note_forward(self) -> None:
        """Compare the buffers after a micro-batch's forward with those after the one before it in this step."""
        if not self._left:
            return
        now = {f"'{name}'": digest for name, _, is_norm, digest in buffer_digests(self._engine.module) if not is_norm}
        now |= {f"parameter '{name}'": digest for name, digest in parameter_digests(self._engine.module)}
        if self._counts is None:
            self._counts = list(_kept_by_calls(self._engine.module))
        if self._elsewhere is None:
            self._elsewhere = MovedState(self._engine.module, self._rule.loss_fn)
        now |= self._elsewhere.now()
        for name, owner, key in self._counts:
            if (text := text_of(vars(owner).get(key))) is not None:
                now[f"attribute '{name}'"] = text
        if self._last is not None:
            changed = (name for name, digest in now.items() if self._last.get(name, digest) != digest)
            self._found.update(dict.fromkeys(changed))
        self._last = now

    def end_step(self, num_samples: int) -> None:
        """Tell what any rank has found; every rank calls it at the end of a step's passes.

        Args:
            num_samples: Of the global batch; a rank that has none makes no call, and counts none [samples].
        """
        if num_samples < self._engine.num_shares and self._left_of_short:
            self._left_of_short -= 1
            self._compare_shares()
        elif self._left_of_ranks and self._engine.num_shares > 1 and self._rule.has_untried_keeping:
            self._left_of_ranks -= 1
            self._compare_shares()
        if not self._left:
            return
        self._left -= 1
        self._last = None
        found, group = list(self._found), self._engine.everyone
        if group.size > 1:
            with group.ledger.of_checks():
                told = group.all_gather_json(found, device=self._engine.device)
            found = list(dict.fromkeys(name for names in told for name in names))
        if found:
            self._left = 0
            self._tell(found)

    def _compare_shares(self) -> None:
        """Tell what ranks keep otherwise, each of its own samples, where no trial has looked at that."""
        engine = self._engine
        self._elsewhere = self._elsewhere or MovedState(engine.module, self._rule.loss_fn)
        with engine.group.ledger.of_checks():
            told = engine.group.all_gather_json(self._elsewhere.now(with_modules=True), device=engine.device)
            names = [name for name in told[0] if any(held.get(name, told[0][name]) != told[0][name] for held in told)]
            found = engine.everyone.all_gather_json(names, device=engine.device)
        if names := list(dict.fromkeys(name for held in found for name in held)):
            self._left_of_ranks = self._left_of_short = 0
            self._rule.reasons += (
                f"buffers: each rank's own samples (or none) change {some_of(names, _MOST_SHOWN)}: where results depend on it, "
                "they are not one device's; with batch=whole they are",
            )

    def _tell(self, found: list[str]) -> None:
        names = some_of(found, _MOST_SHOWN)
        self._rule.reasons += (
            f"buffers: the forward of each micro-batch changes {names}, where one device's forward changes them once in a "
            "step: they are not one device's, nor is what is computed with them; micro_batches=1 is",
        )


def _kept_by_calls(module: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield (FQN, owner, name) of attributes that a method reads before it sets them, as a count of calls is."""
    of_class: dict[type, set[str]] = {}
    for path, child in module.named_modules():
        kind = type(child)
        if kind not in of_class:
            bases = [base for base in kind.__mro__ if base.__module__.partition(".")[0] not in ("torch", "builtins")]
            own = [value for base in bases for value in vars(base).values()]
            codes = [value.__code__ for value in own if isinstance(value, types.FunctionType)]
            of_class[kind] = {name for code in codes for name in moved_in(code)}
        yield from ((f"{path}.{name}" if path else name, child, name) for name in sorted(of_class[kind]))
