"""`verify_plan`: the report is right where a plan is equal, and where it is not."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import pathlib
from typing import Any

import pytest
import torch
from tests.parity import cases, losses
from tests.parity.jobs import tensor_jobs
from tests.parity.models import small_models as models
from torch import nn

import meshwright as mw
from meshwright import testing
from meshwright.compare.verify_config import run_verification
from meshwright.measure.oracle import ModuleOutputs
from meshwright.measure.outputs import RankOutputs, first_difference
from meshwright.measure.verify import ParityReport, verify_plan
from meshwright.ranks.world import World
from meshwright.run.parallel_model import ParallelModel


def _with_dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 13), nn.Dropout(0.5), nn.LSTM(13, 5, 2, dropout=0.3), _First())


class _First(nn.Module):
    def forward(self, outputs: tuple[torch.Tensor, Any]) -> torch.Tensor:
        return outputs[0]


def _noisy() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 5), _Noise())


class _Noise(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.randn_like(x)


def _batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 9), nn.BatchNorm1d(9), nn.Linear(9, 5))


@pytest.mark.parametrize("is_agreed", [True, False])
def test_a_request_to_stop_ends_a_verification(monkeypatch: pytest.MonkeyPatch, is_agreed: bool) -> None:
    if is_agreed:  # by the ranks, when a step begins
        monkeypatch.setattr(ParallelModel, "stop_requested", True)
    else:
        monkeypatch.setattr(World, "stop_requested", lambda _: True)
    with pytest.raises(mw.StoppedOnRequest, match="nothing is compared"):
        verify_plan(_plain_mlp, "single", [(torch.randn(4, 7), torch.randn(4, 5))], losses.square, num_steps=1)


def _plain_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 5))


class _WrongOnRanks(nn.Module):
    """A pair of layers; on ranks, from one on, what it returns is another factor or sign of it."""

    def __init__(self, factor: float, first_rank: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.factor, self.first_rank = factor, first_rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        world = mw.current_world()
        is_wrong = world is not None and world.world_size > 1 and world.rank >= self.first_rank
        result = x + self.down(torch.tanh(self.up(x)))
        return result * self.factor if is_wrong else result


def _wrong_in_the_middle(factor: float, first_rank: int) -> nn.Module:
    layers = [_WrongOnRanks(factor if place == 1 else 1.0, first_rank) for place in range(3)]
    return nn.Sequential(nn.Linear(7, 8), *layers, nn.Linear(8, 5))


def _verify(build: Any, line: str, **options: Any) -> ParityReport:
    batches = cases.CASES["mlp"].batches(6, 2)
    return verify_plan(build, mw.Plan.parse(line), batches, losses.square, **options)


def test_a_plan_with_ranks_is_equal() -> None:
    report = _verify(_plain_mlp, "dp=2,micro_batches=2", max_grad_norm=0.5)
    assert report.equal
    assert (report.plan, report.num_steps, report.dtype, report.bound) == ("dp=2,micro_batches=2", 3, "float64", 1e-11)
    assert [row.name for row in report.parameters] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert all(row.gradient <= 1e-11 and row.value <= 1e-11 for row in report.parameters)
    assert (report.unequal_ranks, report.notes, report.first_difference) == ((), (), None)
    assert all(math.isfinite(a) and math.isfinite(b) for a, b in report.losses)


@pytest.mark.parametrize("line", ["single", "mode=data_parallel,dp=2", "mode=model_parallel,pp=2"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_plans_of_one_process_are_equal(line: str, dtype: torch.dtype) -> None:
    report = _verify(_plain_mlp, line, dtype=dtype, devices=None if line == "single" else ["cpu", "cpu"])
    assert report.equal, report.to_text()
    assert report.dtype == str(dtype).removeprefix("torch.")


def test_dropout_is_switched_off_and_said_so() -> None:
    report = _verify(_with_dropout, "mode=data_parallel,dp=2", devices=["cpu", "cpu"])
    # LSTMs take [time, ...]: here the samples of one share follow each other, so shares are not the whole batch.
    assert any("dropout is switched off" in note and "1, 2" in note for note in report.notes)
    assert not any("random numbers" in note for note in report.notes)


def test_batch_normalisation_is_reported_and_not_equal() -> None:
    report = _verify(_batch_norm, "mode=data_parallel,dp=2", devices=["cpu", "cpu"])
    assert not report.equal
    assert report.first_difference is not None
    assert report.first_difference.name == "0.weight"
    assert "step 0, gradient" in report.first_difference.note
    assert any("batch normalisation (1)" in note for note in report.notes)
    assert "NOT equal to one process" in report.to_text()
    assert "first parameter outside the bound: 0.weight" in report.to_text()


def test_random_numbers_that_cannot_be_switched_off_are_reported() -> None:
    state = torch.get_rng_state()
    report, placed = _verify(_noisy, "single", rng="torch"), _verify(_noisy, "single")
    torch.set_rng_state(state)
    assert any("draws random numbers" in note for note in report.notes)
    assert placed.equal
    assert not any("draws random numbers" in note for note in placed.notes)


def test_what_changes_numbers_is_said() -> None:
    report = _verify(_plain_mlp, "single,precision=bf16", dtype=torch.float32)
    assert not report.equal
    assert any("bf16" in note for note in report.notes)


def test_the_report_round_trips_through_json() -> None:
    report = _verify(_plain_mlp, "single")
    assert ParityReport.from_json(report.to_json()) == report
    broken = dataclasses.replace(report, loss_difference=math.inf, losses=((math.inf, 1.0),), equal=False)
    assert ParityReport.from_json(broken.to_json()) == broken
    assert "Infinity" not in broken.to_json()
    for text in ("{}", "[]", "no", report.to_json().replace('"version": 1', '"version": 2')):
        with pytest.raises(mw.ConfigError):
            ParityReport.from_json(text)


def test_the_text_lists_the_worst_parameters_first() -> None:
    report = _verify(_plain_mlp, "single")
    rows = tuple(dataclasses.replace(row, gradient=float(i)) for i, row in enumerate(report.parameters))
    text = dataclasses.replace(report, parameters=rows, unequal_ranks=(1,)).to_text(max_rows=2)
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("parameter"))
    assert [line.split()[0] for line in lines[start + 1 : start + 3]] == ["2.bias", "2.weight"]
    assert lines[start + 3] == "... and 2 parameters that differ no more than these"
    assert "not bit-identical to rank 0: [1]" in text


def test_what_cannot_be_verified_is_refused() -> None:
    plan = mw.Plan.parse("single")
    with pytest.raises(mw.ConfigError, match="num_steps=0"):
        verify_plan(_plain_mlp, plan, [cases.regression(3, 0)], losses.square, num_steps=0)
    with pytest.raises(mw.ConfigError, match="at least one batch"):
        verify_plan(_plain_mlp, plan, [], losses.square)
    with pytest.raises(mw.ConfigError, match="no bound is known"):
        verify_plan(_plain_mlp, plan, [cases.regression(3, 0)], losses.square, dtype=torch.bfloat16)


def _verify_inside(line: str) -> ParityReport:
    return _verify(models.build_mlp, line)


def test_ranks_that_run_already_are_used() -> None:
    first, second = testing.run_ranks(_verify_inside, 2, "dp=2")
    assert first == second
    assert first.equal, first.to_text()
    outcomes = testing.run_outcomes(_verify_inside, 2, "dp=3")
    assert all(isinstance(outcome.error, mw.ConfigError) for outcome in outcomes)


@pytest.mark.parametrize(
    ("line", "factor", "first_rank", "difference"),
    [
        ("dp=2,micro_batches=2", 1.001, 0, 1.001**2 - 1),
        ("dp=2", 1.001, 1, None),
        ("dp=2,zero=3,whole_below=0B,recompute=full", -1.0, 0, None),
        ("tp=2", 1.001, 0, 1.001**2 - 1),
        ("tp=2,sequence_parallel=off", -1.0, 0, None),
        ("pp=2,micro_batches=3", 1.001, 0, 1.001**2 - 1),
        ("pp=2,schedule=zbv,micro_batches=2", -1.0, 0, None),
    ],
)
def test_the_first_module_that_differs_is_named(
    line: str, factor: float, first_rank: int, difference: float | None
) -> None:
    build = functools.partial(_wrong_in_the_middle, factor, first_rank)
    report = _verify(build, line, num_steps=1)
    assert not report.equal
    assert report.first_module == "2"
    assert report.first_module_difference is not None
    assert difference is None or report.first_module_difference == pytest.approx(difference, rel=1e-6)
    assert "first module whose output differs: 2 (" in report.to_text()
    assert ParityReport.from_json(report.to_json()) == report


@pytest.mark.parametrize(
    "line",
    [
        "dp=2,micro_batches=2",
        "tp=2",
        "tp=2,sequence_parallel=off,recompute=full",
        "pp=2,micro_batches=3",
        "pp=2,schedule=interleaved,virtual=2,recompute=full",
        "tp=2,pp=2,micro_batches=2",
    ],
)
def test_no_module_is_named_where_only_the_update_is_wrong(line: str) -> None:
    # Every module of the GPT is compared: copies, slices of heads, columns and the sequence, logits, a table of positions.
    batches = [tensor_jobs.language(4)]
    plan = mw.Plan.parse(line)
    report = verify_plan(tensor_jobs.build, plan, batches, losses.cross_entropy, num_steps=1, optimizer=_other_rate)
    assert not report.equal
    assert report.first_difference is not None
    assert (report.first_module, report.first_module_difference) == (None, None)
    assert "no module's output was seen to differ" in report.to_text()


def _other_rate(parameters: Any) -> torch.optim.Optimizer:
    world = mw.current_world()
    return torch.optim.SGD(parameters, lr=0.2 if world is not None and world.world_size > 1 else 0.1)


def test_shares_of_one_tensor_and_copies_of_it_are_read_alike() -> None:
    table, half, rows = ModuleOutputs(1, [3.0], [-3.0]), ModuleOutputs(1, [1.5], [0.5]), ModuleOutputs(2, [3.0], [1.0])
    ranks = [RankOutputs(tp_rank=0, modules={"table": table, "rows": half, "odd": half}) for _ in range(2)]
    expected = {"table": table, "rows": rows, "odd": ModuleOutputs(1, [3.0, 1.0], [3.0, 1.0]), "not run": half}
    assert first_difference(ranks, expected, 1e-11) == ("odd", math.inf)
    assert first_difference(ranks, {"table": table, "rows": rows}, 1e-11) is None


def test_a_report_of_an_earlier_release_is_read() -> None:
    report = _verify(_plain_mlp, "single")
    assert report.first_module is None
    fields = json.loads(report.to_json())
    for name in ("first_module", "first_module_difference", "first_unequal", "first_parameter"):
        del fields[name]
    assert ParityReport.from_json(json.dumps(fields)) == report


class _Shifting(torch.optim.SGD):
    """Shifts the last parameter that it has on rank 1 by a little after each step."""

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        world = mw.current_world()
        if world is not None and world.rank == 1:
            with torch.no_grad():
                self.param_groups[0]["params"][-1].add_(1e-9)
        return result


def test_ranks_that_drift_apart_are_named() -> None:
    report = _verify(_plain_mlp, "dp=2", optimizer=functools.partial(_Shifting, lr=0.1))
    assert not report.equal
    assert report.unequal_ranks == (1,)
    assert report.first_unequal == "step 0, value of 2.bias"


def test_a_parameter_that_one_rank_of_a_pipeline_shifts_is_named() -> None:
    build, optimizer = functools.partial(_wrong_in_the_middle, 1.0, 0), functools.partial(_Shifting, lr=0.1)
    report = _verify(build, "pp=2,micro_batches=2", optimizer=optimizer)
    assert not report.equal
    assert report.first_difference is not None
    assert report.first_difference.name == "4.bias"  # in the next step all others follow
    assert "step 0, value" in report.first_difference.note
    # Rank 1 has the first stage of the other half of the batch: rank 0 has nothing wrong until they share gradients.
    report = _verify(build, "dp=2,pp=2,micro_batches=2", optimizer=optimizer, num_steps=1)
    assert not report.equal
    assert report.first_unequal == "step 0, value of 1.down.bias"
    assert "not bit-identical to rank 0: [1, 3], at first in step 0, value of 1.down.bias" in report.to_text()
    assert ParityReport.from_json(report.to_json()) == report


CONFIG = """
[model]
target = "tests.parity.test_verify:{model}"

[data]
source = "tests.parity.test_verify:make_data"

[optimizer]
lr = 0.001

[train]
steps = 5
global_batch_size = 6
loss = "mse"
max_grad_norm = 0.5
"""


def make_batches(split: str) -> torch.utils.data.DataLoader:
    return torch.utils.data.DataLoader(make_data(split), batch_size=5)


def make_data(split: str) -> torch.utils.data.TensorDataset:
    inputs, targets = cases.regression(15, seed=1 if split == "train" else 2)
    return torch.utils.data.TensorDataset(inputs, targets)


@pytest.mark.parametrize(
    "plan", ["dp=2", "data_parallel,dp=2", "model_parallel,pp=2", "pp=2,micro_batches=3", "single"]
)
def test_the_command_verifies_a_configuration(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], plan: str
) -> None:
    path, report_path = tmp_path / "mlp.toml", tmp_path / "report.json"
    path.write_text(CONFIG.format(model="_plain_mlp"))
    assert run_verification(path, plan, steps=3, json_path=report_path) == 0
    assert "equal to one process (3 steps, float64" in capsys.readouterr().out
    report = ParityReport.from_json(report_path.read_text())
    assert (report.equal, report.num_steps) == (True, 3)
    assert len({loss for _, loss in report.losses}) == 3


def test_the_command_takes_ready_made_batches(tmp_path: pathlib.Path) -> None:
    # The stand-in for a model that takes whole batches had no splitter.
    path = tmp_path / "mlp.toml"
    path.write_text(CONFIG.replace("make_data", "make_batches").format(model="_plain_mlp"))
    with pytest.raises(
        mw.ConfigError, match="global_batch_size=6, and the DataLoader makes global batches of 5 samples"
    ):
        run_verification(path, "single", steps=4)
    assert run_verification(path, "single", steps=4, overrides=["train.global_batch_size=5"]) == 0


def test_the_command_says_where_a_plan_is_not_equal(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mlp.toml"
    path.write_text(CONFIG.format(model="_batch_norm"))
    assert run_verification(path, "data_parallel,dp=2", steps=1, overrides=["train.global_batch_size=5"]) == 1
    out = capsys.readouterr().out
    assert "NOT equal to one process" in out
    assert "note: batch normalisation (1)" in out
    assert "outside the bound: loss" in out


def test_the_command_names_what_is_wrong_in_a_pipeline(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mlp.toml"
    path.write_text(CONFIG.format(model="_wrong_model"))
    assert run_verification(path, "pp=2,micro_batches=2", steps=1) == 1
    out = capsys.readouterr().out
    assert "NOT equal to one process" in out
    assert "first module whose output differs: 2 (" in out


def _wrong_model() -> nn.Module:
    return _wrong_in_the_middle(1.001, 0)


def test_the_command_refuses_to_write_where_it_cannot(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "mlp.toml"
    path.write_text(CONFIG.format(model="_plain_mlp"))
    with pytest.raises(mw.ConfigError, match="nowhere"):  # before anything runs
        run_verification(path, "single", steps=1, json_path=tmp_path / "nowhere" / "report.json")
    with pytest.raises(mw.StorageError, match="could not be written"):
        run_verification(path, "single", steps=1, json_path=tmp_path)


@pytest.mark.parametrize("plan", ["dp=2,micro_batches=2", "data_parallel,dp=2"])
def test_the_classes_of_a_configuration_are_compared_in_float64(tmp_path: pathlib.Path, plan: str) -> None:
    # Cross-entropy in float32 would show a difference of 1e-7 between equal plans.
    text = CONFIG.replace('loss = "mse"', 'loss = "cross_entropy"').replace("make_data", "make_classes")
    path = tmp_path / "classes.toml"
    path.write_text(text.format(model="_plain_mlp"))
    assert run_verification(path, plan, steps=3) == 0


def make_classes(split: str) -> torch.utils.data.TensorDataset:
    inputs, _ = cases.regression(15, seed=1 if split == "train" else 2)
    return torch.utils.data.TensorDataset(inputs, torch.arange(15) % 5)
