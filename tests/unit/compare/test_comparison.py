"""Comparisons of made-up runs: rows, tables, conclusions, JSON."""

from __future__ import annotations

import dataclasses
import json
import math
import re

import pytest

from meshwright.compare.comparison import Comparison, make_comparison, pace_notes
from meshwright.compare.conclusion import draw_conclusion
from meshwright.compare.rows import Trial
from meshwright.errors import ConfigError
from meshwright.spec import Prediction, TimeBreakdown


def trial(name="single", seconds=(1.0, 1.0, 1.0), **changes):
    steps, ranks = len(seconds), changes.get("num_ranks", 1)
    fields = {
        "plan": name,
        "device": "cpu",
        "threads": 2,
        "step_seconds": seconds,
        "num_samples": [8] * steps,
        "num_tokens": [8] * steps,
        "losses": [2.0] * (steps + 1),
        "sent_bytes": [[0.0] * ranks] * steps,
        "wait_seconds": [[0.0] * ranks] * steps,
        "formula_bytes": 0.0,
        "peak_memory_bytes": [2**20] * ranks,
    }
    return Trial(name=name, **(fields | changes))


def distributed(seconds=(0.8, 0.8, 0.8), **changes):
    fields = {
        "plan": "dp=2",
        "num_devices": 2,
        "num_ranks": 2,
        "threads": 1,
        "sent_bytes": [[1010.0, 1010.0]] * len(seconds),
        "formula_bytes": 1000.0,
    }
    return trial("distributed", seconds, **(fields | changes))


def model_parallel(seconds=(1.0, 1.0, 1.0), **changes):
    return trial("model_parallel", seconds, **({"mode": "model_parallel", "num_devices": 2} | changes))


def share(seconds=(1.6, 1.6, 1.6)):
    return trial("single, 1 thread", seconds, plan="single", threads=1, is_baseline=True)


def compared(*trials, cores=2, **fields):
    return make_comparison(trials, baseline="single", cores=cores, name="case", **fields)


def row_of(comparison, name):
    return next(row for row in comparison.rows if row.trial.name == name)


# -- rows -------------------------------------------------------------------------------------------------------------


def test_the_numbers_of_a_row():
    row = row_of(compared(trial(), distributed(), share()), "distributed")
    assert row.step_s == 0.8
    assert row.samples_per_s == pytest.approx(10)
    assert row.tokens_per_s is None  # as many tokens as samples: the data has none
    assert row.speedup_same_cores == pytest.approx(1.25)
    assert row.speedup == pytest.approx(2.0)
    assert row.efficiency == pytest.approx(1.0)
    assert row.parallel_fraction == pytest.approx(1.0)
    assert (row.sent_bytes, row.sent_ratio) == (1010, pytest.approx(1.01))
    assert row.exposed_fraction == 0
    assert row.loss_difference == 0
    assert row.peak_memory_bytes == 2**20


def test_each_kind_of_core_has_its_own_baseline():
    rows = compared(trial(), distributed((2.0,)), share((1.0,)), model_parallel((2.0,)))
    assert row_of(rows, "distributed").speedup == pytest.approx(0.5)  # against one thread, which one of its devices has
    assert row_of(rows, "model_parallel").speedup == pytest.approx(0.5)  # against both, which its device has at a time
    assert row_of(rows, "distributed").speedup_same_cores == pytest.approx(0.5)


def test_slower_than_one_device_is_shown_as_it_is():
    row = row_of(compared(trial(), distributed((3.2, 3.2)), share()), "distributed")
    assert row.speedup == pytest.approx(0.5)
    assert row.parallel_fraction == pytest.approx(-2.0)
    assert "-2.00" in str(compared(trial(), distributed((3.2, 3.2)), share()))


def test_one_device_has_no_parallel_fraction():
    row = row_of(compared(trial()), "single")
    assert (row.speedup_same_cores, row.speedup, row.efficiency, row.parallel_fraction) == (1, 1, 1, None)
    assert row.sent_ratio is None  # 0 of 0 bytes


def test_no_baseline_no_speed_up():
    row = row_of(compared(distributed()), "distributed")
    assert (row.speedup_same_cores, row.speedup, row.efficiency, row.parallel_fraction) == (None, None, None, None)
    assert row.loss_difference is None


def test_a_gpu_is_not_compared_with_a_cpu():
    rows = compared(trial(device="NVIDIA X"), distributed())
    assert row_of(rows, "distributed").speedup_same_cores is None
    both = compared(trial(device="NVIDIA X"), distributed(device="NVIDIA X"))
    assert row_of(both, "distributed").speedup == pytest.approx(1.25)  # whatever the number of threads


def test_exposed_is_the_median_step_of_the_ranks_mean():
    waits = [[0.1, 0.3], [0.0, 0.0], [0.4, 0.4]]
    row = row_of(compared(trial(), distributed((1.0, 1.0, 1.0), wait_seconds=waits)), "distributed")
    assert row.exposed_s == pytest.approx(0.2)
    assert row.exposed_fraction == pytest.approx(0.2)
    assert row_of(compared(distributed(wait_seconds=())), "distributed").exposed_fraction is None


def test_losses_are_compared_step_by_step():
    rows = compared(trial(losses=[4.0, 2.0, None]), distributed(losses=[4.0, 2.002, 7.0]))
    assert row_of(rows, "distributed").loss_difference == pytest.approx(1e-3)
    zero = compared(trial(losses=[0.0]), distributed(losses=[1.0]))
    assert row_of(zero, "distributed").loss_difference is None
    assert [row_of(each, "distributed").num_incomparable for each in (rows, zero)] == [1, 1]


@pytest.mark.parametrize("lost", [None, 1.0])
def test_losses_without_a_difference_are_not_called_equal(lost):
    # A run whose losses became NaN has no difference to a finite one; "All losses equal single's" was said of it.
    base = [2.0, 2.0, 2.0, 2.0] if lost is None else [2.0, 2.0, 0.0, 0.0]
    got = compared(trial(losses=base), distributed(losses=[2.0, 2.0, lost, lost]), share())
    assert row_of(got, "distributed").num_incomparable == 2
    assert "in one of two runs alone, or single's is 0: 'distributed' in 2 steps." in got.conclusion
    assert "The other losses equal single's." in got.conclusion
    assert "All losses" not in got.conclusion
    same = compared(trial(losses=[2.0, None]), distributed(losses=[2.0, None]), share())
    assert "All losses equal single's." in same.conclusion


def test_a_failed_run_is_a_row_without_numbers():
    failed = Trial(name="tensor", plan="tp=2", num_devices=2, num_ranks=2, error="rank 1 was killed")
    got = compared(trial(), failed)
    assert all(
        getattr(row_of(got, "tensor"), field.name) is None
        for field in dataclasses.fields(got.rows[1])
        if field.name != "trial"
    )
    assert "'tensor' did not run: rank 1 was killed." in got.conclusion
    assert re.search(r"^tensor +failed +- ", str(got), re.MULTILINE)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"step_seconds": [0.0, 1.0, 1.0]}, r"step_seconds\[0\]=0.0"),
        ({"num_samples": [8]}, "num_samples has 1 entries for 3 steps"),
        ({"wait_seconds": [[0.0]]}, "wait_seconds has 1 entries"),
        ({"threads": 0}, "threads=0"),
        ({"step_seconds": [math.nan] * 3}, "finite"),
        ({"sent_bytes": "no"}, "sent_bytes must be a list"),
    ],
)
def test_a_trial_is_checked(changes, text):
    with pytest.raises(ConfigError, match=text):
        trial(**changes)


def test_a_trial_has_steps_or_an_error():
    with pytest.raises(ConfigError, match="no step and no error"):
        Trial(name="x", plan="single")


# -- text and JSON ----------------------------------------------------------------------------------------------------


def test_json_both_ways():
    failed = Trial(name="tensor", plan="tp=2", error="no")
    got = compared(trial(), distributed(losses=[None, 1.0]), share(), failed, notes=["n"], config={"a": {"b": [1]}})
    again = Comparison.from_json(got.to_json())
    assert again == got
    assert str(again) == str(got)
    loaded = json.loads(got.to_json(indent=1))
    assert (loaded["format"], loaded["version"]) == ("meshwright.comparison", 1)
    assert loaded["rows"][1]["trial"]["step_seconds"] == [0.8, 0.8, 0.8]
    assert loaded["rows"][1]["speedup"] == pytest.approx(2.0)
    assert loaded["conclusion"]


def test_json_of_something_else_is_refused():
    with pytest.raises(ConfigError, match="the format is"):
        Comparison.from_json(trial().to_json())
    with pytest.raises(ConfigError, match="unknown key 'rowz'"):
        Comparison.from_json(compared(trial()).to_json().replace('"rows"', '"rowz"'))


def test_a_comparison_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        compared(trial()).name = "other"


def test_columns_stand_under_each_other():
    text = str(compared(trial(num_tokens=[1024] * 3), distributed(), share(), notes=["beware"]))
    title, times, costs, legend, _ = text.split("\n\n")
    assert title == "case: 3 steps of 1 samples after 0 of warm-up, 2 cores"
    for block in (times, costs):
        head, rule, *lines = block.splitlines()
        assert len(lines) == 3
        ends = [match.end() for match in re.finditer("-+", rule)]
        assert all(line[end : end + 2].strip() == "" for line in (head, *lines) for end in ends)
    assert "1,024" in times
    assert "(single, 1 thread)" in times
    assert "2 processes x 1 thread" in costs
    assert "1.0100" in costs
    assert legend.endswith("note: beware")
    for column in (
        "step",
        "quartiles",
        "x single",
        "S",
        "S/n",
        "p",
        "peak memory",
        "exposed",
        "of step",
        "loss diff.",
        "formula",
        "others",
    ):
        assert column in legend, column


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"mode": "data_parallel", "num_devices": 2, "threads": 1}, "1 process, 2 x 1 thread"),
        ({"mode": "model_parallel", "num_devices": 2}, "1 process, 2 stages, 2 threads"),
        ({"device": "NVIDIA X", "num_devices": 2}, "2 GPUs"),
        ({"device": "NVIDIA X"}, "1 GPU"),
    ],
)
def test_a_row_says_what_it_ran_on(changes, text):
    assert text in str(compared(trial(**changes)))


# -- the conclusion ---------------------------------------------------------------------------------------------------


def test_one_thread_that_is_faster_than_every_plan_is_told():
    whole, one = (
        trial(seconds=(3.0, 3.0, 3.0), is_baseline=True),
        trial("single, 1 thread", (0.4, 0.4, 0.4), plan="single", threads=1, is_baseline=True),
    )
    text = compared(whole, distributed(), one).conclusion
    assert "'distributed' is the fastest with 800 ms" in text
    assert "But 'single, 1 thread' takes 400 ms: every plan takes 2.00x as long or longer, beyond the noise" in text
    assert "But 'single" not in compared(trial(is_baseline=True), distributed(), share()).conclusion


def test_a_clear_winner():
    text = compared(trial(), distributed(wait_seconds=[[0.02, 0.02]] * 3), share()).conclusion
    assert "'distributed' is the fastest with 800 ms a step, 1.25x single on the same 2 cores, beyond the noise" in text
    assert "All losses equal single's." in text


def test_a_difference_within_the_noise_is_named_as_such():
    text = compared(trial(seconds=(0.9, 1.0, 1.1)), distributed((0.8, 0.95, 1.2)), share()).conclusion
    assert "1.05x single on the same 2 cores, which is within the noise" in text


def test_single_may_win():
    text = compared(trial(), distributed((2.0,)), share()).conclusion
    assert "'single' is the fastest with 1 s a step; the next, 'distributed', takes 2.00x as long, beyond" in text
    assert "'single' takes 1 s a step; there is no other plan" in compared(trial()).conclusion


def test_slower_than_the_baseline_that_nobody_asked_for():
    base = trial(is_baseline=True)
    text = compared(distributed((2.0,)), base, share()).conclusion
    assert "is the fastest of the plans with 2 s, and slower than single on the same 2 cores: 0.50x" not in text
    assert (
        "'distributed' is the fastest of the plans with 2 s a step, and slower than single on the same 2 cores" in text
    )


def test_without_a_baseline_nothing_is_claimed():
    assert "there is no speed-up" in compared(distributed()).conclusion


@pytest.mark.parametrize(
    ("wait", "text"),
    [
        (0.4, "Communication limits it: ranks stand still for 50% of the step."),
        (0.008, "Communication exposes only 1.0% of its step, so most of what 2 devices lose"),
    ],
)
def test_what_limits_is_read_off_the_waiting(wait, text):
    waits = [[wait, wait]] * 3
    assert text in compared(trial(), distributed(wait_seconds=waits), share((1.2,))).conclusion


def test_a_pipeline_waits_in_its_bubble_too():
    piped = distributed(plan="pp=2,micro_batches=4", wait_seconds=[[0.4, 0.4]] * 3)
    text = compared(trial(), piped, share()).conclusion
    assert "Its ranks stand still for 50% of the step: for messages, and in the pipeline's bubble." in text


def test_waiting_that_was_not_measured_is_not_guessed():
    assert "was not measured" in compared(trial(), distributed(wait_seconds=()), share()).conclusion


def test_full_efficiency_has_no_loss_to_explain():
    text = compared(trial(), distributed(), share()).conclusion
    assert "Communication exposes 0.0% of its step." in text


def test_layers_over_devices_compute_one_at_a_time():
    text = compared(trial(), model_parallel((1.1,))).conclusion
    assert "'model_parallel' computes on one device at a time" in text
    assert "(S = 0.91)" in text
    assert "(S = 2.00, which is a difference between the runs)" in compared(trial(), model_parallel((0.5,))).conclusion


def test_losses_that_differ_are_named():
    text = compared(trial(), distributed(losses=[2.0, 2.1, 2.0, 2.0])).conclusion
    assert "The losses differ from single's: 'distributed' by 5.0e-02" in text
    close = compared(trial(), distributed(losses=[2.0, 2.0002])).conclusion
    assert "All losses agree with single's within 1.0e-04." in close


def test_nothing_ran():
    assert draw_conclusion(compared(Trial(name="x", plan="single", error="no")).rows, "single", 2) == "No plan ran."


def test_a_machine_of_another_pace_than_when_it_was_measured_is_told():
    foreseen = Prediction(time=TimeBreakdown(forward_s=1.0))
    slow, same = (trial(turn_s=turn, measured_turn_s=1e-3, prediction=foreseen) for turn in (2e-3, 1.1e-3))
    assert (slow.pace, trial().pace, trial(turn_s=1e-3).pace) == (0.5, None, None)
    (note,) = pace_notes([slow, same, trial()])
    assert "at 0.50 to 0.91 times the pace of when it was measured" in note
    assert "at 0.50 times" in pace_notes([slow])[0]
    assert pace_notes([same, trial(turn_s=9e-3, measured_turn_s=1e-3)]) == []  # nothing was predicted for the other
