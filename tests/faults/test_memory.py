"""F12: out of memory, by the address space's limit and by a control group's."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.faults.jobs import rank_jobs as jobs

from meshwright.errors import WorkerKilledError, exit_code_of
from meshwright.ranks.launch import launch

LIMIT_BYTES = 400 << 20


def test_an_allocation_that_fails_says_how_much_was_asked_for() -> None:
    with pytest.raises(RuntimeError, match="you tried to allocate 8589934592 bytes") as caught:
        launch(jobs.exhaust_address_space, 2, 8 << 30)
    assert "rank 1 of 2" in caught.value.__notes__[0]
    assert exit_code_of(caught.value) == 10


@pytest.fixture
def memory_group() -> Iterator[Path]:
    """A memory control group with a limit, of version 1 or 2."""
    for root, limit in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
        directory = Path(root, f"meshwright-test-{secrets.token_hex(4)}")
        try:
            directory.mkdir()
        except OSError:
            continue
        try:
            (directory / limit).write_text(str(LIMIT_BYTES))
        except OSError:
            directory.rmdir()
            continue
        yield directory
        directory.rmdir()
        return
    pytest.skip("a memory control group cannot be made here (it takes root and a writable cgroup file system)")


def test_a_kill_for_want_of_memory_says_so(memory_group: Path) -> None:
    with pytest.raises(WorkerKilledError) as caught:
        launch(jobs.exhaust_memory_group, 2, str(memory_group))
    text = str(caught.value)
    assert (caught.value.rank, caught.value.signal_name) == (1, "SIGKILL")
    assert "likely out of memory: resident" in text
    assert "of limit 0.39 GiB" in text
    assert "step 7, phase forward" in text
    assert exit_code_of(caught.value) == 11
    assert os.path.isdir(memory_group)
