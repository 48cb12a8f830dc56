"""report/: run folders that are damaged or hostile, the HTML as a parser sees it, numbers beside record.json's."""

from __future__ import annotations

import itertools
import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from meshwright import cli
from meshwright.errors import ConfigError
from meshwright.report.cost_terms import memory_terms, time_terms, verdict
from meshwright.report.figures import min_max_buckets
from meshwright.report.page import json_for_html, render, visible, write_page, write_run_report
from meshwright.report.pictures import draw_mesh
from meshwright.report.plan_view import view_plan
from meshwright.report.run_files import read_run
from meshwright.spec.plan import Plan
from meshwright.spec.prediction import MemoryBreakdown, Prediction, TimeBreakdown
from meshwright.spec.record import HeldTensor, Measurement, RunRecord

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)> \"'&amp;\u2028\u202e\x1b[31m\x00\ud800"


class Page(HTMLParser):
    """Tags, attributes, scripts and text of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text = ""
        self._in_raw = ""
        self.open_tags: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "input", "br", "rect"):
            self.open_tags.append(tag)
        self._in_raw = tag if tag in ("script", "style") else self._in_raw
        if tag == "script":
            self.scripts.append("")

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open_tags.pop() == tag
        self._in_raw = ""

    def handle_data(self, data):
        if self._in_raw == "script":
            self.scripts[-1] += data
        elif not self._in_raw:
            self.text += data + " "

    @property
    def data(self):
        return json.loads(self.scripts[0])


def step(number, **changes):
    event = {
        "event": "step", "time": 1.0, "step": number, "loss": 5.0 / number, "grad_norm": 1.0, "lr": 0.1, "num_samples": 8,
        "num_tokens": 64, "seconds": 0.5, "step_seconds": 0.4, "samples_per_s": 16.0, "tokens_per_s": 128.0,
        "peak_memory_bytes": 2**30,
    }  # fmt: skip
    return event | changes


def started(name="run", plan="dp=2,tp=2", **more):
    return {"event": "run_started", "time": 0.0, "name": name, "plan": plan, "num_parameters": 12, **more}


def make_record(plan="dp=2,tp=2", **changes):
    fields = {
        "plan": Plan.parse(plan) if isinstance(plan, str) else plan,
        "config": {"train": {"steps": 3}},
        "prediction": Prediction(
            time=TimeBreakdown(forward_s=0.1, backward_s=0.2, exposed_comm_s=0.05),
            memory=MemoryBreakdown(parameters_bytes=100, activations_bytes=300),
            sent_bytes={"dp": 10},
        ),
        "measurement": Measurement(
            step_seconds=(0.4, 0.5, 0.6), num_samples=24, num_tokens=192, peak_memory_bytes=2**30, loss=1.25,
            rank_peak_memory_bytes=(2**30, 2**29), rank_wait_s=(0.1, 0.2), sent_bytes={"dp": 60}, num_sent_steps=3,
            held_bytes={"parameters": 100},
        ),
        "tensors": {"layer.weight": HeldTensor(shape=(4, 3), held={"0,2": "dim 0: 0-2 of 4", "1,3": "dim 0: 2-4 of 4"})},
    }  # fmt: skip
    return RunRecord(**(fields | changes))


@pytest.fixture
def make_run(tmp_path):
    def make(events=None, record: RunRecord | str | None = None, name="run"):
        folder = tmp_path / name
        folder.mkdir()
        events = (
            [started(), *(step(n) for n in (1, 2, 3)), {"event": "finished", "step": 3}] if events is None else events
        )
        lines = [line if isinstance(line, str) else json.dumps(line) for line in events]
        (folder / "events.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        record = make_record() if record is None else record
        (folder / "record.json").write_text(record if isinstance(record, str) else record.to_json())
        return folder

    return make


# -- the files ----------------------------------------------------------------------------------------------------------


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


# -- figures, plan, terms -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 1999, 2000, 2001, 5003, 40_000])
def test_down_sampling_keeps_every_bucket_s_lowest_and_highest(n):
    values = np.random.default_rng(n).normal(size=n)
    values[n // 2] = np.nan
    x, (y,), size = min_max_buckets(np.arange(n), [values])
    assert len(x) == len(y) <= 2002
    assert (np.diff(x) > 0).all()
    known = values[~np.isnan(values)]
    if known.size:
        assert np.nanmin(y) == known.min()
        assert np.nanmax(y) == known.max()
    assert (size == 1) == (n <= 2000)


def test_ranks_that_hold_the_same_share_a_column():
    view = view_plan(Plan.parse("dp=2,tp=2"), make_record())
    assert view.columns == ("0, 2", "1, 3")
    assert [cell.fraction for cell in view.layers[0].cells] == [0.5, 0.5]


def test_the_mesh_has_a_box_for_each_device():
    picture = draw_mesh(Plan.parse("dp=2,tp=2,pp=2,micro_batches=2"))
    assert len({(box.x, box.y) for box in picture.boxes}) == 8
    assert picture.boxes[5].detail == "pp1 dp0 tp1"
    big = draw_mesh(Plan.parse("dp=1024"))
    assert len(big.boxes) + big.num_left_out == 1024


def test_the_term_that_was_wrong_is_named():
    record = make_record()
    terms = time_terms(record.prediction, record.measurement, 0.01)
    by_name = {term.name: term for term in terms}
    assert by_name["waiting"].measured == pytest.approx(0.15)
    assert by_name["computing"].measured == pytest.approx(0.5 - 0.15 - 0.01)
    assert by_name["step"].ratio == pytest.approx(0.5 / 0.35)
    assert "farthest off is waiting: 100 ms more" in verdict(terms, are_bytes=False)
    memory = memory_terms(record.prediction, record.measurement)
    assert "farthest off is the rest" in verdict(memory, are_bytes=True)


def test_no_term_is_blamed_where_one_of_them_was_not_measured():
    record = make_record(measurement=Measurement(step_seconds=(0.5,), num_samples=8, peak_memory_bytes=2**30))
    told = verdict(time_terms(record.prediction, record.measurement, 0.01), are_bytes=False)
    assert "measured over predicted is 1.43" in told
    assert "Which term was wrong is not known" in told
    assert "not known" in verdict(memory_terms(record.prediction, record.measurement), are_bytes=True)


# -- the command ----------------------------------------------------------------------------------------------------------


def invoke(*arguments):
    return CliRunner().invoke(cli.app, ["report", *map(str, arguments)])


def test_one_run_has_its_report_in_its_folder(make_run):
    folder = make_run()
    assert invoke(folder).output.strip() == str(folder / "report.html")
    assert Page((folder / "report.html").read_text()).open_tags == []


def test_runs_of_one_training_are_concluded_from(make_run, tmp_path):
    alone = make_record(
        "single", measurement=Measurement(step_seconds=(1.0, 1.0, 1.1), num_samples=24, num_sent_steps=3)
    )
    runs = [make_run(name="a", record=alone), make_run(name="b")]
    assert isinstance(invoke(*runs).exception, ConfigError)  # where to?
    invoke(*runs, "-o", tmp_path / "both.html")
    page = Page((tmp_path / "both.html").read_text())
    assert "'2: run' is the fastest with 500 ms a step" in page.text
    assert len(page.data["figures"][0]["lines"]) == 2


def test_different_trainings_have_no_conclusion(make_run, tmp_path):
    runs = [make_run(name="a"), make_run(name="b", record=make_record(config={"optimizer": {"lr": 1.0}}))]
    invoke(*runs, "-o", tmp_path / "both.html")
    assert (
        "No conclusion: these are different trainings, they differ in optimizer.lr"
        in (tmp_path / "both.html").read_text()
    )


def test_a_comparison_s_file_becomes_a_report(tmp_path):
    from meshwright.compare.comparison import make_comparison
    from meshwright.compare.rows import Trial

    trial = Trial(name=HOSTILE[:-1], plan="single", step_seconds=(1.0,), num_samples=(8,), num_tokens=(8,), losses=(2.0,),
                  sent_bytes=((0.0,),), device="cpu")  # fmt: skip
    comparison = make_comparison([trial], baseline="single", cores=2, name="case")
    path = tmp_path / "c.json"
    path.write_text(comparison.to_json())
    assert invoke(path).output.strip() == str(tmp_path / "c.html")
    page = Page((tmp_path / "c.html").read_text())
    assert "takes 1 s a step" in page.text
    assert len(page.scripts) == 2


def test_the_plotting_library_s_licence_is_in_the_package():
    folder = Path(cli.__file__).parent / "report" / "vendor"
    assert "Leon Sorokin" in (folder / "uPlot.LICENSE").read_text()
