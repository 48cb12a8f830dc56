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
        "texts",
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
        "kept_files",
        "garbage",
        "python_state",
        "_torch_texts",
    ),
)
ORDER = (
    *TORCH_FREE_ORDER,
    *(
        "_torch_private",
        "_torch_collectives",
        "_torch_dispatch",
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
        "watch",
    ),
)
MAY_IMPORT: dict[str, frozenset[str]] = {part: frozenset(ORDER[:index]) for index, part in enumerate(ORDER)}
# What computes a step knows no planner: a plan is a value to it, whoever has made it.
PLANNING = frozenset({"plan", "report"})
for part in ORDER[ORDER.index("host") : ORDER.index("train")]:
    MAY_IMPORT[part] -= PLANNING
MAY_IMPORT["testing"] = frozenset(ORDER[: ORDER.index("train")]) - PLANNING
MAY_IMPORT["integrations"] = MAY_IMPORT["measure"] - {"measure"}
CLI_PARTS = ("cli_checkpoint", "cli_plan", "cli_errors")
for part in (*CLI_PARTS, "__init__"):
    MAY_IMPORT[part] = frozenset(ORDER)
MAY_IMPORT["cli"] = frozenset({*ORDER, *CLI_PARTS})
MAY_IMPORT["__main__"] = frozenset({"cli", "cli_plan", "cli_errors"})

TORCH_FREE = {*TORCH_FREE_ORDER, "__init__", "__main__", "cli", *CLI_PARTS}

MAY_PRINT = {"cli.py", "cli_plan.py", "cli_errors.py", "train/progress.py"}
MAY_USE_PRIVATE_TORCH = {"_torch_private.py", "_torch_dispatch.py", "_torch_collectives.py"}
MAY_READ_ERRORS = {
    "_torch_texts.py"
}  # torch raises plain RuntimeErrors of many kinds; our own errors have types and fields


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
    if part in ("cli", *CLI_PARTS, "__main__"):
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


ASKS = {"startswith", "endswith", "find", "rfind", "index", "count", "removeprefix", "removesuffix"}
ASKS |= {"match", "search", "fullmatch", "findall", "finditer", "sub"}


def reads_error_texts(source: str, path: str) -> list[str]:
    """Find code that decides by the wording of an error: ``in str(error)``, a regular expression, ``.startswith``."""
    if path in MAY_READ_ERRORS:  # by words that stand in them, not by a pattern
        return [f"{path}: a regular expression" for _, name in imported_modules(parsed(source)) if name == "re"]
    faults = []
    for function in ast.walk(parsed(source)):
        if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        nodes = list(ast.walk(function))
        errors = {node.name for node in nodes if isinstance(node, ast.ExceptHandler) and node.name}
        given = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        errors |= {each.arg for each in given if each.annotation and _is_error(ast.unparse(each.annotation))}
        errors |= {each.arg for each in given if each.arg in ("error", "exception")}
        texts: set[str] = {"reason", "note"}
        used = {node.id for node in nodes if isinstance(node, ast.Name)}
        if not (errors | texts) & used and "__notes__" not in source:
            continue
        for _ in range(3):  # a text of a text of a text
            texts |= {name for name, value in _bound(nodes) if _has_text(value, errors, texts)}
        for node in nodes:
            asked: list[ast.expr] = []
            if isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.In, ast.NotIn)):
                asked = [] if isinstance(node.comparators[0], (ast.Tuple, ast.List, ast.Set)) else node.comparators
            elif isinstance(node, ast.Compare) and isinstance(node.comparators[0], ast.Constant):
                asked = [node.left] if isinstance(node.comparators[0].value, str) and node.comparators[0].value else []
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ASKS:
                asked = [node.func.value, *node.args]
            if isinstance(node, ast.expr) and any(_has_text(expression, errors, texts) for expression in asked):
                faults.append(f"{path}:{node.lineno}: reads the text of an error")
    return sorted(set(faults))


def _is_error(annotation: str) -> bool:
    return any(word.endswith(("Exception", "Error")) for word in annotation.replace("|", " ").split())


def _bound(nodes: list[ast.AST]) -> Iterator[tuple[str, ast.expr]]:
    """Yield (name, what is assigned to it, or what it runs through)."""
    for node in nodes:
        if isinstance(node, ast.Assign):
            yield from ((target.id, node.value) for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, (ast.NamedExpr, ast.AnnAssign, ast.For, ast.comprehension)):
            value = node.iter if isinstance(node, (ast.For, ast.comprehension)) else node.value
            if isinstance(node.target, ast.Name) and value is not None:
                yield node.target.id, value


def _has_text(expression: ast.expr, errors: set[str], texts: set[str]) -> bool:
    """Tell whether an expression holds the text of an error, or its notes."""
    for node in ast.walk(expression):
        if isinstance(node, ast.Name) and node.id in texts:
            return True
        if isinstance(node, ast.Constant) and node.value == "__notes__":
            return True
        if isinstance(node, ast.Attribute) and node.attr in ("message", "args", "__notes__"):
            return isinstance(node.value, ast.Name) and node.value.id in errors
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("str", "repr"):
            return any(isinstance(one, ast.Name) and one.id in errors for one in node.args)
        if isinstance(node, ast.FormattedValue) and isinstance(node.value, ast.Name) and node.value.id in errors:
            return True
    return False


def _is_torch(name: str) -> bool:
    return name == "torch" or name.startswith("torch.")


CHECKS = (
    wrong_direction,
    relative_imports,
    torch_where_it_is_free,
    asserts,
    prints,
    too_long,
    private_torch,
    reads_error_texts,
)


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
        (reads_error_texts, "run/step.py", "def f():\n    try: g()\n    except E as e:\n        return 'x' in str(e)"),
        (reads_error_texts, "run/step.py", "def f(error):\n    return re.search(r'step (\\d+)', str(error))"),
        (reads_error_texts, "run/step.py", "def f(one: ApplyError | None):\n    return _KNOWN.search(one.message)"),
        (reads_error_texts, "run/step.py", "def f(error):\n    text = str(error).lower()\n    return 'x' in text"),
        (reads_error_texts, "run/step.py", "def f(reason: str):\n    return reason.startswith('on shards')"),
        (reads_error_texts, "_torch_texts.py", "import re\nX = re.compile('x')"),
        (
            reads_error_texts,
            "run/step.py",
            "def f(e):\n    for n in getattr(e, '__notes__', ()):\n        if re.match('rank', n): g()",
        ),
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
        (reads_error_texts, "run/step.py", "def f(error):\n    return str(error).splitlines()[0], error in seen"),
        (reads_error_texts, "_torch_texts.py", "def f(error):\n    return 'x' in str(error)"),
    ],
)
def test_what_is_allowed_is_not_found(check, path: str, source: str) -> None:
    assert check(source, path) == []
