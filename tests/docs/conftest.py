"""Ranks that this process starts are forked from the templates that tests of faults use."""

from tests.faults.conftest import templates  # noqa: F401 - a fixture
