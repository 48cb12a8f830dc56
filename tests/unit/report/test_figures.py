"""Figures, the plan's pictures and the terms of time and memory, beside what they are drawn from."""

from __future__ import annotations

import numpy as np
import pytest
from tests.unit.report.made_runs import make_record

from meshwright.report.cost_terms import memory_terms, time_terms, verdict
from meshwright.report.figures import min_max_buckets
from meshwright.report.pictures import draw_mesh
from meshwright.report.plan_view import view_plan
from meshwright.spec.plan import Plan
from meshwright.spec.record import Measurement


@pytest.mark.parametrize("n", [1, 1999, 2000, 2001, 5003, 40_000])
def test_down_sampling_keeps_every_bucket_s_lowest_and_highest(n):
    values = np.random.default_rng(n).normal(size=n)
    values[n // 2] = np.nan
    x, (y,), size = min_max_buckets(np.arange(n), [values])
    assert len(x) == len(y) <= 2002
    assert (np.diff(x) > 0).all()
    known = values[~np.isnan(values)]
    if known.size:
        assert np.nanmin(y) == known.min()
        assert np.nanmax(y) == known.max()
    assert (size == 1) == (n <= 2000)


def test_ranks_that_hold_the_same_share_a_column():
    view = view_plan(Plan.parse("dp=2,tp=2"), make_record())
    assert view.columns == ("0, 2", "1, 3")
    assert [cell.fraction for cell in view.layers[0].cells] == [0.5, 0.5]


def test_the_mesh_has_a_box_for_each_device():
    picture = draw_mesh(Plan.parse("dp=2,tp=2,pp=2,micro_batches=2"))
    assert len({(box.x, box.y) for box in picture.boxes}) == 8
    assert picture.boxes[5].detail == "pp1 dp0 tp1"
    big = draw_mesh(Plan.parse("dp=1024"))
    assert len(big.boxes) + big.num_left_out == 1024


def test_the_term_that_was_wrong_is_named():
    record = make_record()
    terms = time_terms(record.prediction, record.measurement, 0.01)
    by_name = {term.name: term for term in terms}
    assert by_name["waiting"].measured == pytest.approx(0.15)
    assert by_name["computing"].measured == pytest.approx(0.5 - 0.15 - 0.01)
    assert by_name["step"].ratio == pytest.approx(0.5 / 0.35)
    assert "farthest off is waiting: 100 ms more" in verdict(terms, are_bytes=False)
    memory = memory_terms(record.prediction, record.measurement)
    assert "farthest off is the rest" in verdict(memory, are_bytes=True)


def test_no_term_is_blamed_where_one_of_them_was_not_measured():
    record = make_record(measurement=Measurement(step_seconds=(0.5,), num_samples=8, peak_memory_bytes=2**30))
    told = verdict(time_terms(record.prediction, record.measurement, 0.01), are_bytes=False)
    assert "measured over predicted is 1.43" in told
    assert "Which term was wrong is not known" in told
    assert "not known" in verdict(memory_terms(record.prediction, record.measurement), are_bytes=True)


def test_one_process_does_not_tell_its_devices_waits_from_their_work():
    record = make_record()
    terms = time_terms(record.prediction, record.measurement, 0.01, is_one_process=True)
    (both,) = [term for term in terms if not term.is_part and not term.is_total and term.predicted]
    assert both.name == "computing and waiting"
    assert both.predicted == pytest.approx(0.35)
    assert both.measured == pytest.approx(0.49)
    assert "farthest off is computing and waiting: 140 ms more" in verdict(terms, are_bytes=False)
