"""The commands `meshwright checkpoint convert` and `export`: a model's weights from one kind of file to another."""

from __future__ import annotations

import contextlib
import functools
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

from meshwright.checkpoint.blocks import Digesting
from meshwright.checkpoint.bridges.casting import CASTABLE, cast_pieces
from meshwright.checkpoint.bridges.drafts import draft_of, refuse_existing
from meshwright.checkpoint.bridges.huggingface import read_config, write_directory
from meshwright.checkpoint.bridges.kinds import Kind, kind_of_source, kind_of_target, open_weights
from meshwright.checkpoint.bridges.own_format import step_of, write_checkpoint
from meshwright.checkpoint.bridges.safetensors_files import stream_file
from meshwright.checkpoint.bridges.weight_source import Weights
from meshwright.checkpoint.durable import write_new_file
from meshwright.checkpoint.listing import printable
from meshwright.checkpoint.tensor_files import DeferredTensor, memory_of
from meshwright.errors import CheckpointError, ConfigError, did_you_mean
from meshwright.units import format_bytes, parse_bytes

__all__: list[str] = []


def convert(
    source: Path,
    target: Path,
    *,
    source_kind: Kind | None = None,
    target_kind: Kind | None = None,
    step: int | None = None,
    dtype: str | None = None,
    config: Path | None = None,
    max_shard_size: str = "5GB",
    copies_of_tied: bool = False,
    allow_pickle: bool = False,
    prefix: str | None = None,
    tied: Sequence[str] = (),
) -> int:
    """Write a model's weights as another kind of file, tensor by tensor, and say what was written.

    Args:
        source: A checkpoint or a directory of them, a safetensors file, a Hugging Face directory, or one of torch's DCP.
        target: What is made; it must not exist. A directory of steps, one step's, a safetensors file or a Hugging Face directory.
        source_kind: The source's kind; None recognises it by what is there.
        target_kind: The target's; None goes by its name.
        step: Which step of a directory of steps is read, and which one a new checkpoint has; the newest, and 0, where it is None.
        dtype: Type that floating-point tensors are cast to, from "float16", "bfloat16", "float32" and "float64".
        config: A config.json, or a directory with one, that a Hugging Face directory gets.
        max_shard_size: Largest shard of a Hugging Face directory, as in "5GB".
        copies_of_tied: Whether tied weights are written under each of their names; else under one of them.
        allow_pickle: Whether DCP's index, a pickle, may be read.
        prefix: What names of the model's tensors begin with in a directory of DCP.
        tied: "NAME=KEPT" for weights that the model ties and the source holds twice; they must be equal, and are kept once.

    Returns:
        The exit code, 0.

    Raises:
        CheckpointError: The source is damaged or refused, or the target's kind cannot hold it.
        ConfigError: An option is wrong, or the target exists.
        StorageError: A file cannot be read or written.
    """
    refuse_existing(target)
    kind = source_kind or kind_of_source(source)
    goal = target_kind or kind_of_target(target, kind)
    _check_options(kind, goal, target, step=step, dtype=dtype, config=config, copies_of_tied=copies_of_tied)
    most, own_config = parse_bytes(max_shard_size), None if config is None else read_config(config)
    read_step = step if kind == "meshwright" else None
    with open_weights(source, kind, step=read_step, allow_pickle=allow_pickle, prefix=prefix) as weights:
        for pair in tied:
            _tie(weights, *pair.partition("=")[::2])
        named, aliases = _to_write(weights, dtype, copies_of_tied)
        size = sum(tensor.nbytes for tensor in named.values())
        weights.notes += _notes_on_config(named, own_config)
        with _progress(size) as advance:
            named = {name: _counted(tensor, advance) for name, tensor in named.items()}
            if goal == "safetensors":
                with draft_of(target) as draft:
                    stream = stream_file(named, aliases)
                    write_new_file(draft, stream, stream.num_bytes)
            elif goal == "hf":
                write_directory(target, named, aliases, max_shard_bytes=most, config=own_config)
            else:
                target = write_checkpoint(target, named, aliases, step=step or 0, origin=weights.kind)
        if aliases:
            how = "kept as further names" if goal == "meshwright" else "left out (--copies-of-tied writes them)"
            weights.notes.append(f"names of tied weights, {how}: {', '.join(list(aliases)[:5])}")
    for note in weights.notes:
        sys.stderr.write(f"note: {printable(note)}\n")
    sys.stdout.write(
        f"{kind} {printable(weights.path)} -> {goal} {printable(target)}: {len(named)} tensors, {format_bytes(size)}\n"
    )
    return 0


def _check_options(
    kind: Kind,
    goal: Kind,
    target: Path,
    *,
    step: int | None,
    dtype: str | None,
    config: Path | None,
    copies_of_tied: bool,
) -> None:
    if goal == "dcp":
        raise ConfigError(f"{target}: directories of DCP are read, not written", fix="--to meshwright")
    if kind == goal == "meshwright":
        raise ConfigError(f"both are checkpoints of Meshwright, {target} would be a copy", fix=f"cp -r SRC {target}")
    if dtype is not None and dtype not in CASTABLE:
        raise ConfigError(f"--dtype {dtype} (rule: one of {', '.join(CASTABLE)})", fix="--dtype bfloat16")
    if config is not None and goal != "hf":
        raise ConfigError(f"--config goes with a Hugging Face directory, {target} is of kind {goal}", fix="--to hf")
    if copies_of_tied and goal == "meshwright":
        raise ConfigError(
            "--copies-of-tied goes with files of others; a checkpoint keeps tied names", fix="leave it out"
        )
    if step is not None and "meshwright" not in (kind, goal):
        raise ConfigError(
            "--step goes with checkpoints of Meshwright, none is read or written here", fix="leave it out"
        )
    named_step = step_of(target) if goal == "meshwright" else None
    if named_step is not None and step not in (None, named_step):
        raise ConfigError(f"--step {step} and the name {target.name} differ", fix=f"--step {named_step}")


def _tie(weights: Weights, other: str, kept: str) -> None:
    """Make a tensor a further name of another one, which must have the same entries."""
    for name in (other, kept):
        if name not in weights.tensors or other == kept:
            hint = did_you_mean(name, weights.tensors)
            raise ConfigError(f"--tied {other}={kept}: {name!r} is no tensor of its own in {weights.path}{hint}")
    if weights.tensors[other] != weights.tensors[kept] or _digest(weights, other) != _digest(weights, kept):
        raise CheckpointError(f"--tied {other}={kept}: the two differ in {weights.path}", fix="leave it out")
    del weights.tensors[other]
    weights.aliases |= {name: kept for name, own in weights.aliases.items() if own == other} | {other: kept}


def _digest(weights: Weights, name: str) -> bytes:
    found = Digesting(memory_of(piece.contiguous()) for piece in weights.pieces(name))
    for _ in found:
        pass
    return found.table()


def _to_write(
    weights: Weights, dtype: str | None, copies_of_tied: bool
) -> tuple[dict[str, DeferredTensor], dict[str, str]]:
    """Return the tensors to write, and the names that are left out of them."""
    if not weights.tensors:
        raise CheckpointError(f"{weights.path} holds no tensor of a model")
    named: dict[str, DeferredTensor] = {}
    stays: Counter[str] = Counter()
    for name, kind in weights.tensors.items():
        read: Callable[[], Iterable[torch.Tensor]] = functools.partial(weights.pieces, name)
        wanted = kind.dtype
        if dtype is not None and kind.dtype in CASTABLE:
            wanted = dtype
        elif dtype is not None:
            stays[kind.dtype] += 1
        if wanted != kind.dtype:
            read = functools.partial(_cast, name, read, wanted)
        named[name] = DeferredTensor(wanted, kind.shape, read)
    if stays:
        text = ", ".join(f"{count} of {kind}" for kind, count in stays.items())
        weights.notes.append(f"tensors that keep their type: {text}")
    if copies_of_tied:
        named |= {other: named[kept] for other, kept in weights.aliases.items()}
        return named, {}
    return named, weights.aliases


def _cast(name: str, read: Callable[[], Iterable[torch.Tensor]], dtype: str) -> Iterator[torch.Tensor]:
    return cast_pieces(name, read(), dtype)


def _counted(tensor: DeferredTensor, advance: Callable[[int], None]) -> DeferredTensor:
    def read() -> Iterator[torch.Tensor]:
        for piece in tensor.read():
            yield piece
            advance(piece.nbytes)

    return tensor._replace(read=read)


def _notes_on_config(named: Mapping[str, DeferredTensor], config: bytes | None) -> list[str]:
    found = {} if config is None else json.loads(config)
    said = found.get("dtype", found.get("torch_dtype"))
    floats = {tensor.dtype for tensor in named.values() if tensor.dtype in CASTABLE}
    if said is None or not floats or said in floats:
        return []
    return [
        f"config.json says dtype {str(said)[:40]!r}, the weights are {', '.join(sorted(floats))}: transformers casts them"
    ]


@contextlib.contextmanager
def _progress(num_bytes: int) -> Iterator[Callable[[int], None]]:
    """Yield a function that is told how much was written; on a terminal it moves a bar."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield lambda _count: None
        return
    with Progress(BarColumn(), DownloadColumn(), TimeRemainingColumn(), console=console, transient=True) as bar:
        task = bar.add_task("", total=num_bytes)
        yield lambda count: bar.advance(task, count)
