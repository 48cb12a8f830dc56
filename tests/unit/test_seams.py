"""Outside of `apply/` nobody asks an engine of which kind it is: what differs between strategies, engines answer themselves."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

import meshwright

ROOT = Path(meshwright.__file__).parent
BUILDER = "run/assembly.py"
"""The file that makes engines of a plan, and names their classes for it."""


@functools.cache
def engine_classes() -> frozenset[str]:
    """Return the names of `Engine` and of all classes of the package that are made of it."""
    bases: dict[str, set[str]] = {}
    for path in (ROOT / "apply").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                bases[node.name] = {last_name(base) for base in node.bases}
    found = {"Engine"}
    while more := {name for name, own in bases.items() if own & found} - found:
        found |= more
    return frozenset(found)


def last_name(node: ast.AST) -> str:
    """Return `c` of `a.b.c`, of `c` and of `c[...]`; "" of what has no name."""
    if isinstance(node, ast.Subscript):
        return last_name(node.value)
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def names_in(node: ast.AST) -> set[str]:
    return {last_name(inner) for inner in ast.walk(node)} - {""}


def called(node: ast.AST) -> str:
    return last_name(node.func) if isinstance(node, ast.Call) else ""


def kind_questions(source: str, path: str) -> Iterator[str]:
    """Yield where a file asks for an engine's kind: by isinstance, its type, a pattern, a class's name, or what it has."""
    classes = engine_classes()
    for node in ast.walk(ast.parse(source)):
        asked = ""
        if called(node) in ("isinstance", "issubclass") and isinstance(node, ast.Call):
            asked = "isinstance" if names_in(node.args[1]) & classes else ""
        elif called(node) in ("hasattr", "getattr") and isinstance(node, ast.Call):
            asked = "hasattr" if last_name(node.args[0]) in ("engine", "_engine", "inner") else ""
        elif isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            by_type = any(called(side) == "type" or last_name(side) == "__class__" for side in sides)
            asked = "type" if by_type and any(names_in(side) & classes for side in sides) else ""
        elif isinstance(node, ast.MatchClass):
            asked = "match" if last_name(node.cls) in classes else ""
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            asked = "name" if node.value in classes else ""
        elif isinstance(node, (ast.Name, ast.Attribute)) and path != BUILDER:
            asked = "class" if last_name(node) in classes - {"Engine"} else ""
        if asked:
            yield f"{path}:{getattr(node, 'lineno', 0)}: {asked}"


def outside_of_apply() -> list[Path]:
    return [path for path in sorted(ROOT.rglob("*.py")) if "apply" not in path.relative_to(ROOT).parts]


def test_nobody_asks_an_engine_of_which_kind_it_is() -> None:
    faults: list[str] = []
    for path in outside_of_apply():
        faults += kind_questions(path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix())
    assert faults == []


def test_there_are_engines_and_files_to_look_at() -> None:
    assert {"Engine", "OuterEngine", "PipelineEngine", "TensorEngine", "ShardedEngine", "DistributedEngine"} <= (
        engine_classes()
    )
    assert len(outside_of_apply()) > 50


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("run/step.py", "if isinstance(engine, PipelineEngine): pass"),
        ("run/step.py", "stages = engine if isinstance(engine, (A, TensorEngine | B)) else None"),
        ("run/step.py", "if isinstance(self.engine.inner, engines.ShardedEngine): pass"),
        ("run/step.py", "if type(engine) is PipelineEngine: pass"),
        ("run/step.py", "if engine.__class__ in (PipelineEngine,): pass"),
        ("run/step.py", "if type(engine).__name__ == 'PipelineEngine': pass"),
        ("run/step.py", "match engine:\n    case PipelineEngine(): pass"),
        ("run/step.py", "if hasattr(engine, 'stage_map'): pass"),
        ("run/step.py", "stages = getattr(self.engine, 'stages', None)"),
        ("run/step.py", "def run(engine: PipelineEngine): pass"),
        (BUILDER, "if isinstance(engine, OuterEngine): pass"),
        (BUILDER, "if type(engine) is ReplicasEngine: pass"),
    ],
)
def test_a_planted_question_is_found(path: str, source: str) -> None:
    assert list(kind_questions(source, path))


@pytest.mark.parametrize(
    ("path", "source"),
    [
        (BUILDER, "def build(plan) -> TensorEngine:\n    return TensorEngine(plan)"),
        ("run/step.py", "def step(engine: Engine):\n    return engine.run(work) if engine.needs_lockstep else None"),
        ("run/step.py", "if isinstance(batch, Mapping) and getattr(batch, 'num_samples', 0): pass"),
    ],
)
def test_what_is_allowed_is_not_found(path: str, source: str) -> None:
    assert list(kind_questions(source, path)) == []
