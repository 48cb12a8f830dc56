"""Buffers and parameters that each micro-batch's forward changes, where one device's forward changes them once a step.

A centre of outputs, a codebook's averages, the vectors of a spectral norm, a count of calls: with micro-batches they move once
for each, and the later ones see what the earlier ones left. Statistics of torch's norms are known for it; of others a reason
tells. A forward that writes into a parameter by its batch is refused before; here is one that writes by the parameters alone.
"""

from __future__ import annotations

from meshwright.apply.engine import Engine
from meshwright.apply.state.buffers import buffer_digests
from meshwright.apply.state.kept_parameters import parameter_digests
from meshwright.errors import some_of
from meshwright.run.losses.loss import LossRule

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
        self._last: dict[str, str] | None = None
        self._found: dict[str, None] = {}

    def note_forward(self) -> None:
        """Compare the buffers after a micro-batch's forward with those after the one before it in this step."""
        if not self._left:
            return
        now = {f"'{name}'": digest for name, _, is_norm, digest in buffer_digests(self._engine.module) if not is_norm}
        now |= {f"parameter '{name}'": digest for name, digest in parameter_digests(self._engine.module)}
        if self._last is not None:
            changed = (name for name, digest in now.items() if self._last.get(name, digest) != digest)
            self._found.update(dict.fromkeys(changed))
        self._last = now

    def end_step(self) -> None:
        """Tell what any rank has found; every rank calls it at the end of a step's passes."""
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

    def _tell(self, found: list[str]) -> None:
        names = some_of(found, _MOST_SHOWN)
        self._rule.reasons += (
            f"buffers: the forward of each micro-batch changes {names}, where one device's forward changes them once in a "
            "step: they are not one device's, nor is what is computed with them; micro_batches=1 is",
        )
