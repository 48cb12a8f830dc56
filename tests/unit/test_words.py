"""Words of the package: module docstrings name their subject first, and each folder's map says how to add something."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import meshwright

ROOT = Path(meshwright.__file__).parent
FILES = sorted(path for path in ROOT.rglob("*.py") if path.name != "__main__.py")
HEADLESS = {"What", "How", "Which", "Where", "Whether", "Who", "Whose", "When", "Why", "That", "If"}
"""Words that begin a clause without a subject: a reader should learn first what the module is."""


def docstring_of(path: Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""


def begins_with_a_clause(text: str) -> bool:
    return text.split(maxsplit=1)[0] in HEADLESS


def test_a_headless_clause_is_recognised() -> None:
    assert begins_with_a_clause("What calls give that this stage does not run.")
    assert not begins_with_a_clause("Output shapes of layers that run on other stages.")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_module_docstrings_name_their_subject_first(path: Path) -> None:
    text = docstring_of(path)
    assert text, "a module says what it is"
    assert not begins_with_a_clause(text), text.splitlines()[0]


@pytest.mark.parametrize(
    "path",
    [path for path in FILES if path.name == "__init__.py" and path.parent != ROOT],
    ids=lambda path: str(path.parent.relative_to(ROOT)),
)
def test_folder_maps_say_how_to_add_something(path: Path) -> None:
    last = docstring_of(path).rsplit("\n\n", maxsplit=1)[-1]
    assert last.startswith("To "), f"the map ends with 'To add X, touch Y', not with {last.splitlines()[0]!r}"
