"""train/progress.py: plain lines at a bearable rate, a bar on a terminal, and nothing that steers the terminal."""

import io

import pytest

from meshwright.texts import clean
from meshwright.train.progress import ProgressView


def started(**changes):
    return {
        "event": "run_started",
        "name": "demo",
        "num_parameters": 1234,
        "plan": "dp=2",
        "num_ranks": 2,
        "device": "cpu",
        "threads": 1,
        "steps": 100,
        "global_batch_size": 8,
    } | changes


def step(number, **changes):
    return {
        "event": "step",
        "step": number,
        "steps": 100,
        "loss": 5.0 - number / 100,
        "skipped": False,
        "num_samples": 8,
        "num_tokens": 1024,
        "tokens_per_s": 2048.0,
        "samples_per_s": 16.0,
        "seconds": 0.5,
        "peak_memory_bytes": 2**30,
        "eta_s": (100 - number) / 2,
    } | changes


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")


def show(*events, seconds_between=0.5):
    now = [0.0]
    stream = io.StringIO()
    with ProgressView(stream, clock=lambda: now[0]) as view:
        for event in events:
            view.show(event)
            now[0] += seconds_between
    return stream.getvalue().splitlines()


def test_plain_lines_come_every_two_seconds_first_and_last_always():
    lines = show(started(), *[step(number) for number in range(1, 101)])
    numbers = [int(line.split()[1].partition("/")[0]) for line in lines if line.startswith("step")]
    assert numbers[0] == 1
    assert numbers[-1] == 100
    assert numbers[1:4] == [5, 9, 13]


def test_a_line_has_every_number_of_the_bar():
    lines = show(started(), step(1), {"event": "evaluated", "step": 1, "loss": 4.25, "num_samples": 3, "seconds": 0.1})
    assert lines[0] == "demo: 1,234 parameters, plan 'dp=2' on 2 processes (cpu, 1 thread each), 100 steps of 8 samples"
    for word in ("step 1/100", "loss 4.9900", "2,048 tokens/s", "500 ms/step", "1 GiB", "0:50 left"):
        assert word in lines[1].replace("1.00 GiB", "1 GiB")
    assert "held-out loss 4.2500 on 3 samples" in lines[2]


def test_the_last_step_before_a_stop_is_shown():
    lines = show(started(), step(1), step(2), step(3), {"event": "stopped", "step": 3, "steps": 100}, seconds_between=0)
    assert lines[-2].startswith("step 3/100")
    assert lines[-1] == "stopped after step 3 of 100"


def test_losses_that_are_missing_are_shown_as_such():
    lines = show(started(), step(1, loss=float("nan"), skipped=True))
    assert "loss nan (skipped)" in lines[1]


def test_models_without_tokens_show_samples():
    assert "16 samples/s" in show(started(), step(1, num_tokens=8))[1]


def test_a_terminal_gets_a_bar():
    stream = Terminal()
    with ProgressView(stream) as view:
        view.show(started())
        view.show(step(50))
        view.show(step(100))
    text = stream.getvalue()
    assert "━" in text
    assert "100/100" in text
    assert "\x1b[?25h" in text  # the cursor is back


def test_control_characters_and_markup_from_outside_do_nothing():
    name = "\x1b]0;title\x07a\x1b[31mb\r\x08[bold]c\u202e"
    assert clean(name) == "ab[bold]c"
    assert clean("line\n\ttab") == "line\n\ttab"
    plain = show(started(name=name))
    assert plain[0].startswith("ab[bold]c: ")
    stream = Terminal()
    with ProgressView(stream) as view:
        view.show(started(name=name))
        view.note(f"{name} again")
    assert "\x1b]0" not in stream.getvalue()
    assert "[bold]c again" in stream.getvalue()


def test_a_run_that_goes_on_says_from_where_and_what_was_skipped():
    stream = io.StringIO()
    view = ProgressView(stream)
    skipped = [{"path": "checkpoints/step-00000060", "reason": "rank-00000.safetensors is damaged"}]
    event = started(event="resumed", step=40, checkpoint="checkpoints/step-00000040", skipped=skipped, notes=["a note"])
    view.show(event)
    assert stream.getvalue().splitlines()[:3] == [
        "skipped checkpoints/step-00000060: rank-00000.safetensors is damaged",
        "a note",
        "continued from checkpoints/step-00000040, after step 40 of 100",
    ]
    assert stream.getvalue().splitlines()[3].startswith("demo: 1,234 parameters, plan 'dp=2'")


def test_saves_and_restarts_are_lines():
    stream = io.StringIO()
    view = ProgressView(stream, print_every=0)
    saved = {"event": "saved", "step": 3, "path": "p/step-00000003", "seconds": 0.5, "is_best": False}
    view.show(saved)
    view.show(saved | {"is_best": True, "warning": "an old checkpoint stays: no"})
    view.show({"event": "save_failed", "step": 4, "text": "no room"})
    restart = {"cause": "WorkerKilledError: rank 1", "number": 1, "most": 3, "pause_s": 2.0, "step": 4}
    view.show(restart | {"event": "restarting"})
    assert stream.getvalue().splitlines() == [
        "step 3: saved p/step-00000003 (500 ms)",
        "step 3: saved p/step-00000003 (500 ms, the lowest held-out loss so far)",
        "warning: an old checkpoint stays: no",
        "warning: step 4 was not saved: no room",
        "WorkerKilledError: rank 1",
        "restart 1 of 3 in 2 s, after step 4",
    ]


def test_skipped_steps_are_counted_at_the_end():
    skip = {"loss": float("nan"), "skipped": True}
    done = {"event": "finished", "step": 3, "steps": 3, "seconds": 1.0}
    assert "skipped" not in show(started(), step(1), done)[-1]
    assert show(started(), step(1, **skip), step(2), done)[-1].endswith(
        "; skipped, since the loss or a gradient was not finite: step 1"
    )
    twice = show(started(), step(1, **skip), step(2, **skip), step(1), step(3, **skip), done)[-1]  # after a restart
    assert twice.endswith("not finite: 2 steps, the first 2, the last 3")


def test_a_reason_that_a_warning_has_told_is_not_told_again():
    planned = {"event": "planned", "plan": {"reasons": ["batch: whole, since", "tp=2 cuts"]}}
    assert show(started(), planned)[1:] == ["plan: batch: whole, since", "plan: tp=2 cuts"]
    assert show(started(), planned | {"warned": ["batch: whole, since"]})[1:] == ["plan: tp=2 cuts"]
