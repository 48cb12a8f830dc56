"""Random numbers by place: one process's losses with dropout on, under every kind of plan and after a resume under another."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.parity.jobs.drawing_jobs import Trained, reasons_after_the_first_step, train, train_noted
from tests.parity.models.drawing_models import CASES
from tests.tolerances import FLOAT64
from torch import Tensor, nn

import meshwright as mw
from meshwright import testing


@functools.cache
def single(case: str, steps: int = 2) -> Trained:
    return train(case, "single", steps=steps)


def check(found: Trained, wanted: Trained) -> None:
    assert found.losses == pytest.approx(wanted.losses, rel=FLOAT64)
    assert found.norms == pytest.approx(wanted.norms, rel=FLOAT64)
    assert found.reasons == wanted.reasons


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "line", ["micro_batches=3", "micro_batch_size=2,recompute=selective", "micro_batches=2,recompute=full"]
)
def test_one_process(case: str, line: str) -> None:
    check(train(case, line), single(case))
    assert not single(case).reasons


@pytest.mark.parametrize(
    ("case", "line"),
    [
        ("gpt", "dp=2,zero=3,micro_batches=2"),
        ("gpt", "pp=2,virtual=2,micro_batches=2,schedule=interleaved"),  # a dropout that two stages call
        ("gpt", "tp=2"),
        ("residuals", "tp=2,recompute=full"),
        ("vit", "dp=2,recompute=selective"),
        ("vae", "pp=2,micro_batches=3,recompute=full"),
        ("lstm", "dp=2,zero=1,micro_batches=2"),
        ("lstm", "pp=2,micro_batches=3,schedule=zb-h1"),  # packs between its layers
    ],
)
def test_two_ranks(case: str, line: str) -> None:
    for found in testing.run_ranks(train, 2, case, line):
        check(found, single(case))


def test_torchs_attention_drops_out_in_its_heads() -> None:
    for found in testing.run_ranks(train, 2, "attentive", "tp=2"):
        check(found, single("attentive"))
        attentions = {name: kind for name, kind in found.layouts.items() if "proj" in name and "bias" not in name}
        assert len(attentions) == 4
        assert "whole" not in attentions.values()


@pytest.mark.parametrize("case", ["gpt-two-heads", "narrow"])
def test_a_rank_without_a_unit_draws_nothing(case: str) -> None:
    for found in testing.run_ranks(train, 3, case, "tp=3"):
        check(found, single(case))


def test_layers_that_ran_whole_while_places_were_found_draw_as_they_did_then() -> None:
    for found in testing.run_ranks(train, 4, "latents", "tp=2,pp=2,micro_batches=2"):
        check(found, single("latents"))


def test_stages_of_one_rank_over_cut_layers() -> None:
    for found in testing.run_ranks(train, 4, "gpt", "tp=2,pp=2,virtual=2,micro_batches=2,schedule=zbv"):
        check(found, single("gpt"))


def test_a_run_goes_on_under_another_plan(tmp_path: Path) -> None:
    whole = single("gpt", 4)
    first = testing.run_ranks(functools.partial(train, directory=str(tmp_path)), 2, "gpt", "dp=2")[0]
    assert first.losses == pytest.approx(whole.losses[:2], rel=FLOAT64)
    rest = train("gpt", "micro_batches=3", first=2, directory=str(tmp_path))
    assert rest.losses == pytest.approx(whole.losses[2:], rel=FLOAT64)


def test_steps_and_seeds_draw_others() -> None:
    (first, second), (other, _) = (train_noted(seed) for seed in (0, 1))
    assert not torch.equal(first, second)
    assert not torch.equal(first, other)
    assert torch.equal(first, train_noted(0)[0])


def test_torchs_generators_draw_where_that_is_asked_for() -> None:
    assert train("gpt", "micro_batches=3", rng="torch").losses != single("gpt").losses
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(3), expected)


class Routed(nn.Module):
    """Draws for as many rows as the values of the batch say."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        chosen = x[x[:, 0] > 0]
        return self.layer(x) + torch.rand(len(chosen), 3).sum()


def test_what_cannot_be_placed_is_told() -> None:
    model = mw.apply_plan(Routed, "single", loss_fn=lambda out, batch: out.square().mean(), rng="global")
    model.step((torch.tensor([[1.0, 0, 0], [-1, 0, 0], [1, 0, 0]]), None))
    assert any("has no known sample dim" in reason for reason in model.plan.reasons)


def test_every_rank_has_the_reasons_of_the_stage_that_draws() -> None:
    told = testing.run_ranks(reasons_after_the_first_step, 2, "pp=2,micro_batches=2")
    assert any("code that runs in backward draws" in reason for reason in told[0])
    assert told[0] == told[1]


def test_verify_runs_with_dropout_on() -> None:
    build, loss, batches = CASES["gpt"]
    given = [batches(step, 4) for step in range(2)]
    report = mw.verify_plan(build, mw.Plan.parse("micro_batches=2"), given, loss, num_steps=2, rng="global")
    assert report.equal
    assert not any("switched off" in note or note.startswith("rng") for note in report.notes)


class DropsRows(nn.Module):
    """Drops in as many rows as the values of the batch say."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(3, 3), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        chosen = (x[:, 0] > 0)[:, None].expand_as(x)
        return self.layer(x).masked_scatter(chosen, self.drop(x[x[:, 0] > 0]))


def _square(outputs: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (outputs - batch[1]).square().mean()


@pytest.mark.parametrize(
    ("build", "line", "why"),
    [
        (DropsRows, "micro_batches=2", "has no known sample dim"),
        (lambda: nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)), "data_parallel,dp=2", "devices of one process"),
    ],
)
def test_verify_drops_nothing_where_draws_have_no_place(build: Any, line: str, why: str) -> None:
    batch = torch.tensor([[1.0, 2, 3], [-1, 0, 1], [2, 1, 0], [-2, 1, 1], [3, 0, 1]]), torch.ones(5, 3)
    report = mw.verify_plan(build, line, [batch], _square, num_steps=2)
    assert report.equal
    assert any(why in note for note in report.notes)
    assert any("dropout is switched off" in note for note in report.notes)


def test_another_choice_is_refused() -> None:
    with pytest.raises(mw.ConfigError, match="rng must be 'torch' or 'global', it is 'numpy'"):
        mw.apply_plan(Routed, "single", rng="numpy")  # type: ignore[arg-type]
