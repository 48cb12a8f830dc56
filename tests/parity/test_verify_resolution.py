"""`verify_plan` where the model computes in float32 whatever its weights are, and of buffers."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.parity import cases
from tests.parity.jobs import loss_jobs
from torch import Tensor, nn

import meshwright as mw
from meshwright.measure.verify import ParityReport, verify_plan


class Float32Inside(nn.Module):
    """A norm and a softmax in float32, as Hugging Face writes them; on two ranks the loss can be off by a factor."""

    def __init__(self, factor: float = 1.0, lost: float = 0.0) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(7, 13), nn.Linear(7, 13), nn.Linear(13, 5)
        self.scale = nn.Parameter(torch.ones(13))
        self.factor, self.lost = factor, lost

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x).float()
        hidden = (hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * self.scale
        return self.down(hidden * torch.softmax(self.gate(x), -1, dtype=torch.float32).to(x.dtype))


def on_ranks() -> bool:
    world = mw.current_world()
    return world is not None and world.world_size > 1


class Wrong(Float32Inside):
    """The same; on ranks its results are off by a part, or the gradient of one small parameter is."""

    def forward(self, x: Tensor) -> Tensor:
        result = super().forward(x) * (1 + self.factor if on_ranks() else 1.0)
        if on_ranks() and self.lost:
            result = result + self.lost * (self.scale.sum() - self.scale.sum().detach())
        return result


def float32_loss(outputs: Tensor, batch: Any) -> mw.Loss:
    return mw.Loss(F.mse_loss(outputs.float(), batch[1].float(), reduction="sum"), outputs.numel())


def verify(build: Any, line: str, loss_fn: Any = float32_loss, **options: Any) -> ParityReport:
    return verify_plan(build, mw.Plan.parse(line), cases.CASES["mlp"].batches(7, 2), loss_fn, num_steps=2, **options)


@pytest.mark.parametrize("line", ["dp=2,micro_batches=2", "pp=2,micro_batches=2"])
def test_a_model_that_computes_in_float32_in_places_is_equal_within_that(line: str) -> None:
    report = verify(Float32Inside, line)
    assert report.equal, report.to_text()
    assert report.computes_in == "float32"
    assert report.loss_bound is not None
    assert 1e-11 < report.loss_bound <= 1e-5
    assert any("computes in float32 in places" in note for note in report.notes)
    assert "where float32 bounds it" in report.to_text()
    assert str(report) == report.to_text()
    assert ParityReport.from_json(report.to_json()) == report


@pytest.mark.parametrize(("factor", "lost"), [(1e-5, 0.0), (-1e-4, 0.0), (0.0, 1e-5), (0.0, 1e-3)])
def test_a_true_difference_is_seen_through_float32(factor: float, lost: float) -> None:
    report = verify(functools.partial(Wrong, factor, lost), "dp=2")
    assert not report.equal
    if lost:
        assert report.first_difference is not None


def test_in_float64_alone_nothing_is_loosened() -> None:
    report = verify(loss_jobs.Centred, "single", loss_jobs.mean_square)
    assert report.equal
    assert (report.computes_in, report.loss_bound, report.grad_norm_bound) == (None, None, None)
    assert all((row.gradient_bound, row.value_bound) == (None, None) for row in report.parameters)


@pytest.mark.parametrize(("name", "computes_in"), [("gpt2", "float32"), ("bart", None)])
def test_models_of_hugging_face_with_their_own_loss_are_equal(name: str, computes_in: str | None) -> None:
    batches = [loss_jobs.own_batch(name)]
    build = functools.partial(loss_jobs.build_own, name)
    report = verify_plan(build, mw.Plan.parse("single,micro_batches=2"), batches, num_steps=2)
    assert report.equal, report.to_text()
    assert report.computes_in == computes_in


class Statistics(nn.Module):
    """Keeps a mean of what it saw, which no output depends on; on ranks it may be kept twice."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(7, 9), nn.Linear(9, 5)
        self.times = times
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times if on_ranks() else 1):
            self.mean += 1.0
            self.calls += 1
        return self.down(torch.tanh(self.up(x)))


def test_buffers_are_compared() -> None:
    report = verify(functools.partial(Statistics, 2), "dp=2", loss_jobs.mean_square)
    assert not report.equal
    assert report.first_difference is None  # every gradient and value is right
    assert [(row.name, row.value) for row in report.buffers] == [("mean", 1.0), ("calls", 1.0)]
    assert "outside the bound: buffer calls" in report.to_text()
    assert ParityReport.from_json(report.to_json()) == report
    report = verify(functools.partial(Statistics, 1), "dp=2", loss_jobs.mean_square)
    assert report.equal
    assert "buffers: 2 compared, largest relative difference 0.0e+00" in report.to_text()


def test_a_loss_that_a_step_would_refuse_is_compared_and_said() -> None:
    report = verify(functools.partial(loss_jobs.build, "mlp"), "single,micro_batches=2", loss_jobs.contrastive)
    assert not report.equal
    assert any("is not a mean over samples" in note for note in report.notes)
