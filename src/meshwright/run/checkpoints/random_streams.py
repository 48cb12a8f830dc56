"""Generators of a rank: saved for each rank, and continued where the ranks' shares of the batch are the same.

Ranks with the same share of a batch must draw alike. Where the number of shares is another, no stream of before fits: each share
begins one of its own, from the seed of the run and the step.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from meshwright.apply.engine import Engine
from meshwright.errors import CheckpointError
from meshwright.python_state import PythonState
from meshwright.run.diagnose import RandomState

__all__: list[str] = []

_OF_ENGINE = "engine."


def read_streams(engine: Engine) -> dict[str, Tensor]:
    """Return the states of this rank's generators, by name: bytes."""
    state = RandomState.read(engine.device)
    found = {"torch": state.cpu} | ({} if state.cuda is None else {"cuda": state.cuda})
    text = json.dumps(PythonState().to_json()).encode()
    found["python"] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return found | {_OF_ENGINE + name: generator.get_state() for name, generator in engine.generators().items()}


def set_streams(engine: Engine, streams: Mapping[str, Tensor]) -> None:
    """Continue the streams of `read_streams`; those of the engine as far as it has any yet.

    Raises:
        CheckpointError: A state is none that a generator takes.
    """
    try:
        cuda = streams.get("cuda") if engine.device.type == "cuda" else None
        RandomState(streams["torch"], cuda).restore(engine.device)
        PythonState.from_json(json.loads(bytes(streams["python"].numpy()))).restore()
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(f"the checkpoint's random streams cannot be continued: {error}") from error
    set_own_streams(engine, streams)


def set_own_streams(engine: Engine, streams: Mapping[str, Tensor]) -> None:
    """Continue the engine's own streams."""
    for name, generator in engine.generators().items():
        if _OF_ENGINE + name in streams:
            generator.set_state(streams[_OF_ENGINE + name])


def begin_streams(share: int, seed: int, step: int) -> None:
    """Begin torch's streams anew, equal on ranks with one share of the batch, and different for each share and step.

    Args:
        share: This rank's share of the batch: its dp coordinate.
        seed: Equal on all ranks.
        step: Steps taken so far [count].
    """
    torch.manual_seed((seed + 0x9E3779B97F4A7C15 * (share + 1) + 0xBF58476D1CE4E5B9 * (step + 1)) % 2**63)


def source_of(rows: Sequence[Mapping[str, Any]], place: Mapping[str, int], size: Mapping[str, int]) -> int | None:
    """Return the saved rank whose streams a rank continues; None where the batch had another number of shares.

    Args:
        rows: For each saved rank its coordinates, and `sizes`, those of its mesh.
        place: This rank's coordinates.
        size: The sizes of this mesh.
    """
    fits = [rank for rank, row in enumerate(rows) if row["sizes"]["dp"] == size["dp"] and row["dp"] == place["dp"]]
    same = [rank for rank in fits if rows[rank] == {**place, "sizes": dict(size)}]
    return (same or fits or [None])[0]
