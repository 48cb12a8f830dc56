"""Our own checkpoints as a source of a model's weights, and made of somebody else's."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import ClassVar

import torch

from meshwright.checkpoint.bridges.drafts import draft_of, refuse_existing
from meshwright.checkpoint.bridges.weight_source import TensorKind, Weights
from meshwright.checkpoint.manifest import Manifest, StoredPart, TensorEntry
from meshwright.checkpoint.open_checkpoint import OpenCheckpoint
from meshwright.checkpoint.step_directories import find_steps, is_step, refuse_other_name, root_of
from meshwright.checkpoint.store import SaveUnderWay, Store, name_of
from meshwright.checkpoint.tensor_files import DeferredTensor, TensorFile
from meshwright.errors import ConfigError
from meshwright.layout import ShardLayout

__all__: list[str] = []

PREFIX = "model/"
"""What names of a model's tensors begin with in a checkpoint."""
_STEP_NAME = re.compile(r"step-([0-9]+)(\.[0-9]+)?")


def step_of(path: Path) -> int | None:
    """Return the step that the name of a new checkpoint's directory says, and None where it is a directory of steps.

    Raises:
        ConfigError: It is almost such a name: the directory would be taken for another step, or for a damaged one.

    >>> step_of(Path("step-00000012")), step_of(Path("mine"))
    (12, None)
    """
    match = _STEP_NAME.fullmatch(path.name)
    if match is None:
        return None
    step = int(match[1][:18])
    if name_of(step, 1) != path.name:
        raise ConfigError(f"{path.name} is no name of a new step (rule: step- and 8 digits)", fix=name_of(step, 1))
    return step


class CheckpointWeights(Weights):
    """The model's tensors of a checkpoint, each whole whatever parts it is stored in. All digests are checked first.

    Args:
        path: One step's directory, a directory of steps (the newest sound one), or a run's directory.
        step: This step of them.

    Raises:
        CheckpointError: There is none, or it is damaged.
        StorageError: It cannot be read.
    """

    kind: ClassVar[str] = "meshwright"

    def __init__(self, path: Path, step: int | None = None) -> None:
        super().__init__(path)
        skipped: list[tuple[Path, str]] = []
        if step is None and not is_step(path):
            find_steps(path)
            self._snapshot, skipped = Store(root_of(path)).newest()
            self._opened.callback(self._snapshot.close)
        else:
            place = find_steps(path, step)[0]
            self._snapshot = self._opened.enter_context(OpenCheckpoint(place))
            try:
                if place != path:
                    refuse_other_name(place, self._snapshot.manifest)
                self._snapshot.check()
            except BaseException:
                self.close()
                raise
        self.path = self._snapshot.path
        self.step = self._snapshot.manifest.step
        self.notes += [f"{where.name} is skipped: {reason}" for where, reason in skipped]
        manifest, begin = self._snapshot.manifest, len(PREFIX)
        for name, entry in manifest.tensors.items():
            if name.startswith(PREFIX):
                self.tensors[name[begin:]] = TensorKind(entry.dtype, entry.full_shape)
        self.aliases = {
            other[begin:]: kept[begin:]
            for other, kept in manifest.aliases.items()
            if other.startswith(PREFIX) and kept.startswith(PREFIX)
        }
        others = Counter(name.partition("/")[0] for name in manifest.tensors if not name.startswith(PREFIX))
        if others:
            text = ", ".join(f"{count} of {group}/" for group, count in others.items())
            self.notes.append(f"left out, since it is no weight of the model: {text}")

    def pieces(self, name: str) -> Iterator[torch.Tensor]:
        """Yield a tensor in one piece; see `Weights.pieces`."""
        yield self._snapshot.read(PREFIX + name)


def write_checkpoint(
    path: Path, named: Mapping[str, DeferredTensor], aliases: Mapping[str, str], *, step: int, origin: str
) -> Path:
    """Write a checkpoint that holds a model's weights and nothing else.

    Args:
        path: A directory of steps that is made anew, or, where its name is `step-...`, that step's own directory.
        named: FQN -> tensor.
        aliases: Further FQNs -> the FQN in `named`.
        step: Its step; of a name `step-...` it is that one's.
        origin: The kind of source, which is put in the state.

    Returns:
        The step's directory.

    Raises:
        CheckpointError: A source is damaged.
        ConfigError: The path exists.
        StorageError: The disk is full or fails.
    """
    named_step = step_of(path)
    if named_step is None:
        with draft_of(path) as draft:
            name = _save(Store(draft).begin(step), named, aliases, origin).name
        return path / name
    refuse_existing(path)
    return _save(Store(path.parent).begin(named_step), named, aliases, origin)


def _save(
    under_way: SaveUnderWay, named: Mapping[str, DeferredTensor], aliases: Mapping[str, str], origin: str
) -> Path:
    try:
        file = TensorFile([(PREFIX + name, tensor) for name, tensor in named.items()])
        written = under_way.write("rank-00000.safetensors", file)
        tensors = {
            PREFIX + name: TensorEntry(
                tensor.dtype, tensor.shape, (StoredPart(0, offset, ShardLayout(shape=tensor.shape)),)
            )
            for (name, tensor), offset in zip(named.items(), file.offsets, strict=True)
        }
        manifest = Manifest(
            step=under_way.step,
            epoch=under_way.epoch,
            plan="single",
            files=(written,),
            tensors=tensors,
            aliases={PREFIX + other: PREFIX + kept for other, kept in aliases.items()},
            state={"origin": origin},
        )
        return under_way.commit(manifest)
    except BaseException:
        under_way.discard()
        raise
