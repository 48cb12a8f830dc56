"""States that a script saves beside the model's: those of loaders and learning rate schedules.

A state of plain JSON stands in the manifest as it is. One that has more, as those of torch's MultiStepLR (a Counter) and
ReduceLROnPlateau (an infinity), stands under a key of its own, encoded: what reads plain states alone must not take it for one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import xxhash

from meshwright.checkpoint.open_checkpoint import OpenCheckpoint
from meshwright.errors import CheckpointError
from meshwright.run.checkpoints.encoded import decode, encode

__all__: list[str] = []

PLAIN, ENCODED = "extra", "extra_encoded"
_MOST_DEPTH = 32


def states_of(extra: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the states of objects, as JSON, for the manifest: key -> name -> state.

    Args:
        extra: Name -> what has a `state_dict()`.

    Raises:
        CheckpointError: One has none, or its state has something that has no place in a file.
    """
    states: dict[str, dict[str, Any]] = {PLAIN: {}}
    for name, item in extra.items():
        if not hasattr(item, "state_dict"):
            raise CheckpointError(
                f"extra[{name!r}] is a {type(item).__name__} without state_dict()", fix="pass a loader or a schedule"
            )
        state = item.state_dict()
        if _is_plain(state, 0):
            states[PLAIN][name] = state
        else:
            states.setdefault(ENCODED, {})[name] = _encoded(state, f"extra[{name!r}].state_dict()")
    return states


def digest_of_states(states: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Return name -> digest of a state, by which ranks see that theirs are alike."""
    return {
        name: xxhash.xxh3_64_hexdigest(repr(state).encode()) for part in states.values() for name, state in part.items()
    }


def refuse_missing(extra: Mapping[str, Any], snapshot: OpenCheckpoint) -> None:
    """Raise an error where a checkpoint has no state for one of some objects.

    Raises:
        CheckpointError: Their names, and those that it has.
    """
    known = {**_stored(snapshot, PLAIN), **_stored(snapshot, ENCODED)}
    missing = sorted(set(extra) - set(known))
    if missing:
        raise CheckpointError(
            f"{snapshot.path} has no state for extra {missing}; it has {sorted(known)}",
            fix="leave these out, or load a checkpoint that was saved with them",
        )


def load_states(extra: Mapping[str, Any], snapshot: OpenCheckpoint) -> None:
    """Give objects their states.

    Raises:
        CheckpointError: A state is none that `states_of` returns.
    """
    plain, encoded = _stored(snapshot, PLAIN), _stored(snapshot, ENCODED)
    for name, item in extra.items():
        state = plain[name] if name in plain else decode(encoded[name], f"extra[{name!r}]", _no_tensor)
        item.load_state_dict(state)


def _stored(snapshot: OpenCheckpoint, key: str) -> Mapping[str, Any]:
    stored = snapshot.manifest.state.get(key)
    return stored if isinstance(stored, dict) else {}


def _is_plain(value: Any, depth: int) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if value is None or isinstance(value, (bool, int, str)):
        return True
    if depth == _MOST_DEPTH:
        return False
    if isinstance(value, list):
        return all(_is_plain(item, depth + 1) for item in value)
    is_dict = isinstance(value, dict) and all(isinstance(key, str) for key in value)
    return is_dict and all(_is_plain(item, depth + 1) for item in value.values())


def _encoded(state: Any, where: str) -> Any:
    def refuse(name: str, tensor: Any) -> None:
        raise CheckpointError(f"'{name}' is a {type(tensor).__name__} (rule: numbers, texts and None, in containers)")

    try:
        return encode(state, where, refuse)
    except CheckpointError as error:
        fix = "give that object a state_dict() of such values: tensor.tolist(), for example"
        raise CheckpointError(error.message, fix=fix) from None


def _no_tensor(name: str) -> Any:
    raise CheckpointError(f"the checkpoint has a tensor '{name}' where numbers belong")
