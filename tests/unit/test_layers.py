"""The house's walls: who may import whom, and what may not stand in ``src``. See docs/architecture.md."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

import meshwright

ROOT = Path(meshwright.__file__).parent
MAX_LINES = 400

# Each part may import what stands before it. A part is a module or a folder of the package.
TORCH_FREE_ORDER = (
    *(
        "errors",
        "units",
        "values",
        "mesh",
        "layout",
        "traffic",
        "spec",
        "schedule",
        "hardware",
        "plan",
        "report",
        "host",
    ),
)
ORDER = (
    *TORCH_FREE_ORDER,
    *(
        "_torch_private",
        "trees",
        "comm",
        "ranks",
        "describe",
        "nn",
        "checkpoint",
        "apply",
        "run",
        "measure",
        "train",
        "compare",
    ),
)
MAY_IMPORT: dict[str, frozenset[str]] = {part: frozenset(ORDER[:index]) for index, part in enumerate(ORDER)}
# What computes a step knows no planner: a plan is a value to it, whoever has made it.
PLANNING = frozenset({"plan", "report"})
for part in ORDER[ORDER.index("host") : ORDER.index("train")]:
    MAY_IMPORT[part] -= PLANNING
MAY_IMPORT["testing"] = frozenset(ORDER[: ORDER.index("train")]) - PLANNING
MAY_IMPORT["cli"] = MAY_IMPORT["__init__"] = frozenset(ORDER)
MAY_IMPORT["__main__"] = frozenset({"cli"})

TORCH_FREE = {*TORCH_FREE_ORDER, "__init__", "__main__", "cli"}

MAY_PRINT = {"cli.py", "train/progress.py"}
MAY_USE_PRIVATE_TORCH = {"_torch_private.py"}


parsed = functools.cache(ast.parse)


def part_of(path: str) -> str:
    """Return the part that a file, relative to the package, or a dotted module belongs to."""
    return path.removesuffix(".py").replace("/", ".").split(".")[0]


def imported_modules(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (line, dotted name) of every import, inside functions too; ``from a import b`` gives a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def wrong_direction(source: str, path: str) -> list[str]:
    part, faults = part_of(path), []
    for line, name in imported_modules(parsed(source)):
        if name.split(".")[0] != "meshwright" or name == "meshwright.__version__":
            continue
        target = part_of(name.removeprefix("meshwright").removeprefix(".") or "__init__")
        if target not in MAY_IMPORT:
            # `from meshwright import Plan`: the public names are for users, the house uses its rooms' doors.
            target = "__init__"
        if target != part and target not in MAY_IMPORT.get(part, frozenset()):
            faults.append(f"{path}:{line}: {part} imports {name}")
    if part not in MAY_IMPORT:
        faults.append(f"{path}: nobody said what the part '{part}' may import")
    return faults


def relative_imports(source: str, path: str) -> list[str]:
    nodes = ast.walk(parsed(source))
    return [f"{path}:{node.lineno}: relative" for node in nodes if isinstance(node, ast.ImportFrom) and node.level]


def torch_where_it_is_free(source: str, path: str) -> list[str]:
    """Find torch in the torch-free parts: anywhere, but for the CLI and type checkers only where it runs on import."""
    part = part_of(path)
    if part not in TORCH_FREE:
        return []
    tree = parsed(source)
    lazy: set[int] = set()
    if part in ("cli", "__main__"):
        functions = (ast.FunctionDef, ast.AsyncFunctionDef)
        lazy = {id(inner) for node in ast.walk(tree) if isinstance(node, functions) for inner in ast.walk(node)}
    if part == "__init__":
        guards = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
        lazy = {id(inner) for node in guards for inner in ast.walk(node)}
    faults = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)) and id(node) not in lazy:
            for line, name in imported_modules(node):
                names = name.split(".")
                ours = part_of(".".join(names[1:]) or "__init__") if names[0] == "meshwright" else None
                if names[0] == "torch" or (ours in MAY_IMPORT and ours not in TORCH_FREE):
                    faults.append(f"{path}:{line}: {part} is free of torch and imports {name}")
    return faults


def asserts(source: str, path: str) -> list[str]:
    return [f"{path}:{node.lineno}: assert" for node in ast.walk(parsed(source)) if isinstance(node, ast.Assert)]


def prints(source: str, path: str) -> list[str]:
    if path in MAY_PRINT:
        return []
    return [
        f"{path}:{node.lineno}: print"
        for node in ast.walk(parsed(source))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]


def too_long(source: str, path: str) -> list[str]:
    lines = len(source.splitlines())
    return [f"{path}: {lines} lines, at most {MAX_LINES}"] if lines > MAX_LINES else []


def private_torch(source: str, path: str) -> list[str]:
    """Find ``torch._x``, ``torch.a._x`` and what is imported from such, under any alias."""
    if path in MAY_USE_PRIVATE_TORCH:
        return []
    tree, aliases, faults = parsed(source), {"torch": "torch"}, []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            aliases |= {alias.asname: alias.name for alias in node.names if alias.asname and _is_torch(alias.name)}
        elif isinstance(node, ast.ImportFrom) and node.module and _is_torch(node.module):
            aliases |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [name for _, name in imported_modules(node)]
        elif isinstance(node, ast.Attribute):
            root, _, rest = ast.unparse(node).partition(".")
            # An imported class stands for itself: what users of torch may subclass and call is not ours to judge.
            if root in aliases and not aliases[root].rpartition(".")[2][:1].isupper():
                names = [f"{aliases[root]}.{rest}"]
        for name in names:
            words = name.split(".")
            if _is_torch(name) and any(word.startswith("_") and not word.startswith("__") for word in words):
                faults.append(f"{path}:{node.lineno}: private {name}")
    return sorted(set(faults))


def _is_torch(name: str) -> bool:
    return name == "torch" or name.startswith("torch.")


CHECKS = (wrong_direction, relative_imports, torch_where_it_is_free, asserts, prints, too_long, private_torch)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_package_holds_the_rule(check) -> None:
    faults = []
    for path in sorted(ROOT.rglob("*.py")):
        faults += check(path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix())
    assert faults == []


def test_there_is_something_to_check() -> None:
    assert len(list(ROOT.rglob("*.py"))) > 20


@pytest.mark.parametrize(
    ("check", "path", "source"),
    [
        (wrong_direction, "plan/search.py", "from meshwright.apply.data import x"),
        (wrong_direction, "apply/data.py", "def f():\n    import meshwright.plan.search"),
        (wrong_direction, "ranks/world.py", "from meshwright.run import step"),
        (wrong_direction, "describe/layers.py", "from meshwright.apply.engine import x"),
        (wrong_direction, "run/step.py", "from meshwright.measure.verify import verify_plan"),
        (wrong_direction, "run/step.py", "from meshwright.testing import run_ranks"),
        (wrong_direction, "run/step.py", "from meshwright import Plan"),
        (wrong_direction, "run/step.py", "from meshwright import testing"),
        (wrong_direction, "mesh.py", "from meshwright.spec import Plan"),
        (wrong_direction, "layout.py", "from meshwright.checkpoint.store import save"),
        (wrong_direction, "nn/linear.py", "from meshwright.apply.engine import x"),
        (wrong_direction, "comm/functional.py", "from meshwright.nn.linear import x"),
        (wrong_direction, "newcomer.py", "x = 1"),
        (relative_imports, "spec/plan.py", "from . import model"),
        (relative_imports, "spec/plan.py", "from .model import x"),
        (torch_where_it_is_free, "spec/plan.py", "def f():\n    import torch.nn"),
        (torch_where_it_is_free, "cli.py", "from meshwright.run import step"),
        (torch_where_it_is_free, "report/text.py", "from torch import nn"),
        (torch_where_it_is_free, "__init__.py", "from meshwright.ranks.launch import launch"),
        (asserts, "run/step.py", "def f(x):\n    assert x"),
        (prints, "run/step.py", "print('x')"),
        (too_long, "run/step.py", "x = 1\n" * (MAX_LINES + 1)),
        (private_torch, "run/step.py", "import torch\ntorch._C.x()"),
        (private_torch, "run/step.py", "import torch.distributed as dist\ndist._x()"),
        (private_torch, "run/step.py", "from torch import distributed\ndistributed._x()"),
        (private_torch, "run/step.py", "from torch.autograd.graph import _x"),
        (private_torch, "run/step.py", "import torch._dynamo"),
    ],
)
def test_a_planted_violation_is_found(check, path: str, source: str) -> None:
    assert check(source, path)


@pytest.mark.parametrize(
    ("check", "path", "source"),
    [
        (
            wrong_direction,
            "apply/data.py",
            "from meshwright.comm.ledger import Ledger\nfrom meshwright.spec import Plan",
        ),
        (wrong_direction, "checkpoint/store.py", "from meshwright.layout import Box"),
        (wrong_direction, "cli.py", "from meshwright.train.config.types import TrainConfig"),
        (torch_where_it_is_free, "cli.py", "def train():\n    from meshwright.train.session import x"),
        (wrong_direction, "cli.py", "from meshwright import __version__"),
        (prints, "cli.py", "print('x')"),
        (private_torch, "run/step.py", "import torch\ntorch.nn.Linear.__name__\nx._y"),
        (private_torch, "_torch_private.py", "import torch._C"),
    ],
)
def test_what_is_allowed_is_not_found(check, path: str, source: str) -> None:
    assert check(source, path) == []
