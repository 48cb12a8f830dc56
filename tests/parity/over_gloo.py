"""Cells that `make test` runs a second time, over gloo: in the same session, whose workers have imported everything by then."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from tests.cell_command import OVER_GLOO
from tests.parity import representatives

VARIABLE = "MESHWRIGHT_TRANSPORT"

# Files that start no ranks (one process, accumulation, the tables), or whose ranks make exchanges that others make: the tools,
# Hugging Face, presets, counts of bytes.
_FILES = (
    *(
        "one_process",
        "accumulation",
        "edge_case_table",
        "turns",
        "testing",
        "verify",
        "hugging_face",
        "trainer",
        "fabric",
    ),
    *("presets", "sent_bytes", "probe", "foreseen_stages"),
)
# The largest models, eight ranks of tensor parallelism, where compressed training ends, which is no question of the transport,
# what starts gloo by itself, and a rank that is interrupted and lives on, as in the pool: the limit alone ends the others there.
_NAMES = ("hf_", "wide", "style_", "many_ranks", "training_ends", "without_shared_memory", "interrupted_in_its_forward")


def is_over_gloo() -> bool:
    """Tell whether the ranks that a test starts exchange over gloo."""
    return os.environ.get(VARIABLE) == "gloo"


def repeated(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return items of `representatives.choose` anew, under a name that ends in `OVER_GLOO`.

    Args:
        items: The items of all tests.
    """
    return [_again(item) for item in representatives.choose([item for item in items if _is_told_apart(item)])]


def _is_told_apart(item: pytest.Item) -> bool:
    """Tell whether a test may show something over gloo that it does not over shared memory."""
    file = Path(item.nodeid.partition("::")[0])
    is_other = file.parent.name != "parity" or file.stem.removeprefix("test_") in _FILES
    return not is_other and not any(name in item.nodeid for name in _NAMES)


def _again(item: pytest.Item) -> pytest.Item:
    assert isinstance(item, pytest.Function)
    made: Any = pytest.Function.from_parent(
        item.parent,
        name=item.name + OVER_GLOO,
        callspec=getattr(item, "callspec", None),
        callobj=item.obj,
        fixtureinfo=item._fixtureinfo,
        originalname=item.originalname,
    )
    if hasattr(
        made, "_id"
    ):  # pytest 9.2 makes it from the function's name and its parameters, not from this item's name
        made._id = type(made._id).parse(item.nodeid + OVER_GLOO)
    return made


if __name__ == "__main__":  # for `make test-grid`, which runs all other files over gloo
    print(*(f"--ignore tests/parity/test_{name}.py" for name in _FILES))
