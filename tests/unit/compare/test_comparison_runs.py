"""Which runs a comparison makes, what it does with what they give, and what a model should send."""

from __future__ import annotations

import functools
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
import rich.console
import torch
from torch import nn

from gpt import build_gpt
from meshwright.apply.data.expected_bytes import CopiesForecast
from meshwright.apply.forecast import SeenStep
from meshwright.comm.communicator import Communicator
from meshwright.comm.compression.reducer import PlainReducer
from meshwright.comm.ledger import Ledger
from meshwright.compare import run_plans as module
from meshwright.compare.command import run_comparison, show, split_plans
from meshwright.compare.comparison import Comparison
from meshwright.compare.run_plans import compare_plans
from meshwright.compare.trial import RankSamples, learn_step
from meshwright.describe.batches import BatchSplitter
from meshwright.errors import (
    ApplyError,
    ConfigError,
    NonFiniteError,
    StoppedOnRequest,
    UserCodeError,
    WorkerKilledError,
)
from meshwright.run.applying import apply_plan
from meshwright.spec import Plan
from meshwright.train.config.load import load_config

CLASSIC = Path(__file__).parents[3] / "examples" / "mlp_classic.toml"


# -- what a model should send ------------------------------------------------------------------------------------------


class Untraceable(nn.Sequential):
    """Needs the values of what it is given, which shapes alone do not have."""

    def forward(self, x):
        return super().forward(x * float(x.sum() > 0))


def chain(kind=nn.Sequential):
    return kind(nn.Linear(4, 16), nn.Linear(16, 16), nn.Linear(16, 4))


def sent_and_formula(build, line, batch, num_devices=2):
    plan = Plan.parse(line, num_devices=num_devices)
    with apply_plan(build, plan, loss_fn=lambda outputs, _: outputs.float().square().mean()) as model:
        forecast = model.engine.forecast()
        before = model.ledger.sent_bytes
        model.step(batch)
        sent = model.ledger.sent_bytes - before
        learn_step(forecast, model, batch, len(batch[0]), is_cross_entropy=False)
    return sent, forecast.sent_bytes()


def test_the_cut_of_a_chain_is_counted_exactly():
    batch = (torch.randn(6, 4), torch.zeros(6))
    assert sent_and_formula(chain, "model_parallel", batch) == (2 * 6 * 16 * 4, 2 * 6 * 16 * 4)
    # Cutting the batch does not change what crosses.
    assert sent_and_formula(chain, "model_parallel,micro_batches=3", batch) == (2 * 6 * 16 * 4, 2 * 6 * 16 * 4)


def test_a_tied_head_goes_back_to_the_embedding():
    batch = (torch.randint(0, 256, (2, 16)), torch.zeros(2))
    settings = {"hidden_size": 32, "num_layers": 4, "num_heads": 2, "max_length": 16}
    sent, tied = sent_and_formula(lambda: build_gpt(tie_embeddings=True, **settings), "model_parallel", batch)
    _, free = sent_and_formula(lambda: build_gpt(tie_embeddings=False, **settings), "model_parallel", batch)
    hidden, tables = 2 * 16 * 32 * 4, 2 * (16 * 8 * 4)
    # The rotary tables that the blocks are handed cross as well, one way, once for each micro-batch.
    assert (tied, free) == (2 * 2 * hidden + tables, 2 * hidden + tables)
    assert sent == tied
    twice = sent_and_formula(
        lambda: build_gpt(tie_embeddings=True, **settings), "model_parallel,micro_batches=2", batch
    )
    assert twice == (sent + tables, sent + tables)


def test_a_count_of_what_crosses_leaves_no_hooks_behind():
    module = chain()
    with apply_plan(
        module, Plan.parse("model_parallel", num_devices=2), loss_fn=lambda outputs, _: outputs.sum()
    ) as model:
        forecast = model.engine.forecast()
        learn_step(forecast, model, (torch.randn(6, 4), torch.zeros(6)), 6, is_cross_entropy=False)
        hooks = len(module._forward_hooks)
        assert forecast.sent_bytes() == 2 * 6 * 16 * 4
        assert len(module._forward_hooks) == hooks
    forecast.sent_bytes()
    assert not any(len(layer._forward_hooks) + len(layer._forward_pre_hooks) for layer in module.modules())


def test_replicas_on_the_cpu_move_nothing():
    batch = (torch.randn(6, 4), torch.zeros(6))
    assert sent_and_formula(chain, "data_parallel", batch) == (0, 0)


def test_a_model_that_needs_values_has_no_formula():
    batch = (torch.randn(6, 4), torch.zeros(6))
    sent, formula = sent_and_formula(lambda: chain(Untraceable), "model_parallel", batch)
    assert sent > 0
    assert formula is None


def test_sparse_gradients_and_frozen_parameters_are_not_in_the_ring():
    module = nn.ModuleList([nn.Embedding(10, 4, sparse=True), nn.Embedding(10, 4), nn.Linear(4, 4)])
    module[2].bias.requires_grad_(False)
    alone = Communicator(None, ranks=[0], rank=0, ledger=Ledger(), timeout_s=1.0)
    forecast = CopiesForecast(module, 4, PlainReducer(alone))
    forecast.learn(
        SeenStep(plan=Plan.parse("dp=4"), batch=None, num_samples=1, splitter=BatchSplitter(), is_cross_entropy=False)
    )
    assert forecast.sent_bytes() == 2 * 3 / 4 * 4 * (10 * 4 + 4 * 4)


# -- which runs are made ----------------------------------------------------------------------------------------------


class FakeLaunch:
    """Stands in for `launch`: notes the calls and returns made-up samples."""

    def __init__(self, errors=None, device="cpu", **samples):
        self.samples = samples
        self.calls = []
        self.errors = errors or {}
        self.device = device

    def __call__(self, fn, num_ranks, config_json, warm_up, steps, *, threads_per_rank, on_event):
        plan = json.loads(config_json)["plan"]
        mode = plan.get("mode", "ranks")
        self.calls.append((mode, num_ranks, threads_per_rank, warm_up, steps))
        if mode in self.errors:
            raise self.errors[mode]
        total = warm_up + steps
        seconds = [100.0] * warm_up + [1.0] * steps
        return [
            RankSamples(
                device=self.device,
                seconds=[value + rank for value in seconds],
                num_samples=[1] * warm_up + [64] * steps,
                num_tokens=[1] * warm_up + [64] * steps,
                losses=[1.0] * total,
                sent_bytes=[0.0] * total,
                wait_seconds=[0.0] * total,
                sees_waiting=self.device == "cpu",
                peak_memory_bytes=[100 + rank],
                formula_bytes=0.0 if rank == 0 else None,
                **self.samples,
            )
            for rank in range(num_ranks)
        ]


@pytest.fixture
def fake(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(module, "usable_cores", lambda: 4)

    def install(**kwargs):
        launch = FakeLaunch(**kwargs)
        monkeypatch.setattr(module, "launch", launch)
        return launch

    return install


ALL = ["single", "data_parallel", "model_parallel", "distributed"]


def test_all_plans_share_the_same_cores(fake):
    launch = fake()
    got = compare_plans(CLASSIC, ALL, steps=2)
    assert launch.calls == [
        ("ranks", 1, 4, 3, 2),
        ("data_parallel", 1, 4, 3, 2),
        ("model_parallel", 1, 4, 3, 2),
        ("ranks", 2, 2, 3, 2),
        ("ranks", 1, 2, 3, 2),  # added: single on what one of two devices has
    ]
    assert [(row.trial.name, row.trial.threads) for row in got.rows] == [
        ("single", 4),
        ("data_parallel", 2),
        ("model_parallel", 4),
        ("distributed", 2),
        ("single, 2 threads", 2),
    ]
    assert [row.trial.is_baseline for row in got.rows] == [False] * 4 + [True]
    assert got.cores == 4
    assert got.notes == ()


def test_single_is_added_where_nobody_asked_for_it(fake):
    launch = fake()
    compare_plans(CLASSIC, ["distributed"], steps=1)
    assert launch.calls == [("ranks", 2, 2, 3, 1), ("ranks", 1, 4, 3, 1), ("ranks", 1, 2, 3, 1)]


def test_nothing_is_added_where_nothing_is_missing(fake):
    launch = fake()
    compare_plans(CLASSIC, ["single", "model_parallel"], steps=1)
    assert len(launch.calls) == 2


def test_cores_that_do_not_divide_are_left_idle_for_single_too(fake, monkeypatch):
    monkeypatch.setattr(module, "usable_cores", lambda: 3)
    launch = fake()
    got = compare_plans(CLASSIC, ["single", "distributed"], steps=1)
    assert got.cores == 2
    assert launch.calls == [("ranks", 1, 2, 3, 1), ("ranks", 2, 1, 3, 1), ("ranks", 1, 1, 3, 1)]


def test_gpus_need_one_single_only(fake):
    launch = fake(device="NVIDIA X")
    got = compare_plans(CLASSIC, ["distributed"], steps=1)
    assert [call[1] for call in launch.calls] == [2, 1]
    assert got.rows[0].exposed_fraction is None


def test_a_step_takes_as_long_as_its_slowest_rank_and_warm_up_does_not_count(fake):
    fake()
    row = compare_plans(CLASSIC, ["dp=2"], steps=2).rows[0]
    assert row.trial.step_seconds == (2.0, 2.0)
    assert row.trial.num_samples == row.trial.num_tokens == (64, 64)
    assert len(row.trial.losses) == 5
    assert row.trial.peak_memory_bytes == (100, 101)
    assert row.peak_memory_bytes == 101


def test_a_preset_is_spread_over_the_configurations_devices_and_an_explicit_plan_is_not(fake):
    fake()
    got = compare_plans(CLASSIC, ["distributed", "dp=4", "distributed,micro_batches=2"], steps=1)
    assert [row.trial.plan for row in got.rows][:3] == ["dp=2", "dp=4", "dp=2,micro_batches=2"]


@pytest.mark.parametrize(("configured", "expected"), [(7, 7), (100, 100), (101, 30), (5000, 30)])
def test_steps(fake, configured, expected):
    launch = fake()
    compare_plans(CLASSIC, ["single"], overrides=[f"train.steps={configured}"])
    assert launch.calls[0][4] == expected


@pytest.mark.parametrize(
    ("plans", "error", "text"),
    [
        (["single", "distribted"], ConfigError, "the plan 'distribted': .*did you mean 'distributed'"),
        (["single", "dp=2,zorro=1"], ConfigError, "the plan 'dp=2,zorro=1': .*unknown key 'zorro'"),
        (["single", "dp=65"], ConfigError, "the plan 'dp=65': train.global_batch_size = 64"),
        (["single", "cp=2"], ApplyError, "the plan 'cp=2' asks for cp=2"),
        ([], ConfigError, "no plan to compare"),
    ],
)
def test_a_bad_plan_stops_everything_before_it_starts(fake, plans, error, text):
    launch = fake()
    with pytest.raises(error, match=text):
        compare_plans(CLASSIC, plans)
    assert launch.calls == []


def test_steps_and_overrides_are_checked(fake):
    fake()
    with pytest.raises(ConfigError, match="steps=0"):
        compare_plans(CLASSIC, ["single"], steps=0)
    with pytest.raises(ConfigError, match="overrides are for a configuration file"):
        compare_plans(load_config(CLASSIC), ["single"], overrides=["train.steps=1"])
    assert compare_plans(load_config(CLASSIC), ["single"], steps=1).rows


def test_ranks_of_a_job_do_not_compare(fake, monkeypatch):
    launch = fake()
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29555")
    with pytest.raises(ConfigError, match="compare starts the ranks of each plan itself"):
        compare_plans(CLASSIC, ["single"])
    assert launch.calls == []


def test_a_plan_that_fails_does_not_take_the_others_along(fake, capsys):
    launch = fake(errors={"model_parallel": WorkerKilledError("rank 0 was killed by SIGKILL", rank=0)})
    code = run_comparison(CLASSIC, "model_parallel; single", steps=1)
    assert code == 11
    assert len(launch.calls) == 2
    out = capsys.readouterr().out
    assert "'model_parallel' did not run: rank 0 was killed by SIGKILL." in out
    assert "'single' takes 2 s" not in out  # one rank: 1 s
    assert "'single' takes 1 s a step" in out


def test_where_the_users_code_raised_is_shown(fake, capsys):
    error = UserCodeError("rank 0 raised Odd: x\x1b[2J", rank=0, traceback_text="Traceback of Odd\x07")
    fake(errors={"model_parallel": error})
    assert run_comparison(CLASSIC, "single; model_parallel", steps=1) == 10
    shown = capsys.readouterr()
    assert "Traceback of Odd\n" in shown.err
    assert "\x1b" not in shown.err + shown.out


def test_where_no_plan_ran_its_error_is_raised(fake):
    fake(errors={"ranks": NonFiniteError("the loss is NaN")})
    with pytest.raises(NonFiniteError, match="the loss is NaN"):
        compare_plans(CLASSIC, ["single"], steps=1)


def test_a_request_to_stop_stops_all(fake):
    launch = fake(errors={"ranks": StoppedOnRequest("stopped")})
    with pytest.raises(StoppedOnRequest):
        compare_plans(CLASSIC, ["single", "model_parallel"], steps=1)
    assert len(launch.calls) == 1


def test_other_work_on_the_machine_is_told_apart_from_the_ranks_own(fake):
    fake(elapsed_s=10.0, own_busy_s=8.0, machine_busy_s=20.0)
    got = compare_plans(CLASSIC, ["single", "distributed"], steps=1)
    assert [row.trial.other_cores for row in got.rows] == [
        1.2,
        0.4,
        1.2,
    ]  # of 4; two ranks use twice as much themselves
    assert "(1.2 of 4 cores during 'single', 1.2 of 4 cores during 'single, 2 threads')" in got.conclusion
    fake(elapsed_s=10.0, own_busy_s=8.0, machine_busy_s=7.0)  # clocks tick coarsely
    got = compare_plans(CLASSIC, ["single"], steps=1)
    assert got.rows[0].trial.other_cores == 0
    assert "busy with other work" not in got.conclusion


def test_more_devices_than_there_are_is_noted(fake):
    fake()
    got = compare_plans(CLASSIC, ["dp=64"], steps=1)
    assert any("the plan 'dp=64' uses 64 devices" in note for note in got.notes)


def test_the_command_writes_the_table_and_the_json(fake, capsys, tmp_path):
    fake()
    path = tmp_path / "c.json"
    assert run_comparison(CLASSIC, "single; distributed", json_path=path, steps=2) == 0
    shown = capsys.readouterr()
    got = Comparison.from_json(path.read_text())
    assert shown.out == f"{got}\n"
    assert shown.err.splitlines()[0] == "single: 'single', 3 + 2 steps"
    assert got.config["train"]["global_batch_size"] == 64
    assert {"torch", "python", "cores", "processor", "load_average"} <= set(got.environment)


@pytest.mark.parametrize(("width", "framed"), [(150, True), (80, False)])
def test_a_wide_terminal_gets_frames(fake, monkeypatch, capsys, width, framed):
    fake(errors={"model_parallel": ValueError("[bold]not markup[/bold]")})
    comparison = compare_plans(CLASSIC, ["single", "model_parallel", "distributed"], steps=2)
    screen = io.StringIO()
    made = functools.partial(rich.console.Console, file=screen, force_terminal=True, width=width, color_system=None)
    monkeypatch.setattr(rich.console, "Console", made)
    show(comparison)
    plain = capsys.readouterr().out
    assert ("\u2502 distributed" in screen.getvalue()) is framed
    assert (plain == f"{comparison}\n") is not framed
    shown = " ".join((screen.getvalue() + plain).split())
    for text in (comparison.title, comparison.conclusion, "2 processes x 2 threads", "[bold]not markup[/bold]"):
        assert text in shown


def test_a_json_file_that_cannot_be_written_is_noticed_before_the_runs(fake, tmp_path):
    launch = fake()
    with pytest.raises(ConfigError, match="there is no folder"):
        run_comparison(CLASSIC, "single", json_path=tmp_path / "no" / "c.json")
    assert launch.calls == []


def test_split_plans():
    assert split_plans("single; dp=2,micro_batches=2;") == ["single", "dp=2,micro_batches=2"]
    assert split_plans(" ; ") == []


def test_the_launching_side_imports_without_torch():
    code = "import sys, meshwright.compare.run_plans; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
    meta = "import sys, torch; sys.exit('torch' in sys.modules)"  # the check sees torch where it is
    assert subprocess.run([sys.executable, "-c", meta], timeout=60, check=False).returncode == 1
