"""A forward that raises when it is tried without gradients says nothing about the step, and leaves no rank behind."""

import pytest
import torch
from tests.parity.jobs import raising_trial_jobs as jobs
from tests.tolerances import FLOAT64

from meshwright import testing


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=2", "dp=2,zero=3,whole_below=0"])
def test_a_forward_that_needs_gradients_is_stepped_where_one_rank_has_samples(plan: str) -> None:
    # The other rank waited under ZeRO-3 for exchanges of the pass that the exception had ended.
    losses, state = jobs.steps_on_one_device()
    for found, values in testing.run_ranks(jobs.steps_on_shares, 2, plan):
        assert found == pytest.approx(losses, rel=FLOAT64)
        for name, value in state.items():
            torch.testing.assert_close(values[name], value, rtol=FLOAT64, atol=1e-12)


@pytest.mark.parametrize("zero", ["zero=1", "zero=3,whole_below=0"])
def test_a_trial_that_raises_in_one_of_two_pipelines_is_stepped(zero: str) -> None:
    # Its ranks kept the parameters that they had gathered, and the other pipeline waited for them in the next trial.
    for found, expected in testing.run_ranks(
        jobs.steps_of_which_one_share_raises, 4, f"dp=2,pp=2,{zero},micro_batches=2"
    ):
        assert found == pytest.approx(expected, rel=FLOAT64)
