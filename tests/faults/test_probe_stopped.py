"""A probe that a signal stops: it has nothing to save, so that it ends at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LEAST_GRACE_S = 5.0  # of work that has something to save: 30
PROGRAM = """
import os, signal, time
from meshwright.errors import StoppedOnRequest
from meshwright.measure.probe import probe_cluster
asked = []
def on_stage(*_):
    asked.append(time.monotonic())
    os.kill(os.getpid(), signal.SIGTERM)
if __name__ == "__main__":
    try:
        probe_cluster(1, budget_s=60.0, on_stage=on_stage)
    except StoppedOnRequest as error:
        print(time.monotonic() - asked[0], error)
"""


def test_a_stopped_probe_ends_at_once(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    found = subprocess.run(
        [sys.executable, "program.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "MESHWRIGHT_TRANSPORT": "gloo"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        preexec_fn=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL),
    )
    seconds, _, said = found.stdout.partition(" ")
    assert said == "the measurement of this machine was stopped; nothing of it is kept\n", found.stderr
    assert float(seconds) < LEAST_GRACE_S
