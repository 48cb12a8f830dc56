"""The tables of edge cases and faults name tests and models that exist."""

from __future__ import annotations

import re
from pathlib import Path

from tests.parity import cases

ROOT = Path(__file__).resolve().parents[2]
TABLE = (ROOT / "docs" / "edge_cases.md").read_text(encoding="utf-8")


def test_every_test_that_the_table_names_exists() -> None:
    named = set(re.findall(r"`((?:\w+/)*)(test_\w+\.py)::(test_\w+)`", TABLE))
    assert len(named) > 60
    missing = [
        f"{folder}{file}::{test}"
        for folder, file, test in sorted(named)
        if f"def {test}(" not in (ROOT / "tests" / (folder or "parity") / file).read_text(encoding="utf-8")
    ]
    assert missing == []


def test_every_model_that_the_table_names_exists() -> None:
    models = {
        name for words in re.findall(r"matrix: ((?:`\w+\*?`(?:, )?)+)", TABLE) for name in re.findall(r"`(\w+)", words)
    }
    assert len(models) > 15
    assert [
        name
        for name in sorted(models)
        if not any(case.startswith(name) for case in {**cases.CASES, **cases.HUGGING_FACE})
    ] == []


def test_every_row_is_a_case_with_an_answer() -> None:
    rows = [line.split("|")[1:-1] for line in TABLE.splitlines() if re.match(r"\| (E\d{3}|F\d\d) ", line)]
    numbers = [row[0].strip() for row in rows]
    assert numbers == sorted(set(numbers))
    assert {f"F{number}" for number in (*range(21, 35), 42)} <= set(numbers)
    assert all(len(row) == 3 and len(row[2].strip()) > 10 for row in rows)


def test_every_test_that_the_list_of_found_defects_names_exists() -> None:
    text = (ROOT / "benchmarks" / "faults" / "found.md").read_text(encoding="utf-8")
    files = list((ROOT / "tests").rglob("test_*.py"))
    source = "\n".join((*(path.stem for path in files), *(path.read_text(encoding="utf-8") for path in files)))
    named = set(re.findall(r"\btest_\w+", text))
    assert len(named) > 90
    assert [
        name
        for name in sorted(named - {"test_never_wrong_"})
        if f"def {name}(" not in source and f"\n{name}\n" not in source
    ] == []
    paths = re.findall(r"`(\w+(?:/\w+)+\.py)", text)
    missing = [path for path in paths if not any((ROOT / folder / path).exists() for folder in ("tests", ""))]
    assert missing == []
