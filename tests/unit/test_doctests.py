"""The examples in the docstrings of the torch-free modules are true."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

PARTS = (
    *(
        "errors",
        "units",
        "values",
        "mesh",
        "layout",
        "traffic",
        "spec",
        "schedule",
        "hardware",
        "plan",
        "plan.deepspeed",
    ),
    "compare.formulas",
)


def _modules() -> list[str]:
    names = []
    for part in PARTS:
        module = importlib.import_module(f"meshwright.{part}")
        names.append(module.__name__)
        if hasattr(module, "__path__"):
            names += [entry.name for entry in pkgutil.iter_modules(module.__path__, f"{module.__name__}.")]
    return names


MODULES = _modules()


@pytest.mark.parametrize("name", MODULES)
def test_examples_are_true(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0


def test_the_examples_are_found() -> None:
    finder = doctest.DocTestFinder(exclude_empty=True)
    found = {name: finder.find(importlib.import_module(name)) for name in MODULES}
    assert sum(len(test.examples) for tests in found.values() for test in tests) > 40
