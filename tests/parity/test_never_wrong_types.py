"""What types keep whole under tensor parallelism: code that reads numbers of what would be cut, against one plain process."""

from __future__ import annotations

import pytest
from tests.parity.jobs import types_jobs
from tests.tolerances import FLOAT64

from meshwright import testing


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_branch_on_values_that_the_first_batch_does_not_take_keeps_the_hidden_entries_whole(num_ranks: int) -> None:
    gradients, plain, layouts, reasons, count = testing.run_ranks(
        types_jobs.train_rescaled, num_ranks, f"tp={num_ranks}"
    )[0]
    assert count == 1  # the second batch takes it, and the first does not
    testing.assert_parity(gradients, plain, FLOAT64)
    assert layouts["first.0.weight"] == "column"
    # Not as a pair, whose hidden entries would be parts: each by itself, so that the branch sees all of them.
    assert layouts["up.weight"] == layouts["down.weight"] == "column"
    assert any("layer by layer" in reason and "types_jobs.py" in reason for reason in reasons)
