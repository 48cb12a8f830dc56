"""Code of installed packages that define nothing of the model is not searched; modules that import one another are, once."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.apply.state.class_identity import refuse_class_identity
from meshwright.apply.state.outside import Outside
from meshwright.spec import Plan

_CODE = """
COUNT = 0

def count(x):
    global COUNT
    COUNT += 1
    return type(x) is type(COUNT)
"""


def _package(name: str, folder: Path) -> types.ModuleType:
    path = folder / name / "__init__.py"
    path.parent.mkdir(parents=True)
    path.write_text(_CODE)
    module = types.ModuleType(name)
    module.__file__ = str(path)
    exec(compile(_CODE, str(path), "exec"), vars(module))
    return module


@pytest.mark.parametrize("folder", ["site-packages", "target", "work"])
def test_an_installed_package_is_a_library(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"helper_{folder.replace('-', '_')}"
    helper = _package(name, tmp_path / folder)
    if folder == "target":  # of `pip install --target`
        (tmp_path / folder / f"{name}-1.0.dist-info").mkdir()
    monkeypatch.setitem(sys.modules, name, helper)

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if helper.count(x) else x * 2

    module = Model()
    moment = Outside(module).take()
    module(torch.ones(1))
    assert bool(moment.changed()) == (folder == "work")
    if folder != "work":
        refuse_class_identity(module, [], Plan.parse("tp=2"))


def test_modules_that_import_one_another_are_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = types.ModuleType("one_of_two"), types.ModuleType("other_of_two")
    one.other, other.one, other.value = other, one, [1]  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "one_of_two", one)
    monkeypatch.setitem(sys.modules, "other_of_two", other)

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            one.other.one.other.value.append(1)  # pyright: ignore[reportAttributeAccessIssue]
            return x

    moment = Outside(Model()).take()
    Model()(torch.ones(1))
    assert set(moment.changed().values()) == {"other_of_two.value"}


@pytest.mark.parametrize(
    ("helper", "draws"), [("transformers.models.heard.masks", True), ("transformers.utils", False)]
)
def test_a_library_draws_for_its_models_in_code_beside_them(helper: str, draws: bool) -> None:
    masks, model = types.ModuleType(helper), types.ModuleType("transformers.models.heard.modeling")
    exec("import numpy as np\ndef mask(x):\n    return x * np.random.rand()", vars(masks))
    vars(model).update(nn=nn, mask=vars(masks)["mask"])
    exec("class Model(nn.Module):\n    def forward(self, x):\n        return mask(x)", vars(model))
    assert Outside(vars(model)["Model"]()).draws is draws


class Missing:
    """Stands for a package that is not installed, and raises what it likes where it is asked for anything."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


def test_what_stands_for_a_missing_package_is_no_obstacle() -> None:
    model = types.ModuleType("the_users_model")
    vars(model).update(nn=nn, missing=Missing())
    exec(
        "class Model(nn.Module):\n    def forward(self, x):\n        return missing.run(x) if x is None else x",
        vars(model),
    )
    assert not Outside(vars(model)["Model"]()).draws
