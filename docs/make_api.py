"""Makes docs/api.md from the docstrings of all public names.

    python docs/make_api.py            writes docs/api.md
    python docs/make_api.py --check    writes nothing; exit status 1 where the page is not what the docstrings say

`tests/unit/test_api.py` runs the check, and holds every docstring on the page to the rule that the page states.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import itertools
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parent / "api.md"
ERRORS = "Errors"
CHAPTERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "Training": (
        "meshwright",
        (
            "apply_plan",
            "ParallelModel",
            "StepResult",
            "Loss",
            "make_loader",
            "split_batch",
            "gather_batch",
            "GradientAccumulation",
            "trace_steps",
        ),
    ),
    "Checkpoints": ("meshwright", ("save_checkpoint", "load_checkpoint", "wait_for_checkpoint")),
    "Plans and descriptions": (
        "meshwright",
        (
            *(
                "describe_model",
                "Plan",
                "MeshSpec",
                "PipelineSchedule",
                "TrainSpec",
                "ModelSpec",
                "Prediction",
                "RunRecord",
            ),
            *("ClusterSpec", "DeviceSpec", "LinkSpec", "load_cluster"),
            *("make_plans", "predict_plan", "select_strategy", "probe_cluster"),
        ),
    ),
    "Ranks": ("meshwright", ("launch", "join_world", "current_world", "register_shm")),
    "Proof and comparison": ("meshwright", ("verify_plan", "ParityReport", "compare_plans")),
}
"""Public names by subject; what is missing here is an error's name, or fails the test."""
SUBMODULES = {"Building blocks: `meshwright.nn`": "meshwright.nn", "Tests: `meshwright.testing`": "meshwright.testing"}
RETURNED = {
    "meshwright.ranks.world": ("World",),
    "meshwright.ranks.launch": ("RankGroup",),
    "meshwright.comm.ledger": ("Ledger", "LedgerEntry"),
    "meshwright.compare.comparison": ("Comparison",),
    "meshwright.layout": ("ShardLayout",),
    "meshwright.values": ("Value",),
}
"""What public calls return and nobody has to import, by module."""

SECTION = re.compile(r"^(Args|Returns|Yields|Raises|Example|Source|Attributes)(?:: *)(.*)$")
ENTRY = re.compile(r"^    (\*{0,2}\w+): ?(.*)$")


@dataclasses.dataclass(frozen=True)
class Entry:
    """One name of the page.

    Args:
        path: What to write in code, for example "Plan.parse".
        kind: "class", "call" or "property".
        source: What has the signature and the code.
        text: The docstring, dedented.
        fields: Of a class: field -> the text under it.
    """

    path: str
    kind: str
    source: Any
    text: str
    fields: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def is_made_by_others(self) -> bool:
        """Whether it is a class that no user's code calls."""
        return self.kind == "class" and "Made by `" in self.text

    def signature(self) -> inspect.Signature | None:
        """Return the signature without self and cls; None for a property."""
        if self.kind == "property":
            return None
        found = inspect.signature(self.source)
        kept = [parameter for name, parameter in found.parameters.items() if name not in ("self", "cls")]
        return found.replace(parameters=kept)


def public_entries() -> dict[str, list[Entry]]:
    """Return the entries of each chapter, in the page's order."""
    package = importlib.import_module("meshwright")
    chapters = {
        title: [entry for name in names for entry in entries_of(name, getattr(importlib.import_module(module), name))]
        for title, (module, names) in CHAPTERS.items()
    }
    for title, module in SUBMODULES.items():
        found = importlib.import_module(module)
        short = module.rpartition(".")[2]
        chapters[title] = [
            entry for name in found.__all__ for entry in entries_of(f"{short}.{name}", getattr(found, name))
        ]
    chapters["What calls return"] = [
        entry
        for module, names in RETURNED.items()
        for name in names
        for entry in entries_of(name, getattr(importlib.import_module(module), name))
    ]
    errors = [name for name in package.__all__ if is_error(getattr(package, name))]
    errors.sort(key=lambda name: (getattr(package, name).exit_code, name))
    chapters[ERRORS] = [entry for name in errors for entry in entries_of(name, getattr(package, name))]
    return chapters


def is_error(found: Any) -> bool:
    """Tell an error from the other public names."""
    return isinstance(found, type) and issubclass(found, Exception)


def entries_of(path: str, found: Any) -> Iterator[Entry]:
    """Yield a name, and its public members where it is a class; those of a public base stand there."""
    if not isinstance(found, type):
        yield Entry(path, "call", inspect.unwrap(found), inspect.getdoc(found) or "")
        return
    yield Entry(path, "class", found, _own_doc(found), field_texts(found))
    members: dict[str, Any] = {}
    for base in reversed([found, *(base for base in found.__mro__ if base.__name__.startswith("_"))]):
        members |= {name: member for name, member in vars(base).items() if not name.startswith("_")}
    for name, member in sorted(members.items()):
        if isinstance(member, property):
            yield Entry(f"{path}.{name}", "property", member.fget, inspect.getdoc(member) or "")
        elif isinstance(member, classmethod | staticmethod):
            yield Entry(f"{path}.{name}", "call", member.__func__, inspect.getdoc(member.__func__) or "")
        elif inspect.isfunction(member):
            yield Entry(f"{path}.{name}", "call", inspect.unwrap(member), inspect.getdoc(member) or "")


def _own_doc(found: type) -> str:
    return inspect.cleandoc(vars(found).get("__doc__") or "")


def field_texts(found: type) -> dict[str, str]:
    """Return the texts that stand under a class's fields."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(found))).body
    texts: dict[str, str] = {}
    body = tree.body if isinstance(tree, ast.ClassDef) else []
    for field, below in itertools.pairwise(body):
        match field, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                texts[name] = inspect.cleandoc(text)
    return {name: text for name, text in texts.items() if not name.startswith("_")}


def sections(text: str) -> dict[str, list[str]]:
    """Return a docstring's lines by section; what stands before and between them is under ""."""
    found: dict[str, list[str]] = {"": []}
    current = ""
    for line in text.splitlines():
        head = SECTION.match(line)
        if head:
            current = head[1]
            found[current] = [f"    {head[2]}"] if head[2] else []
        else:
            if line and not line.startswith(" "):
                current = ""
            found[current].append(line)
    return found


def entries(lines: list[str]) -> dict[str, str]:
    """Return name -> text of a section such as Args."""
    found: dict[str, list[str]] = {}
    name = ""
    for line in lines:
        head = ENTRY.match(line)
        if head:
            name = head[1]
            found[name] = [head[2]]
        elif name:
            found[name].append(line[8:])
    return {name: "\n".join(text).strip() for name, text in found.items()}


def shown_signature(entry: Entry) -> str:
    """Return a call as code: on one line where it fits, else a line an argument."""
    signature = entry.signature()
    if signature is None:
        return ""
    words = [_parameter(parameter) for parameter in signature.parameters.values()]
    kinds = [parameter.kind for parameter in signature.parameters.values()]
    if inspect.Parameter.KEYWORD_ONLY in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
        words.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
    result = signature.return_annotation
    arrow = "" if entry.kind == "class" or result is inspect.Signature.empty else f" -> {_name(result)}"
    line = f"{entry.path}({', '.join(words)}){arrow}"
    if len(line) <= 110:
        return line
    return "\n".join([f"{entry.path}(", *(f"    {word}," for word in words), f"){arrow}"])


def _parameter(parameter: inspect.Parameter) -> str:
    star = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    text = f"{star}{parameter.name}"
    if parameter.annotation is not inspect.Parameter.empty:
        text += f": {_name(parameter.annotation)}"
    if parameter.default is not inspect.Parameter.empty:
        default = repr(parameter.default)
        text += f" = {default if len(default) <= 24 and '<' not in default else '...'}"
    return text


def _name(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))


def markdown(entry: Entry) -> str:
    """Return an entry's part of the page."""
    parts = sections(entry.text)
    level = "####" if "." in entry.path.removeprefix("nn.").removeprefix("testing.") else "###"
    lines = [f"{level} {entry.path}", ""]
    if entry.kind != "property" and not entry.is_made_by_others:
        lines += ["```python", shown_signature(entry), "```", ""]
    lines += [*_prose(parts[""]), ""]
    listed = entries(parts.get("Args", [])) | entry.fields
    for title, rows in (("Arguments", listed), ("Raises", entries(parts.get("Raises", [])))):
        if title == "Raises":
            lines += _results(parts)
        if rows:
            lines += [f"{title}:", "", *(_row(name, text) for name, text in rows.items()), ""]
    for title in ("Source", "Example"):
        if title in parts:
            lines += [*_prose(textwrap.dedent("\n".join(parts[title])).strip("\n").splitlines()), ""]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip() + "\n"


def _results(parts: dict[str, list[str]]) -> list[str]:
    found = [title for title in ("Returns", "Yields") if title in parts]
    return [line for title in found for line in (f"{title}: " + textwrap.dedent("\n".join(parts[title])).strip(), "")]


def _row(name: str, text: str) -> str:
    return f"- `{name}`: " + text.replace("\n", "\n  ").replace("\n  \n", "\n\n")


def _prose(lines: list[str]) -> list[str]:
    """Return lines with examples as blocks of code; indented lines are code in Markdown as they stand."""
    shown: list[str] = []
    in_example = False
    for line in [*lines, ""]:
        if line.startswith(">>>") and not in_example:
            in_example = True
            shown += ["", "```python"]
        if in_example and not line.strip():
            in_example = False
            shown.append("```")
        shown.append(line)
    return shown


def page() -> str:
    """Return the whole page."""
    chapters = public_entries()
    head = INTRODUCTION.strip()
    body = [f"## {title}\n\n" + "\n".join(markdown(entry) for entry in found) for title, found in chapters.items()]
    return "\n\n".join([head, *body])


INTRODUCTION = """
<!-- Made by docs/make_api.py from the docstrings: change those, then run it. -->
# API

Every public name: those of `import meshwright as mw`, `mw.nn` and `mw.testing`, and what their calls return. What is not on
this page may change in any version. The [guide](guide.md) shows how they go together; [architecture.md](architecture.md) has the
errors' exit codes.

Each entry says what the call does; with two arguments or more, what every one of them is; what comes back; and which errors the
call itself raises. Numbers have their unit in brackets (`[bytes]`, `[s]`, `[count]`, `[samples]`) unless they are a rank, an
index, a degree, a seed, a norm, a loss or a share of 1. Tensors have their shape.

## What may change, and when

Versions are `MAJOR.MINOR.PATCH`; `mw.__version__` has this one. Until 1.0 the middle number counts as the major one would.

- A **patch** version mends. No call, key or exit code changes. It may refuse what was wrong without a word before.
- A **minor** version adds. A name, an argument, a key of a configuration or a word of a plan that is to go still works in it, and
  raises a `DeprecationWarning` that names its replacement. It goes with the minor version after that: there is one minor version
  in which both work.
- Numbers are part of the promise: a change that can alter a loss by one bit stands in [CHANGELOG.md](../CHANGELOG.md) under
  *Numerics*.
- JSON that is written (plans, reports, records) names its format and that format's version. Whoever raises it goes on reading the
  one before for one minor version; a newer one is refused by name.

Nothing is deprecated in 0.2.
"""


def main(arguments: list[str], write: Callable[[str], Any] = PAGE.write_text) -> int:
    """Write the page, or compare it with `--check`."""
    wanted = page()
    if "--check" not in arguments:
        write(wanted)
        return 0
    if PAGE.exists() and PAGE.read_text() == wanted:
        return 0
    sys.stderr.write("docs/api.md is not what the docstrings say: run python docs/make_api.py\n")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
