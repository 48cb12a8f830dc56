"""train/lock.py: one process has a folder, a dead one never, and a number that was given again proves nothing."""

import dataclasses
import os
import subprocess
import sys

import pytest

from meshwright.errors import DirectoryInUseError
from meshwright.train import lock
from meshwright.train.lock import FolderLock, Owner


def take(folder):
    FolderLock(folder / ".lock", folder).close()


def parent():
    """A process that lives, and is not this one."""
    return dataclasses.replace(Owner.this_process(), pid=os.getppid(), started=lock._start_of(os.getppid()))


def test_the_file_says_who_holds_it_and_is_empty_afterwards(tmp_path):
    held = FolderLock(tmp_path / ".lock", tmp_path)
    owner = Owner.read((tmp_path / ".lock").read_text())
    assert owner is not None
    assert (owner.pid, owner.host, owner.started) == (os.getpid(), os.uname().nodename, lock._start_of(os.getpid()))
    with pytest.raises(
        DirectoryInUseError, match=f"process {os.getpid()} on {owner.host} since {owner.since}, is using"
    ):
        take(tmp_path)
    held.close()
    held.close()
    assert (tmp_path / ".lock").read_text() == ""
    take(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"started": "1"},  # the number was given to another process
        {"boot": "0ddba11-before-the-last-power-cut"},
        {"boot": ""},
        {"pid": 2**22 + 1},  # beyond what Linux gives
        {"pid": -1},
    ],
)
def test_the_file_of_a_dead_owner_holds_nobody(tmp_path, changes):
    (tmp_path / ".lock").write_text(dataclasses.replace(parent(), **changes).to_line())
    take(tmp_path)


def test_a_living_owner_has_it_where_the_kernel_gives_the_lock_to_everybody(tmp_path):
    (tmp_path / ".lock").write_text(parent().to_line())
    with pytest.raises(DirectoryInUseError, match=f"process {os.getppid()} on"):
        take(tmp_path)
    assert Owner.read((tmp_path / ".lock").read_text()) == parent()  # which was left as it was


@pytest.mark.parametrize("text", ["", "123\n", "{}", "[1]", '{"pid": 1}', "\xff\0"])
def test_a_file_that_names_nobody_holds_nobody(tmp_path, text):
    (tmp_path / ".lock").write_text(text)
    take(tmp_path)


def test_a_lock_ends_with_its_process_though_its_children_live_on(tmp_path):
    code = """
import os, sys
from pathlib import Path
from meshwright.train.lock import FolderLock
held = FolderLock(Path(sys.argv[1]) / ".lock", Path(sys.argv[1]))
if os.fork() == 0:
    sys.stdin.read()
    os._exit(0)
held.close()
print("closed", flush=True)
sys.stdin.read()
"""
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"closed\n"
        take(tmp_path)
        process.stdin.close()
        assert process.wait(30) == 0
