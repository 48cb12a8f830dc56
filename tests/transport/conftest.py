"""How to run a test that failed alone."""

from tests.cell_command import pytest_runtest_makereport  # noqa: F401 - a hook
