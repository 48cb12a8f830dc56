"""Batches of a script, drawn from the program's seed, and how they are cut into shares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from benchmarks.fuzz.models import IGNORED
from torch import Tensor


def make_batch(program: dict[str, Any], action: dict[str, Any]) -> Any:
    """Return the batch of one action: `n` samples of length `t`, with the flags that it passes."""
    spec, form = program["model"], program["loss"]
    source = torch.Generator().manual_seed(1000 * program.get("data_seed", 0) + action.get("batch", 0))
    samples, length = action["n"], action.get("t", 6)
    inputs = draw_inputs(spec, samples, length, source)
    keywords: dict[str, Any] = {}
    if action.get("mask", program.get("mask")) and spec["domain"] in ("tokens", "series"):
        lengths = torch.randint(1, length + 1, (samples,), generator=source)
        keywords["mask"] = torch.arange(length)[None, :] < lengths[:, None]
        if "trim" in spec.get("root", {}):
            keywords["lengths"] = lengths
    labels = draw_labels(spec, form, samples, length, source)
    if "trim" in spec.get("root", {}) and "lengths" in keywords and labels.dim() > 1:
        labels = labels[:, : int(keywords["lengths"].max())]  # what a collate function would have cut
    if "rounds" in spec.get("root", {}):
        most = action.get("rounds", 1)
        keywords["rounds"] = torch.ones(samples, dtype=torch.long)
        keywords["rounds"][0] = most  # so that the first rank has more to do than the others
    keywords |= action.get("flags", {})
    if program.get("ragged") and "mask" in keywords and labels.dim() > 1:
        labels = labels.masked_fill(~keywords["mask"], IGNORED)
    if form["kind"] == "weighted":
        keywords["weights"] = torch.rand(samples, generator=source, dtype=torch.float64) + 0.1
    return in_form(program.get("batch_form", "dict"), inputs, keywords, labels)


def in_form(form: str, inputs: Tensor, keywords: dict[str, Any], labels: Tensor) -> Any:
    if form == "dict" or "weights" in keywords or (form == "pair" and keywords):
        return {"x": inputs, "labels": labels, **keywords}
    if form == "pair_tuple" and not set(keywords) - {"mask"}:
        return (tuple([inputs, keywords["mask"]] if "mask" in keywords else [inputs]), labels)
    return (inputs, labels) if form == "pair" and not keywords else ({"x": inputs, **keywords}, labels)


def draw_inputs(spec: dict[str, Any], samples: int, length: int, source: torch.Generator) -> Tensor:
    domain = spec["domain"]
    if domain == "tokens":
        return torch.randint(spec["vocabulary"], (samples, length), generator=source)
    shape = {"series": (samples, length, spec.get("inputs", 5)), "vectors": (samples, spec.get("inputs", 5))}
    size = shape.get(domain, (samples, 3, length, length))
    return torch.randn(size, generator=source, dtype=torch.float64)


def draw_labels(
    spec: dict[str, Any], form: dict[str, Any], samples: int, length: int, source: torch.Generator
) -> Tensor:
    is_per_token = spec["domain"] in ("tokens", "series") and spec.get("pool", "none") == "none"
    shape = (samples, length) if is_per_token else (samples,)
    if form["kind"] == "mse":
        return torch.randn((*shape, spec["outputs"]), generator=source, dtype=torch.float64)
    labels = torch.randint(spec["outputs"], shape, generator=source)
    if form["kind"] == "masked" or (form["kind"] == "own" and form.get("ignored")):
        drop = torch.rand(shape, generator=source) < 0.4
        drop.view(samples, -1)[:, 0] = False
        labels = labels.masked_fill(drop, IGNORED)
    return labels


def trimmed(share: Any) -> Any:
    """Return a share padded to its own longest sample alone, as a collate function on each rank would give it."""
    if share is None:
        return None
    longest = int(share["mask"].sum(1).max())
    return {key: v[:, :longest] if isinstance(v, Tensor) and v.dim() > 1 else v for key, v in share.items()}


def call(model: Any, batch: Any) -> Any:
    """Call a model on a batch: a mapping as keywords, else the first of a pair."""
    inputs = batch if isinstance(batch, Mapping) else batch[0]
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def samples_in(batch: Any) -> int:
    found = first_tensor(batch)
    return found.shape[0]


def first_tensor(tree: Any) -> Tensor:
    if isinstance(tree, Tensor):
        return tree
    items = tree.values() if isinstance(tree, Mapping) else tree
    return next(first_tensor(item) for item in items if isinstance(item, Tensor | Mapping | tuple))


def sizes_of(total: int, parts: int) -> list[int]:
    return [total // parts + (index < total % parts) for index in range(parts)]


def cut(batch: Any, parts: int) -> list[Any]:
    """Return contiguous parts, the larger ones first; None where nothing is left."""
    pieces, start = [], 0
    for size in sizes_of(samples_in(batch), parts):
        pieces.append(part_of(batch, start, start + size) if size else None)
        start += size
    return pieces


def part_of(tree: Any, start: int, stop: int) -> Any:
    if isinstance(tree, Tensor):
        return tree[start:stop] if tree.dim() else tree
    if isinstance(tree, Mapping):
        return {key: part_of(value, start, stop) for key, value in tree.items()}
    if isinstance(tree, tuple):
        return tuple(part_of(value, start, stop) for value in tree)
    return tree


def pieces(batch: Any, mode: str, degree: int, micro_batches: int) -> Sequence[Sequence[Any]]:
    """Return for each rank or replica its micro-batches, None for an empty one of a replica.

    One process cuts micro-batches first and each of them for its replicas; ranks cut their own shares.
    """
    if mode == "data_parallel":
        rows = [cut(piece, degree) for piece in cut(batch, micro_batches) if piece is not None]
        return [[row[replica] for row in rows] for replica in range(degree)]
    shares = cut(batch, degree)
    return [[] if share is None else [p for p in cut(share, micro_batches) if p is not None] for share in shares]
