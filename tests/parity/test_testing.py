"""The tools of meshwright.testing: every check can fail, and says what is wrong; ranks are kept and replaced."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest
import torch
from tests.parity import cases
from tests.parity.harness import Setting, reference

import meshwright as mw
from meshwright import testing
from meshwright.testing.pool import RankPool


def _tensors(**changes: torch.Tensor | None) -> dict[str, torch.Tensor | None]:
    tensors = {"small": torch.tensor([1e-6, 2e-6]), "large": torch.tensor([[1e3, -2e3]]), "unused": None}
    return {name: None if t is None else t.double() for name, t in {**tensors, **changes}.items()}


@pytest.mark.parametrize(
    ("candidate", "words"),
    [
        (_tensors(small=torch.tensor([1e-6, 2.0001e-6])), ["1 of 3", "first is small", "[1]"]),
        (_tensors(large=torch.tensor([[1e3, -2.1e3]])), ["first is large", "-2100", "-2000", "[0, 1]"]),
        (_tensors(large=torch.tensor([[1e3, float("nan")]])), ["first is large", "inf"]),
        (_tensors(unused=torch.zeros(2)), ["first is unused", "the reference has None"]),
        (_tensors(small=None), ["first is small", "None, the reference has a tensor"]),
        (_tensors(small=torch.ones(3)), ["first is small", "float64[3] instead of float64[2]"]),
        ({"small": _tensors()["small"]}, ["first is large", "missing"]),
        (_tensors(more=torch.ones(1)), ["first is more", "not in the reference"]),
    ],
)
def test_assert_parity_names_the_first_difference(candidate: dict, words: list[str]) -> None:
    testing.assert_parity(_tensors(), _tensors(), 0.0)
    with pytest.raises(AssertionError) as caught:
        testing.assert_parity(candidate, _tensors())
    for word in words:
        assert word in str(caught.value)


def test_a_difference_is_relative_to_its_own_tensor_and_not_to_the_model() -> None:
    # A lost gradient of a tiny parameter is 1e-9 of the model's norm, and 1 of its own.
    with pytest.raises(AssertionError, match="first is small"):
        testing.assert_parity(_tensors(small=torch.zeros(2)), _tensors(), 1e-3)


def test_rounding_of_a_gradient_that_is_zero_is_no_difference() -> None:
    exact = {"weight": torch.ones(2, dtype=torch.float64), "key_bias": torch.full((2,), 1e-17, dtype=torch.float64)}
    other = {**exact, "key_bias": torch.full((2,), -2e-17, dtype=torch.float64)}
    testing.assert_parity(other, exact)
    with pytest.raises(AssertionError):
        testing.assert_parity({**exact, "key_bias": torch.full((2,), 1e-13, dtype=torch.float64)}, exact)


@pytest.mark.parametrize(
    ("one", "other"), [([True, False], [True, True]), ([3, -7], [3, -8]), ([-(2**63), 0], [0, 0])], ids=str
)
def test_masks_and_integers_are_compared_as_well(one: list[int], other: list[int]) -> None:
    # They are buffers of many models: a causal mask, a count of batches.
    testing.assert_parity({"buffer": torch.tensor(one)}, {"buffer": torch.tensor(one)}, 0.0)
    with pytest.raises(AssertionError, match=r"first is buffer: .* at \[[01]\]"):
        testing.assert_parity({"buffer": torch.tensor(other)}, {"buffer": torch.tensor(one)})


def test_assert_parity_names_the_step_and_the_kind() -> None:
    expected = reference("mlp", Setting())
    other = testing.oracle_steps(
        cases.CASES["mlp"].build, cases.CASES["mlp"].batches(7), cases.CASES["mlp"].loss_fn, max_grad_norm=0.01
    )
    with pytest.raises(AssertionError, match=r"the first is step 0 gradients 0\.weight"):
        testing.assert_parity(other, expected)
    with pytest.raises(AssertionError, match="2 steps were recorded, the reference has 3"):
        testing.assert_parity(expected[:2], expected)
    with pytest.raises(TypeError, match="cannot compare"):
        testing.assert_parity(expected, {})


def test_the_oracle_is_a_plain_training_loop() -> None:
    case = cases.CASES["gpt"]
    batches = case.batches(4)
    records = testing.oracle_steps(case.build, batches, case.loss_fn, max_grad_norm=0.1)
    torch.manual_seed(0)
    model = case.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for record, (ids, labels) in zip(records, batches, strict=True):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), labels.flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
        assert (record.loss, record.grad_norm) == (loss.item(), norm.item())
        testing.assert_parity(record.gradients, gradients, 0.0)
        testing.assert_parity(record.parameters, {n: p.detach() for n, p in model.named_parameters()}, 0.0)


def test_the_oracle_leaves_a_module_alone() -> None:
    model = cases.CASES["mlp"].build()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    testing.oracle_steps(model, cases.CASES["mlp"].batches(4), cases.CASES["mlp"].loss_fn)
    testing.assert_parity({n: p.detach() for n, p in model.named_parameters()}, before, 0.0)
    assert all(p.grad is None for p in model.parameters())


def _whoami(offset: int) -> tuple[int, int, int]:
    world = mw.current_world()
    return world.rank + offset, world.world_size, os.getpid()


def test_ranks_are_kept_between_calls() -> None:
    first = testing.run_ranks(_whoami, 2, 10)
    second = testing.run_ranks(_whoami, 2, 20)
    assert [(rank, size) for rank, size, _ in first] == [(10, 2), (11, 2)]
    assert [pid for *_, pid in first] == [pid for *_, pid in second]
    assert {pid for *_, pid in first} <= testing.pool_pids()


def _raise_on(rank: int) -> int:
    if mw.current_world().rank == rank:
        raise ValueError(f"on purpose on rank {rank}")
    return mw.current_world().rank


def test_ranks_are_replaced_after_a_failure() -> None:
    before = {pid for *_, pid in testing.run_ranks(_whoami, 2, 0)}
    with pytest.raises(Exception, match="on purpose on rank 1"):
        testing.run_ranks(_raise_on, 2, 1)
    after = {pid for *_, pid in testing.run_ranks(_whoami, 2, 0)}
    assert not before & after
    assert not before & testing.pool_pids()


def test_a_pool_of_ones_own_ends_alone() -> None:
    before = testing.run_ranks(os.getpid, 2)
    own = RankPool(env={"ANY_VARIABLE": "1"})
    try:
        assert set(own.run(os.getpid, 2)).isdisjoint(before)
    finally:
        own.close()
    assert testing.run_ranks(os.getpid, 2) == before


def test_outcomes_of_ranks_that_raise() -> None:
    fine, failed = testing.run_outcomes(_raise_on, 2, 1)
    assert (fine.result, fine.error) == (0, None)
    assert isinstance(failed.error, ValueError)
    assert "_raise_on" in failed.traceback_text


LEAKS = """
import os, subprocess, sys, threading

def test_variable():
    os.environ["LEFT_BEHIND"] = "1"

def test_variable_taken_away():
    del os.environ["LEFT_BEHIND"]

def test_process():
    subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)

def test_thread():
    threading.Thread(target=threading.Event().wait, args=(2,), name="left").start()

def test_group(tmp_path):
    import torch.distributed as dist
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)

def test_nothing():
    pass
"""


@pytest.mark.long
def test_what_a_test_leaves_behind_is_an_error(tmp_path: pathlib.Path) -> None:
    conftest = (pathlib.Path(__file__).parents[1] / "conftest.py").read_text()
    assert conftest.count("_PATIENCE_S = 5.0") == 1
    (tmp_path / "conftest.py").write_text(conftest.replace("_PATIENCE_S = 5.0", "_PATIENCE_S = 0.1"))
    (tmp_path / "test_leaks.py").write_text(LEAKS)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-c",
        os.devnull,
        "--rootdir",
        str(tmp_path),
        "-p",
        "no:cacheprovider",
    ]
    run = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, timeout=100, check=False)
    assert run.returncode == 1, run.stdout
    assert "6 passed, 5 errors" in run.stdout, run.stdout
    for words in ("LEFT_BEHIND", "processes were left behind", "threads were left behind: ['left']", "process group"):
        assert words in run.stdout, words
