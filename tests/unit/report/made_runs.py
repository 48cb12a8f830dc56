"""Run folders and pages for tests of report/: events, records, hostile names, and the HTML as a parser sees it."""

from __future__ import annotations

import json
from html.parser import HTMLParser

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
        if tag not in ("meta", "input", "br"):
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
