"""Command `plan` for a model that needs no torch, and a reader of its plain command lines.

typer and what it imports take longer to load than most plans take to find. A line of known words alone is read here; typer reads
all others, and tells what is wrong with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Literal, get_args

from meshwright.texts import clean

__all__: list[str] = []

PrecisionWord = Literal["fp32", "bf16"]
OptimizerWord = Literal["adamw", "adam", "momentum", "sgd"]

_NUMBERS: Final = {"--global-batch": "global_batch", "--sequence": "sequence", "--top": "top"}
_TEXTS: Final = {"--cluster": "cluster", "--precision": "precision", "--optimizer": "optimizer", "--json": "json_path"}
_CHOICES: Final = {"--precision": get_args(PrecisionWord), "--optimizer": get_args(OptimizerWord)}
_MOST_DIGITS: Final = 9


def show_plans(
    model: str,
    cluster: str,
    global_batch: int,
    *,
    sequence: int | None = None,
    precision: PrecisionWord | None = None,
    optimizer: OptimizerWord | None = None,
    top: int = 5,
    json_path: str | Path | None = None,
) -> None:
    """Print the best plans for a model of the catalogue, a `config.json` or a description; parameters are the options."""
    from meshwright.hardware import load_cluster
    from meshwright.plan.plan_table import list_plans, read_model
    from meshwright.spec.train import TrainSpec

    train = TrainSpec(global_batch_size=global_batch, precision=precision or "bf16", optimizer=optimizer or "adamw")
    where = load_cluster(cluster)
    spec = read_model(model, sequence=sequence)
    path = None if json_path is None else Path(json_path)
    print(clean(list_plans(spec, where, train, top=top, json_path=path)))


def read_plain(words: Sequence[str]) -> dict[str, Any] | None:
    """Return the arguments of `show_plans` that a command line gives; None where typer has to read it.

    >>> read_plain(["plan", "llama3-8b", "--cluster", "8xh100-sxm", "--global-batch", "64"])
    {'model': 'llama3-8b', 'cluster': '8xh100-sxm', 'global_batch': 64}
    >>> read_plain(["plan", "llama3-8b", "--cluster"]) is None
    True
    """
    if words[:1] != ["plan"] or not all(word.isprintable() and word for word in words):
        return None
    found: dict[str, Any] = {}
    rest = iter(words[1:])
    for word in rest:
        name, value = ("", word) if not word.startswith("-") else (word, next(rest, "-"))
        key = "model" if not name else _NUMBERS.get(name) or _TEXTS.get(name)
        if key is None or key in found or value.startswith("-") or value not in _CHOICES.get(name, (value,)):
            return None
        if name in _NUMBERS and not (value.isascii() and value.isdigit() and len(value) <= _MOST_DIGITS and int(value)):
            return None
        found[key] = int(value) if name in _NUMBERS else value
    # A training's TOML file, and a module that has to be built, need more.
    is_known = {"model", "cluster", "global_batch"} <= found.keys() and not found["model"].endswith(".toml")
    return found if is_known and ":" not in found["model"] else None
