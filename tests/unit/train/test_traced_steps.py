"""`train.trace`: steps that can be read, and that the run takes."""

from __future__ import annotations

import pytest
from tests.unit.train.test_config import folder, load  # noqa: F401 - a fixture

from meshwright.errors import ConfigError
from meshwright.train.config.traced_steps import traced_steps


@pytest.mark.parametrize("text", ["0", "3-2", "a", "1-", "-1", "1-200", "1,2", "", "9" * 40, "1 - 2"])
def test_what_is_not_steps_is_refused_with_a_fix(text: str) -> None:
    with pytest.raises(ConfigError, match="counted from 1") as caught:
        traced_steps(text)
    assert "10-12" in str(caught.value.fix)


def test_steps_that_are_not_taken_are_refused(folder) -> None:  # noqa: F811
    with pytest.raises(ConfigError, match="traced steps are taken"):
        load(folder, "train.trace='5-9'", "train.steps=8")
    assert load(folder, "train.trace='5-8'", "train.steps=8").train.trace == "5-8"
    assert load(folder, "train.trace=8", "train.steps=8").train.trace == "8"


def test_a_profiler_without_traced_steps_is_refused_with_a_fix(folder) -> None:  # noqa: F811
    with pytest.raises(ConfigError, match=r"profiler = true without train\.trace") as caught:
        load(folder, "train.profiler=true")
    assert caught.value.fix == 'train.trace = "10"'
    assert load(folder, "train.profiler=true", "train.trace=1").train.profiler


def test_loggers_are_named(folder) -> None:  # noqa: F811
    assert load(folder, "train.log=['csv']").train.log == ("csv",)
    with pytest.raises(ConfigError, match="log"):
        load(folder, "train.log=['excel']")
