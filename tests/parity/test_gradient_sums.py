"""Terms of gradients that several ranks have: whatever their kind, they are summed in one way, or it is said why not."""

from __future__ import annotations

import pytest
import torch
from tests.parity.jobs import gradient_sums_jobs as jobs

from meshwright import testing

WANTED = {
    "on all": torch.full((3,), 3.0, dtype=torch.float64),
    "on one": torch.ones(2, 2, dtype=torch.float64),
    "on none": None,
    "frozen": None,
    "complex": torch.full((2,), 3j, dtype=torch.complex128),
    "complex on one": torch.full((2,), 2 + 1j, dtype=torch.complex128),
    "sparse": torch.tensor([[2.0] * 2, [0.0] * 2, [3.0] * 2, [0.0] * 2], dtype=torch.float64),
    "float32": torch.full((2,), 3.0),
}


def test_terms_of_every_kind_are_summed() -> None:
    for found in testing.run_ranks(jobs.summed, 2):
        assert found.keys() == WANTED.keys()
        for name, wanted in WANTED.items():
            got = found[name]
            if wanted is None or got is None:
                assert got is wanted, name
            else:
                assert got.layout == torch.strided, name
                torch.testing.assert_close(got, wanted, rtol=0, atol=0, msg=name)


def test_terms_of_every_kind_are_summed_in_backward() -> None:
    for found in testing.run_ranks(jobs.summed_in_backward, 2):
        assert len(found) == 3
        for name, got in found.items():
            torch.testing.assert_close(got, WANTED[name], rtol=0, atol=0, msg=name)


# Over small buckets the gradient that was taken away is NaN after the sum. Under tp, and pp, nobody asked the engine inside why.
@pytest.mark.parametrize("plan", ["dp=2,bucket_bytes=64B", "dp=2,tp=2,bucket_bytes=64B"])
def test_a_gradient_that_a_hook_takes_away_is_named(plan: str) -> None:
    for message, _ in testing.run_ranks(jobs.refusal_of_taken, 4 if "tp" in plan else 2, plan):
        assert "a hook took the gradient of '0.weight' away on rank" in message
