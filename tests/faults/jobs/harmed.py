"""What `meshwright train` trains in faults' campaigns: without an end, until a file says what happens to a rank.

The file `harm-RANK` holds "WHERE KIND": in "data" or in the model's "forward"; see `HARMS`. The rank renames it to `done-RANK`.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from meshwright.ranks.world import current_world

NUM_SAMPLES = 64


class UnpicklableError(Exception):
    """An exception that no other process can rebuild."""

    def __init__(self, first: str, second: object) -> None:
        super().__init__(f"{first} {second}")


def _raise_value() -> None:
    raise ValueError("harmed")


def _raise_strange() -> None:
    raise UnpicklableError("harmed", threading.Lock())


def _raise_memory() -> None:
    raise MemoryError("harmed")


def _sleep() -> None:
    threading.Event().wait()


def _hold_interpreter() -> None:
    ctypes.PyDLL(None).sleep(1000)  # in C, without letting other threads run


HARMS: dict[str, Callable[[], None]] = {
    "raise ValueError": _raise_value,
    "raise unpicklable": _raise_strange,
    "raise MemoryError": _raise_memory,
    "os._exit(0)": lambda: os._exit(0),
    "sys.exit(3)": lambda: sys.exit(3),
    "os.abort()": os.abort,
    "sleep": _sleep,
    "hold the interpreter": _hold_interpreter,
}


def do_harm(where: str) -> None:
    """Do what the rank's file asks for here."""
    world = current_world()
    path = f"harm-{0 if world is None else world.rank}"
    if not os.path.exists(path):  # a microsecond
        return
    wanted, _, kind = Path(path).read_text().partition(" ")
    if wanted == where:
        os.rename(path, path.replace("harm", "done"))
        HARMS[kind]()


class Harmed(nn.Module):
    """A layer in whose forward the harm is done."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 16)

    def forward(self, x: Tensor) -> Tensor:
        do_harm("forward")
        return torch.tanh(self.linear(x))


def build() -> nn.Module:
    return nn.Sequential(Harmed(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))


def build_plain() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))


class Samples(Dataset[tuple[Tensor, Tensor]]):
    deterministic_samples = True

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(NUM_SAMPLES, 6, generator=generator)
        self.targets = torch.randint(0, 3, (NUM_SAMPLES,), generator=generator)

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        do_harm("data")
        return self.inputs[index], self.targets[index]


def data(split: str = "train") -> Samples:
    return Samples()
