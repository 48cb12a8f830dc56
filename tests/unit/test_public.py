from __future__ import annotations

import ast
import importlib
import importlib.util
import pkgutil
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import meshwright
from unit.test_layers import TORCH_FREE_ORDER

SOURCE = Path(meshwright.__file__)
TORCH_FREE = [name for name in TORCH_FREE_ORDER if importlib.util.find_spec(f"meshwright.{name}")] + ["plan.deepspeed"]


def _imports_torch(code: str) -> bool:
    probe = f"{code}\nimport sys\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True, timeout=100)
    return done.stdout.strip() == "True"


def test_the_names_are_sorted_and_unique() -> None:
    assert meshwright.__all__ == sorted(set(meshwright.__all__))


@pytest.mark.parametrize("name", meshwright.__all__)
def test_every_name_resolves_to_what_it_says(name: str) -> None:
    value = getattr(meshwright, name)
    assert value.__name__ == name
    assert value.__module__.startswith("meshwright.")
    assert value.__doc__


def test_no_name_is_a_module() -> None:
    # Otherwise `meshwright.plan` is a function or a module, depending on who imported what first.
    modules = {module.name for module in pkgutil.iter_modules(meshwright.__path__)}
    assert not modules & set(meshwright.__all__)


def test_type_checkers_see_the_same_names_from_the_same_modules() -> None:
    tree = ast.parse(SOURCE.read_text())
    guarded = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.name: f"{statement.module}"
        for statement in guarded.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }
    lazy = {name: f"meshwright.{module}" for name, module in meshwright._MODULE_OF_NAME.items()}
    assert seen == lazy
    assert sorted(seen) == meshwright.__all__


def test_all_errors_are_public() -> None:
    from meshwright import errors

    kinds = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
    assert kinds <= set(meshwright.__all__)


def test_unknown_names_have_a_suggestion() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'aply_plan' \(did you mean 'apply_plan'\?\)"):
        _ = meshwright.aply_plan


def test_dir_lists_the_names() -> None:
    assert set(meshwright.__all__) <= set(dir(meshwright))


@pytest.mark.parametrize("name", ["nn", "testing"])
def test_submodules_load_when_they_are_used(name: str) -> None:
    module = getattr(meshwright, name)
    assert module is importlib.import_module(f"meshwright.{name}")
    assert name not in meshwright.__all__
    assert name in dir(meshwright)
    assert module.__all__ == sorted(module.__all__)


def test_the_version_has_one_source() -> None:
    # tests/docs/test_wheel.py compares it with the distribution's; one that is installed here may be older than the checkout.
    settings = tomllib.loads((SOURCE.parents[2] / "pyproject.toml").read_text())
    assert "version" not in settings["project"]
    assert settings["project"]["dynamic"] == ["version"]
    assert settings["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "meshwright.__version__"}
    changes = (SOURCE.parents[2] / "CHANGELOG.md").read_text()
    assert re.findall(r"^## (\S+)", changes, re.MULTILINE)[0] == meshwright.__version__


def test_the_vocabulary_imports_no_torch() -> None:
    modules = ", ".join(f"meshwright.{name}" for name in TORCH_FREE)
    assert not _imports_torch(f"import meshwright, {modules}")
    assert not _imports_torch("import meshwright as mw; mw.Plan.parse('hybrid', 8); mw.load_cluster('8xh100-sxm')")


def test_the_probe_sees_torch_when_it_is_imported() -> None:
    assert _imports_torch("import torch")
