"""Checkpoints: saved under one plan, loaded under another, bit for bit; and what is refused."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.parity.jobs import checkpoint_jobs as jobs

import meshwright as mw
from meshwright import testing
from meshwright.checkpoint.open_checkpoint import OpenCheckpoint
from meshwright.checkpoint.store import Store


def run(function: Callable[..., Any], plan: str, *args: Any, **options: Any) -> Any:
    """Return what a job gives on rank 0."""
    ranks = mw.Plan.parse(plan).num_ranks
    job = functools.partial(function, plan, *args, **options)
    return job() if ranks == 1 else testing.run_ranks(job, ranks)[0]


def contents(directory: Path) -> tuple[dict[str, torch.Tensor], Any]:
    """Return the model's and the optimizer's whole tensors in the newest checkpoint, and the optimizer's numbers."""
    with OpenCheckpoint(Store(directory).saved()[0].path) as snapshot:
        names = [name for name in snapshot.manifest.tensors if name.startswith(("model/", "optimizer/"))]
        return {name: snapshot.read(name) for name in names}, snapshot.manifest.state["optimizer"]


def assert_same(left: Path, right: Path) -> None:
    (mine, numbers), (others, other_numbers) = contents(left), contents(right)
    assert mine.keys() == others.keys()
    for name, value in mine.items():
        assert value.dtype == others[name].dtype, name
        assert torch.equal(value, others[name]), name
    assert numbers == other_numbers


@pytest.mark.parametrize("plan", jobs.PLANS)
@pytest.mark.parametrize("optimizer", ["adamw", "adafactor"])
def test_a_checkpoint_is_the_same_under_every_plan(tmp_path: Path, plan: str, optimizer: str) -> None:
    if optimizer == "adafactor" and plan == "dp=2,tp=2,zero=3":
        pytest.skip("whole matrices are not cut twice: refused when the plan is applied")
    run(jobs.train, plan, "words", optimizer, steps=(0, 2), target=str(tmp_path / "a"))
    run(jobs.resave, "single", "words", optimizer, str(tmp_path / "a"), str(tmp_path / "b"))
    assert_same(tmp_path / "a", tmp_path / "b")
    run(jobs.resave, plan, "words", optimizer, str(tmp_path / "b"), str(tmp_path / "c"))
    assert_same(tmp_path / "a", tmp_path / "c")


@pytest.mark.parametrize("plan", ["dp=2,zero=1", "dp=2,zero=3,whole_below=1", "tp=2"])
def test_memory_in_another_order_comes_back(tmp_path: Path, plan: str) -> None:
    run(jobs.train, plan, "images", "adamw", steps=(0, 2), target=str(tmp_path / "a"))
    for number, other in enumerate(["single", "dp=4,zero=2", plan]):
        run(jobs.resave, other, "images", "adamw", str(tmp_path / "a"), str(tmp_path / str(number)))
        assert_same(tmp_path / "a", tmp_path / str(number))


@pytest.mark.parametrize(
    "plan", ["single", "dp=2,zero=3,whole_below=1", "tp=2", "pp=2,micro_batches=2", "dp=2,pp=2,zero=1"]
)
def test_a_continued_run_is_the_undisturbed_one_bit_for_bit(tmp_path: Path, plan: str) -> None:
    whole = run(jobs.train, plan, "words", "adamw", steps=(0, 4), target=str(tmp_path / "whole"), dropout=0.2)
    first = run(jobs.train, plan, "words", "adamw", steps=(0, 2), target=str(tmp_path / "part"), dropout=0.2)
    options = {"source": str(tmp_path / "part"), "target": str(tmp_path / "part"), "dropout": 0.2}
    second = run(jobs.train, plan, "words", "adamw", steps=(2, 4), **options)
    assert first + second == whole
    assert_same(tmp_path / "part", tmp_path / "whole")


@pytest.mark.parametrize(
    ("before", "after"), [("pp=2,tp=2,micro_batches=2", "dp=2,zero=3"), ("dp=4,zero=1", "tp=2"), ("dp=2", "dp=4")]
)
def test_a_run_goes_on_under_another_plan(tmp_path: Path, before: str, after: str) -> None:
    expected = run(jobs.train, "single", "words", "adamw", steps=(0, 4))
    losses = run(jobs.train, before, "words", "adamw", steps=(0, 2), target=str(tmp_path))
    losses += run(jobs.train, after, "words", "adamw", steps=(2, 4), source=str(tmp_path))
    assert losses == pytest.approx(expected, rel=1e-11)


def test_each_entry_is_written_once_and_by_all_ranks(tmp_path: Path) -> None:
    run(jobs.train, "dp=4", "words", "adamw", steps=(0, 1), target=str(tmp_path))
    with OpenCheckpoint(Store(tmp_path).saved()[0].path) as snapshot:
        entries = snapshot.manifest.tensors.values()
        held = sum(part.layout.numel * 8 for entry in entries if entry.dtype == "float64" for part in entry.parts)
        sizes = [file.num_bytes for file in snapshot.manifest.files]
    assert held == 3 * sum(parameter.nbytes for parameter in jobs.build("words").parameters())
    assert len(sizes) == 4
    assert max(sizes) < 2 * min(sizes)


@pytest.mark.parametrize("plan", ["single", "dp=2", "dp=2,zero=3,whole_below=1", "pp=2,tp=2,micro_batches=2"])
def test_a_save_in_the_background_has_the_values_of_its_step(tmp_path: Path, plan: str) -> None:
    beside = run(jobs.save_beside, plan, str(tmp_path / "beside"))
    assert beside == run(jobs.train, plan, "words", "adamw", steps=(0, 4), target=str(tmp_path / "then"))
    assert [saved.step for saved in Store(tmp_path / "beside").saved()] == [4, 2]
    assert_same(tmp_path / "beside", tmp_path / "then")
    assert not [path for path in (tmp_path / "beside").rglob("*") if "note" in path.name or path.name.startswith(".")]
    (tmp_path / "beside" / "step-00000004" / "manifest.json").unlink()
    losses = run(jobs.train, plan, "words", "adamw", steps=(2, 4), source=str(tmp_path / "beside"))
    assert losses == pytest.approx(beside[2:], rel=1e-11)


IN_PLACE = [
    "dp=2",
    "dp=2,micro_batches=2,zero=1",
    "dp=2,zero=2,offload=optimizer",
    "dp=2,zero=3,whole_below=1",
    "tp=2",
    "pp=2,micro_batches=2",
    "dp=2,tp=2,zero=3,whole_below=1",
    "data_parallel,dp=2",
    "model_parallel,pp=2",
]


@pytest.mark.parametrize("plan", IN_PLACE)
def test_a_share_that_is_read_in_place_has_the_bits_of_its_step(tmp_path: Path, plan: str) -> None:
    assert run(jobs.save_in_place, plan, str(tmp_path)) == []
    assert_same(tmp_path / "beside", tmp_path / "then")


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=1"])
def test_what_one_rank_writes_beside_a_save_is_refused_on_all(tmp_path: Path, plan: str) -> None:
    job = functools.partial(jobs.save_in_place, plan, str(tmp_path), writes=True)
    for outcome in testing.run_outcomes(job, 2):
        (text,) = outcome.result
        assert "step 1 is not saved: a script has written into" in text
    assert list((tmp_path / "beside").iterdir()) == []


@pytest.mark.parametrize("plan", ["dp=2", "tp=2"])
def test_a_failed_save_in_the_background_is_raised_by_the_next_step_on_all_ranks(tmp_path: Path, plan: str) -> None:
    job = functools.partial(jobs.save_beside, plan, str(tmp_path), breaks=True)
    calm = run(jobs.train, plan, "words", "adamw", steps=(0, 4))
    for outcome in testing.run_outcomes(job, 2):
        assert outcome.result == [*calm[:2], "no space", *calm[2:]]
    assert [saved.step for saved in Store(tmp_path).saved()] == [4]
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000004"]


# -- what is damaged, or of another model ---------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", ["single", "dp=2,zero=3,whole_below=1"])
def test_a_damaged_checkpoint_is_skipped_and_told(tmp_path: Path, plan: str, caplog: pytest.LogCaptureFixture) -> None:
    for steps in ((0, 1), (0, 2)):
        run(jobs.train, plan, "words", "sgd", steps=steps, target=str(tmp_path))
    path = tmp_path / "step-00000002" / "rank-00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        losses = run(jobs.train, plan, "words", "sgd", steps=(1, 2), source=str(tmp_path))
    assert losses == pytest.approx(run(jobs.train, "single", "words", "sgd", steps=(0, 2))[1:], rel=1e-11)
    assert plan != "single" or "rank-00000.safetensors is damaged in bytes" in caplog.text


@pytest.mark.parametrize("plan", ["single", "dp=2", "pp=2"])
def test_another_model_is_refused_with_a_list(tmp_path: Path, plan: str) -> None:
    run(jobs.train, "single", "words", "sgd", steps=(0, 1), target=str(tmp_path))
    text = run(jobs.refusal, plan, "images", "sgd", str(tmp_path))
    assert "is of another model" in text
    assert "missing: head.bias" in text
    assert "unexpected: blocks.0.down.bias" in text or "and " in text
    assert "fix: build the model that was saved, or load what they have in common" in text


@pytest.mark.parametrize("plan", ["single", "dp=2,zero=2"])
def test_another_optimizer_is_refused(tmp_path: Path, plan: str) -> None:
    run(jobs.train, "single", "words", "adamw", steps=(0, 1), target=str(tmp_path))
    assert "has the state of AdamW, the model has SGD" in run(jobs.refusal, plan, "words", "sgd", str(tmp_path))


def test_an_empty_directory_is_refused(tmp_path: Path) -> None:
    for text in testing.run_ranks(jobs.refusal, 2, "dp=2", "words", "sgd", str(tmp_path)):
        assert "no sound checkpoint is in" in text


def test_a_disk_that_fails_is_told_on_every_rank(tmp_path: Path) -> None:
    for text in testing.run_ranks(jobs.saved_into_a_file, 2, str(tmp_path / "file")):
        assert "cannot make" in text or "cannot read" in text


def test_a_save_before_the_first_batch_of_a_loaded_model_is_refused(tmp_path: Path) -> None:
    run(jobs.train, "single", "words", "adamw", steps=(0, 1), target=str(tmp_path))
    for outcome in testing.run_outcomes(_saved_too_early, 2, str(tmp_path)):
        assert isinstance(outcome.error, mw.CheckpointError)
        assert "waits for the first batch" in str(outcome.error)


def _saved_too_early(directory: str) -> None:
    model = jobs.apply("tp=2", "words", "adamw")
    mw.load_checkpoint(model, directory)
    mw.save_checkpoint(model, directory, step=2)


@pytest.mark.parametrize("plan", ["dp=2,zero=3", "tp=2", "pp=2"])
@pytest.mark.parametrize("how", ["whole", "closed", "steps", "directories", "states"])
def test_a_save_that_cannot_be_one_checkpoint_is_refused(tmp_path: Path, plan: str, how: str) -> None:
    words = {
        "whole": "inside of a step",
        "closed": "inside of a step",
        "states": "extra ['schedule'] has another state",
    }
    word = words.get(how, "in different ways")
    for text in testing.run_ranks(jobs.refused_save, 2, plan, str(tmp_path), how):
        assert word in text
    assert not Store(tmp_path).saved()


@pytest.mark.parametrize("plan", ["dp=2", "pp=2"])
def test_a_step_that_another_model_has_saved_there_is_refused(tmp_path: Path, plan: str) -> None:
    for first, refused, *others in testing.run_ranks(jobs.saved_by_two, 2, plan, str(tmp_path)):
        assert refused == (
            f"another model of this program has saved step 1 in {tmp_path} (rule: a directory for each model; the newest save "
            "of a step is the one that is loaded)"
        )
        assert [first, *others] == ["step-00000001", "step-00000002", "step-00000001.2", "step-00000001.3"]


@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "pp=2"])
def test_what_a_script_writes_after_a_load_stays(tmp_path: Path, plan: str) -> None:
    run(jobs.train, "single", "words", "sgd", steps=(0, 1), target=str(tmp_path))
    expected = run(jobs.written_after_a_load, "single", str(tmp_path))
    assert run(jobs.written_after_a_load, plan, str(tmp_path)) == pytest.approx(expected, rel=1e-11)
    assert expected[1] == 3.0


@pytest.mark.parametrize("plan", ["single", "dp=2,zero=3", "tp=2", "pp=2"])
def test_a_partial_load_takes_what_is_common(tmp_path: Path, plan: str) -> None:
    run(jobs.train, "single", "words", "adamw", steps=(0, 2), target=str(tmp_path))
    saved = contents(tmp_path)[0]
    before, after = run(jobs.partly_loaded, plan, str(tmp_path))
    assert torch.equal(after["tokens.weight"], saved["model/tokens.weight"])
    assert torch.equal(after["blocks.1.up.weight"], saved["model/blocks.1.up.weight"])
    assert torch.equal(after["scale"], before["scale"])
    assert torch.equal(after["blocks.3.up.weight"], before["blocks.3.up.weight"])


def test_a_partial_load_has_no_optimizer() -> None:
    with pytest.raises(mw.ConfigError, match="partial=True loads no optimizer's state"):
        mw.load_checkpoint(jobs.apply("single", "words", "sgd"), "nowhere", partial=True)


def test_extra_states_come_back(tmp_path: Path) -> None:
    model = jobs.apply("single", "words", "sgd")
    loader = mw.make_loader(
        [(torch.zeros(5, dtype=torch.long), torch.zeros(5, dtype=torch.long))] * 9, model, global_batch_size=2
    )
    batches = iter(loader)
    next(batches)
    mw.save_checkpoint(model, tmp_path, step=1, extra={"loader": loader})
    other = mw.make_loader(loader.dataset, model, global_batch_size=2)
    assert mw.load_checkpoint(model, tmp_path, extra={"loader": other}) == 1
    assert len(list(other)) == len(list(batches))
    with pytest.raises(mw.CheckpointError, match=r"has no state for extra \['schedule'\]; it has \['loader'\]"):
        mw.load_checkpoint(model, tmp_path, extra={"schedule": other})
