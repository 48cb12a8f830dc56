"""What the tests of runs train: a model with dropout, and data of which one sample may do harm, once, to the rank that reads it.

The harm is the text of the file `harm` in the working directory: "INDEX WORD [WORD]".
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset

NUM_SAMPLES = 56
HARM = Path("harm")


def build(dropout: float = 0.0) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 3))


class Samples(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    deterministic_samples = True

    def __init__(self, split: str) -> None:
        generator = torch.Generator().manual_seed(len(split))
        self.inputs = torch.randn(NUM_SAMPLES, 6, generator=generator)
        self.targets = torch.randint(0, 3, (NUM_SAMPLES,), generator=generator)
        self.is_harmful = split == "train"

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        wanted, *words = _harm_to_do() if self.is_harmful else [""]
        if wanted == str(index) and _is_mine():
            harm(*words)
        return self.inputs[index], self.targets[index]


def _harm_to_do() -> list[str]:
    with contextlib.suppress(FileNotFoundError):  # another rank may remove it at any time
        return HARM.read_text().split() or [""]
    return [""]


def _is_mine() -> bool:
    try:
        HARM.unlink()
    except FileNotFoundError:  # another rank that reads the same sample was faster, and does it
        return False
    return True


def data(split: str = "train") -> Samples:
    return Samples(split)


def harm(kind: str, what: str) -> None:
    """Have something happen to this rank.

    Args:
        kind: "signal", to itself; "limit", of the size of its files; or "run" a second time in this folder.
        what: The signal's name; bytes, and of which later sample the limit goes away; or a configuration.
    """
    if kind == "signal":
        os.kill(os.getpid(), signal.Signals[what])
    elif kind == "limit":
        size, _, later = what.partition(":")
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(size) if int(size) >= 0 else hard, hard))
        if later:
            HARM.write_text(f"{later} limit -1")
    else:
        words = ["-m", "meshwright", "train", what]
        # It finds what this rank does, whose path the tests have put together.
        found = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        done = subprocess.run(
            [sys.executable, *words], capture_output=True, text=True, timeout=60, check=False, env=found
        )
        Path("second").write_text(json.dumps({"code": done.returncode, "err": done.stderr}))
