"""What a failing test prints beside its traceback: the one command that runs it alone, with the environment that it ran in."""

from __future__ import annotations

import os
import shlex
from collections.abc import Generator, Mapping

import pytest

_PREFIX = "MESHWRIGHT_"  # the transport, the full grid, the backend under test: each makes another test of it
TITLE = "this cell alone"
OVER_GLOO = " over gloo"
"""End of the name of a test that runs a second time, over gloo (`parity/over_gloo.py`)."""
NOT_MEASURED = ("MESHWRIGHT_CLUSTER", "none")  # what conftest.py sets by itself


def command_of(nodeid: str, environment: Mapping[str, str]) -> str:
    """Return a line for a shell in the repository's root.

    Args:
        nodeid: The test's, with its parameters.
        environment: The variables in force; those that choose what is tested stand before the command.
    """
    chosen = sorted(pair for pair in environment.items() if pair[0].startswith(_PREFIX) and pair != NOT_MEASURED)
    words = [f"{name}={shlex.quote(value)}" for name, value in chosen]
    return " ".join([*words, "python -m pytest", shlex.quote(nodeid.removesuffix(OVER_GLOO))])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the command to the report of a test that failed, in its set-up, its call or its clean-up."""
    report = yield
    if report.failed:
        report.sections.append((TITLE, command_of(item.nodeid, os.environ)))
    return report
