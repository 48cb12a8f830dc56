"""Collectives of torch.distributed that a model's or a loss's code calls are refused, and no others."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as with_gradients
from torch.distributed import distributed_c10d

import meshwright as mw
from meshwright.run.model_collectives import _refuse_inside, hide_from_models, refuse_in_models


def _module(name: str, source: str, **names: Any) -> dict[str, Any]:
    """Return the names of a module that a source defines."""
    module = types.ModuleType(name)
    vars(module).update(names)
    exec(source, vars(module))
    return vars(module)


def _calls(name: str, called: Callable[[], None]) -> Callable[[], None]:
    """Return a function of a module that calls another one."""
    return _module(name, "def call():\n    called()", called=called)["call"]


_SOURCE = "import sys\ndef all_reduce(*_, **__):\n    look(sys._getframe())"
_torchs = _module("torch.distributed.distributed_c10d", _SOURCE, look=_refuse_inside)["all_reduce"]
"""Stands for torch.distributed's function, which asks first."""


@pytest.mark.parametrize("engine", ["meshwright.run.step", "meshwright.apply.pipeline.engine"])
@pytest.mark.parametrize("through", ["", "torch.distributed.nn.functional"])
def test_a_model_that_an_engine_runs_may_not_call_one(engine: str, through: str) -> None:
    call = _calls(through, _torchs) if through else _torchs
    with pytest.raises(
        mw.ApplyError, match=r"calls torch\.distributed\.all_reduce \(<string>:2\)[\s\S]*fix: leave it out"
    ):
        _calls("script", _calls(engine, _calls("torch.nn.modules.module", _calls("library.model", call))))()


@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch calls them deprecated, by a wrapper around each
def test_torchs_own_functions_with_gradients_are_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "all_reduce", _torchs)
    call = functools.partial(with_gradients.all_reduce, torch.ones(2, requires_grad=True))
    with pytest.raises(mw.ApplyError, match=r"calls torch\.distributed\.all_reduce \(<string>:2\)"):
        _calls("meshwright.run.step", _calls("library.model", call))()


@pytest.mark.parametrize(
    "chain",
    [
        ["script"],
        ["meshwright.run.parallel_model", "meshwright.comm.communicator"],
        ["meshwright.run.step", "library.model", "torch.nn.modules.batchnorm"],
        ["meshwright.run.step", "torch.optim.optimizer", "library.optimizer"],
        ["meshwright.run.building.paged_build", "script"],
        ["meshwright.train.session", "script"],
    ],
)
def test_others_may(chain: list[str]) -> None:
    call = _torchs
    for name in reversed(chain):
        call = _calls(name, call)
    call()


def _one() -> torch.Tensor:
    return torch.ones(1)


CALLS: dict[str, Callable[[], Any]] = {
    "all_reduce": lambda: dist.all_reduce(_one()),
    "broadcast": lambda: dist.broadcast(_one(), 0),
    "broadcast_object_list": lambda: dist.broadcast_object_list([1], 0),
    "barrier": dist.barrier,
    "reduce": lambda: dist.reduce(_one(), 0),
    "irecv": lambda: dist.irecv(_one(), 0),
    "all_gather": lambda: dist.all_gather([_one()], _one()),
    "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(_one(), _one()),
    "all_gather_object": lambda: dist.all_gather_object([None], 1),
    "gather": lambda: dist.gather(_one(), [_one()]),
    "gather_object": lambda: dist.gather_object(1, [None]),
    "all_to_all_single": lambda: dist.all_to_all_single(_one(), _one()),
    "reduce_scatter": lambda: dist.reduce_scatter(_one(), [_one()]),
    "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(_one(), _one()),
    "scatter": lambda: dist.scatter(_one(), [_one()]),
    "scatter_object_list": lambda: dist.scatter_object_list([None], [1]),
}


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    refuse_in_models()
    hide_from_models()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", CALLS)
def test_each_collective_is_seen_however_the_model_holds_it(name: str, group: None) -> None:
    library = _module("library.model", "def call():\n    taken()", taken=CALLS[name])
    with pytest.raises(mw.ApplyError, match=rf"calls torch\.distributed\.{name}"):
        _calls("meshwright.run.step", library["call"])()


_MODE = """
from torch.overrides import TorchFunctionMode

class Passing(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))
"""


def test_a_collective_is_seen_under_a_function_mode_of_a_trial(group: None) -> None:
    passing = _module("meshwright.run.losses.trials", _MODE)["Passing"]
    library = _module("library.model", "def call():\n    taken()", taken=CALLS["all_reduce"])
    with passing(), pytest.raises(mw.ApplyError, match=r"calls torch\.distributed\.all_reduce"):
        _calls("meshwright.run.step", library["call"])()


def test_a_model_may_ask_for_its_rank_and_torchs_functions_stay_its_own(group: None) -> None:
    source = "def call():\n    assert (rank(), size()) == (0, 1)"
    ask = _module("library.model", source, rank=dist.get_rank, size=dist.get_world_size)
    _calls("meshwright.run.step", ask["call"])()
    for name in ("isend", "irecv", "all_reduce"):
        assert getattr(dist, name) is getattr(distributed_c10d, name)


_ASKS = "def call():\n    assert asks() is wanted"
_MODULE = """
class Layer(Module):
    def __init__(self):
        assert asks() is wanted
"""


@pytest.mark.parametrize(
    ("chain", "wanted"),
    [
        (["script"], True),
        (["meshwright.run.step", "torch.nn.modules.module", "library.model"], False),
        (["meshwright.apply.pipeline.engine", "script"], False),
        (["meshwright.run.step", "library.model", "torch.nn.modules.batchnorm"], True),
        (["meshwright.run.step", "torch.optim.optimizer", "library.optimizer"], True),
        (["meshwright.run.parallel_model", "meshwright.comm.communicator"], True),
        (["meshwright.run.building.paged_build", "script"], True),
    ],
)
@pytest.mark.parametrize("asks", [dist.is_initialized, "by a helper"])
def test_models_code_sees_no_group(chain: list[str], wanted: bool, asks: Any, group: None) -> None:
    if asks is not dist.is_initialized:
        asks = _module(chain[-1], "def call():\n    return asks()", asks=dist.is_initialized)["call"]
    call = _module(chain[-1], _ASKS, asks=asks, wanted=wanted)["call"]
    for name in reversed(chain[:-1]):
        call = _calls(name, call)
    call()
    assert dist.is_initialized()


def test_models_code_is_the_first_of_one_process(group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = type(distributed_c10d._get_default_group())
    monkeypatch.setattr(kind, "size", lambda _: 2)
    monkeypatch.setattr(kind, "rank", lambda _: 1)
    names = {"rank": dist.get_rank, "size": dist.get_world_size}
    asks = _module("library.model", "def call():\n    assert (rank(), size()) == (0, 1)", **names)["call"]
    _calls("meshwright.run.step", _calls("torch.nn.modules.module", asks))()
    _module("script", "def call():\n    assert (rank(), size()) == (1, 2)", **names)["call"]()


@pytest.mark.parametrize(("engine", "wanted"), [("meshwright.run.building.paged_build", False), ("script", True)])
def test_a_modules_constructor_sees_none_where_a_plan_builds_it(engine: str, wanted: bool, group: None) -> None:
    names = {"asks": dist.is_initialized, "wanted": wanted, "Module": torch.nn.Module}
    _calls(engine, _calls("script", _module("library.model", _MODULE, **names)["Layer"]))()
