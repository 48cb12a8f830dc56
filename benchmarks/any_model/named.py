"""Models of small libraries of single authors, each by its import path, as people take them into their scripts.

    python -m benchmarks.any_model.named --out benchmarks/any_model/others.jsonl

`named.jsonl` has a line for each: its class, arguments and batch. An argument may itself be made, as
`{"make": "library.module:Class", "with": {...}}`. A package that is missing leaves a problem in the row.
"""

from __future__ import annotations

import functools
import importlib
import json
from pathlib import Path
from typing import Any

from benchmarks.any_model import float64

float64.install()

import torch  # noqa: E402
from benchmarks.any_model import finder, probe, recipes  # noqa: E402
from torch import nn  # noqa: E402

_ENTRIES = Path(__file__).with_name("named.jsonl")


def build(path: str, fields: dict[str, Any]) -> nn.Module:
    """Build a model.

    Args:
        path: `module:name` of what makes it.
        fields: Its arguments.
    """
    return _made({"make": path, "with": fields})


def _made(value: Any, sequence: type = tuple) -> Any:
    if isinstance(value, list):
        return sequence(_made(item, sequence) for item in value)
    if not isinstance(value, dict):
        return value
    if "make" not in value:
        return {key: _made(item, sequence) for key, item in value.items()}
    module, _, name = value["make"].partition(":")
    made: Any = importlib.import_module(module)
    for part in name.split("."):
        made = getattr(made, part)
    # transformers' configurations take no tuples; small libraries ask for them.
    fields = _made(value["with"], list if module == "transformers" else tuple)
    return made(**fields)


def find(entry: dict[str, Any]) -> dict[str, Any]:
    """Return the recipe of a model, or what stood in the way."""
    row = {"kind": "named", "library": "named", "loss": "outputs", **entry}
    try:
        torch.manual_seed(0)
        module = recipes.build(row)
        count = sum(p.numel() for p in module.parameters())
        found = probe._try_batch(module, {**row, "parameters": count})
    except TimeoutError:
        raise
    except Exception as error:
        found = probe._text(error)
    return found if isinstance(found, dict) else {**row, "problem": found}


def main() -> None:
    arguments, rows = finder.begin(__doc__)
    done = {row["type"] for row in rows}
    entries = [json.loads(line) for line in _ENTRIES.read_text().splitlines()]
    wanted = [(row["type"], functools.partial(find, row)) for row in entries if row["type"] not in done]
    finder.find_each("named", wanted, arguments)


if __name__ == "__main__":
    main()
