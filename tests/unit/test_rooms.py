"""Rooms of the package: each folder's map names its files, no two files or classes share a name, and imports have no circle."""

from __future__ import annotations

import ast
import functools
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

import meshwright

ROOT = Path(meshwright.__file__).parent
FILES = sorted(path for path in ROOT.rglob("*.py") if path.name != "__main__.py")
ROLES = {"engine", "expected_bytes", "rehearsal"}
"""Names that files of sibling folders may share: the same role for another strategy."""
SAME_CLASS_NAMES: set[str] = set()


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def name_of(path: Path) -> str:
    names = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(names[:-1] if names[-1] == "__init__" else names)


MODULES = {name_of(path): path for path in FILES}


def imports_of(path: Path) -> Iterator[str]:
    """Yield the package's modules that a file imports, inside functions and for type checkers too."""
    for node in ast.walk(parsed(path)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in MODULES else node.module for name in names]
        yield from (name for name in names if name in MODULES)


def circles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Return the groups of modules that reach each other."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in sorted(edges.get(node, ())):
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            group = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(group) > 1:
                found.append(sorted(group))

    for node in sorted(edges):
        if node not in index:
            visit(node)
    return found


@pytest.mark.parametrize("folder", sorted({path.parent for path in FILES} - {ROOT}), ids=name_of)
def test_each_folder_has_a_map_of_its_files(folder: Path) -> None:
    text = ast.get_docstring(parsed(folder / "__init__.py")) or ""
    named = {line.split()[0].removesuffix(".py") for line in text.splitlines() if line.split()[1:]}
    files = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    folders = {f"{path.name}/" for path in folder.iterdir() if (path / "__init__.py").exists()}
    assert (files | folders) - named == set()


def test_no_two_files_have_one_name_but_siblings_of_one_role() -> None:
    places = defaultdict(list)
    for path in FILES:
        if path.stem != "__init__":
            places[path.stem].append(path.parent.relative_to(ROOT).as_posix())
    assert {name: found for name, found in places.items() if len(found) > 1 and name not in ROLES} == {}


def test_no_two_classes_have_one_name() -> None:
    places = defaultdict(list)
    for path in FILES:
        for node in parsed(path).body:
            if isinstance(node, ast.ClassDef):
                places[node.name.lstrip("_")].append(path.relative_to(ROOT).as_posix())
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_imports_have_no_circle() -> None:
    own = "meshwright"
    edges = {name: set(imports_of(path)) - {name, own} for name, path in MODULES.items() if name != own}
    assert circles(edges) == []


def test_a_circle_is_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]
