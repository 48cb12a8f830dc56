"""A loss that takes tensors of layers beside the model's outputs: each stage runs it that has one of them."""

import pytest
from tests.parity.jobs import loss_beside_jobs as jobs
from tests.tolerances import FLOAT64

from meshwright import testing


@pytest.mark.parametrize(("plan", "num_ranks"), [("pp=2", 2), ("pp=2,schedule=zbv", 2), ("tp=2", 2), ("tp=2,pp=2", 4)])
def test_auxiliary_losses_of_every_stage_are_in_the_loss(plan: str, num_ranks: int) -> None:
    # A stage without an output left before the loss and sent nothing. Under tp and pp the first look ran a copy, whose
    # attributes the loss did not see.
    losses, gradients = jobs.train_plainly()
    for found, own in testing.run_ranks(jobs.train, num_ranks, plan):
        assert found == pytest.approx(losses, rel=FLOAT64)
        testing.assert_parity(own, gradients, FLOAT64)


@pytest.mark.parametrize(("plan", "num_ranks"), [("pp=2,micro_batches=2", 2), ("tp=2,pp=2", 4)])
def test_stages_go_on_with_the_same_trials_where_one_alone_can_compute_the_loss(plan: str, num_ranks: int) -> None:
    # A changed model is tried again. On a stage without the penalised weight the trial's loss is NaN, which ended its trials.
    expected = jobs.losses_beside_a_switch(None)
    for losses in testing.run_ranks(jobs.losses_beside_a_switch, num_ranks, plan):
        assert losses == pytest.approx(expected, rel=FLOAT64)
