"""Which cells run by default, as one table: `make cells` writes it to `cells.md`.

A cell is a model under a plan with a setting. `turns.py` chooses; a test compares the committed table with what it chooses now.
"""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

from tests.parity import cases, test_distributed, test_pipeline, test_sharded, test_tensor
from tests.parity.harness import Setting

TABLE = Path(__file__).with_name("cells.md")

_HEAD = """# Cells that run by default

Made by `make cells`; `test_turns.py` compares it with what runs. Each line is a model of `cases.py`, each column
a test `test_equals_one_process`: the plan there, and the letter of its setting. A model meets every kind of plan that it
fits once: data parallelism or ZeRO 1 or 2, ZeRO-3, tensor and pipeline. Every second form of outputs is not cut. Plans
and settings take turns, so each plan meets several models and several settings; plans of eight ranks meet one. Hugging Face's
models meet one kind each, for `benchmarks/any_model` has hundreds. Styles are ways to write a layer: each is cut over two or
three ranks, and every fourth is in a pipeline, which takes layers whole.
`make test-grid` runs every model under every plan with every setting.
"""


def _column_of(plan: str) -> str:
    return next((f"zero={stage}" for stage in (1, 2, 3) if f"zero={stage}" in plan), "")


def _rows() -> list[tuple[str, str, str, Setting]]:
    """Return (column, model, plan, setting) of every cell."""
    rows = [("data parallel", name, f"dp={ranks}", setting) for name, ranks, setting in test_distributed._matrix()]
    rows += [(_column_of(plan), name, plan, setting) for name, plan, _, setting in test_sharded._matrix()]
    rows += [("tensor", name, plan, setting) for name, plan, _, setting in test_tensor._matrix()]
    return rows + [("pipeline", name, plan, setting) for name, plan, setting in test_pipeline._matrix()]


SETTINGS: dict[str, Any] = {
    "data parallel": test_distributed.SETTINGS,
    "zero=1": test_sharded.SETTINGS,
    "zero=2": test_sharded.SETTINGS,
    "zero=3": test_sharded.SETTINGS,
    "tensor": test_tensor.SETTINGS,
    "pipeline": test_pipeline.SETTINGS,
}
"""Column -> its settings, by letters."""


def text() -> str:
    """Return the table."""
    cells: dict[tuple[str, str], list[str]] = {}
    for column, name, plan, setting in _rows():
        letter = string.ascii_lowercase[SETTINGS[column].index(setting)]
        cells.setdefault((name, column), []).append(f"{plan.replace(f',{column}', '').replace(',', ' ')} **{letter}**")
    lines = [_HEAD, "Settings: samples, micro-batches, the norm that gradients are clipped to, words of the plan.", ""]
    for column, settings in SETTINGS.items():
        if column not in ("zero=2", "zero=3"):
            named = [
                f"**{letter}** {setting}" for letter, setting in zip(string.ascii_lowercase, settings, strict=False)
            ]
            lines.append(f"- {'zero' if column == 'zero=1' else column}: {', '.join(named)}")
    lines += ["", "| model | " + " | ".join(SETTINGS) + " |", "|---" * (1 + len(SETTINGS)) + "|"]
    for name in (*cases.CASES, *cases.TENSOR_STYLES, *cases.HUGGING_FACE):
        lines.append(
            f"| {name} | " + " | ".join(", ".join(cells.get((name, column), [])) for column in SETTINGS) + " |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(text(), end="")
