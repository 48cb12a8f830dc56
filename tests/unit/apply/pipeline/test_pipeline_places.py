"""Where calls take place: the cut, the stages' forwards and the forecast of bytes go by one rule."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.apply.modules.copies import copy_module
from meshwright.apply.pipeline.expected_bytes import count_crossings
from meshwright.apply.pipeline.notes import digest_of
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


class Opened(nn.Module):
    """A heavy layer that reads a value between its own layers."""

    def __init__(self, *, reads: bool) -> None:
        super().__init__()
        self.wide, self.narrow, self.reads = nn.Linear(6, 64), nn.Linear(64, 6), reads

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.wide(inputs)
        return self.narrow(hidden if not self.reads or hidden.sum().item() < 9e9 else -hidden)


@pytest.mark.parametrize("reads", [True, False])
def test_a_heavy_layer_whose_own_code_reads_values_stays_in_one_piece(reads: bool) -> None:
    module = nn.Sequential(nn.Linear(6, 6), Opened(reads=reads), nn.Linear(6, 6))
    flow = observe(module, lambda copy: copy(torch.ones(4, 6)).sum(), num_stages=2, closed=(), on_copy=False)
    assert flow.units == (("0", "1", "2") if reads else ("0", "1.wide", "1.narrow", "2"))
    assert not flow.firsts


class ReadsBetween(nn.Module):
    """Reads a value of its second layer, and rows that the third layer chooses or not."""

    def __init__(self, *, late: bool) -> None:
        super().__init__()
        self.layers, self.late = nn.ModuleList(nn.Linear(6, 6) for _ in range(4)), late

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.layers[1](self.layers[0](inputs))
        hidden = hidden if bool((hidden > -9e9).all()) else -hidden
        third = self.layers[2](hidden)
        return self.layers[3](third[third[:, 0] > -9e9] if self.late else third)


@pytest.mark.parametrize("late", [True, False])
def test_layers_up_to_the_one_whose_values_are_read_are_on_the_first_stage(late: bool) -> None:
    module = ReadsBetween(late=late)
    stage_map = _cut(module, {})
    assert stage_map.stages == {"layers.0": 0, "layers.1": 0, "layers.2": 0 if late else 1, "layers.3": 1}
    assert stage_map.flow.num_first == 2 + late
    assert "__bool__() of a tensor of 'layers.1'" in stage_map.flow.reasons(module)[0]


class AsksBetween(nn.Module):
    """Asks whether its second layer has given back its very argument; `is None` is no such question."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.after = nn.ModuleList(nn.Linear(6, 6) for _ in range(4)), None

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.layers[2](self._turned(self.layers[0](inputs)))
        return self.layers[3](hidden) if self.after is None else hidden

    def _turned(self, hidden: Tensor) -> Tensor:
        same = self.layers[1](hidden)
        return -same if same is hidden else same


def test_a_comparison_of_objects_between_layers_is_told() -> None:
    module = AsksBetween()
    (reason,) = _cut(module, {}).flow.reasons(module)
    assert "by `is`" in reason
    plain = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
    assert not _cut(plain, {}).flow.reasons(plain)


def test_a_text_of_a_tensor_between_layers_is_told() -> None:
    class Prints(nn.Sequential):
        def forward(self, input: Tensor) -> Tensor:
            for place, layer in enumerate(self):
                input = layer(input) * (1 if place else len(str(input)) and len(str(layer(input))))
            return input

    module = Prints(*(nn.Linear(6, 6) for _ in range(3)))
    (reason,) = _cut(module, {}).flow.reasons(module)
    assert "__repr__() of a tensor of '0'" in reason


def test_what_no_stage_is_left_for_is_refused() -> None:
    class Ends(nn.Sequential):
        def forward(self, input: Tensor) -> Tensor:
            hidden = super().forward(input)
            return hidden if hidden.sum().item() < 9e9 else -hidden

    with pytest.raises(ApplyError, match="reads values between its layers"):
        _cut(Ends(nn.Linear(6, 6), nn.Linear(6, 6)), {})


def test_a_digest_of_no_entries() -> None:
    assert digest_of(torch.empty(0, 3)) == digest_of(torch.empty(0))
