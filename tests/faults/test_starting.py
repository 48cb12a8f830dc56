"""What launch promises when nothing goes wrong, and what it refuses."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from tests.faults.jobs import rank_jobs as jobs
from tests.scopes import FULL_GRID

from meshwright.errors import ConfigError, InternalError, LostPeerError
from meshwright.ranks.launch import RankGroup, launch


def run_script(path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments, str(path)] if not arguments else [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=path.parent,
    )


def test_results_come_in_rank_order_and_the_world_is_whole() -> None:
    # Threads are set when a process starts: what other tests' ranks are forked from has one, and is passed over.
    results = launch(jobs.place, 3, threads_per_rank=2)
    assert [result["rank"] for result in results] == [0, 1, 2]
    expected = {"sum": [3.0, 3.0, 3.0], "threads": 2, "launched": True, "stop": False}
    for rank, result in enumerate(results):
        assert {**expected, "rank": rank, "distributed": rank} == result


def test_one_group_serves_many_calls() -> None:
    with RankGroup(2) as group:
        assert group.submit(jobs.identity, {"a": [1, 2]}) == [{"a": [1, 2]}] * 2
        pids = group.pids
        for _ in range(200):
            group.submit(jobs.nothing)
        assert group.pids == pids
    with pytest.raises(InternalError, match="closed"):
        group.submit(jobs.nothing)


def test_events_keep_their_order() -> None:
    seen: dict[int, list[int]] = {0: [], 1: []}

    def note(rank: int, event: dict[str, Any]) -> None:
        seen[rank].append(event["number"])

    launch(jobs.chatter, 2, 300, on_event=note)
    assert seen == {0: list(range(300)), 1: list(range(300))}


def test_results_and_arguments_larger_than_a_sockets_buffer() -> None:
    results = launch(jobs.big, 2, 8 << 20)
    assert [int(result.float().mean()) for result in results] == [0, 1]
    payload = bytes(8 << 20)
    assert [len(result) for result in launch(jobs.identity, 2, payload)] == [8 << 20] * 2


def test_a_rank_cannot_launch() -> None:
    with pytest.raises(ConfigError, match="ranks cannot start ranks"):
        launch(jobs.launch_again, 2)


def test_what_cannot_be_pickled_is_refused_before_it_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with RankGroup(1) as group:
        with pytest.raises(ConfigError, match="cannot be handed to another process"):
            group.submit(lambda: None)
        assert group.submit(jobs.identity, 3) == [3]


@pytest.mark.parametrize("num", [0, -1])
def test_a_senseless_number_of_ranks(num: int) -> None:
    with pytest.raises(ConfigError, match="ranks cannot be started"):
        launch(jobs.nothing, num)


def test_an_error_in_on_event_ends_the_ranks() -> None:
    def broken(rank: int, event: dict[str, Any]) -> None:
        raise ArithmeticError("mine")

    with pytest.raises(ArithmeticError, match="mine"):
        launch(jobs.loop_until_stopped, 2, on_event=broken)


@pytest.mark.usefixtures("own_template")
def test_a_start_that_takes_too_long_names_the_ranks() -> None:
    with pytest.raises(LostPeerError, match=r"ranks 0, 1 of 2 did not start within 0\.05 s"):
        launch(jobs.nothing, 2, start_timeout_s=0.05)


SCRIPT = """
import dataclasses
from meshwright.ranks.launch import launch
from meshwright.ranks.world import current_world

@dataclasses.dataclass
class Mine:
    value: int

def work(mine):
    return Mine(mine.value + current_world().rank)

print("top level", __name__)
if __name__ == "__main__":
    results = launch(work, 2, Mine(10))
    print([result.value for result in results], type(results[0]) is Mine)
"""


@pytest.mark.parametrize("as_module", [False, True] if FULL_GRID else [True])
def test_a_function_of_the_main_script(tmp_path: Path, as_module: bool) -> None:
    path = tmp_path / "my_script.py"
    path.write_text(SCRIPT)
    done = run_script(path, *(["-m", "my_script"] if as_module else []))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines.count("top level __main__") == 1
    assert lines.count("top level __mp_main__") == 2
    assert lines[-1] == "[10, 11] True"


def test_a_script_without_a_main_guard_is_told_so(tmp_path: Path) -> None:
    path = tmp_path / "unguarded.py"
    path.write_text(
        textwrap.dedent("""
        from meshwright.ranks.launch import launch
        def work():
            return 1
        launch(work, 2)
        """)
    )
    done = run_script(path)
    assert done.returncode != 0
    assert "ranks cannot start ranks" in done.stderr
    assert 'if __name__ == "__main__"' in done.stderr


def test_an_interactive_function_is_refused() -> None:
    text = "import sys; sys.modules['cloudpickle'] = None\nfrom meshwright.ranks.launch import launch\n"
    text += "def f(): pass\nlaunch(f, 1)"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60, check=False)
    assert "ConfigError" in done.stderr
    assert "interactive session" in done.stderr


def test_nobody_closes_the_group(tmp_path: Path) -> None:
    path = tmp_path / "forgetful.py"
    path.write_text(
        textwrap.dedent("""
        import math
        from meshwright.ranks.launch import RankGroup
        if __name__ == "__main__":
            group = RankGroup(2)
            print(group.submit(math.sqrt, 4.0))
        """)
    )
    done = run_script(path)
    assert (done.returncode, done.stdout) == (0, "[2.0, 2.0]\n"), done.stderr


@pytest.mark.usefixtures("own_template")
def test_the_callers_environment_reaches_the_ranks_and_stays_as_it_was() -> None:
    before = dict(os.environ)
    assert launch(os.getenv, 2, "MY_OWN", env={"MY_OWN": "7"}) == ["7", "7"]
    assert dict(os.environ) == before


def test_a_script_that_reads_its_arguments_at_module_level(tmp_path: Path) -> None:
    path = tmp_path / "arguments.py"
    path.write_text(
        textwrap.dedent("""
        import argparse, sys
        from meshwright.ranks.launch import launch
        parser = argparse.ArgumentParser()
        parser.add_argument("--width", type=int, required=True)
        arguments = parser.parse_args()
        def work():
            return arguments.width, sys.argv[1:]
        if __name__ == "__main__":
            print(launch(work, 2))
        """)
    )
    done = run_script(path, str(path), "--width", "7")
    assert (done.returncode, done.stdout) == (0, f"{[(7, ['--width', '7'])] * 2}\n"), done.stderr
