"""Forms of shares as JSON: what ranks tell one another of a batch's containers, tensors and numbers before they join it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from meshwright.errors import ApplyError
from meshwright.trees import LEAVES

__all__: list[str] = []

_MAX_SHOWN = 160
_PLAIN = {"dict": dict, "list": list, "tuple": tuple}
"""Containers that a rank can build which has never had a sample."""


def form_of(tree: Any, count: int) -> list[Any]:
    """Return the form of a batch of so many samples as JSON, numbers without dims among it: [kind, ...].

    Raises:
        ApplyError: It holds what cannot be joined.
    """
    if isinstance(tree, torch.Tensor):
        return _form_of_tensor(tree)
    if isinstance(tree, Mapping):
        return ["mapping", _class_name(tree), [[_key(key), form_of(value, count)] for key, value in tree.items()]]
    if isinstance(tree, (list, tuple)) and not isinstance(tree, PackedSequence):
        items = [form_of(item, count) for item in tree]
        if isinstance(tree, list) and len(tree) == count and all(kind == "value" for kind, *_ in items):
            raise ApplyError(
                f"a batch of {count} samples holds a list of {count} numbers or texts, which may be one a sample"
            )
        return ["items", _class_name(tree), items]
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        names = [field.name for field in dataclasses.fields(tree) if field.init]
        return ["mapping", _class_name(tree), [[name, form_of(getattr(tree, name), count)] for name in names]]
    if type(tree) not in LEAVES:
        raise ApplyError(f"a batch holds a {type(tree).__name__}")
    return ["value", _class_name(tree), tree if type(tree) in (int, float, bool, str, type(None)) else repr(tree)]


def _form_of_tensor(tensor: torch.Tensor) -> list[Any]:
    is_plain = type(tensor) is torch.Tensor and tensor.layout == torch.strided and not tensor.is_quantized
    if not is_plain or tensor.is_nested:
        raise ApplyError(f"a batch holds a tensor of another kind ({type(tensor).__name__}, {tensor.layout})")
    if tensor.requires_grad:
        raise ApplyError("a tensor of a batch requires a gradient, which would not reach the rank that has given it")
    kind = str(tensor.dtype).removeprefix("torch.")
    return ["rows", kind, list(tensor.shape[1:])] if tensor.dim() else ["number", kind, repr(tensor.item())]


def _class_name(tree: Any) -> str:
    return f"{type(tree).__module__}.{type(tree).__qualname__}".removeprefix("builtins.")


def _key(key: Any) -> Any:
    if type(key) not in (str, int, bool, type(None)):
        raise ApplyError(f"a batch has a key of class {type(key).__name__}")
    return key


def obstacle_of(told: Sequence[Mapping[str, Any]], ranks: Sequence[int]) -> str:
    """Return why shares of these forms cannot be joined, or nothing."""
    for rank, row in zip(ranks, told, strict=True):
        if "obstacle" in row:
            return f"{row['obstacle']} (rank {rank})"
    full = [(rank, row["form"]) for rank, row in zip(ranks, told, strict=True) if row["count"]]
    if not full:
        return "no rank has a sample"
    first, form = full[0]
    for rank, other in full:
        if other != form:
            shown = [json.dumps(each)[:_MAX_SHOWN] for each in _first_difference(form, other)]
            return f"ranks {first} and {rank} have batches of other forms, {shown[0]} and {shown[1]}"
    for rank, row in zip(ranks, told, strict=True):
        if not row["count"] and row["form"] != form and (strange := _strange_class(form)):
            return f"rank {rank} has no sample, and cannot make a {strange} by itself"
    return ""


def _first_difference(form: list[Any], other: list[Any]) -> tuple[Any, Any]:
    """Return the smallest parts in which two forms differ first."""
    alike = form[:2] == other[:2] and form[0] in ("mapping", "items") and len(form[2]) == len(other[2])
    pairs = zip(form[2], other[2], strict=True) if alike else ()
    for one, two in pairs:
        if one != two:
            if form[0] == "items":
                return _first_difference(one, two)
            return _first_difference(one[1], two[1]) if one[0] == two[0] else (one[0], two[0])
    return form, other


def _strange_class(form: list[Any]) -> str:
    """Return a class in a form that only a rank with a sample can make, or nothing."""
    kind, name, held = form
    if kind == "value":
        return "" if held is None or name in ("int", "float", "bool", "str") else name
    if kind not in ("mapping", "items"):
        return ""
    inside = [entry[1] for entry in held] if kind == "mapping" else held
    return "" if name in _PLAIN and not any(map(_strange_class, inside)) else name


def built_of(form: list[Any]) -> Any:
    """Return a batch without samples of a form that has no strange classes."""
    kind, name, held = form
    if kind == "value":
        return held
    if kind == "number":
        dtype = getattr(torch, name)
        read = complex if dtype.is_complex else float if dtype.is_floating_point else int
        return torch.tensor(held == "True" if dtype == torch.bool else read(held), dtype=dtype)
    if kind == "rows":
        return torch.zeros((0, *held), dtype=getattr(torch, name))
    return _PLAIN[name]([(key, built_of(inside)) for key, inside in held] if kind == "mapping" else map(built_of, held))
