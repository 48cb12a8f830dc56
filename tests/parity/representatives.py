"""A few cells of all tests, for `make test`: every value of each test's parameters is met, and over another transport every plan.

A transport sees flat memory, whichever model it belongs to and whichever script fills it. What it can do wrong depends on which
exchanges are made, among how many ranks, of which sizes and in which order: on the plan, the setting and the number of ranks.
So each of these that files about exchanges have is met once. Files about how an exchange fails, counts or rounds run one cell of
every test besides.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

MODEL = ("name", "index")
"""What tests call the parameter that says whose memory it is."""

SLOW = ("gpt", "style_")
"""Models with attention, whose layouts take seconds to prove: others stand for the exchanges of a plan, where there are any."""

PLAN = ("plan", "line", "words")
"""What tests call the parameter that is a plan, or words of one."""

SETTING = ("num_ranks", "setting", "micro_batches", "schedule")
"""What tests call the parameters that decide how many exchanges there are, of which sizes, among how many ranks."""

EXCHANGES = (
    "buffers",
    "compression",
    "distributed",
    "exchange",
    "never_wrong_pipeline",
    "nn",
    "non_finite",
    "pipeline",
    "raising",
    "sentinels",
    "sharded",
    "sharded_parts",
    "weights",
)
"""Files that are about what is sent: each of their plans and settings is met."""

WAYS = ("never_wrong_pipeline", "pipeline", "sharded", "sharded_parts", "weights")
"""Of these, files whose tests differ in the model and the script alone: other cells make their exchanges."""


def choose(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return one item of each test of an exchange, and as few more as hold every plan and setting of those tests, in order.

    Args:
        items: The items of all tests.
    """
    tests = _by_test(items)
    times: Counter[str] = Counter()  # how often each model has been taken
    about_exchanges = [item for item in items if is_about_an_exchange(item)]
    missing = {value for item in about_exchanges for value in values(item)}
    chosen: set[pytest.Item] = set()

    def take(cells: list[pytest.Item]) -> None:
        best = max(
            cells,
            key=lambda cell: (len(values(cell) & missing), not _model(cell).startswith(SLOW), -times[_model(cell)]),
        )
        chosen.add(best)
        times[_model(best)] += 1
        missing.difference_update(values(best))

    def cover(cells: list[pytest.Item]) -> None:
        while any(values(cell) & missing for cell in cells):
            take(cells)

    # First those that train with a setting and compare numbers: a plan that a test refuses is not met by that.
    cover([item for item in items if "setting" in _parameters(item)])
    for cells in tests.values():
        if is_about_an_exchange(cells[0]) and not stands_in(cells[0], WAYS) and chosen.isdisjoint(cells):
            take(cells)
    cover([item for item in items if is_about_an_exchange(item)])
    return [item for item in items if item in chosen]


def each_value(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return so few items of each test that every value of each of its parameters is met, in their order.

    Cells of the tables that take turns are all there: they have been chosen so already.

    Args:
        items: The items of all tests.
    """
    chosen: set[pytest.Item] = set()
    for cells in _by_test(items).values():
        if "setting" in _parameters(cells[0]):
            chosen.update(cells)
            continue
        missing = {value for cell in cells for value in _of_each(cell)}
        while missing:
            best = max(cells, key=lambda cell: len(_of_each(cell) & missing))
            chosen.add(best)
            missing -= _of_each(best)
    return [item for item in items if item in chosen]


def first_of(items: list[pytest.Item], again: list[pytest.Item]) -> set[pytest.Item]:
    """Return one item of each test but the long ones, of the tables that take turns each plan once, over gloo one of each file.

    Args:
        items: The items that are to run.
        again: Those over gloo.
    """
    chosen: set[pytest.Item] = set()
    met: set[tuple[str, str]] = set()
    times: Counter[str] = Counter()

    def take(cells: list[pytest.Item], wanted: set[tuple[str, str]]) -> None:
        best = max(
            cells,
            key=lambda cell: (
                len(values(cell) & wanted),
                not _model(cell).startswith((*SLOW, "hf_")),
                -times[_model(cell)],
            ),
        )
        chosen.add(best)
        times[_model(best)] += 1
        met.update(values(best))

    by_file: dict[str, list[pytest.Item]] = {}
    items = [item for item in items if item.get_closest_marker("long") is None]
    for item in again:
        by_file.setdefault(item.nodeid.partition("::")[0], []).append(item)
    for cells in by_file.values():
        take(cells, {value for cell in cells for value in values(cell)} - met)
    met.clear()
    for cells in _by_test(items).values():
        if "setting" not in _parameters(cells[0]):
            take(cells, {value for cell in cells for value in values(cell)} - met)
            continue
        plans = {value for cell in cells for value in values(cell) if value[0] in ("plan", "num_ranks")}
        while plans - met:
            take(cells, plans - met)
    return chosen


def _by_test(items: list[pytest.Item]) -> dict[str, list[pytest.Item]]:
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return tests


def _of_each(cell: pytest.Item) -> set[tuple[str, str]]:
    return {("", "")} | {(name, repr(value)) for name, value in _parameters(cell).items()}


def is_about_an_exchange(item: pytest.Item) -> bool:
    """Tell whether a test stands in a file about what is sent."""
    return stands_in(item, EXCHANGES)


def stands_in(item: pytest.Item, files: tuple[str, ...]) -> bool:
    """Tell whether a test stands in one of these files."""
    return Path(item.nodeid.partition("::")[0]).stem.removeprefix("test_") in files


def _parameters(cell: pytest.Item) -> dict[str, object]:
    return cell.callspec.params if isinstance(cell, pytest.Function) and hasattr(cell, "callspec") else {}


def values(cell: pytest.Item) -> set[tuple[str, str]]:
    """Return what a cell's exchanges depend on: its plan, its setting and its number of ranks, each with what it is.

    That ZeRO-3 leaves no parameter whole tests spell `whole_below=` 0, 0B or 1.
    """
    parameters = {name: str(value) for name, value in _parameters(cell).items()}
    plans = {
        re.sub(r"whole_below=\w+", "whole_below=0", parameters[name])
        for name in PLAN
        if "=" in parameters.get(name, "")
    }
    return {("plan", plan) for plan in plans} | {(name, parameters[name]) for name in SETTING if name in parameters}


def _model(cell: pytest.Item) -> str:
    return next((str(value) for name, value in _parameters(cell).items() if name in MODEL), "")
