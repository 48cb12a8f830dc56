"""An average that is older than the cut: equal inside `whole_parameters`, refused elsewhere on all ranks alike."""

import pytest
import torch
from tests.parity.jobs import early_average_jobs as jobs
from torch.optim.swa_utils import AveragedModel

from meshwright import testing


@pytest.mark.parametrize("through", ["itself", "copied"])
def test_values_of_a_part_are_refused_on_every_rank(through: str) -> None:
    # A rank whose tensors happened to fit went on, and waited for one that had been refused.
    first, *others = testing.run_ranks(jobs.average_of_a_part, 2, through)
    assert "inside model.whole_parameters()" in first
    assert others == [first]


def test_values_of_the_whole_are_averaged_as_on_one_device() -> None:
    expected = jobs.average_on_one_device()
    for values, kind in testing.run_ranks(jobs.average_of_the_whole, 2):
        assert kind == str(AveragedModel)
        for name, value in expected.items():
            torch.testing.assert_close(values[name], value, rtol=1e-11, atol=1e-12)


def test_values_of_another_whole_model_are_averaged() -> None:
    # They were refused, too, with a fix that cannot be applied once the cut model is closed.
    for seen in testing.run_ranks(jobs.average_of_another_model, 2):
        for values, num_steps in zip(seen, (2, 3), strict=True):
            for name, value in jobs.average_on_one_device(num_steps).items():
                torch.testing.assert_close(values[name], value, rtol=1e-11, atol=1e-12)


def test_a_model_is_copied_and_pickled_with_a_buffer_that_one_stage_computes() -> None:
    # What the pipeline knows of such a buffer hung on the tensor, and was copied with it: ranks, groups and all.
    before, after = jobs.computed_buffer_on_one_device()[-2:]
    for own, copied, pickled in testing.run_ranks(jobs.copies_of_a_computed_buffer, 2):
        torch.testing.assert_close(own, after, rtol=1e-11, atol=1e-12)
        for value in (copied, pickled):
            torch.testing.assert_close(value, before, rtol=1e-11, atol=1e-12)
