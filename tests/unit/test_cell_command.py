"""A failing test says how to run it alone, and that command does."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cell_command import TITLE, command_of

FAILS = """
import pytest

pytest_plugins = ["cell_command"]

@pytest.mark.parametrize("plan", ["dp=2,zero=1", "it's [odd]"])
def test_cell(plan):
    assert plan == "another"

def test_passes():
    pass
"""


@pytest.mark.parametrize(
    ("nodeid", "environment", "command"),
    [
        ("tests/a.py::test", {}, "python -m pytest tests/a.py::test"),
        (
            "tests/parity/test_tensor.py::test_equals[mlp-tp=2-2-n5]",
            {"MESHWRIGHT_TRANSPORT": "gloo", "HOME": "/root"},
            "MESHWRIGHT_TRANSPORT=gloo python -m pytest 'tests/parity/test_tensor.py::test_equals[mlp-tp=2-2-n5]'",
        ),
        (
            "tests/a.py::test[it's]",
            {"MESHWRIGHT_TRANSPORT": "gloo", "MESHWRIGHT_FULL_GRID": "1"},
            "MESHWRIGHT_FULL_GRID=1 MESHWRIGHT_TRANSPORT=gloo python -m pytest 'tests/a.py::test[it'\"'\"'s]'",
        ),
    ],
)
def test_the_command_names_the_cell_and_what_chooses_it(nodeid: str, environment: dict[str, str], command: str) -> None:
    assert command_of(nodeid, environment) == command


def _pytest(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    options = ["-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(folder)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1]), "MESHWRIGHT_TRANSPORT": "gloo"}
    return subprocess.run(
        [sys.executable, "-m", "pytest", *options, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_failing_cell_prints_the_command_that_runs_it_alone(tmp_path: Path) -> None:
    (tmp_path / "test_fails.py").write_text(FAILS)
    done = _pytest(tmp_path)
    assert "2 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    printed = [lines[i + 1] for i, line in enumerate(lines) if TITLE in line]
    assert len(printed) == 2
    for command in printed:
        assert shlex.split(command)[:-1] == ["MESHWRIGHT_TRANSPORT=gloo", "python", "-m", "pytest"]
    alone = _pytest(tmp_path, shlex.split(printed[1])[-1])
    assert "1 failed" in alone.stdout, alone.stdout
    assert "it's [odd]" in alone.stdout
    assert "passed" not in alone.stdout
