"""Kinds of things that hold a model's weights, recognised by what is there or by a name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal, TypeAlias

from meshwright.checkpoint.bridges.huggingface import INDEX, WHOLE, HuggingFaceWeights
from meshwright.checkpoint.bridges.own_format import CheckpointWeights, step_of
from meshwright.checkpoint.bridges.safetensors_files import SafetensorsWeights
from meshwright.checkpoint.bridges.weight_source import Weights
from meshwright.checkpoint.durable import told_of
from meshwright.checkpoint.step_directories import is_step, root_of
from meshwright.checkpoint.store import Store
from meshwright.errors import CheckpointError, ConfigError

__all__: list[str] = []

Kind: TypeAlias = Literal["meshwright", "safetensors", "hf", "dcp"]
_DCP_INDEX = ".metadata"


def kind_of_source(path: Path) -> Kind:
    """Return the kind of what is at a path.

    Raises:
        CheckpointError: It is of no kind that is known, or could be of two.
        StorageError: It cannot be read.
    """
    with told_of(path, "read"):
        os.stat(path)
    if not path.is_dir():
        if path.suffix == ".safetensors":
            return "safetensors"
        raise CheckpointError(
            f"{path} is no file of weights that is known (rule: it ends in .safetensors)",
            fix="--from safetensors, if it is one; save other files as safetensors first",
        )
    found: list[Kind] = []
    if is_step(path) or Store(root_of(path)).saved():
        found.append("meshwright")
    if any(os.path.lexists(path / name) for name in (WHOLE, INDEX)):
        found.append("hf")
    if os.path.lexists(path / _DCP_INDEX):
        found.append("dcp")
    if len(found) != 1:
        what = f"could be {' and '.join(found)}" if found else "holds no weights of a kind that is known"
        raise CheckpointError(
            f"{path} {what} (rule: step-... directories or a manifest.json, {WHOLE} or its index, or {_DCP_INDEX})",
            fix=f"--from {found[0]}" if found else None,
        )
    return found[0]


def kind_of_target(path: Path, source: str) -> Kind:
    """Return the kind that a name asks for: a file by its suffix, a step by its name, else the other kind than the source's.

    Raises:
        ConfigError: It is almost the name of a step.

    >>> kind_of_target(Path("a.safetensors"), "hf"), kind_of_target(Path("a"), "hf"), kind_of_target(Path("a"), "meshwright")
    ('safetensors', 'meshwright', 'hf')
    """
    if path.suffix == ".safetensors":
        return "safetensors"
    if step_of(path) is not None:
        return "meshwright"
    return "hf" if source == "meshwright" else "meshwright"


def open_weights(
    path: Path,
    kind: Kind | None = None,
    *,
    step: int | None = None,
    allow_pickle: bool = False,
    prefix: str | None = None,
) -> Weights:
    """Open what holds a model's weights.

    Args:
        path: A file or directory.
        kind: Its kind; None recognises it.
        step: Which step, of our own checkpoints.
        allow_pickle: Whether the index of a directory of DCP may be read.
        prefix: What names begin with in a directory of DCP.

    Raises:
        CheckpointError: It is refused; the message names the file and the rule.
        ConfigError: An option does not go with the kind.
        StorageError: It cannot be read.
    """
    kind = kind or kind_of_source(path)
    for option, given, of in (("--step", step is not None, "meshwright"), ("--prefix", prefix is not None, "dcp")):
        if given and kind != of:
            raise ConfigError(
                f"{option} goes with sources of kind {of}, {path} is of kind {kind}", fix=f"leave out {option}"
            )
    if kind == "meshwright":
        return CheckpointWeights(path, step)
    if kind == "safetensors":
        return SafetensorsWeights(path)
    if kind == "hf":
        return HuggingFaceWeights(path)
    from meshwright.checkpoint.bridges.dcp import DcpWeights  # it brings the module `pickle`, which nothing else needs

    return DcpWeights(path, allow_pickle=allow_pickle, prefix=prefix)
