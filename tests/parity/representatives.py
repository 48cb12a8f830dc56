"""A few cells of each test, such that every plan, kind, setting and number of ranks that a file has is still met.

For a second run over another transport: it sees flat memory, whichever model that belongs to, so models take turns, and what
is exchanged, in which order and among how many ranks does not depend on the pairs that these form.
"""

from __future__ import annotations

from collections import Counter

import pytest

MODEL = ("name", "index")
"""What tests call the parameter that says whose memory it is."""


def choose(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return one item of each test, and as few more as hold every value of every parameter in a file, in their order.

    Args:
        items: The items of all tests.
    """
    files: dict[str, dict[str, list[pytest.Item]]] = {}
    for item in items:
        file, _, test = item.nodeid.partition("[")[0].partition("::")
        files.setdefault(file, {}).setdefault(test, []).append(item)
    times: Counter[str] = Counter()  # how often each model has been taken, over all files
    chosen = {item for tests in files.values() for item in _cover(list(tests.values()), times)}
    return [item for item in items if item in chosen]


def _cover(tests: list[list[pytest.Item]], times: Counter[str]) -> list[pytest.Item]:
    """Take the cell that adds the most, and of several the one whose model was taken least, until nothing is left to add."""
    missing = {value for cells in tests for cell in cells for value in values(cell)}
    taken: list[pytest.Item] = []

    def take(cells: list[pytest.Item]) -> None:
        best = max(cells, key=lambda cell: (len(values(cell) & missing), -times[_model(cell)]))
        taken.append(best)
        times[_model(best)] += 1
        missing.difference_update(values(best))

    for cells in tests:
        take(cells)
    while missing:
        take([cell for cells in tests for cell in cells])
    return taken


def _parameters(cell: pytest.Item) -> dict[str, object]:
    return cell.callspec.params if isinstance(cell, pytest.Function) and hasattr(cell, "callspec") else {}


def values(cell: pytest.Item) -> set[tuple[str, str]]:
    """Return the values of a cell's parameters, but for the model, with the parameters' names."""
    return {(name, str(value)) for name, value in _parameters(cell).items() if name not in MODEL}


def _model(cell: pytest.Item) -> str:
    return str(_parameters(cell).get("name", ""))
