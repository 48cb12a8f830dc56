"""What the README shows is run: its program as a script of its own, its commands up to their arguments."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()

READERS_PART = """
import torch
from torch import nn

def build_model():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))

def loss_fn(outputs, batch):
    return nn.functional.cross_entropy(outputs, batch[1])

dataset = torch.utils.data.TensorDataset(torch.randn(40, 4), torch.randint(0, 2, (40,)))
"""


def test_the_ten_lines_train_a_model_of_the_readers(tmp_path: Path) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    script = tmp_path / "mine.py"
    script.write_text(READERS_PART + program + "    print(sorted(state))\n")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "['0.bias', '0.weight', '2.bias', '2.weight']"


def _commands() -> list[str]:
    lines = [line.strip() for line in README.splitlines() if line.startswith("    meshwright ")]
    assert len(lines) >= 3
    return lines


@pytest.mark.parametrize("line", _commands())
def test_a_command_is_understood(line: str, tmp_path: Path) -> None:
    (tmp_path / "my.toml").write_text((ROOT / "examples/gpt_python.toml").read_text())
    words = shlex.split(line, comments=True)
    # One wrong key stops it where everything else of the line has been read and found right.
    command = [sys.executable, "-m", "meshwright", *words[1:], "--set", "train.stepps=3"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 2
    assert "train.stepps" in done.stderr
    assert "did you mean 'steps'" in done.stderr


def test_the_lock_file_and_the_package_agree_on_torch() -> None:
    lock = (ROOT / "requirements.lock").read_text()
    assert "\ntorch==2.13.0\n" in lock
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "torch>=2.11,<2.14" in project["dependencies"]
