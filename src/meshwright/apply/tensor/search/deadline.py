"""Deadline of a search: the ranks that wait for it would soon be taken for hung."""

from __future__ import annotations

import time

from meshwright.errors import ApplyError

__all__: list[str] = []

DEFAULT_PATIENCE_S = 300.0
"""How long ranks wait in one exchange by default [s]."""

_SHARE = 0.93
"""Of the patience: a proof that has begun by then takes its time [fraction]."""


class Deadline:
    """The end of a search.

    Args:
        patience_s: How long the other ranks wait [s].
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._at = time.monotonic() + _SHARE * patience_s

    def check(self, num_proofs: int) -> None:
        """Raise ApplyError after the end.

        Args:
            num_proofs: Proofs made by now [count].
        """
        if time.monotonic() > self._at:
            raise ApplyError(
                f"the search for what can be cut took more than {_SHARE * self._patience_s:.0f} s, after {num_proofs} proofs; "
                f"the other ranks wait for {self._patience_s:.0f} s, and what it has found by then depends on the machine",
                fix="raise timeout_s of launch or join_world, say in the plan what stays whole: "
                "layouts={'the name of a parameter': 'whole'}, or use tp=1",
            )
