"""Weights that transformers has saved, read into a model in pieces: under any plan a rank holds no second copy."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from meshwright.apply.state.buffers import persistent_buffers
from meshwright.checkpoint.bridges.huggingface import INDEX, WHOLE, HuggingFaceWeights
from meshwright.errors import CheckpointError, ConfigError, tensors_differ

__all__: list[str] = []


def with_pretrained(
    build_model: nn.Module | Callable[[], nn.Module], directory: str | os.PathLike[str]
) -> nn.Module | Callable[[], nn.Module]:
    """Return the model with the weights of a directory, or a function that builds one.

    Raises:
        ConfigError: What is named is no path.
    """
    given: object = directory
    if not isinstance(given, str | os.PathLike) or "\0" in str(given):
        raise ConfigError(
            f"pretrained={given!r} (rule: a text or a path)", fix="name a directory that save_pretrained wrote"
        )
    if isinstance(build_model, nn.Module):
        load_pretrained(build_model, directory)
        return build_model
    return functools.partial(build_pretrained, build_model, os.fspath(directory))


def build_pretrained(build_model: Callable[[], nn.Module], directory: str) -> nn.Module:
    """Return what a function builds, with the weights of a directory."""
    module = build_model()
    if isinstance(module, nn.Module):  # anything else is refused, with the right words, by `apply_plan`
        load_pretrained(module, directory)
    return module


def load_pretrained(module: nn.Module, directory: str | os.PathLike[str]) -> None:
    """Fill parameters and persistent buffers from a directory that `save_pretrained` wrote, cast to the model's own types.

    Names may lack the model's `base_model_prefix`, or have it, as where the weights are those of a model with another head.
    Further names of a tied parameter may be missing; where they are there, they have its value.

    Args:
        module: The model.
        directory: Has model.safetensors, or shards with an index.

    Raises:
        CheckpointError: Names or shapes differ; the message lists them. Nothing was written then. Or a file is damaged.
        ConfigError: There is no such directory, or it has no weights in the safetensors format.
        StorageError: A file cannot be read.
    """
    path = Path(directory)
    _require_weights(path)
    with HuggingFaceWeights(path) as weights:
        names = [*weights.tensors, *weights.aliases]
        sources, lines = _match(module, names)
        for name, tensor in _tensors_of(module):
            source = sources.get(name)
            kind = None if source is None else weights.tensors[weights.aliases.get(source, source)]
            if kind is not None and kind.shape != tuple(tensor.shape):
                lines.append(f"{name}: {list(kind.shape)} there, the model has {list(tensor.shape)}")
        lines += [] if lines else _different_ties(module, sources, weights)
        if lines:
            raise CheckpointError(
                f"{path} has the weights of another model: {tensors_differ(lines)}",
                fix="build the model from the config.json of the same directory",
            )
        filled: set[int] = set()
        for name, tensor in _tensors_of(module):
            if name in sources and id(tensor) not in filled:
                filled.add(id(tensor))
                _fill(tensor, weights, weights.aliases.get(sources[name], sources[name]))


def _require_weights(path: Path) -> None:
    if not path.is_dir():
        raise ConfigError(
            f"pretrained: there is no directory {path}", fix="name a directory that save_pretrained wrote"
        )
    if os.path.lexists(path / WHOLE) or os.path.lexists(path / INDEX):
        return
    pickles = sorted(file.name for file in path.glob("*.bin"))
    found = f"only {', '.join(pickles[:3])}, which are pickles and run code" if pickles else "no weights"
    raise ConfigError(
        f"pretrained: {path} has {found} (rule: {WHOLE}, or shards with {INDEX})",
        fix="save it with save_pretrained(DIR, safe_serialization=True)",
    )


def _tensors_of(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return (FQN, tensor) of what a state dict has, each name of a tied one."""
    kept = {name for name, _ in persistent_buffers(module)}
    buffers = [(name, buffer) for name, buffer in module.named_buffers(remove_duplicate=False) if name in kept]
    return [*module.named_parameters(remove_duplicate=False), *buffers]


def _match(module: nn.Module, names: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return FQN -> the name in the files, and lines on what has no partner."""
    named = _tensors_of(module)
    prefix = getattr(module, "base_model_prefix", "")
    prefix = f"{prefix}." if isinstance(prefix, str) and prefix else ""
    known = set(names)
    sources = {name: name for name, _ in named if name in known}
    taken_by = {name: id(tensor) for name, tensor in named if name in known}
    for name, tensor in named:
        if name in sources or not prefix:
            continue
        for candidate in (prefix + name, name.removeprefix(prefix)):
            # A tensor there fills one here: `model.head.weight` and `head.weight` are two.
            if candidate in known and taken_by.setdefault(candidate, id(tensor)) == id(tensor):
                sources[name] = candidate
                break
    filled = {id(tensor) for name, tensor in named if name in sources}
    lines = [f"missing: {name}" for name, tensor in named if name not in sources and id(tensor) not in filled]
    used = set(sources.values())
    return sources, lines + [f"unexpected: {name}" for name in names if name not in used]


def _different_ties(module: nn.Module, sources: Mapping[str, str], weights: HuggingFaceWeights) -> list[str]:
    """Return lines on tensors that have one value here and several there."""
    lines: list[str] = []
    first: dict[int, str] = {}
    for name, tensor in _tensors_of(module):
        if name not in sources:
            continue
        source = weights.aliases.get(sources[name], sources[name])
        other = first.setdefault(id(tensor), source)
        if other != source and not _are_equal(weights, other, source):
            lines.append(f"{other} and {source}: two values there, the model has one parameter for both")
    return lines


def _are_equal(weights: HuggingFaceWeights, one: str, other: str) -> bool:
    if weights.tensors[one].dtype != weights.tensors[other].dtype:
        return False
    pairs = zip(weights.pieces(one), weights.pieces(other), strict=True)
    return all(torch.equal(mine.view(torch.uint8), its.view(torch.uint8)) for mine, its in pairs)


def _fill(tensor: Tensor, weights: HuggingFaceWeights, name: str) -> None:
    with torch.no_grad():
        if not tensor.is_contiguous():
            tensor.copy_(weights.read(name))
            return
        flat, start = tensor.detach().view(-1), 0
        for piece in weights.pieces(name):
            flat[start : start + piece.numel()].copy_(piece)
            start += piece.numel()
