"""Every test here proves that it left nothing behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.faults import leaks
from tests.faults.shm_ranks import Zygote


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """What starts ranks that no launching process watches over."""
    started = Zygote()
    yield started
    started.close()


@pytest.fixture(autouse=True)
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[leaks.Watch]:
    """Mark what the test starts, and check that it is gone two seconds after the test."""
    watch = leaks.Watch()
    monkeypatch.setenv(leaks.MARK_VARIABLE, watch.mark)
    # One thread per rank, whatever the machine: the tests share two cores.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield watch
    watch.assert_nothing_left()
