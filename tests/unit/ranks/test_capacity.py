"""ranks/capacity.py, ranks/environment.py: this host's limits and the launchers' variables, refused with their numbers."""

import errno
import os
import resource

import pytest

from meshwright.errors import ConfigError
from meshwright.host import usable_cores
from meshwright.ranks import capacity
from meshwright.ranks.environment import expand_nodes, read_join_timeout, read_place
from meshwright.ranks.launch import launch
from meshwright.ranks.processes import scratch_file


def test_degrees_are_held_against_the_cores():
    most = capacity.RANKS_PER_CORE * usable_cores()
    capacity.check_devices(most)
    with pytest.raises(ConfigError, match=f"{most} here"):
        launch(int, most + 1)
    with pytest.raises(ConfigError, match="the plan 'tp=999' has"):
        capacity.check_devices(10**18, "tp=999")


def test_open_files_are_counted_before_anything_is_started(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _kind: (30, 30))
    with pytest.raises(ConfigError, match="the limit of this process is 30") as told:
        launch(int, 2)
    assert "ulimit -n" in str(told.value)


def test_room_for_processes_is_counted_too(monkeypatch):
    monkeypatch.setattr(capacity, "_room_in_group", lambda: (7, "/group/pids.max"))
    with pytest.raises(ConfigError, match=r"need 10 processes and threads.* room for 7"):
        capacity.check_launch(2)


@pytest.mark.parametrize(
    ("number", "what"),
    [
        (errno.EMFILE, "limit of open files is [0-9]+"),
        (errno.EAGAIN, "limit of processes and threads is"),
        (errno.ENOMEM, "no memory for another process"),
        (errno.EPERM, "seccomp"),
    ],
)
def test_a_limit_met_while_starting_is_named(number, what):
    explained = capacity.explain_limit(OSError(number, "told so"), 2)
    assert explained is not None
    assert explained.fix
    with pytest.raises(ConfigError, match=what):
        raise explained
    assert capacity.explain_limit(OSError(errno.EIO, "disk"), 2) is None


def test_a_system_without_memfd_create_gets_a_nameless_file(monkeypatch):
    def forbidden(*_args):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr("os.memfd_create", forbidden)
    descriptor = scratch_file(16)
    try:
        assert os.fstat(descriptor).st_size == 16
        assert os.fstat(descriptor).st_nlink == 0
    finally:
        os.close(descriptor)


@pytest.mark.parametrize(
    "nodes", ["n[1-3000][1-3000]", "n[1-99999][1-99999][1-99999]", "a" * 200_000, "n[" + "1," * 60_000 + "1]"]
)
def test_node_lists_have_a_limit_for_their_product(nodes):
    with pytest.raises(ConfigError, match="SLURM_NODELIST"):
        expand_nodes(nodes)


RANK = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("WORLD_SIZE", "9" * 5000),
        ("WORLD_SIZE", str(10**18)),
        ("RANK", "1" + "0" * 30),
        ("MASTER_ADDR", "a\x1b[31m"),
        ("MASTER_ADDR", "a" * 5000),
        ("MASTER_PORT", "nan"),
    ],
)
def test_a_launchers_variable_is_refused_by_name(name, value):
    with pytest.raises(ConfigError, match=name) as told:
        read_place({**RANK, name: value})
    assert len(str(told.value)) < 300


def test_a_job_number_that_is_not_one_is_refused():
    slurm = {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0", "SLURM_NODELIST": "n[1-2]"}
    with pytest.raises(ConfigError, match="SLURM_JOB_ID"):
        read_place({**slurm, "SLURM_JOB_ID": "²"})  # a digit for `str.isdigit`, and not for `int`


@pytest.mark.parametrize("text", ["abc", "nan", "inf", "-1", "0", "1e300"])
def test_the_time_to_join_is_a_number_of_seconds(text):
    with pytest.raises(ConfigError, match="MESHWRIGHT_JOIN_TIMEOUT_S"):
        read_join_timeout({"MESHWRIGHT_JOIN_TIMEOUT_S": text})
    assert read_join_timeout({}) == 60.0
