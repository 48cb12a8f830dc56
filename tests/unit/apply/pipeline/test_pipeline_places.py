"""Where calls take place: the cut, the stages' forwards and the forecast of bytes go by one rule."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.apply.modules.copies import copy_module
from meshwright.apply.pipeline.expected_bytes import count_crossings
from meshwright.apply.pipeline.tracing.call_trace import Flow
from meshwright.apply.pipeline.tracing.observation import observe
from meshwright.apply.pipeline.tracing.stage_map import StageMap, cut
from meshwright.apply.pipeline.walking.stand_ins import Meta, make_fake
from meshwright.errors import ApplyError


class Chance(nn.Module):
    """A bare layer between two others, and a parameter that the code after it looks up."""

    def __init__(self, *, draws: bool) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.drop = nn.Dropout(0.0)
        self.scale = nn.Parameter(torch.ones(6))
        self.last = nn.Linear(6, 6)
        self.draws = draws

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        if not self.draws or float(torch.rand(())) < 2.0:
            hidden = self.drop(hidden)
        return self.last(hidden * self.scale)


def _cut(module: nn.Module, stages: dict[str, int]) -> StageMap:
    flow = observe(module, lambda copy: copy(torch.ones(4, 6)).sum(), num_stages=2, closed=(), on_copy=False)
    return cut(module, Flow.from_json(flow.to_json()), [0, 1], stages)


@pytest.mark.parametrize(("draws", "place"), [(True, 0), (False, 1)])
def test_a_parameter_is_held_where_the_code_after_a_bare_layer_takes_place(draws: bool, place: int) -> None:
    # Where chance may leave layers out, a bare one runs with its tensors; the cut had the parameter on the stage dealt to it.
    module = Chance(draws=draws)
    stage_map = _cut(module, {"first": 0, "drop": 1, "last": 1})
    assert stage_map.place_of_call("drop", 0, module.drop, [0]) == place
    assert stage_map.holders["scale"] == (place,)
    assert stage_map.holders["last.weight"] == (1,)


def test_the_forecast_of_bytes_has_calls_where_the_stages_have_them() -> None:
    module = Chance(draws=True)
    stage_map = _cut(module, {"first": 0, "drop": 1, "last": 1})

    def fake(tensor: Tensor) -> Any:
        return make_fake(Meta.of(tensor)) if isinstance(tensor, nn.Parameter) else tensor.clone()

    module.draws = False  # a number that the forecast's tensors have not
    crossing = count_crossings(copy_module(module, fake), stage_map, {"inputs": torch.ones(4, 6)})
    assert dict(crossing) == {(0, 1): 4 * 6 * 4, (1, 0): 4 * 6 * 4}


def test_a_layer_that_holds_something_cannot_run_before_its_tensors() -> None:
    module = Chance(draws=False)
    stage_map = _cut(module, {"first": 0, "drop": 0, "last": 1})
    assert stage_map.place_of_call("drop", 0, module.drop, [0, None, 1]) == 1
    with pytest.raises(ApplyError, match=r"'first' is on stage 0 and takes a tensor that stage 1 computes"):
        stage_map.place_of_call("first", 0, module.first, [1])
