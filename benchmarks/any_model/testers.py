"""Recipes from transformers' own model testers: the tiny configurations and inputs that its tests write down for each model.

    python -m benchmarks.any_model.testers CHECKOUT --again benchmarks/any_model/recipes.jsonl --out testers.jsonl

CHECKOUT is a checkout of huggingface/transformers, of which the folder `tests` is read. Its version may be older than
the installed one: statements that fail there are passed over, and names that are gone stand for nothing.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import json
import os
import signal
import sys
import time
import types
import unittest
from pathlib import Path
from typing import Any

from benchmarks.any_model import float64

float64.install()

import torch  # noqa: E402
from benchmarks.any_model import configs, finder, probe, recipes, vision  # noqa: E402
from torch import Tensor  # noqa: E402

_LITERAL = 300
"""Entries of a sample up to which whole numbers are written into a recipe [count]."""


class _Nothing(type):
    """Stands for a name that is gone: a base class, a decorator, a flag."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing

    def __getitem__(cls, _: Any) -> Any:
        return Nothing

    def __call__(cls, *arguments: Any, **keywords: Any) -> Any:
        if cls is not Nothing:
            return super().__call__(*arguments, **keywords)
        return arguments[0] if arguments and callable(arguments[0]) else Nothing


class Nothing(metaclass=_Nothing):
    """Stands for what cannot be imported."""


class TolerantLoader:
    """Runs files of a checkout statement by statement, each file once.

    Args:
        checkout: The checkout's folder.
    """

    def __init__(self, checkout: Path) -> None:
        self.checkout = checkout
        self.loaded: dict[Path, dict[str, Any]] = {}

    def load(self, path: Path) -> dict[str, Any]:
        """Return the names of a file."""
        if path in self.loaded:
            return self.loaded[path]
        module = types.ModuleType(f"checkout.{path.stem}")
        names = self.loaded[path] = vars(module)
        sys.modules[module.__name__] = module
        names["__file__"] = str(path)
        for node in ast.parse(path.read_text()).body:
            self._run(node, names, path)
        return names

    def _run(self, node: ast.stmt, names: dict[str, Any], path: Path) -> None:
        if isinstance(node, ast.ImportFrom):
            self._import(node, names, path)
            return
        if isinstance(node, ast.If):
            for inner in node.body:
                self._run(inner, names, path)
            return
        try:
            exec(compile(ast.Module([node], []), str(path), "exec"), names)
        except Exception:
            for alias in node.names if isinstance(node, ast.Import) else ():
                names[(alias.asname or alias.name).split(".")[0]] = Nothing

    def _import(self, node: ast.ImportFrom, names: dict[str, Any], path: Path) -> None:
        source: Any = None
        if node.level or (node.module or "").split(".")[0] == "tests":
            base = path.parents[node.level - 1] if node.level else self.checkout
            file = base.joinpath(*(node.module or "__init__").split(".")).with_suffix(".py")
            source = types.SimpleNamespace(**(self.load(file) if file.exists() else {}))
        for alias in node.names:
            try:
                module = source if source is not None else importlib.import_module(node.module or "")
                names[alias.asname or alias.name] = getattr(module, alias.name)
            except Exception:
                names[alias.asname or alias.name] = Nothing


def cases_of(names: dict[str, Any]) -> list[Any]:
    """Return the test cases of a file that have a tester, each made ready."""
    found: list[Any] = []
    for value in list(names.values()):
        if not (isinstance(value, type) and issubclass(value, unittest.TestCase) and hasattr(value, "setUp")):
            continue
        try:
            case = value()
            case.setUp()
        except Exception:
            continue
        if hasattr(case, "model_tester"):
            found.append(case)
    return found


def find(case: Any, wanted: set[str]) -> list[dict[str, Any]]:
    """Return the recipe of a test case's model, or what stood in the way; nothing where it is none of those wanted."""
    config, _ = case.model_tester.prepare_config_and_inputs_for_common()
    model_type = config.model_type
    if model_type not in wanted:
        return []
    kinds = {name: kind for kind, name in reversed(recipes.heads_of(model_type))}
    classes = list(getattr(case, "all_model_classes", None) or getattr(case.model_tester, "all_model_classes", ()))
    order = [name for _, name in recipes.heads_of(model_type)]
    classes.sort(key=lambda cls: order.index(cls.__name__) if cls.__name__ in order else len(order))
    problems: dict[str, None] = {}
    for cls in classes:
        try:
            config, inputs = case.model_tester.prepare_config_and_inputs_for_common()
            recipe = {"type": model_type, "kind": kinds.get(cls.__name__, "base"), "class": cls.__name__}
            recipe |= {"config": _plain(config), "library": "transformers", "from": "tester"}
            found = _try(recipe, config, cls, inputs, int(case.model_tester.batch_size))
        except probe._LateError:
            raise
        except Exception as error:
            found = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        if isinstance(found, dict):
            return [found]
        problems[f"{cls.__name__}: {found}"] = None
    return [{"type": model_type, "problem": " | ".join(problems)[:900] or "no class"}]


def _plain(config: Any) -> dict[str, Any]:
    """Return a configuration's fields as JSON knows them, without dropout."""
    cls = type(config)
    dropped = ("transformers_version", "architectures", "dtype", "torch_dtype", "model_type", "experts_implementation")
    fields = {key: value for key, value in config.to_diff_dict().items() if key not in dropped}
    try:
        is_whole = cls(**fields).to_dict() == config.to_dict()
    except Exception:  # what differs alone does not make one
        is_whole = False
    text = json.dumps(fields if is_whole else config.to_dict(), default=lambda value: value.to_dict())
    return _without_dropout({key: value for key, value in json.loads(text).items() if key not in dropped})


def _without_dropout(value: Any, name: str = "") -> Any:
    if isinstance(value, dict):
        return {key: _without_dropout(item, key) for key, item in value.items()}
    is_rate = isinstance(value, float) and "drop" in name
    return configs.tiny_value(name, value, configs.Tokens()) if is_rate else value


def _try(recipe: dict[str, Any], config: Any, cls: Any, inputs: dict[str, Any], count: int) -> dict[str, Any] | str:
    kind = recipe["kind"]
    if kind in recipes.LABELS_PER_SAMPLE:
        recipe["num_labels"] = recipes.CLASSES
    names = list(inspect.signature(cls.forward).parameters)
    flattened: list[str] = []
    batch: list[list[Any]] = []
    for name, value in inputs.items():
        if isinstance(value, Tensor) and name in names:
            per_sample = len(value) // count if value.dim() else 0
            if not per_sample or len(value) % count:
                return f"{name} has shape {tuple(value.shape)} for {count} samples"
            if per_sample > 1:
                flattened.append(name)
            rows = value if per_sample == 1 else value.unflatten(0, (count, per_sample))
            batch.append([name, *_entry(rows)])
    if "mm_token_type_ids" in names and "mm_token_type_ids" not in inputs and "input_ids" in inputs:
        ids = inputs["input_ids"]  # newer versions want to be told where placeholders are
        batch.append(["mm_token_type_ids", *_entry((ids == getattr(config, "image_token_id", -1)).long())])
    recipe |= {"flattened": flattened} if flattened else {}
    torch.manual_seed(0)
    module = recipes.build_hf(recipe)
    parameters = sum(p.numel() for p in module.parameters())
    if parameters > probe._MOST_PARAMETERS:
        return f"{parameters} parameters"
    problems: dict[str, None] = {}
    for used in _with_labels(batch, kind, names, config):
        loss = "own" if any(entry[0] == "labels" for entry in used) else "outputs"
        found = probe._try_batch(module, {**recipe, "batch": used, "loss": loss, "parameters": parameters})
        if isinstance(found, dict):
            return found
        problems[found] = None
    return " / ".join(problems)[:400]


def _entry(rows: Tensor) -> list[Any]:
    """Return the kind and the facts of an input: values for whole numbers and masks, a shape for others."""
    shape = list(rows.shape[1:])
    if rows.is_floating_point() and not bool((rows == rows.flatten()[0]).all()):
        return ["normal", *shape]
    if rows[0].numel() <= _LITERAL:
        return ["rows", rows[:5].tolist()]
    if bool((rows == rows.flatten()[0]).all()):
        return ["filled", rows.flatten()[0].item(), *shape]
    return ["ids", int(rows.min()), int(rows.max()) + 1, *shape]


def _with_labels(batch: list[list[Any]], kind: str, names: list[str], config: Any) -> list[list[list[Any]]]:
    plain = [entry for entry in batch if entry[0] != "labels"]
    if "labels" not in names:
        return [plain]
    vocabulary = int(probe.proposals._find(config, ("vocab_size",), configs.VOCABULARY))
    length = next((len(e[2][0]) for n in ("decoder_input_ids", "input_ids") for e in batch if e[:2] == [n, "rows"]), 0)
    found = [plain]
    if kind in recipes.LABELS_PER_TOKEN and length:
        found = [[*plain, ["labels", "ids", min(20, vocabulary // 2), vocabulary, length]], plain]
    elif kind in recipes.LABELS_PER_SAMPLE:
        found = [[*plain, ["labels", "ids", 0, recipes.CLASSES]], plain]
    elif kind == "ctc":
        found = [[*plain, ["labels", "ids", 3, min(20, vocabulary), 2]], plain]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument(
        "--again", type=Path, required=True, help="recipes, of which those that have a problem are sought"
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=1e6)
    arguments = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    finder.prepare()
    vision.load_if_there()
    rows = [json.loads(line) for line in arguments.again.read_text().splitlines()]
    done = (
        {json.loads(line)["type"] for line in arguments.out.read_text().splitlines()}
        if arguments.out.exists()
        else set()
    )
    wanted = {row["type"] for row in rows if "problem" in row} - done
    folders = {path.name for path in (arguments.checkout / "tests" / "models").iterdir()}
    loader = TolerantLoader(arguments.checkout)
    signal.signal(signal.SIGALRM, probe._late)
    end = time.monotonic() + 60 * arguments.minutes
    for model_type in sorted(wanted):
        if time.monotonic() > end:
            return
        for row in _rows_of(model_type, folders, loader):
            with arguments.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(row["type"], row.get("class", ""), row.get("seconds", ""), row.get("problem", ""), flush=True)


def _rows_of(model_type: str, folders: set[str], loader: TolerantLoader) -> list[dict[str, Any]]:
    name = model_type.replace("-", "_")
    folder = max((f for f in folders if name == f or name.startswith(f"{f}_")), key=len, default="")
    rows: list[dict[str, Any]] = []
    signal.alarm(probe._LIMIT_S)
    try:
        for path in (
            sorted((loader.checkout / "tests" / "models" / folder).glob("test_modeling_*.py")) if folder else ()
        ):
            for case in cases_of(loader.load(path)):
                rows += find(case, {model_type})
    except probe._LateError as error:
        rows.append({"type": model_type, "problem": str(error)})
    except Exception as error:
        rows.append({"type": model_type, "problem": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"})
    finally:
        signal.alarm(0)
    good = [row for row in rows if "problem" not in row]
    return good[:1] or rows[:1] or [{"type": model_type, "problem": "no tester"}]


if __name__ == "__main__":
    main()
