"""Directories as transformers reads and writes them: model.safetensors, or shards with an index, and config.json.

Source: https://huggingface.co/docs/transformers/main/en/models (sharded checkpoints).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from meshwright.checkpoint.bridges.drafts import draft_of
from meshwright.checkpoint.bridges.safetensors_files import SafetensorsWeights, stream_file
from meshwright.checkpoint.bridges.weight_source import open_guarded
from meshwright.checkpoint.durable import read_at, write_new_file
from meshwright.checkpoint.strict_json import parse_object
from meshwright.checkpoint.tensor_files import DeferredTensor
from meshwright.errors import CheckpointError, ConfigError

__all__: list[str] = []

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
_MOST_JSON = 1 << 28


class HuggingFaceWeights(SafetensorsWeights):
    """A model that transformers has saved, in one file or in shards. Names are as they stand there.

    Args:
        path: The directory.

    Raises:
        CheckpointError: A file breaks a rule, or the index and the files differ.
        StorageError: It cannot be read.
    """

    kind: ClassVar[str] = "hf"

    def __init__(self, path: Path) -> None:
        super().__init__(path / WHOLE if os.path.lexists(path / WHOLE) else path / INDEX)

    def _add_file(self, name: str) -> list[str]:
        if name == INDEX:
            self._add_shards()
            return list(self.tensors)
        if os.path.lexists(self.path / INDEX) and name == WHOLE:
            raise CheckpointError(
                f"{self.path} has {WHOLE} and {INDEX} (rule: one of them, so that it is clear which weights are meant)",
                fix=f"name {self.path / WHOLE}, or move it away",
            )
        return super()._add_file(name)

    def _add_shards(self) -> None:
        path, descriptor, size = self.open_inside(INDEX)
        if size > _MOST_JSON:
            raise CheckpointError(f"{path} is refused: it has {size} bytes (rule: at most {_MOST_JSON})")
        places = parse_object(read_at(path, descriptor, 0, size), str(path)).get("weight_map")
        is_map = isinstance(places, dict) and all(isinstance(file, str) for file in places.values())
        if not isinstance(places, dict) or not is_map or not places:
            raise CheckpointError(f"{path} is refused: its weight_map is no object of file names")
        for file in dict.fromkeys(places.values()):
            if not file.endswith(".safetensors"):
                raise CheckpointError(f"{path} names the file {file[:200]!r} (rule: it ends in .safetensors)")
            for name in self._add_file(file):
                if places.get(name) != file:
                    raise CheckpointError(f"{self.path / file} holds {name[:200]!r}, {INDEX} says {places.get(name)!r}")
        missing = [name for name in places if name not in self.tensors]
        if missing:
            shown = ", ".join(repr(name[:200]) for name in missing[:5])
            raise CheckpointError(f"{len(missing)} tensors that {path} lists are not in their files: {shown}")
        self.tensors = {name: self.tensors[name] for name in places}


def read_config(path: Path) -> bytes:
    """Return the contents of a config.json.

    Args:
        path: The file, or a directory that has one.

    Raises:
        CheckpointError: It is missing, a link, or no JSON object.
        StorageError: It cannot be read.
    """
    path = path / CONFIG if path.is_dir() else path
    descriptor = open_guarded(path)
    try:
        size = os.fstat(descriptor).st_size
        if size > _MOST_JSON:
            raise CheckpointError(f"{path} is refused: it has {size} bytes (rule: at most {_MOST_JSON})")
        data = read_at(path, descriptor, 0, size)
    finally:
        os.close(descriptor)
    parse_object(data, str(path))
    return data


def write_directory(
    path: Path,
    named: Mapping[str, DeferredTensor],
    aliases: Mapping[str, str],
    *,
    max_shard_bytes: int,
    config: bytes | None = None,
) -> Path:
    """Write a directory that `from_pretrained` loads.

    Args:
        path: The directory, which does not exist.
        named: FQN -> tensor.
        aliases: Names of tied weights -> the name in `named`; they are left out, as transformers does.
        max_shard_bytes: Largest shard, but for a single tensor that is larger [bytes].
        config: Contents of config.json, if there is to be one.

    Raises:
        CheckpointError: A source is damaged, safetensors has no such type, or the configuration denies ties.
        ConfigError: The path exists.
        StorageError: The disk is full or fails.
    """
    _check_ties(aliases, config)
    shards = split_into_shards({name: tensor.nbytes for name, tensor in named.items()}, max_shard_bytes)
    files = {
        WHOLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors": names
        for number, names in enumerate(shards, start=1)
    }
    with draft_of(path) as draft:
        draft.mkdir()
        for file, names in files.items():
            stream = stream_file({name: named[name] for name in names}, aliases)
            write_new_file(draft / file, stream, stream.num_bytes)
        if len(files) > 1:
            places = {name: file for file, names in files.items() for name in names}
            total = sum(tensor.nbytes for tensor in named.values())
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
            write_new_file(draft / INDEX, [json.dumps(index, indent=2).encode() + b"\n"])
        if config is not None:
            write_new_file(draft / CONFIG, [config])
    return path


def split_into_shards(sizes: Mapping[str, int], most: int) -> list[list[str]]:
    """Return names in shards, as huggingface_hub splits them: in their order, a tensor that is larger alone.

    Args:
        sizes: Name -> size [bytes].
        most: Largest shard [bytes].

    Raises:
        ConfigError: The largest shard is none.

    >>> split_into_shards({"a": 3, "b": 9, "c": 3, "d": 1}, 6)
    [['b'], ['a', 'c'], ['d']]
    """
    if most < 1:
        raise ConfigError(f"a shard of {most} bytes (rule: at least 1)", fix="--max-shard-size 5GB")
    shards: list[list[str]] = []
    current: list[str] = []
    fill = 0
    for name, size in sizes.items():
        if size > most:
            shards.append([name])
            continue
        if current and fill + size > most:
            shards.append(current)
            current, fill = [], 0
        current.append(name)
        fill += size
    return [*shards, current] if current else shards


def _check_ties(aliases: Mapping[str, str], config: bytes | None) -> None:
    """Refuse to leave out tied weights where the configuration says that they are not tied: they would be drawn anew."""
    if not aliases or config is None or json.loads(config).get("tie_word_embeddings") is not False:
        return
    other, kept = next(iter(aliases.items()))
    raise CheckpointError(
        f"{other!r} is tied to {kept!r} and would be left out, {CONFIG} says tie_word_embeddings=false",
        fix="--copies-of-tied",
    )
