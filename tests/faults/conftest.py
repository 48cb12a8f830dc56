"""Every test here proves that it left nothing behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.faults import leaks
from tests.faults.shm_ranks import Zygote
from tests.scopes import FOR_RANKS, ONE_THREAD

from meshwright.ranks import spawning
from meshwright.ranks.processes import rank_environment


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """What starts ranks that no launching process watches over."""
    started = Zygote()
    yield started
    started.close()


@pytest.fixture(scope="session")
def templates() -> None:
    """What ranks are forked from here, once for all tests that are not about starting; closed with the pools."""
    from meshwright.testing import pool

    environment = rank_environment("", None, ONE_THREAD)
    pool.keep_templates(environment, FOR_RANKS)


@pytest.fixture
def own_template(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a launch start as it does outside of tests: with a template of its own."""
    monkeypatch.setattr(spawning, "kept", [])


@pytest.fixture
def no_template(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a launch start as it does where ranks cannot be forked: each as an interpreter of its own."""
    monkeypatch.setattr(spawning, "kept", [])
    monkeypatch.setattr(spawning, "can_fork", lambda: False)


@pytest.fixture(autouse=True)
def watch(monkeypatch: pytest.MonkeyPatch, templates: None) -> Iterator[leaks.Watch]:
    """Mark what the test starts, and check that it is gone two seconds after the test."""
    watch = leaks.Watch()
    monkeypatch.setenv(leaks.MARK_VARIABLE, watch.mark)
    # One thread per rank, whatever the machine: the tests share two cores.
    for name, value in ONE_THREAD.items():
        monkeypatch.setenv(name, value)
    yield watch
    watch.assert_nothing_left()
