"""Code blocks that `make_pages.py` does not put in: each is known, and run, parsed or compared here or in the test named."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest
import typer
from tests.docs.here import run_here

from meshwright import cli
from meshwright.train.loggers.fan_out import PACKAGES

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [
    page
    for page in [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
    if page.parent.name != "adr" and page.name not in ("log.md", "api.md")
]
RUN_BY = {
    ("README.md", "python"): "test_readme.py: its parts make the folder in which the commands run",
    ("README.md", "toml"): "test_readme.py",
    ("README.md", ""): "test_readme.py: torchrun and verify",
    ("adding_a_strategy.md", "python"): "tests/parity/test_local_sgd.py",
    ("guide.md", "python"): "test_readme.py",
    ("guide.md", ""): "here",
    ("hosts.md", ""): "docs/check_started.py",
    ("planning.md", "python"): "here",
    ("quickstart.md", ""): "test_wheel.py: pip install",
    ("watching.md", "toml"): "here",
}
"""Page and kind of the blocks without a mark of `make_pages.py`, and what runs them. api.md is made from docstrings: doctests."""


def unmarked(page: Path) -> list[tuple[str, str]]:
    """Return kind and text of the blocks that no mark stands above."""
    found: list[tuple[str, str]] = []
    kind, lines, above = None, [], ""
    for line in page.read_text().splitlines():
        if kind is not None and line != "```":
            lines.append(line)
        elif kind is not None:
            found += [(kind, "\n".join(lines))] if kind != "{toctree}" else []
            kind = None
        elif line.startswith("```") and not above.startswith("<!-- "):
            kind, lines = line[3:], []
        elif line.startswith("```"):
            kind, lines = "{toctree}", []  # of make_pages.py
        above = line
    return found


def test_each_block_is_run_by_a_test() -> None:
    found = {(page.name, kind) for page in PAGES for kind, _ in unmarked(page)}
    assert found == set(RUN_BY)


def lines_of(page: Path) -> list[str]:
    """Return the commands of a page that stand alone in a line, with the first of what they offer to choose from."""
    found = re.findall(r"^    (?:\$ )?(meshwright [a-z]+ .*)$", page.read_text(), re.MULTILINE)
    lines = [re.sub(r"\[.*?\]", "", re.split(r"\s{2,}(?![\[-])", line)[0]) for line in found]
    return [re.sub(r"\b(\w+)\|\w+", r"\1", line) for line in lines]


LINES = {(page.name, line) for page in PAGES for line in lines_of(page)}


def test_lines_are_found() -> None:
    assert len(LINES) > 40


@pytest.mark.parametrize(("page", "line"), sorted(LINES))
def test_the_command_line_takes_a_line_of_a_page(page: str, line: str) -> None:
    group = typer.main.get_command(cli.app)
    context = group.make_context("meshwright", shlex.split(line, comments=True)[1:])
    while hasattr(group, "resolve_command"):
        name, group, rest = group.resolve_command(context, [*context._protected_args, *context.args])
        context = group.make_context(name, rest, parent=context)


@pytest.mark.usefixtures("templates")
@pytest.mark.timeout(200)
def test_the_guide_shows_what_a_run_says_of_its_cut(tmp_path: Path) -> None:
    ((_, text),) = [one for one in unmarked(DOCS / "guide.md") if not one[0]]
    sets = [word for key in ("steps=1", "eval_every=0", "global_batch_size=2") for word in ("--set", f"train.{key}")]
    code, out, error = run_here(
        ["train", str(ROOT / "examples" / "gpt_python.toml"), "--plan", "tp=2", *sets], tmp_path
    )
    assert code == 0, error
    assert [line for line in text.splitlines() if line not in out.splitlines()] == []


def test_the_plan_of_the_page_is_made(capsys: pytest.CaptureFixture[str]) -> None:
    ((_, program),) = unmarked(DOCS / "planning.md")
    exec(program, {})
    assert "dp=" in capsys.readouterr().out


def test_the_loggers_of_the_page_are_all() -> None:
    ((_, text),) = unmarked(DOCS / "watching.md")
    assert set(tomllib.loads(text)["train"]["log"]) == set(PACKAGES)
