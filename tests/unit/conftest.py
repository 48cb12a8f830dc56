"""No deadline for property tests, one thread, a small heap to collect, and no world that an earlier test has joined."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# On a busy machine a deadline fails what is right.
settings.register_profile("unit", deadline=None)
settings.load_profile("unit")


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Small models gain nothing from more, and two workers share the cores."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="session")
def heap_of_tests_alone() -> Iterator[None]:
    """Have collections look at what tests make, not at modules and thousands of collected tests, which live on."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def in_no_world() -> Iterator[None]:
    """A process joins its world, be it of one, for good: have the next test find it as if it had not."""
    from meshwright.ranks.world import set_current_world

    yield
    set_current_world(None)


@pytest.fixture
def in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run a test in a folder of its own, which is returned."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
