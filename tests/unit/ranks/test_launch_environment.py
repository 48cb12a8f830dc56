"""What the variables of launchers say about a rank's place."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import ConfigError
from meshwright.ranks.environment import ALONE, expand_nodes, read_place
from meshwright.ranks.launch import launch

COMPLETE = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_NODELIST": "node[07-08]",
    "SLURM_JOB_ID": "123456",
    "SLURM_TASKS_PER_NODE": "4(x2)",
}


def test_nothing_is_alone() -> None:
    assert read_place({"PATH": "/bin", "SLURM_NTASKS": "8"}) == ALONE  # a shell inside an allocation is no task


def test_the_four_variables() -> None:
    place = read_place(COMPLETE)
    assert (place.rank, place.world_size, place.address) == (3, 4, ("node1", 29500))
    assert (place.is_one_host, place.has_agent_store) == (False, False)


def test_torchrun_on_one_host() -> None:
    place = read_place(
        {
            **COMPLETE,
            "LOCAL_RANK": "3",
            "LOCAL_WORLD_SIZE": "4",
            "TORCHELASTIC_RUN_ID": "none",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
    )
    assert (place.source, place.local_rank, place.local_size) == ("torchrun", 3, 4)
    assert (place.is_one_host, place.has_agent_store) == (True, True)


@pytest.mark.parametrize("missing", sorted(COMPLETE))
def test_each_missing_variable_is_named_alone(missing: str) -> None:
    environment = {name: value for name, value in COMPLETE.items() if name != missing}
    with pytest.raises(ConfigError) as caught:
        read_place(environment)
    assert f"but {missing} is missing" in str(caught.value)
    assert f"unset {' '.join(environment)}" in str(caught.value)


@pytest.mark.parametrize("missing", sorted(COMPLETE))
def test_an_empty_variable_is_a_missing_one(missing: str) -> None:
    with pytest.raises(ConfigError, match=f"but {missing} is missing"):
        read_place({**COMPLETE, missing: ""})


def test_the_fix_of_a_stale_world_size_works() -> None:
    environment = {"WORLD_SIZE": "2"}
    with pytest.raises(ConfigError) as caught:
        read_place(environment)
    assert caught.value.fix is not None
    for name in caught.value.fix.rsplit("unset ", 1)[1].split():
        del environment[name]
    assert read_place(environment) == ALONE


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"RANK": "4"}, "RANK is 4 but WORLD_SIZE is 4; ranks count from 0 to 3"),
        ({"RANK": "one"}, "RANK is 'one', which is not a whole number"),
        ({"RANK": "-1"}, "RANK is -1; it must not be negative"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT is 70000; ports count from 1 to 65535"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT is 0"),
        ({"LOCAL_RANK": "x"}, "LOCAL_RANK is 'x'"),
    ],
)
def test_contradictions(change: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        read_place({**COMPLETE, **change})


def test_srun() -> None:
    place = read_place(SLURM)
    assert (place.rank, place.world_size, place.local_rank, place.local_size) == (5, 8, 1, 4)
    assert place.address == ("node07", 15000 + 123456 % 16000)
    assert not place.is_one_host


def test_an_address_in_brackets_is_the_address() -> None:
    assert read_place({**COMPLETE, "MASTER_ADDR": "[fd00::2]"}).address == ("fd00::2", 29500)


def test_srun_with_an_address_of_the_users_own() -> None:
    place = read_place({**SLURM, "MASTER_ADDR": "other", "MASTER_PORT": "1234"})
    assert place.address == ("other", 1234)


def test_srun_with_one_task_needs_nobody() -> None:
    assert read_place({"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0"}).address is None


@pytest.mark.parametrize("missing", ["SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NODELIST", "SLURM_JOB_ID"])
def test_srun_with_something_missing(missing: str) -> None:
    with pytest.raises(ConfigError, match=missing):
        read_place({name: value for name, value in SLURM.items() if name != missing})


def test_torchruns_variables_count_before_sruns() -> None:
    assert read_place({**SLURM, **COMPLETE}).rank == 3  # torchrun inside an srun task


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=6),
    st.text("abc", min_size=1, max_size=4),
    st.text("xyz", max_size=2),
)
def test_what_is_written_as_a_list_expands_to_it(numbers: list[int], head: str, tail: str) -> None:
    inside = ",".join(f"{number:03d}-{number + 2:03d}" for number in numbers)
    expected = [f"{head}{n:03d}{tail}" for number in numbers for n in range(number, number + 3)]
    assert expand_nodes(f"{head}[{inside}]{tail}") == expected


@pytest.mark.parametrize("text", ["", "node[3-1]", "node[a]", "node[1", "a;rm -rf", "-rf", "node[0-999999999]"])
def test_what_is_no_list_of_hosts(text: str) -> None:
    with pytest.raises(ConfigError, match="not a list of hosts"):
        expand_nodes(text)


def test_a_launch_in_ranks_of_torchrun_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    # Each of torchrun's ranks would train everything once more, and nobody would say so.
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="torchrun has started 2 ranks, and each of them would launch 3 of its own"):
        launch(math.sqrt, 3, 4.0)
