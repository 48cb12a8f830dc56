"""report/: run folders that are damaged or hostile, the HTML as a parser sees it, numbers beside record.json's."""

from __future__ import annotations

import itertools
import json
import os
import re
from pathlib import Path

import pytest
from tests.unit.report.made_runs import HOSTILE, Page, make_record, started, step

from meshwright.compare.run_report import run_report
from meshwright.errors import ConfigError
from meshwright.report.page import json_for_html, render, visible, write_page, write_run_report
from meshwright.report.run_files import read_run
from meshwright.spec.plan import Plan
from meshwright.spec.record import HeldTensor


def test_damaged_lines_are_told_and_left_out(make_run):
    folder = make_run(
        [started(), step(1), "{broken", "[1]", "[" * 100_000, step(True), step(-1), step(2), step(2), step(3)]
    )
    with (folder / "events.jsonl").open("a") as file:
        file.write('{"event": "step", "step": 4, "lo')
    run = read_run(folder)
    assert list(run.steps.steps) == [1, 2, 3]
    told = "\n".join(run.problems)
    assert all(f"line {number} was left out" in told for number in (3, 4, 5, 6, 7))
    assert "1 more lines are damaged" in told
    assert "unfinished" in told
    assert "{broken" in Page(render([run])).text


def test_numbers_of_wrong_types_are_gaps(make_run):
    wrong = step(1, loss="x", grad_norm=None, seconds=True, lr=[1], tokens_per_s=10**400)
    run = read_run(make_run([started(name=["x"]), wrong, step(2, loss=float("nan")), step(3)]))
    assert [value == value for value in run.steps.columns["loss"]] == [False, False, True]
    assert run.name == "run"  # the folder's
    assert Page(render([run])).data["figures"][0]["lines"][0]["y"] == [None, None, float(f"{5 / 3:.7g}")]


def test_steps_that_a_resumption_did_again_are_there_once(make_run):
    again = [step(2, loss=9.0), step(3, loss=8.0)]
    resumed = {"event": "resumed", "step": 1, "name": "run", "plan": "dp=2"}
    run = read_run(
        make_run([started(), step(1), step(2), step(3), {"event": "evaluated", "step": 3, "loss": 1}, resumed, *again])
    )
    assert list(run.steps.columns["loss"]) == [5.0, 9.0, 8.0]
    assert len(run.evaluations) == 0


@pytest.mark.parametrize(
    "record",
    [
        "{",
        "[" * 100_000,
        '{"format": "meshwright.record", "version": 99}',
        "\ud800".encode("utf-8", "surrogatepass").decode("latin1"),
    ],
)
def test_a_damaged_record_is_told_and_the_events_are_shown(make_run, record):
    run = read_run(make_run(record=record))
    assert run.record is None
    assert "record.json was left out" in run.problems[0]
    assert "Loss" in Page(render([run])).text


@pytest.mark.parametrize("name", ["events.jsonl", "record.json"])
def test_links_and_pipes_are_not_followed(make_run, tmp_path, name):
    folder = make_run()
    (folder / name).rename(tmp_path / "other")
    (folder / name).symlink_to(tmp_path / "other")
    assert "symbolic link" in " ".join(read_run(folder).problems)
    (folder / name).unlink()
    os.mkfifo(folder / name)
    assert "not a regular file" in " ".join(read_run(folder).problems)


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"neither events\.jsonl nor record\.json"):
        read_run(tmp_path)
    with pytest.raises(ConfigError, match="not a run's folder"):
        read_run(tmp_path / "none")


def test_long_lines_and_files_are_bounded(make_run, monkeypatch):
    folder = make_run([started(), step(1), step(2, junk="x" * 5000), step(3)])
    monkeypatch.setattr("meshwright.report.run_files.MOST_LINE_BYTES", 1000)
    run = read_run(folder)
    assert list(run.steps.steps) == [1, 3]
    assert "longer than 1000 bytes" in run.problems[-1]
    monkeypatch.setattr("meshwright.report.run_files.MOST_EVENT_BYTES", 600)
    assert "only the first 600 bytes" in read_run(folder).problems[-1]


# -- the page -----------------------------------------------------------------------------------------------------------


def test_hostile_names_are_text(make_run):
    name = HOSTILE.replace("\ud800", "")
    plan = Plan.parse("dp=2,tp=2").replace(layouts={name: HOSTILE[:-1]}, reasons=(name,))
    record = make_record(
        plan=plan, config={name: name}, tensors={name: HeldTensor(shape=(2,), held={name: name, "0": name})}
    )
    failed = {"event": "failed", "rank": HOSTILE, "type": HOSTILE, "text": HOSTILE, "traceback": HOSTILE * 2}
    html = render(
        [read_run(make_run([started(HOSTILE), step(1), failed, {"event": HOSTILE, HOSTILE: HOSTILE}], record))]
    )
    page = Page(html)
    tags = {tag for tag, _ in page.tags}
    assert "img" not in tags
    assert len(page.scripts) == 2
    assert not any(attribute.startswith("on") for _, attributes in page.tags for attribute in attributes)
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u2028\u202e]", html)
    assert "</script><script>alert(1)</script>" in page.text
    assert "\\u202e\\x1b[31m\\x00\\ud800" in page.text
    html.encode()  # no lone surrogate is left
    assert page.open_tags == []


def test_long_names_are_cut_and_say_so(make_run):
    html = render([read_run(make_run([started("n" * 100_000), step(1)]))])
    assert len(html) < 300_000
    assert "(100000 characters)" in html


def test_data_cannot_end_its_element():
    text = json_for_html({"</script>": "<!--\u2028&"})
    assert not set("<>&\u2028") & set(text)
    assert json.loads(text) == {"</script>": "<!--\u2028&"}


def test_control_characters_are_visible():
    assert visible("a\tb\n\x9b\u2066é") == "a\tb\n\\x9b\\u2066é"


def test_the_page_needs_no_network_and_runs_its_own_script_alone(make_run):
    page = Page(render([read_run(make_run())]))
    policy = next(a["content"] for tag, a in page.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    addresses = [a[key] for _, a in page.tags for key in ("src", "href") if key in a]
    assert addresses
    assert all(address.startswith("#") for address in addresses)
    assert not any("style" in attributes for _, attributes in page.tags)
    assert "The MIT License" in page.scripts[1]


def test_a_screen_reader_finds_its_way(make_run):
    page = Page(render([read_run(make_run())]))
    ids = [a["id"] for _, a in page.tags if "id" in a]
    assert len(ids) == len(set(ids))
    assert all(a["href"][1:] in ids for tag, a in page.tags if tag == "a")
    assert all(a.get("aria-label") for tag, a in page.tags if a.get("role") in ("img", "region", "group"))
    assert ("html", {"lang": "en"}) in page.tags
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))


def test_losses_that_are_not_finite_and_skipped_steps_are_told(make_run):
    bad = {"loss": float("nan"), "skipped": True}
    events = [started(), step(1), step(2, **bad), step(3), step(4, **bad), {"event": "finished", "step": 4}]
    page = Page(render([read_run(make_run(events, make_record(measurement=None)))]))
    text = " ".join(page.text.split())
    assert "The loss is not a finite number in 2 of 4 cases, first at step 2" in text
    assert "2 of 4 steps were skipped, since the loss or a gradient was not finite: first step 2, last step 4" in text
    assert "last loss not a finite number" in text
    assert "skipped steps 2" in text
    assert "loss 5 1.6667 2.5 3.3333 4.1667 5 -" in text  # the last one is no number, and not the one before it


def test_a_run_that_was_killed_shows_its_last_losses(make_run):
    events = [started(), step(1), step(2, loss=4.5), {"event": "evaluated", "time": 0.0, "step": 2, "loss": 4.75}]
    text = " ".join(Page(render([read_run(make_run(events, make_record(measurement=None)))])).text.split())
    assert "last loss 4.5 last held-out loss 4.75" in text


def test_a_resumption_undoes_skipped_steps(make_run):
    resumed = {"event": "resumed", "step": 1, "name": "run"}
    run = read_run(make_run([started(), step(1), step(2, loss=float("nan"), skipped=True), resumed, step(2)]))
    assert not run.skipped
    assert run.steps.since_when_not_finite("loss") is None
    assert "not a finite number" not in render([run])


def test_tables_of_several_runs_have_names_of_their_own(make_run):
    page = Page(render([read_run(make_run(name="a")), read_run(make_run(name="b"))]))
    labels = [a["aria-label"] for _, a in page.tags if a.get("role") in ("region", "group")]
    assert len(labels) > 10
    assert len(labels) == len(set(labels))


def test_the_numbers_are_those_of_the_record(make_run):
    text = " ".join(Page(render([read_run(make_run())])).text.split())
    for expected in ("last loss 1.25", "median step 500 ms", "tokens/s 128.0", "peak memory, fullest rank 1 GiB",
                     "step time, measured over predicted 1.43"):  # fmt: skip
        assert expected in text
    assert "ranks 0, 2 ranks 1, 3 layer 12 50.0% 50.0%" in text
    assert "rank 0,2: dim 0: 0-2 of 4" in text


def test_a_run_without_a_step_has_a_report(make_run):
    empty = make_record(measurement=None, prediction=None, tensors={})
    text = Page(render([read_run(make_run([started()], empty))])).text
    assert "No step was told" in text
    assert "may be running, or it was killed" in text


def test_another_file_is_not_replaced(make_run):
    folder = make_run()
    target = write_run_report(folder)
    write_run_report(folder)
    target.write_text("mine")
    with pytest.raises(ConfigError, match="is not a report"):
        write_run_report(folder)
    assert target.read_text() == "mine"
    link = folder / "link.html"
    link.symlink_to(target)
    with pytest.raises(ConfigError, match="is not a report"):
        write_page("x", link)
    assert [path.name for path in folder.glob(".*")] == []


def test_every_step_is_there_exactly_where_asked_for(make_run):
    run = read_run(make_run([started(), *(step(n, loss=1 / 3 + n) for n in range(1, 4))]))
    assert Page(render([run])).data["every_step"] == {}
    exact = Page(render([run], with_every_step=True)).data["every_step"]["run0"]
    assert exact["step"] == [1, 2, 3]
    assert exact["loss"] == [1 / 3 + n for n in (1, 2, 3)]


def test_a_report_is_not_written_into_a_file_named_like_standard_output() -> None:
    with pytest.raises(ConfigError, match="is not printed"):
        run_report([Path("run")], Path("-"))
