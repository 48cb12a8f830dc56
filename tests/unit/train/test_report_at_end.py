"""Report of a run: what it needs is loaded at the start, and a load that fails there costs the run nothing."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from meshwright.report import page
from meshwright.train.report_at_end import RunReport


@pytest.mark.parametrize("in_background", [True, False])
def test_what_a_report_needs_is_loaded_at_the_start(monkeypatch: pytest.MonkeyPatch, in_background: bool) -> None:
    loaders: list[threading.Thread] = []
    monkeypatch.setattr(page, "load_template", lambda: loaders.append(threading.current_thread()))
    report = RunReport(in_background=in_background)
    report.close()
    assert [loader is not threading.current_thread() for loader in loaders] == [in_background]
    assert not [thread for thread in threading.enumerate() if thread.name == "meshwright-report"]


def test_a_load_that_fails_is_left_to_the_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise ImportError("jinja2 is not there")

    monkeypatch.setattr(page, "load_template", fail)
    report = RunReport(in_background=False)
    assert not report.write(tmp_path)  # a folder without a run, which is told before anything is rendered
    assert "warning: no report: " in capsys.readouterr().err


def test_the_template_is_compiled_once() -> None:
    assert page.load_template() is page.load_template()
