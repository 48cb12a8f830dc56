"""Trials and proofs leave alone what user code reaches: the batch, and layers that a hook refers to."""

from __future__ import annotations

import pytest
import torch
from tests.parity.jobs import reaching_jobs as jobs
from tests.tolerances import FLOAT64

from meshwright import testing

WRITING = [
    ("micro_batches=2", 1),
    ("dp=2", 2),
    ("dp=2,zero=3,whole_below=1", 2),
    ("tp=2", 2),
    ("tp=2,micro_batches=2,recompute=full", 2),
    ("pp=2,micro_batches=2", 2),
    ("pp=2,micro_batches=4,schedule=zbv", 2),
]


def _check(kind: str, line: str, num_ranks: int, num_parts: int) -> None:
    losses, state = jobs.plain(kind, num_parts)
    for found in testing.run_ranks(jobs.trained, num_ranks, kind, line):
        assert found[0] == pytest.approx(losses, rel=FLOAT64)
        for name, value in state.items():
            assert torch.allclose(found[1][name], value, rtol=1e-11, atol=1e-12), name


@pytest.mark.parametrize(("line", "num_ranks"), WRITING)
def test_code_that_writes_into_its_batch_trains_as_on_one_device(line: str, num_ranks: int) -> None:
    _check("writing", line, num_ranks, 1)


@pytest.mark.parametrize("kind", jobs.HOOKS)
@pytest.mark.parametrize("num_parts", [1, 2])
def test_proofs_leave_no_gradient_on_layers_that_a_hook_refers_to(kind: str, num_parts: int) -> None:
    _check(kind, f"tp=2,micro_batches={num_parts}", 2, num_parts)
