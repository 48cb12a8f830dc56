"""What is written of a failed run: tracebacks where users' code has a part in it, and each message once."""

from __future__ import annotations

import contextlib
import traceback
from pathlib import Path
from types import SimpleNamespace

import pytest

from meshwright import errors
from meshwright.errors import ApplyError, ConfigError, LostPeerError, PlanError, StorageError
from meshwright.train.config.load import load_config
from meshwright.train.failures import report_failure

CONFIG = load_config(Path(__file__).parents[3] / "examples" / "gpt_python.toml", ["train.name='x'"])


def told(error: Exception) -> dict[int, dict[str, object]]:
    """Return what rank 1 tells of an error that it has raised."""
    trace = "".join(traceback.format_exception(error))
    return {1: {"event": "failed", "rank": 1, "step": 4, "phase": "resume", "traceback": trace}}


def raised(do: object) -> Exception:
    try:
        do()  # type: ignore[operator]
    except Exception as error:
        error.rank = 1  # type: ignore[attr-defined]
        return error
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize("kind", [ConfigError, ApplyError, PlanError, StorageError])
def test_an_answer_of_the_library_has_no_traceback_and_stands_once(
    capsys: pytest.CaptureFixture[str], kind: type[ConfigError]
) -> None:
    error = kind("run is of other settings:\n  train.seed", fix="put them back", rank=1)
    trace = f"""Traceback (most recent call last):
  File "{contextlib.__file__}", line 81, in inner
    return func(*args, **kwds)
  File "{Path(errors.__file__).parent}/train/resume.py", line 80, in refuse_changes
    with told_of(path, "write"):
  File "{contextlib.__file__}", line 158, in __exit__
    self.gen.throw(typ, value, traceback)
  File "{Path(errors.__file__).parent}/train/resume.py", line 80, in refuse_changes
    raise ConfigError(
{traceback.format_exception_only(error)[0].rstrip()}
"""
    failures = {1: {"event": "failed", "rank": 1, "step": 4, "phase": "resume", "traceback": trace}}
    assert report_failure(CONFIG, error, failures) == error.exit_code
    text = capsys.readouterr().err
    assert "Traceback" not in text
    assert text.count("run is of other settings") == 2  # the message, and the line for machines
    assert text.splitlines()[-1].startswith("FATAL run=x rank=1 step=4 phase=resume cause=")


def test_an_error_that_nobody_foresaw_shows_where_it_was_raised(capsys: pytest.CaptureFixture[str]) -> None:
    trace = f"""Traceback (most recent call last):
  File "{Path(errors.__file__).parent}/run/step.py", line 80, in step
    raise ApplyError(
"""
    failures = {1: {"event": "failed", "rank": 1, "step": 4, "phase": "step", "traceback": trace}}
    report_failure(CONFIG, ApplyError("parameters differ", rank=1), failures)
    assert "run/step.py" in capsys.readouterr().err


@pytest.mark.parametrize("kind", [ConfigError, ApplyError])
def test_where_users_code_has_a_part_it_is_shown_and_the_message_stands_once(
    capsys: pytest.CaptureFixture[str], kind: type[ConfigError]
) -> None:
    def of_the_user() -> None:
        raise kind("it does not fit", fix="another one")

    error = raised(of_the_user)
    report_failure(CONFIG, error, told(error))
    text = capsys.readouterr().err
    assert "in of_the_user" in text
    assert text.count("fix: another one") == 1
    assert text.count("it does not fit") == 3  # the line of code, the message, the line for machines


def test_a_rank_that_was_told_writes_no_line_for_machines(capsys: pytest.CaptureFixture[str]) -> None:
    error = LostPeerError("rank 0 raised", rank=1, peer=0)
    error.is_told = True
    report_failure(CONFIG, error, {})
    assert "FATAL" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("done", "phase", "reported", "told"),
    [
        (0, "load", 0, 1),
        (0, "step", 0, 1),
        (4, "step", 4, 5),
        (5, "evaluate", 4, 5),
        (5, "save", 4, 5),
        (0, "data", -1, 0),
    ],
)
def test_a_failure_is_of_the_step_that_the_lines_of_progress_name(
    done: int, phase: str, reported: int, told: int
) -> None:
    from meshwright.train.session import _Session  # pyright: ignore[reportPrivateUsage]

    progress: list[int] = []
    world = SimpleNamespace(rank=1, report_progress=lambda step, phase: progress.append(step))
    session = _Session(CONFIG, world)  # type: ignore[arg-type]
    session.step = done
    session._enter(phase)
    assert progress == [reported]  # a training's world counts from 1
    assert session.failure(ConfigError("no"))["step"] == told


def test_what_a_step_sends_is_told_without_first_steps_evaluations_and_checkpoints() -> None:
    from meshwright.train.session import WARM_UP_STEPS, _Session  # pyright: ignore[reportPrivateUsage]

    world = SimpleNamespace(rank=0, device=SimpleNamespace(type="cpu"))
    session = _Session(CONFIG, world)  # type: ignore[arg-type]
    session._sent.extend([9000.0] * WARM_UP_STEPS + [10.0, 10.0, 30.0])
    entries = {("all_reduce", "dp"): SimpleNamespace(sent_bytes=1e6)}
    model = SimpleNamespace(ledger=SimpleNamespace(entries=entries), engine=SimpleNamespace(is_prepared=False))
    found = session._summary(model)  # type: ignore[arg-type]
    assert (found["step_sent_bytes"], found["sent_bytes"]) == (10.0, {"dp": 1_000_000})
