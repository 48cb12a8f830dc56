"""How many proofs a search makes in each scope."""

from __future__ import annotations

from collections import Counter

import pytest

from meshwright.apply.tensor.search import regions
from meshwright.apply.tensor.tensor_layout import Region


def count_proofs(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Return a counter of the proofs in each scope, from now on."""
    counts: Counter[str] = Counter()
    prove = regions.Proving.prove

    def counted(self: regions.Proving, scope: str, region: Region) -> Region:
        counts[scope] += 1
        return prove(self, scope, region)

    monkeypatch.setattr(regions.Proving, "prove", counted)
    return counts
