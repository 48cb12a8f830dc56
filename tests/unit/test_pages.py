"""The Markdown pages: their links lead somewhere, and the index of the benchmarks is complete."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").rglob("*.md"), *ROOT.glob("tests/*.md")]
)
INDEX = ROOT / "benchmarks" / "README.md"
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


def links_of(text: str) -> list[str]:
    """Return the targets of a page's links that are not elsewhere; code is none."""
    prose = re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)
    return [target.partition("#")[0] for target in LINK.findall(prose) if not re.match(r"\w+:|#", target)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_to_files(page: Path) -> None:
    broken = [target for target in links_of(page.read_text()) if not (page.parent / target).exists()]
    assert broken == []


def test_links_are_found() -> None:
    assert links_of("[a](b.md#c) `[x](y)` ![d](e.svg) [f](https://g) [h](#i)\n```\n[j](k)\n```") == ["b.md", "e.svg"]


def test_each_benchmark_is_in_the_index() -> None:
    text = INDEX.read_text()
    folders = {path.parent.name for path in INDEX.parent.glob("*/README.md")}
    assert {Path(target).parent.name for target in links_of(text) if target.endswith("/README.md")} == folders


def test_commands_of_the_index_exist() -> None:
    text = INDEX.read_text()
    scripts = set(re.findall(r"python (benchmarks/\S+\.py)", text))
    scripts |= {name.replace(".", "/") + ".py" for name in re.findall(r"python -m (benchmarks[.\w]+)", text)}
    assert len(scripts) >= 9
    assert [script for script in scripts if not (ROOT / script).exists()] == []


def test_result_files_of_the_index_exist() -> None:
    rows = [line for line in INDEX.read_text().splitlines() if line.startswith("| [")]
    assert len(rows) >= 9
    for row in rows:
        cells = row.split(" | ")
        folder = INDEX.parent / re.findall(r"\[(\w+)\]", cells[0])[0] / "results"
        patterns = re.findall(r"`([^`]+)`", cells[3])
        assert patterns
        for pattern in patterns:
            found = sorted(folder.glob(pattern if pattern.endswith((".json", ".jsonl")) else f"{pattern}.json"))
            assert found, f"{folder.name}: {pattern}"
            for path in found:
                for text in path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]:
                    json.loads(text)


@pytest.mark.parametrize(
    "page",
    [ROOT / "docs/architecture.md", ROOT / "docs/adding_a_strategy.md", ROOT / "CONTRIBUTING.md"],
    ids=lambda page: page.stem,
)
def test_modules_that_a_page_names_exist(page: Path) -> None:
    package = ROOT / "src/meshwright"
    rooms = "|".join(path.parent.name for path in package.glob("*/__init__.py"))
    named = re.findall(rf"(?<![\w/.-])((?:{rooms})/[\w/]+)(\.\w+)?", page.read_text())
    assert named
    missing = [
        name + kind
        for name, kind in named
        if not any((base / (name + end)).exists() for base in (package, ROOT / "tests") for end in (kind, "", ".py"))
    ]
    assert missing == []
