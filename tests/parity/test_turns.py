"""What is not run by default leaves no plan, no setting and no model out."""

from __future__ import annotations

import pathlib
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
from tests.cell_command import OVER_GLOO
from tests.parity import cases, cell_table, representatives, test_pipeline, test_sharded, test_tensor
from tests.parity.harness import Setting
from tests.parity.turns import FORMS, take_turns
from tests.scopes import FULL_GRID

import meshwright as mw


@pytest.mark.parametrize(
    ("test", "refused"),
    [
        (test_sharded, set()),
        (test_tensor, {*test_tensor.UNCUT, *FORMS[1::2]}),
        (test_pipeline, {name for name, num_layers in test_pipeline.NUM_LAYERS.items() if num_layers == 1}),
    ],
    ids=["sharded", "tensor", "pipeline"],
)
def test_every_plan_meets_models_and_settings(test: Any, refused: set[str]) -> None:
    rows = test._matrix()
    models, settings = Counter(row[1] for row in rows), {(row[1], row[-1]) for row in rows}
    for plan in test.PLANS:
        text = plan if isinstance(plan, str) else plan[0]
        num_wanted = 2 if mw.Plan.parse(text).num_ranks <= 4 else 1
        assert models[text] >= num_wanted, text
        assert len({setting for other, setting in settings if other == text}) >= num_wanted, text
    assert {row[-1] for row in rows} == set(test.SETTINGS)
    assert {row[0] for row in rows} >= cases.CASES.keys() - refused


@pytest.mark.skipif(FULL_GRID, reason="the table is of what runs by default")
def test_the_committed_table_is_what_runs() -> None:
    assert cell_table.TABLE.read_text() == cell_table.text(), "run make cells"


@pytest.mark.skipif(FULL_GRID, reason="takes no turns")
def test_turns_are_even_and_a_models_plans_are_unlike() -> None:
    plans, settings = ("a", "b", "c", "d"), (Setting(3), Setting(5))
    rows = take_turns("uvwxyz", plans, settings, num_plans=2, fits=lambda name, plan: (name, plan) != ("v", "b"))
    assert rows[:2] == [("u", "a", settings[0]), ("u", "c", settings[1])]
    assert len(set(rows)) == len(rows) == 12
    assert ("v", "b") not in {row[:2] for row in rows}
    assert Counter(plan for _, plan, _ in rows) == {"a": 3, "b": 3, "c": 3, "d": 3}
    assert set(Counter(row[1:] for row in rows).values()) == {1, 2}


def test_representatives_leave_no_plan_no_setting_and_no_exchange_out(request: pytest.FixtureRequest) -> None:
    def met(items: list[pytest.Item]) -> set[tuple[str, str]]:
        return {value for item in items for value in representatives.values(item)}

    items = request.session.items
    about_exchanges = [item for item in items if representatives.is_about_an_exchange(item)]
    chosen = representatives.choose(items)
    assert met(chosen) >= met(about_exchanges)
    of_their_own = {
        _test(item) for item in about_exchanges if not representatives.stands_in(item, representatives.WAYS)
    }
    assert {_test(item) for item in chosen} >= of_their_own
    assert set(representatives.WAYS) < set(representatives.EXCHANGES)
    assert len(chosen) == len(set(chosen)) <= len(items)


def _test(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


def test_each_value_leaves_no_test_and_no_value_out(request: pytest.FixtureRequest) -> None:
    def met(items: list[pytest.Item]) -> set[tuple[str, str, str]]:
        parameters = [(item, getattr(getattr(item, "callspec", None), "params", {"": ""})) for item in items]
        return {(item.nodeid.partition("[")[0], name, repr(v)) for item, own in parameters for name, v in own.items()}

    items = request.session.items
    chosen = representatives.each_value(items)
    assert met(chosen) == met(items)
    assert len(chosen) == len(set(chosen)) <= len(items)


def test_the_first_half_has_each_test_each_plan_of_the_tables_and_each_file_over_gloo(
    request: pytest.FixtureRequest,
) -> None:
    def plans(items: Iterable[pytest.Item]) -> set[tuple[str, str]]:
        tables = [item for item in items if "setting" in getattr(getattr(item, "callspec", None), "params", {})]
        return {value for item in tables for value in representatives.values(item) if value[0] == "plan"}

    items = [item for item in request.session.items if not item.name.endswith(OVER_GLOO)]
    again = representatives.choose(items)
    first = representatives.first_of(items, again)
    assert {_test(item) for item in first} == {_test(item) for item in items}
    assert plans(first) == plans(items)
    assert {item.nodeid.partition("::")[0] for item in first & set(again)} == {
        item.nodeid.partition("::")[0] for item in again
    }


def test_files_about_exchanges_are_there() -> None:
    files = {path.stem.removeprefix("test_") for path in pathlib.Path(__file__).parent.glob("test_*.py")}
    assert set(representatives.EXCHANGES) <= files
