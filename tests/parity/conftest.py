"""One thread, as in the ranks; one worker for Hugging Face's models; a choice of cells; how to run one that failed alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.cell_command import OVER_GLOO, pytest_runtest_makereport  # noqa: F401 - a hook
from tests.parity import over_gloo, representatives
from tests.scopes import ONE_THREAD, is_hugging_face


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--each-value",
        action="store_true",
        help="run so few cells of each test that every value of each of its parameters is met",
    )
    parser.addoption(
        "--over-gloo",
        action="store_true",
        help="run so few cells a second time, over gloo, that each plan, setting and number of ranks is met, and each exchange",
    )
    parser.addoption(
        "--half",
        choices=("first", "second"),
        help="of the cells that the other options leave, run one of each test, or those that are left then",
    )


@pytest.hookimpl(trylast=True)  # of what -k has left
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what other cells stand for, and add what runs a second time over gloo."""
    again = over_gloo.repeated(items) if config.getoption("--over-gloo") else []
    if config.getoption("--each-value"):
        chosen = set(representatives.each_value(items))
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = [item for item in items if item in chosen]
    half = config.getoption("--half")
    if half:
        first = representatives.first_of(items, again)
        config.hook.pytest_deselected(items=[item for item in items if (item in first) != (half == "first")])
        items[:], again = ([item for item in some if (item in first) == (half == "first")] for some in (items, again))
    items += again


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Small models gain nothing from more, and ranks share the cores.

    Ranks of `launch` and of the pool then have one environment, whatever the machine, and are forked from the same processes.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ONE_THREAD.items():
            patch.setenv(name, value)
        yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def models_are_imported_once(request: pytest.FixtureRequest) -> None:
    """Where a worker's first ranks are for these models, import them in the processes that all its ranks are forked from."""
    if is_hugging_face(request.node.nodeid):
        from tests.parity.models import hf_models

        from meshwright.testing import pool

        pool.preload(*hf_models.MODULES)


@pytest.fixture(autouse=True)
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have ranks exchange over gloo where the test's name says so."""
    if request.node.name.endswith(OVER_GLOO):
        monkeypatch.setenv(over_gloo.VARIABLE, "gloo")
