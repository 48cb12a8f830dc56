"""Objects as a notebook shows them: tables and pictures, names as text; and calls that a notebook hands to ranks."""

from __future__ import annotations

import pickle
import sys
import types
from html.parser import HTMLParser

import pytest
from tests.unit.compare.test_comparison import compared, distributed, trial
from tests.unit.report.made_runs import HOSTILE

import meshwright as mw
from meshwright.errors import ConfigError
from meshwright.measure.parity import ParameterParity, ParityReport
from meshwright.ranks import launch as launch_module
from meshwright.texts import html_table


class Tags(HTMLParser):
    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.found.append(tag)

    def handle_data(self, data):
        self.text += data


def test_a_plan_shows_its_reasons_and_places():
    plan = mw.Plan(pp=2, reasons=(HOSTILE,), stages={"a": 0, HOSTILE: 1}, layouts={"a": "whole"})
    page = Tags(plan._repr_html_())
    assert "plan pp=2" in page.text
    assert {"img", "script"}.isdisjoint(page.found)
    assert "alert(1)" in page.text


def test_ranked_plans_are_a_list_and_a_table():
    from meshwright.hardware import load_cluster

    gpt = mw.ModelSpec.transformer(layers=4, hidden=64, heads=4, vocab=100, sequence=32)
    plans = mw.make_plans(gpt, load_cluster("2xa100-sxm-80gb"), mw.TrainSpec(global_batch_size=8))
    assert isinstance(plans, list)
    page = Tags(plans._repr_html_())  # pyright: ignore[reportAttributeAccessIssue]
    assert str(plans[0]) in page.text
    assert page.found.count("tr") >= len(plans) + 1
    assert type(plans)()._repr_html_()  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("kind", ["gpipe", "1f1b", "interleaved", "zb-h1", "zbv"])
def test_a_schedule_draws_every_action(kind):
    schedule = mw.PipelineSchedule.build(kind, num_ranks=3, num_micro_batches=4)
    page = Tags(schedule._repr_html_())
    assert page.found.count("rect") == sum(len(row) for row in schedule.actions)
    assert "idle for" in page.text


def test_a_parity_report_shows_the_worst_first():
    rows = tuple(
        ParameterParity(name=name, gradient=gradient, value=0.0) for name, gradient in (("a", 1e-16), (HOSTILE, 1e-3))
    )
    report = ParityReport(
        plan="dp=2", num_steps=3, dtype="float64", bound=1e-11, equal=False, losses=((1.0, 1.0),), loss_difference=0.0,
        grad_norm_difference=0.0, parameters=rows,
    )  # fmt: skip
    page = Tags(report._repr_html_())
    assert "NOT equal to one process" in page.text
    assert page.text.index("1.0e-03") < page.text.index("1.0e-16")
    assert "img" not in page.found


def test_a_comparison_shows_its_tables():
    comparison = compared(trial(), distributed())
    page = Tags(comparison._repr_html_())
    assert page.found.count("table") == len(comparison.tables())
    assert comparison.conclusion.split("\n")[0] in page.text


def test_long_tables_say_what_they_leave_out():
    assert "3 more rows are not shown" in html_table(["a"], [[n] for n in range(5)], most=2)


def as_notebook(monkeypatch, **names):
    main = types.ModuleType("__main__")
    vars(main).update(names)
    monkeypatch.setitem(sys.modules, "__main__", main)
    return main


def test_a_function_of_a_notebook_travels_with_its_code(monkeypatch):
    pytest.importorskip("cloudpickle")
    main = as_notebook(monkeypatch)
    exec("factor = 3\ndef times(x): return factor * x", vars(main))  # as a cell
    payload, script = launch_module._pack_call(main.times, (14,))
    assert script is None
    as_notebook(monkeypatch)  # a rank's main program has nothing of it
    function, args = pickle.loads(payload)
    assert function(*args) == 42


def test_what_cannot_be_copied_is_an_error(monkeypatch, tmp_path):
    pytest.importorskip("cloudpickle")
    main = as_notebook(monkeypatch)
    with (tmp_path / "file").open("w") as file:
        exec("def use(): return file", vars(main))
        vars(main)["file"] = file
        with pytest.raises(
            ConfigError, match="use, what it uses and its arguments cannot be handed to another process"
        ):
            launch_module._pack_call(main.use, ())


def test_without_the_package_the_error_says_so(monkeypatch):
    main = as_notebook(monkeypatch)
    exec("def work(): pass", vars(main))
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(ConfigError, match="interactive session") as caught:
        launch_module._pack_call(main.work, ())
    assert "meshwright[notebook]" in str(caught.value.fix)


def test_an_imported_function_needs_no_package(monkeypatch):
    as_notebook(monkeypatch)
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    payload, script = launch_module._pack_call(len, ("ab",))
    assert script is None
    function, args = pickle.loads(payload)
    assert function(*args) == 2
