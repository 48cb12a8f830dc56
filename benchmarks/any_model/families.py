"""Families of timm in small: of each of its modules the smallest registered model, shrunk by the names of its arguments.

python -m benchmarks.any_model.families --out benchmarks/any_model/others.jsonl
"""

from __future__ import annotations

import ast
import contextlib
import copy
import dataclasses
import functools
import importlib
import inspect
import re
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.any_model import float64

float64.install()

import torch  # noqa: E402
from benchmarks.any_model import finder, recipes, vision  # noqa: E402
from torch import nn  # noqa: E402

_DEPTHS = re.compile(
    r"(serial_|parallel_|transformer_)?depths?|depth_list|layers|stages|num_blocks|block_config|k_sec|d"
)
_WIDTHS = re.compile(
    r"(embed_|base_|inner_)?dims?|widths|width_list|hidden_sizes|channels|c|num_features|head_hidden_size"
)
_HEADS = re.compile(r"(num_)?heads")
_SMALL = (
    "test_",
    "atto",
    "femto",
    "zepto",
    "nano",
    "xxs",
    "xxtiny",
    "xx_small",
    "xs",
    "tiny",
    "_s",
    "050",
    "_t",
    "b0",
    "m0",
)
_SIDES = (32, 64, 128, 224)
_MOST_PARAMETERS = 6_000_000


def tiny(name: str, value: Any, side: int) -> Any:
    """Return the small value of an argument or of a configuration's field."""
    if isinstance(value, list | tuple) and value:
        if _HEADS.fullmatch(name):
            return type(value)(min(item, 2 ** min(index, 1)) for index, item in enumerate(value))
        if _WIDTHS.fullmatch(name) and all(isinstance(item, int) for item in value):
            return type(value)(min(item, 16 * 2 ** min(index, 1)) for index, item in enumerate(value))
        return type(value)(tiny(name, item, side) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return tiny_configuration(value, side)
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    if _DEPTHS.fullmatch(name):
        return min(value, 1 if name == "d" else 2)
    if _WIDTHS.fullmatch(name):
        return min(value, 32)
    if _HEADS.fullmatch(name):
        return min(value, 4)
    return {"img_size": side, "patch_size": min(value, 8), "window_size": min(value, 4)}.get(name, value)


def tiny_configuration(value: Any, side: int) -> Any:
    """Return a configuration with small fields, those inside as well."""
    fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return dataclasses.replace(value, **{name: tiny(name, item, side) for name, item in fields.items()})


@contextlib.contextmanager
def _small_configuration(function: Any, name: str, side: int) -> Iterator[None]:
    """Have a module's table of configurations give the small one for a name."""
    table = vars(sys.modules[function.__module__]).get("model_cfgs")
    if not isinstance(table, dict) or name not in table:
        raise LookupError(f"no configuration of {name}")
    before = table[name]
    table[name] = tiny(name, copy.deepcopy(before), side)
    try:
        yield
    finally:
        table[name] = before


class _ReachedError(Exception):
    """What an entry point passes on to a model's class."""

    def __init__(self, cls: Any, arguments: dict[str, Any]) -> None:
        super().__init__()
        self.cls = cls
        self.arguments = arguments


@contextlib.contextmanager
def _replaced_builder(function: Any, inside: dict[str, Any] | None) -> Iterator[None]:
    """Have a module's entry points build with these arguments, whatever they write down; None: raise with what they write."""
    names = vars(sys.modules[function.__module__])
    before = names["build_model_with_cfg"]

    def build_model(cls: Any, variant: str, pretrained: bool, **arguments: Any) -> nn.Module:
        if inside is None:
            raise _ReachedError(cls, arguments)
        return before(cls, variant, pretrained, **{**arguments, **inside})

    names["build_model_with_cfg"] = build_model
    try:
        yield
    finally:
        names["build_model_with_cfg"] = before


def build(name: str, fields: dict[str, Any]) -> nn.Module:
    """Return a model by its name.

    A field `small` has its module's configuration shrunk for images of this side, and `inside` are arguments of its class.
    """
    timm = importlib.import_module("timm")
    if "inside" in fields:
        with _replaced_builder(timm.models.model_entrypoint(name), fields["inside"]):
            return timm.create_model(name, num_classes=recipes.CLASSES)
    side = fields.pop("small", None)
    if side is None:
        return timm.create_model(name, num_classes=recipes.CLASSES, **fields)
    with _small_configuration(timm.models.model_entrypoint(name), name, side):
        return timm.create_model(name, num_classes=recipes.CLASSES, **fields)


# ---- which, and with what


def written_arguments(function: Any) -> dict[str, Any]:
    """Return the arguments that an entry point writes down as constants."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    found: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "dict":
            for keyword in node.keywords:
                with contextlib.suppress(ValueError):
                    found.setdefault(keyword.arg or "", ast.literal_eval(keyword.value))
    return {name: value for name, value in found.items() if name}


def arguments_inside(name: str, function: Any, side: int) -> list[dict[str, Any]]:
    """Return small arguments of a model's class: of those that its entry point writes down, and of the class's defaults."""
    try:
        with _replaced_builder(function, None):
            function()
    except _ReachedError as reached:
        defaults = {key: p.default for key, p in inspect.signature(reached.cls.__init__).parameters.items()}
        known = {key: value for key, value in defaults.items() if value is not inspect.Parameter.empty}
        found = []
        for given in ({**known, **reached.arguments}, reached.arguments):
            small = {key: tiny(key, value, side) for key, value in given.items() if key in defaults}
            found.append({key: value for key, value in small.items() if value != given[key] and _is_plain(value)})
        few = {key: value for key, value in found[0].items() if _DEPTHS.fullmatch(key)}
        return [{"inside": fields} for fields in (*found, few) if fields]
    except Exception:  # an entry point that wants more
        return []
    return []


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def changes_of(name: str, function: Any, side: int) -> list[dict[str, Any]]:
    """Return fields in the order in which they are tried: all small, few layers alone, the module's configuration, none."""
    written = written_arguments(function)
    small = {key: tiny(key, value, side) for key, value in written.items()}
    small = {key: value for key, value in small.items() if value != written[key]}
    few = {key: value for key, value in small.items() if _DEPTHS.fullmatch(key)}
    sized = {"img_size": side}
    table = vars(sys.modules[function.__module__]).get("model_cfgs") or {}
    found = [{"small": side, **sized}, {"small": side}] if name in table else []
    found += [{**small, **sized}, small, {**few, **sized}, few, *arguments_inside(name, function, side), sized, {}]
    return [fields for index, fields in enumerate(found) if fields not in found[:index]]


def _size_of(name: str, place: int) -> tuple[int, int]:
    return next((rank for rank, hint in enumerate(_SMALL) if hint in name), len(_SMALL)), place


def find(module: str, names: list[str]) -> dict[str, Any]:
    """Return the recipe of a family, or what stood in the way."""
    timm = importlib.import_module("timm")
    problems: dict[str, None] = {}
    ordered = sorted(names, key=lambda name: _size_of(name, names.index(name)))
    for name in ordered[:2]:
        for side in _SIDES:
            for fields in changes_of(name, timm.models.model_entrypoint(name), side):
                recipe = {"type": f"timm/{name}", "kind": "image", "class": name, "config": fields, "library": "timm"}
                recipe |= {"batch": [["x", "normal", 3, side, side]], "loss": "outputs"}
                try:
                    return {**recipe, **_facts(recipe)}
                except TimeoutError:
                    raise
                except Exception as error:
                    problems[f"{name}: {type(error).__name__}: {' '.join(str(error).split())[:150]}"] = None
    return {"type": f"timm/{module}", "library": "timm", "problem": " | ".join(problems)[:900]}


def _facts(recipe: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(0)
    try:
        with torch.device("meta"):
            count = sum(p.numel() for p in build(recipe["class"], copy.deepcopy(recipe["config"])).parameters())
    except (RuntimeError, NotImplementedError):  # code that reads values while it builds
        count = 0
    if count > _MOST_PARAMETERS:
        raise ValueError(f"{count} parameters")
    model = recipes.build(recipe)
    count = sum(p.numel() for p in model.parameters())
    if count > _MOST_PARAMETERS:
        raise ValueError(f"{count} parameters")
    batch = recipes.make_batch(recipe, 0)
    begin = time.perf_counter()
    loss = recipes.OutputsLoss(None)(model(**batch), batch)
    loss.backward()
    if not bool(torch.isfinite(loss)):
        raise ValueError("not finite")
    mixes = recipes.keeps_batch_statistics(model, recipe)
    return {"parameters": count, "seconds": round(time.perf_counter() - begin, 3), "mixes": mixes}


def _wanted(timm: Any, known: set[str]) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Yield the modules that have models and no row yet, each with its search."""
    for module in sorted(timm.list_modules()):
        all_names = timm.list_models(module=module)
        names = [name for name in all_names if not name.startswith("test_")]
        if names and not known & {module, *all_names}:
            yield module, functools.partial(find, module, names)


def main() -> None:
    arguments, rows = finder.begin(__doc__)
    vision.load_if_there()
    known = {row["type"].removeprefix("timm/") for row in rows}
    finder.find_each("timm", _wanted(importlib.import_module("timm"), known), arguments)


if __name__ == "__main__":
    main()
