"""Collectives of torch.distributed that a model's or a loss's code calls are refused, and no others."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d

import meshwright as mw
from meshwright.run.model_collectives import _refuse_inside, refuse_in_models


def _module(name: str, source: str, **names: Any) -> dict[str, Any]:
    """Return the names of a module that a source defines."""
    module = types.ModuleType(name)
    vars(module).update(names)
    exec(source, vars(module))
    return vars(module)


def _calls(name: str, called: Callable[[], None]) -> Callable[[], None]:
    """Return a function of a module that calls another one."""
    return _module(name, "def call():\n    called()", called=called)["call"]


def _torchs() -> None:
    """Stands for torch.distributed's function, which asks first."""
    _refuse_inside("all_reduce")


@pytest.mark.parametrize("engine", ["meshwright.run.step", "meshwright.apply.pipeline.engine"])
@pytest.mark.parametrize("through", ["", "torch.distributed.nn.functional"])
def test_a_model_that_an_engine_runs_may_not_call_one(engine: str, through: str) -> None:
    call = _calls(through, _torchs) if through else _torchs
    with pytest.raises(
        mw.ApplyError, match=r"calls torch\.distributed\.all_reduce \(<string>:2\)[\s\S]*fix: leave it out"
    ):
        _calls("script", _calls(engine, _calls("torch.nn.modules.module", _calls("library.model", call))))()


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


def test_operations_that_torch_knows_by_identity_stay_its_own() -> None:
    refuse_in_models()
    assert (dist.isend, dist.irecv) == (distributed_c10d.isend, distributed_c10d.irecv)
    assert dist.all_reduce is not distributed_c10d.all_reduce
