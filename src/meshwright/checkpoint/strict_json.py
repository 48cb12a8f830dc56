"""JSON of others, read with suspicion: a key that stands twice or a number that is none is refused."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from meshwright.errors import CheckpointError

__all__: list[str] = []


def parse(data: bytes) -> Any:
    """Return what a JSON text is.

    Raises:
        ValueError: It is no JSON, or has a key twice.
        RecursionError: It is too deep.
    """
    return json.loads(data, object_pairs_hook=_without_repeats, parse_constant=_refuse_constant)


def parse_object(data: bytes, where: str) -> dict[str, Any]:
    """Return the object that a JSON text is.

    Args:
        data: The text.
        where: What it is, for messages.

    Raises:
        CheckpointError: It is no JSON, too deep, has a key twice, or is no object.
    """
    try:
        found = parse(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where} is no valid JSON: {str(error)[:200]}") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{where} is no JSON object")
    return found


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object has a key twice")
    return found


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number of JSON")
