"""`meshwright report`: where it writes, what it concludes from several runs, and a comparison's file."""

from __future__ import annotations

from pathlib import Path

from tests.unit.report.made_runs import HOSTILE, Page, make_record, started, step
from typer.testing import CliRunner

from meshwright import cli
from meshwright.errors import ConfigError
from meshwright.spec.record import Measurement


def invoke(*arguments):
    return CliRunner().invoke(cli.app, ["report", *map(str, arguments)])


def test_one_run_has_its_report_in_its_folder(make_run):
    folder = make_run()
    assert invoke(folder).output.strip() == str(folder / "report.html")
    assert Page((folder / "report.html").read_text()).open_tags == []


def test_runs_of_one_training_are_concluded_from(make_run, tmp_path):
    alone = make_record(
        "single", measurement=Measurement(step_seconds=(1.0, 1.0, 1.1), num_samples=24, num_sent_steps=3)
    )
    runs = [make_run(name="a", record=alone), make_run(name="b")]
    assert isinstance(invoke(*runs).exception, ConfigError)  # where to?
    invoke(*runs, "-o", tmp_path / "both.html")
    page = Page((tmp_path / "both.html").read_text())
    assert "'2: run' is the fastest with 500 ms a step" in page.text
    assert len(page.data["figures"][0]["lines"]) == 2


def test_losses_of_runs_are_compared_step_by_step(make_run, tmp_path):
    # One line of run b is damaged; its second step was compared with a's first.
    alone = make_record("single", measurement=Measurement(step_seconds=(1.0,), num_samples=8, num_sent_steps=1))
    events = [started(), '{"event": "step", "st', step(2), step(3), {"event": "finished", "step": 3}]
    runs = [make_run(name="a", record=alone), make_run(events, name="b")]
    invoke(*runs, "-o", tmp_path / "both.html")
    assert "All losses equal single's." in Page((tmp_path / "both.html").read_text()).text


def test_different_trainings_have_no_conclusion(make_run, tmp_path):
    runs = [make_run(name="a"), make_run(name="b", record=make_record(config={"optimizer": {"lr": 1.0}}))]
    invoke(*runs, "-o", tmp_path / "both.html")
    assert (
        "No conclusion: these are different trainings, they differ in optimizer.lr"
        in (tmp_path / "both.html").read_text()
    )


def test_a_comparison_s_file_becomes_a_report(tmp_path):
    from meshwright.compare.comparison import make_comparison
    from meshwright.compare.rows import Trial

    trial = Trial(name=HOSTILE[:-1], plan="single", step_seconds=(1.0,), num_samples=(8,), num_tokens=(8,), losses=(2.0,),
                  sent_bytes=((0.0,),), device="cpu")  # fmt: skip
    comparison = make_comparison([trial], baseline="single", cores=2, name="case")
    path = tmp_path / "c.json"
    path.write_text(comparison.to_json())
    assert invoke(path).output.strip() == str(tmp_path / "c.html")
    page = Page((tmp_path / "c.html").read_text())
    assert "takes 1 s a step" in page.text
    assert len(page.scripts) == 2


def test_the_plotting_library_s_licence_is_in_the_package():
    folder = Path(cli.__file__).parent / "report" / "vendor"
    assert "Leon Sorokin" in (folder / "uPlot.LICENSE").read_text()
