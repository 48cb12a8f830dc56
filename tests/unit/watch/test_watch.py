"""Watching of a run: its folder as it grows, who is late, what is shown after a kill; two at once; the browser's side."""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console
from tests.unit.report.made_runs import HOSTILE, Page, make_record, started, step

from meshwright.errors import ConfigError
from meshwright.spec.rank_states import RankActivity, RankStates
from meshwright.train.lock import Owner
from meshwright.watch import follow, serve
from meshwright.watch.follow import RunFollower
from meshwright.watch.screen import spark, verdict, view
from meshwright.watch.serve import HOST, LiveServer
from meshwright.watch.watch_command import watch_in_terminal

ONE = {
    "pid": 5,
    "step": 3,
    "phase": "forward",
    "progress_s": 1.0,
    "wait_s": None,
    "collective": "",
    "num_waits": 7,
    "rss_bytes": 2**20,
}


def states(*changes, limit_s=None, age_s=0.0):
    ranks = tuple(RankActivity(**ONE | change) for change in changes)
    return RankStates(written_at=time.time() - age_s, limit_s=limit_s, ranks=ranks)


WAITS = {"wait_s": 9.0, "collective": "all_reduce", "num_waits": 8}


@pytest.fixture
def folder(tmp_path):
    def make(*events, owner: Owner | str | None = None, of_ranks: RankStates | str | None = None):
        path = tmp_path / "run"
        path.mkdir(exist_ok=True)
        write(path, *events)
        line = owner.to_line() if isinstance(owner, Owner) else owner or ""
        (path / ".lock").write_text(line)
        if of_ranks is not None:
            (path / "ranks.json").write_text(of_ranks if isinstance(of_ranks, str) else of_ranks.to_json())
        return path

    return make


def write(path: Path, *events):
    with (path / "events.jsonl").open("a", encoding="utf-8") as file:
        file.writelines(event if isinstance(event, str) else json.dumps(event) + "\n" for event in events)


def shown(watched, width=120):
    console = Console(width=width, record=True, file=open(os.devnull, "w"))  # noqa: SIM115 - the console's
    console.print(view(watched, width=width))
    console.file.close()
    return console.export_text()


def dead_owner():
    """Return the owner that a process which has ended was."""
    code = "from meshwright.train.lock import Owner; print(Owner.this_process().to_line())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    owner = Owner.read(done.stdout)
    assert owner is not None
    return owner


def test_a_running_run_is_followed_event_by_event(folder):
    path = folder(started(steps=9), step(1), owner=Owner.this_process(), of_ranks=states({}, {}))
    follower = RunFollower(path)
    watched = follower.look()
    assert (watched.outcome, watched.is_over, watched.is_alive) == ("running", False, True)
    line = json.dumps(step(2)) + "\n"
    write(path, line[:20])
    assert len(follower.look().run.steps) == 1  # not a whole line yet
    write(path, line[20:], step(3))
    watched = follower.look()
    assert list(watched.run.steps.steps) == [1, 2, 3]
    assert not watched.run.problems
    text = shown(watched)
    assert "step 3 of 9" in text
    assert "1 MiB" in text
    write(path, {"event": "finished", "step": 3})
    (path / ".lock").write_text("")
    assert follower.look().outcome == "finished"
    assert follower.look().is_over


def test_two_watchers_see_the_same(folder):
    path = folder(started(), step(1), owner=Owner.this_process())
    first, second = RunFollower(path), RunFollower(path)
    assert first.look().outcome == second.look().outcome == "running"
    write(path, step(2))
    assert list(first.look().run.steps.steps) == list(second.look().run.steps.steps) == [1, 2]


def test_a_run_that_begins_anew_is_read_from_its_begin(folder):
    path = folder(started(), step(1), step(2), owner=Owner.this_process())
    follower = RunFollower(path)
    follower.look()
    (path / "events.jsonl").rename(path / "events.1.jsonl")
    write(path, started(name="anew"), step(1))
    watched = follower.look()
    assert (watched.run.name, list(watched.run.steps.steps)) == ("anew", [1])


def test_a_late_rank_is_named(folder):
    path = folder(started(), step(1), owner=Owner.this_process(), of_ranks=states(WAITS, {"progress_s": 9.5}, WAITS))
    watched = RunFollower(path).look()
    assert watched.late == (1,)
    assert "The others wait for rank 1 (forward, no progress for 9.5 s), for 9 s so far" in verdict(watched)
    assert "<- late" in shown(watched)


@pytest.mark.parametrize(
    ("found", "late"),
    [
        (states({}, {"wait_s": 3.0}), ()),  # shorter than five seconds
        (states(WAITS, {}, limit_s=20.0), ()),  # steps explain it
        (states(WAITS, {}, limit_s=8.0), (1,)),
        (states(WAITS, WAITS), ()),  # all in the same one
        (states(WAITS, WAITS | {"num_waits": 6}), (1,)),
        (states(WAITS, {}, {}), (1, 2)),
    ],
)
def test_who_is_late(found, late):
    assert found.late_ranks() == late
    assert RankStates.from_json(found.to_json()) == found


def test_a_killed_run_shows_what_was_going_on(folder):
    path = folder(started(), step(1), step(2), owner=dead_owner(), of_ranks=states(WAITS, {}, age_s=60.0))
    watched = RunFollower(path).look()
    assert watched.is_over
    assert "killed: its launching process is gone and told no end; the last step that it told is 2" in verdict(watched)
    text = shown(watched)
    assert "At the last look the others had waited for rank 1" in verdict(watched)
    assert "waits in all_reduce" in text
    assert re.search(r"as of 1\S* min ago", text)


@pytest.mark.parametrize(
    "content",
    [
        *("{", "[]", '{"ranks": [{"pid": "x"}], "written_at": 1, "limit_s": null}', "null", "[" * 90_000),
        '{"ranks": [], "written_at": 1, "limit_s": ' + "[" * 480 + "]" * 480 + "}",
        json.dumps({"ranks": [ONE | {"step": 10**400}], "written_at": 1, "limit_s": None}),
        json.dumps({"ranks": [ONE | {"phase": "x" * 10_000}], "written_at": 1, "limit_s": None}),
    ],
)
def test_damaged_states_are_left_out(folder, content):
    path = folder(started(), step(1), owner="{broken", of_ranks=content)
    watched = RunFollower(path).look()
    assert watched.states is None
    assert "loss" in shown(watched)


@pytest.mark.parametrize("lock", ["[" * 4000, '{"host": [], "pid": 1, "started": {}, "boot": 5}'])
def test_a_damaged_lock_names_nobody(folder, lock):
    assert RunFollower(folder(started(), owner=lock)).look().is_over


def test_a_process_that_tells_nothing_any_more_is_told(folder):
    path = folder(started(), step(1), owner=Owner.this_process(), of_ranks=states({}, age_s=30.0))
    follower = RunFollower(path)
    assert "running or standing still: its first process lives, and its ranks' states are 30 s old" in verdict(
        follower.look()
    )
    write(path, {"event": "restarting", "step": 1})  # there are no ranks to tell of
    assert follower.look().outcome == "running"


def test_a_rank_that_was_stopped_in_an_exchange_is_late(folder):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        child.send_signal(signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)
        path = folder(
            started(), step(1), owner=Owner.this_process(), of_ranks=states(WAITS, WAITS | {"pid": child.pid})
        )
        assert RunFollower(path).look().late == (1,)
        (path / "ranks.json").write_text(states(WAITS, WAITS | {"pid": child.pid, "host": "b"}).to_json())
        assert RunFollower(path).look().late == ()  # a number of another host
    finally:
        child.kill()
        child.wait(10)


def test_many_lines_of_many_kinds_are_counted(folder):
    kinds = [{"event": f"kind {number}"} for number in range(150)]
    path = folder(started(), *kinds, *([{"event": "planned", "plan": {"dp": "x"}}] * 50))
    run = RunFollower(path).look().run
    assert len(run.remarkable) <= 101
    assert len(run.problems) <= 1


def test_a_file_without_end_is_left(folder, monkeypatch):
    path = folder(started(), step(1))
    os.truncate(path / "events.jsonl", 1 << 40)  # a terabyte without contents
    monkeypatch.setattr(follow, "MOST_EVENT_BYTES", 4 << 20)
    assert list(RunFollower(path).look().run.steps.steps) == [1]


def test_hostile_names_do_not_reach_the_terminal(folder):
    hostile = {"phase": f"[/] [red]{HOSTILE.replace(chr(0xD800), '')}[/red]"[:250], "collective": "\x1b[31m"}
    path = folder(
        started(name=HOSTILE, plan=HOSTILE),
        step(1),
        owner=Owner.this_process(),
        of_ranks=states(hostile, WAITS | hostile),
    )
    text = shown(RunFollower(path).look())
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "[/] [red]" in text  # as text, not as rich's markup


def test_a_loss_that_is_no_number_any_more_is_told(folder):
    nan = float("nan")
    path = folder(started(), step(1), step(2, loss=nan), step(3), step(4, loss=nan), step(5, loss=nan))
    assert "loss not a finite number since step 4" in shown(RunFollower(path).look())


def test_a_terminal_that_knows_ascii_alone_is_served(folder, monkeypatch):
    path = folder(started(name="größe"), *(step(number) for number in range(1, 9)), of_ranks=states({}))
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii", errors="backslashreplace"))
    watch_in_terminal(path)
    sys.stdout.flush()
    text = raw.getvalue().decode("ascii")
    assert "0.625 at step 8" in text
    assert "| @" in text  # the curve's bars


def test_the_lowest_loss_is_that_of_all_steps(folder):
    # Of many steps the curve draws some; the lowest was that of those.
    path = folder(started(), *(step(number, loss=0.125 if number == 251 else 2.0) for number in range(1, 501)))
    assert "lowest 0.125" in shown(RunFollower(path).look())


def test_a_folder_that_is_none_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="not a run's folder"):
        RunFollower(tmp_path / "nothing")


def test_a_line_of_bars_has_the_lowest_and_the_highest():
    assert spark([0.0, 4.0, 8.0], 3) == "▁▅█"
    assert spark([1.0] * 5, 2) == "▁▁"
    assert spark([1e308, 1e308, -1e308], 2) == "█▁"  # whose sum and difference overflow
    assert spark([5e-324, -5e-324], 2) == "█▁"


# -- the browser's side ---------------------------------------------------------------------------------------------------


@pytest.fixture
def server(folder):
    path = folder(started(), step(1), owner=Owner.this_process(), of_ranks=states(WAITS, {}))
    (path / "record.json").write_text(make_record().to_json())
    with LiveServer(path) as live:
        thread = threading.Thread(target=live.serve)
        thread.start()
        yield live
        live.stop()
        thread.join(10)
        assert not thread.is_alive()


def ask(live, path="", *, method="GET", host=None, body=None):
    connection = http.client.HTTPConnection(HOST, live.port, timeout=10)
    headers = {"Host": host or f"{HOST}:{live.port}"}
    connection.request(method, path, body=body, headers=headers)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer, text


def test_the_live_page_its_state_and_the_report(server):
    answer, text = ask(server, f"/{server.token}/")
    assert answer.status == 200
    assert "default-src 'none'" in str(answer.headers["Content-Security-Policy"])
    assert Page(text).open_tags == []
    answer, text = ask(server, f"/{server.token}/state")
    state = json.loads(text)
    assert "The others wait for rank 1" in state["verdict"]
    assert state["ranks"][1][-1] == "late"
    answer, text = ask(server, f"/{server.token}/report")
    assert answer.headers["Cache-Control"] == "no-store"
    assert "Prediction beside measurement" in Page(text).text
    write(server.folder, step(2))
    assert json.loads(ask(server, f"/{server.token}/state")[1])["step"] == 2


def test_without_the_token_there_is_nothing(server):
    for path in ("/", "/state", "/report", f"/{server.token[:-1]}/", f"/{server.token}x/report", "//", "/%2e%2e/", "*"):
        answer, text = ask(server, path)
        assert answer.status == 404
        assert "loss" not in text
    assert ask(server, f"/{server.token}/../../etc/passwd")[0].status == 404


def test_pages_of_other_hosts_are_refused(server):
    assert ask(server, f"/{server.token}/state", host="evil.example")[0].status == 421
    assert ask(server, f"/{server.token}/state", host=f"localhost:{server.port}")[0].status == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_nothing_writes(server, method):
    assert ask(server, f"/{server.token}/state", method=method, body=b"x")[0].status == 501


def test_a_folder_that_cannot_be_shown_is_an_answer(server, monkeypatch):
    monkeypatch.setattr(serve, "as_data", lambda _: {}["x"])
    answer, text = ask(server, f"/{server.token}/state")
    assert (answer.status, text) == (500, "the run's folder cannot be shown: KeyError\n")


def test_connections_that_say_nothing_do_not_fill_the_machine(server):
    with contextlib.ExitStack() as stack:
        for _ in range(serve._MOST_CONNECTIONS):
            stack.enter_context(socket.create_connection((HOST, server.port), 10))
        late = stack.enter_context(socket.create_connection((HOST, server.port), 10))
        assert late.recv(1) == b""
    deadline = time.monotonic() + 10.0
    while True:
        try:
            assert ask(server, f"/{server.token}/state")[0].status == 200
            break
        except (http.client.RemoteDisconnected, ConnectionResetError):
            assert time.monotonic() < deadline


def test_it_listens_on_this_machine_alone(server):
    listening = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    mine = [fields[1] for fields in listening if fields[3] == "0A" and fields[1].endswith(f":{server.port:04X}")]
    assert mine == [f"0100007F:{server.port:04X}"]


def test_a_taken_port_is_an_error_with_a_fix(folder):
    path = folder(started())
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        with pytest.raises(ConfigError, match="is taken") as caught:
            LiveServer(path, taken.getsockname()[1])
        assert "--port 0" in str(caught.value.fix)


@pytest.mark.skipif(os.getuid() != 0, reason="only root may become another user")
def test_another_user_reads_nothing(server):
    # Python's own files may be out of another user's reach: what is needed is imported before.
    code = (
        "import encodings.idna, os, socket, sys\n"
        "port, pid, token = sys.stdin.read().split()\n"
        "os.setgid(65534); os.setuid(65534)\n"
        "connection = socket.create_connection(('127.0.0.1', int(port)), 10)\n"
        "connection.sendall(b'GET /state HTTP/1.0\\r\\nHost: 127.0.0.1:' + port.encode() + b'\\r\\n\\r\\n')\n"
        "print(connection.recv(100).split()[1].decode())\n"
        "print(token in open(f'/proc/{pid}/cmdline').read())"
    )
    told = f"{server.port} {os.getpid()} {server.token}"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, input=told, capture_output=True, text=True, timeout=30, check=False)
    assert done.stdout.split() == ["404", "False"], done.stderr


def test_the_command_loads_no_torch(folder):
    path = folder(started(), step(1))
    code = (
        "import sys; from meshwright import cli; sys.argv = ['meshwright', 'watch', sys.argv[1]]\n"
        "try:\n    cli.main()\nexcept SystemExit as ended:\n    assert not ended.code, ended\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "ended without telling" in done.stdout or "killed" in done.stdout
