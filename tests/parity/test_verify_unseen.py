"""`verify_plan` where a wrong number hides: tiny, beside a mask, complex; and what it must not change on the caller's side."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
from tests.parity import cases, losses
from torch import nn

from meshwright.apply.engine import Engine
from meshwright.measure.verify import verify_plan


class _Faint(nn.Module):
    """A layer, a complex one, and a parameter that the loss hardly depends on, beside a mask and a count in other buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.faint = nn.Linear(7, 5), nn.Parameter(torch.randn(5))
        self.phase = nn.Parameter(torch.randn(5, 5, dtype=torch.complex64))
        self.register_buffer("mask", torch.full((3, 3), -math.inf).triu(1))
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.up(x))
        return (hidden.to(self.phase.dtype) @ self.phase).abs() + 1e-18 * self.faint


def _doubles_faint(module: nn.Module) -> None:
    module.get_parameter("faint").grad.mul_(2)  # pyright: ignore[reportOptionalMemberAccess]


def _conjugates(module: nn.Module) -> None:
    module.get_parameter("phase").grad.imag.neg_()  # pyright: ignore[reportOptionalMemberAccess]


def _shifts_buffer(module: nn.Module) -> None:
    module.get_buffer("seen").add_(1.0)


@pytest.mark.parametrize(
    ("breaks", "where"),
    [
        (None, None),
        (_doubles_faint, "step 0, gradient"),
        (_conjugates, "step 0, gradient"),
        (_shifts_buffer, "buffer seen"),
    ],
    ids=["whole", "faint", "conjugate", "buffer"],
)
def test_what_is_small_or_beside_a_mask_or_complex_is_compared(
    monkeypatch: pytest.MonkeyPatch, breaks: Callable[[nn.Module], None] | None, where: str | None
) -> None:
    finish = Engine.finish_gradients

    def finish_wrongly(self: Engine, scale: float) -> None:
        finish(self, scale)
        if breaks is not None:
            breaks(self.module)

    monkeypatch.setattr(Engine, "finish_gradients", finish_wrongly)
    batches = cases.CASES["mlp"].batches(6, 1)
    report = verify_plan(_Faint, "single,micro_batches=2", batches, losses.square, num_steps=1)
    assert report.equal is (where is None), report.to_text()
    assert where is None or where in report.to_text()


class _InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(7, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(x.mul_(2))


def test_the_caller_s_things_are_left_alone() -> None:
    module, batches = _InPlace(), cases.CASES["mlp"].batches(6, 1)
    given, before = batches[0][0].clone(), copy.deepcopy(module.state_dict())
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    report = verify_plan(lambda: module, "single", batches, losses.square)  # the same module each time
    assert report.equal, report.to_text()
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(batches[0][0], given)
    assert all(torch.equal(value, module.state_dict()[name]) for name, value in before.items())
    assert {value.dtype for value in module.state_dict().values()} == {torch.float32}
