"""run/sentinels/settings.py, code_digest.py: code and switches that differ between ranks have a row that differs."""

import functools
import types

import pytest
import torch
from torch import nn

from meshwright.run.sentinels import settings

FILE = """
from torch import nn
EPS = 1e-5
RANK = 0

def scaled(x):
    return helper(x) * 2

def helper(x):
    return x + EPS

class Base(nn.Module):
    def scale(self, x):
        return scaled(x)

class Model(Base):
    @property
    def size(self):
        return 3

    @staticmethod
    def name():
        return "a"

    def forward(self, x):
        if RANK == 0:
            pass
        return self.scale(x) if x.dim() in (1, {2, 3} and 2) else x
"""


def of_model(text: str) -> dict[str, str]:
    """Return the rows of a model as a rank with this file has them."""
    module = types.ModuleType("the_users")
    exec(text, module.__dict__)
    return dict(settings.of_modules(module.Model()))


def of_loss(text: str) -> dict[str, str]:
    module = types.ModuleType("the_users")
    exec(text, module.__dict__)
    return dict(settings.of_loss(module.scaled))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("self.scale(x) if", "self.scale(x + 1) if"),
        ("scaled(x)\n\nclass Model", "scaled(-x)\n\nclass Model"),
        ("helper(x) * 2", "helper(x) * 3"),
        ("x + EPS", "x - EPS"),
        ("EPS = 1e-5", "EPS = 1e-6"),
        ("return 3", "return 4"),
        ('return "a"', 'return "b"'),
    ],
)
def test_code_that_differs_anywhere_in_the_file_differs_in_its_row(old, new):
    assert FILE.count(old) == 1
    here, there = of_model(FILE), of_model(FILE.replace(old, new))
    differing = {name for name in here if here[name] != there[name]}
    assert differing == {"the code of class the_users.Model"}


def test_equal_code_and_a_ranks_own_number_are_equal():
    assert of_model(FILE) == of_model(FILE) == of_model(FILE.replace("RANK = 0", "RANK = 1"))


def test_a_losss_helpers_are_part_of_it():
    assert of_loss(FILE) == of_loss(FILE)
    assert of_loss(FILE) != of_loss(FILE.replace("x + EPS", "x - EPS"))


def test_a_patched_class_of_torch_is_told(monkeypatch):
    before = dict(settings.of_modules(nn.Sequential(nn.ReLU())))
    monkeypatch.setattr(nn.ReLU, "forward", lambda _self, x: x.clamp(min=0.01))
    after = dict(settings.of_modules(nn.Sequential(nn.ReLU())))
    assert {name for name in before if before[name] != after[name]} == {
        "the code of class torch.nn.modules.activation.ReLU"
    }


def test_functions_that_call_each_other_have_a_digest():
    text = FILE.replace("def helper(x):\n", "def helper(x):\n    if x is None: return scaled(x)\n")
    assert of_loss(text) == of_loss(text) != of_loss(FILE)


def test_torchs_switches_are_rows(monkeypatch):
    cpu = torch.device("cpu")
    before = dict(settings.of_torch(cpu))
    if not torch.set_flush_denormal(True):
        pytest.fail("this processor cannot flush denormal numbers")
    try:
        after = dict(settings.of_torch(cpu))
    finally:
        torch.set_flush_denormal(False)
    assert {name for name in before if before[name] != after[name]} == {"torch.set_flush_denormal()"}
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    assert dict(settings.of_torch(cpu)) != before


def test_a_rate_of_dropout_that_changes_between_steps_is_a_row():
    module = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1))
    before = dict(settings.of_modes(module))
    module[1].p = 0.5
    after = dict(settings.of_modes(module))
    assert {name for name in before if before[name] != after[name]} == {"the rate of dropout '1'"}


def _checked(text: str, address: int):
    """Return the rows of a model whose method a decorator checks by code that it writes, with an address in it."""
    module = types.ModuleType("the_users")
    exec(text, module.__dict__)
    written: dict = {}
    source = f"def scale(self, x, object_{address}=None):\n    return wrapped(self, x)"
    wrapped = module.Base.scale
    exec(compile(source, f"<checked at {address}>", "exec"), {"wrapped": wrapped}, written)
    module.Base.scale = functools.wraps(wrapped)(written["scale"])
    return dict(settings.of_modules(module.Model()))


def test_code_that_a_decorator_writes_in_each_process_is_what_it_wraps():
    assert _checked(FILE, 140) == _checked(FILE, 139)
    assert _checked(FILE, 140) != _checked(FILE.replace("return scaled(x)", "return scaled(-x)"), 140)


def test_a_decorator_of_autocast_that_one_rank_has_run_is_the_same():
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    model.scaled = torch.autocast("cpu", enabled=False)(lambda x: 2 * x)
    before = dict(settings.of_modules(model))
    model.scaled(torch.ones(2))
    assert dict(settings.of_modules(model)) == before
    other.scaled = torch.autocast("cpu", dtype=torch.bfloat16)(lambda x: 2 * x)
    assert dict(settings.of_modules(other)) != before
