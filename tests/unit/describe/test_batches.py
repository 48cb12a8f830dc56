"""Batches that are mappings, whose entries are keywords of the model."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw


class _Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.linear(x * mask)


class _TakesTargets(_Masked):
    def forward(self, x: Tensor, mask: Tensor, y: Tensor | None = None) -> Tensor:
        return self.linear(x * mask)


def _loss(outputs: Tensor, batch: Any) -> Tensor:
    return (outputs.squeeze(-1) - (batch["y"] if isinstance(batch, dict) else batch[1])).square().mean()


def test_an_entry_that_the_model_does_not_take_is_named_and_the_fix_works() -> None:
    x, mask, y = torch.ones(4, 3), torch.ones(4, 3), torch.zeros(4)
    with mw.apply_plan(_Masked, "single", loss_fn=_loss) as model:
        with pytest.raises(mw.ApplyError) as error:
            model.step({"x": x, "mask": mask, "y": y})
        assert "_Masked.forward takes no 'y'" in error.value.message
        fix = "a pair of inputs and targets: ({'x': ..., 'mask': ...}, batch['y']), or let forward take y=None"
        assert error.value.fix == fix
    with mw.apply_plan(_Masked, "single", loss_fn=_loss) as model:
        paired = model.step(({"x": x, "mask": mask}, y)).loss
    with mw.apply_plan(_TakesTargets, "single", loss_fn=_loss) as model:
        assert model.step({"x": x, "mask": mask, "y": y}).loss == paired > 0


class _Point(NamedTuple):
    x: Tensor
    y: Tensor
    weight: Tensor


@dataclasses.dataclass
class _Sample:
    x: Tensor
    y: Tensor


class _Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


@pytest.mark.parametrize("label", ["label", "score"])
def test_a_mapping_of_which_the_model_takes_nothing_has_a_fix_that_works(label: str) -> None:
    batch = {"image": torch.ones(4, 3), label: torch.zeros(4), "id": ["a", "b", "c", "d"]}
    with mw.apply_plan(_Plain, "single", loss_fn=_loss) as model:
        with pytest.raises(mw.ApplyError) as error:
            model.step(batch)
        assert f"a pair of inputs and targets: (batch['image'], batch['{label}'])" in str(error.value.fix)
        assert model.step((batch["image"], batch[label])).loss > 0


@pytest.mark.parametrize(
    "batch",
    [_Point(torch.ones(4, 3), torch.zeros(4), torch.ones(4)), _Sample(torch.ones(4, 3), torch.zeros(4))],
    ids=lambda batch: type(batch).__name__,
)
def test_an_object_of_inputs_and_targets_is_named_with_what_helps(batch: Any) -> None:
    with mw.apply_plan(_Plain, "single", loss_fn=_loss) as model:
        with pytest.raises(TypeError) as error:
            model.step(batch)
        assert f"the batch is a {type(batch).__name__}" in error.value.__notes__[0]
        assert model.step((batch.x, batch.y)).loss > 0


def test_verify_names_it_too() -> None:
    batch = {"x": torch.ones(4, 3), "mask": torch.ones(4, 3), "y": torch.zeros(4)}
    with pytest.raises(mw.ApplyError, match="forward takes no 'y'"):
        mw.verify_plan(_Masked, "single", [batch], loss_fn=_loss)
    assert mw.verify_plan(_TakesTargets, "single", [batch], loss_fn=_loss).equal


def test_a_type_error_of_the_models_own_stays_what_it_is() -> None:
    class Raises(_Masked):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            raise TypeError("mine")

    with mw.apply_plan(Raises, "single", loss_fn=_loss) as model, pytest.raises(TypeError, match="mine"):
        model.step({"x": torch.ones(4, 3), "mask": torch.ones(4, 3)})
