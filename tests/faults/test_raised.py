"""F08 and hangs: exceptions on one rank, on several, that cannot get out; and ranks that wait for ever."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from tests.faults.jobs import rank_jobs as jobs
from tests.faults.jobs import saving_jobs

from meshwright.errors import LostPeerError, UserCodeError, exit_code_of, rank_of
from meshwright.ranks.launch import RankGroup, launch


@pytest.mark.parametrize("rank", [0, 1])
def test_an_exception_comes_back_as_itself(rank: int) -> None:
    with RankGroup(2) as group:
        start = time.monotonic()
        with pytest.raises(ValueError, match=f"broken on {rank}") as caught:
            group.submit(jobs.fail, [rank], "value")
        assert time.monotonic() - start < 1.0
    notes = "\n".join(caught.value.__notes__)
    assert f"rank {rank} of 2; its traceback:" in notes
    assert "jobs.py" in notes
    assert "in fail" in notes
    assert "worker.py" not in notes
    assert exit_code_of(caught.value) == 10


def test_two_different_exceptions_give_the_earlier_one() -> None:
    with pytest.raises(ValueError, match=r"broken on [01]") as caught:
        launch(jobs.fail, 2, [0, 1], "value")
    assert str(caught.value)[-1] in caught.value.__notes__[0].split(" of ")[0]


def test_an_exception_behind_a_collective_that_its_peers_are_not_in() -> None:
    with RankGroup(2) as group, pytest.raises(ValueError, match="broken on 1"):
        group.submit(jobs.fail, [1], "barrier")


@pytest.mark.parametrize(("rank", "kind"), [(0, "blocked"), (1, "barrier")])
def test_an_exception_behind_a_finally_that_blocks(rank: int, kind: str) -> None:
    # Over shared memory the barrier does not block: it raises, see above.
    with RankGroup(2, env={"MESHWRIGHT_TRANSPORT": "gloo"}) as group:
        start = time.monotonic()
        with pytest.raises(ValueError, match=f"broken on {rank}") as caught:
            group.submit(jobs.fail, [rank], kind)
        assert time.monotonic() - start < 3.0
    notes = "\n".join(caught.value.__notes__)
    assert f"rank {rank} of 2" in notes
    assert "cleanup on its way is still running" in notes


def test_a_slow_except_block_is_no_fault() -> None:
    assert launch(jobs.handle_slowly, 2, 2.5) == ["fine", "fine"]


def test_an_exception_that_cannot_be_rebuilt() -> None:
    with pytest.raises(UserCodeError, match="OddError: this and that") as caught:
        launch(jobs.fail, 2, [1], "odd")
    assert caught.value.rank == 1
    assert "in fail" in caught.value.traceback_text


def test_a_result_that_cannot_be_sent() -> None:
    with pytest.raises(UserCodeError, match="rank 1 returned a function that cannot be sent back") as caught:
        launch(jobs.fail, 2, [1], "lambda")
    assert caught.value.rank == 1


def test_sys_exit_is_the_users_error() -> None:
    with pytest.raises(UserCodeError, match=r"rank 1 of 2 called sys.exit\(3\)") as caught:
        launch(jobs.die, 2, 1, "sys.exit")
    assert caught.value.rank == 1
    assert exit_code_of(caught.value) == 10


@pytest.mark.parametrize("leaving", [(0, 1), (1,)])
def test_sys_exit_waits_for_a_save_in_the_background(tmp_path: Path, leaving: tuple[int, ...]) -> None:
    with pytest.raises(UserCodeError, match=r"called sys.exit\(0\)") as caught:
        launch(saving_jobs.leave_beside_a_save, 2, str(tmp_path), leaving, "sys.exit")
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert "may be lost" not in "".join(caught.value.__notes__)


def test_an_exception_says_which_save_it_may_cost(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="broken") as caught:
        launch(saving_jobs.leave_beside_a_save, 2, str(tmp_path), (1,), "raise")
    assert f"the save of step 1 in {tmp_path} was under way, and may be lost" in caught.value.__notes__


def test_keyboard_interrupt_in_a_rank_is_the_users_error() -> None:
    with pytest.raises(UserCodeError, match="rank 0 of 2 raised KeyboardInterrupt"):
        launch(jobs.fail, 2, [0], "interrupt")


def test_a_hang_names_who_waits_where_and_what_the_others_do() -> None:
    start = time.monotonic()
    with pytest.raises(LostPeerError) as caught:
        launch(jobs.hang, 2, timeout_s=1.5)
    text = str(caught.value)
    assert "rank 0 of 2 has waited 1." in text
    assert "in all_reduce" in text
    assert "step 4, phase optimizer" in text
    assert "in wait_forever" in text
    assert (caught.value.rank, caught.value.peer) == (0, 1)
    assert exit_code_of(caught.value) == 12
    assert time.monotonic() - start < 15


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_rank_that_tells_of_anothers_error_does_not_take_its_place(rank: int) -> None:
    with pytest.raises(ValueError, match="the user's own") as caught:
        launch(jobs.train_with_a_loss_that_raises, 3, rank)
    assert rank_of(caught.value) == rank


@pytest.mark.parametrize(("num_threads", "exchange"), [(1, "all_reduce"), (120, "all_reduce"), (1, "barrier")])
def test_a_hang_names_other_threads_than_the_main_one(num_threads: int, exchange: str) -> None:
    with pytest.raises(LostPeerError) as caught:
        launch(jobs.hang_in_a_thread, 2, num_threads, exchange, timeout_s=1.5)
    assert f"in {exchange}" in str(caught.value)
    of_rank_1 = str(caught.value).partition("rank 1 ")[2]
    main, _, other = of_rank_1.partition("and another thread in:")
    assert "in hang_in_a_thread" in main
    assert "in wait_forever" in other
    assert "meshwright-channel" not in of_rank_1
    assert "in _listen" not in of_rank_1


def test_a_stopped_rank_is_called_stopped() -> None:
    with pytest.raises(LostPeerError, match=r"rank 1 is in no collective.*it is stopped \(SIGSTOP\)"):
        launch(jobs.stop_self, 2, timeout_s=1.5)
