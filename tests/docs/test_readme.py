"""What the README and the guide show is run: their programs, their commands, their plans; and what they print is compared."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from tests.docs.here import run_here

from meshwright.spec import Plan
from meshwright.spec.supported import refuse_unbuilt

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
GUIDE = (ROOT / "docs" / "guide.md").read_text()

READERS_PART = """
import torch
from torch import nn

def build_model():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))

def loss_fn(outputs, batch):
    return nn.functional.cross_entropy(outputs, batch[1])

dataset = torch.utils.data.TensorDataset(torch.randn(40, 4), torch.randint(0, 2, (40,)))
"""


def block(text: str, kind: str) -> str:
    """Return the one block of a kind that a page has."""
    (found,) = re.findall(rf"^```{kind}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return found


def shown(command: str) -> list[str]:
    """Return what the README shows below "$ command"."""
    (found,) = re.findall(rf"^```\n\$ {re.escape(command)}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    return found.splitlines()


def commands(text: str) -> list[str]:
    return [line.strip() for line in re.findall(r"^(?:    |\$ )(meshwright .*)$", text, re.MULTILINE)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder as a reader has it who saved what the README says."""
    (tmp_path / "mine.py").write_text(block(README, "python"))
    (tmp_path / "mine.toml").write_text(block(README, "toml"))
    return tmp_path


def run(words: list[str], folder: Path, timeout_s: float) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_the_script_trains_under_torchrun_as_shown(folder: Path) -> None:
    words = ["--nproc-per-node", "2", "mine.py"]
    wanted = shown(f"torchrun {' '.join(words)}")
    # --standalone finds a free port: several tests may run at once.
    done = run(["torch.distributed.run", "--standalone", *words], folder, 180)
    assert done.returncode == 0, done.stderr
    pattern = re.compile(r"step (\d+): loss ([\d.]+)")
    printed = [pattern.fullmatch(line) for line in done.stdout.splitlines()]
    expected = [pattern.fullmatch(line) for line in wanted]
    assert all(expected)
    assert [match and match[1] for match in printed] == [match and match[1] for match in expected]
    for ours, readers in zip(printed, expected, strict=True):
        assert float(ours[2]) == pytest.approx(float(readers[2]), rel=0.01)  # float32, on another processor


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_verify_says_what_is_shown(folder: Path) -> None:
    (command,) = [line for line in commands(README) if line.startswith("meshwright verify")]
    done = run(shlex.split(command), folder, 180)
    assert done.returncode == 0, done.stderr
    printed = [line for line in done.stdout.splitlines() if line]
    wanted = shown(command)
    assert printed[:2] == wanted[:2]
    for ours, readers in zip(printed[2:5], wanted[2:5], strict=True):
        assert [float(word) for word in ours.split()] == pytest.approx([float(word) for word in readers.split()], 1e-12)
    without_numbers = re.compile(r"[\d.]+e-\d+")
    assert without_numbers.sub("#", printed[5]) == without_numbers.sub("#", wanted[5])
    assert printed[6] == wanted[6]
    assert len(wanted) == 8
    assert wanted[7].split()[0] in {line.split()[0] for line in printed[7:]}  # which is worst depends on the processor


def test_the_guides_program_trains_a_model_of_the_readers(tmp_path: Path) -> None:
    script = tmp_path / "mine.py"
    script.write_text(READERS_PART + block(GUIDE, "python") + "    print(sorted(state))\n")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "['0.bias', '0.weight', '2.bias', '2.weight']"


def test_the_pages_have_commands() -> None:
    assert {line.split()[1] for line in commands(README)} == {"train", "verify"}
    assert {line.split()[1] for line in commands(GUIDE)} == {"train", "compare", "verify", "schedule"}


@pytest.mark.parametrize("line", [*commands(README), *commands(GUIDE)])
def test_a_command_is_understood(line: str, folder: Path) -> None:
    program, *words = shlex.split(line, comments=True)
    assert program == "meshwright"
    if "mine.toml" not in words:
        code, _, error = run_here(words, folder)
        assert (code, error) == (0, "")
        return
    # One wrong key stops it where everything else of the line has been read and found right.
    code, _, error = run_here([*words, "--set", "train.stepps=3"], folder)
    assert code == 2
    assert "train.stepps" in error
    assert "did you mean 'steps'" in error


def _plans() -> list[str]:
    table = README.partition("## One line, one strategy")[2].partition("\n## ")[0]
    first_cells = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    return [plan for cell in first_cells for plan in re.findall(r"`(.*?)`", cell)]


@pytest.mark.parametrize("text", _plans())
def test_a_plan_of_the_table_is_one_that_is_built(text: str) -> None:
    line = f"dp=4,{text}" if text.startswith(("zero=", "recompute=", "precision=", "compress=")) else text
    plan = Plan.parse(line, 2 if line.endswith("_parallel") else None)
    refuse_unbuilt(plan)
    assert plan.num_devices > 1 or line == "single"


def test_the_table_has_plans() -> None:
    assert len(_plans()) >= 12


def test_the_readme_is_short() -> None:
    words = re.sub(r"<!--.*?-->|\]\(.*?\)", " ", README).split()
    assert len(README.splitlines()) <= 110
    assert len(words) <= 900


def test_the_picture_and_the_table_are_what_the_results_give() -> None:
    script = ROOT / "benchmarks" / "peers" / "figure.py"
    done = subprocess.run(
        [sys.executable, str(script), "--check"], capture_output=True, text=True, timeout=150, check=False
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_the_lock_file_and_the_package_agree_on_torch() -> None:
    lock = (ROOT / "requirements.lock").read_text()
    assert "\ntorch==2.13.0\n" in lock
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "torch>=2.11,<2.14" in project["dependencies"]
