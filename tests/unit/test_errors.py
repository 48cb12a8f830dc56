from __future__ import annotations

import pickle

import pytest

from meshwright import errors
from meshwright.errors import MeshwrightError

KINDS = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, MeshwrightError)]
EXTRA = {"UserCodeError": {"rank": 3}, "WorkerKilledError": {"rank": 3}}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_error_crosses_process_borders(kind: type[MeshwrightError]) -> None:
    error = kind("what is wrong", fix="do this", **EXTRA.get(kind.__name__, {}))
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert str(copy) == str(error) == "what is wrong\nfix: do this"
    assert copy.__dict__ == error.__dict__


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_the_tree_drawn_on_top_has_every_class_and_its_exit_code(kind: type[MeshwrightError]) -> None:
    line = next(line for line in (errors.__doc__ or "").splitlines() if kind.__name__ in line.split())
    assert str(kind.exit_code) in line.split()


def test_no_error_exits_as_success_and_a_bug_is_not_the_users_fault() -> None:
    assert all(kind.exit_code != 0 for kind in KINDS)
    assert errors.InternalError.exit_code == 70


def test_exit_codes_of_other_exceptions() -> None:
    assert errors.exit_code_of(KeyboardInterrupt()) == 130
    assert errors.exit_code_of(ZeroDivisionError()) == 10
    assert errors.exit_code_of(errors.PlanError("nothing fits")) == 3


def test_a_note_that_names_a_rank_crosses_process_borders_on_the_users_own_exception() -> None:
    error = ValueError("bad picture")
    error.add_note("read from a file")
    error.add_note(errors.RankNote("raised elsewhere", 2))
    copy = pickle.loads(pickle.dumps(error))
    assert errors.rank_of(copy) == 2
    assert copy.__notes__ == ["read from a file", "raised elsewhere"]


def test_where_an_error_came_from_is_data_and_no_wording() -> None:
    assert errors.rank_of(errors.PlanError("rank 1 of 2 says so at step 3, phase load")) is None
    error = errors.PlanError("none fits", rank=1, step=3, phase="load")
    assert (errors.rank_of(error), error.step, error.phase) == (1, 3, "load")
    assert str(error) == "none fits"


def test_without_a_fix_there_is_no_fix_line() -> None:
    assert str(errors.ConfigError("wrong")) == "wrong"
