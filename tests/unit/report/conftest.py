"""A run's folder, made from events and a record."""

from __future__ import annotations

import json

import pytest
from tests.unit.report.made_runs import make_record, started, step

from meshwright.spec.record import RunRecord


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
