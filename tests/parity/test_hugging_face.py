"""Hugging Face's models beside the grids of ZeRO and data parallelism: unmodified, in one process, and free of float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.parity import cases
from tests.parity.harness import Setting, assert_ranks_agree, reference, run_case
from tests.scopes import FULL_GRID
from tests.tolerances import FLOAT32, FLOAT64
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import meshwright as mw
from meshwright import testing
from meshwright.measure.oracle import whole_batch_loss

pytestmark = pytest.mark.slow


# ---- as they are, with their own loss, whose labels are shifted inside and count by their number


def _build() -> nn.Module:
    import transformers  # seconds, which other tests need not wait for

    config = transformers.LlamaConfig(
        vocab_size=101,
        hidden_size=24,
        intermediate_size=13,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=16,
        tie_word_embeddings=True,
        attn_implementation="eager",
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)


def _batch(valid: list[int]) -> dict[str, torch.Tensor]:
    ids, _ = cases.language(len(valid), seed=5)
    labels = ids.clone()
    for row, count in zip(labels, valid, strict=True):
        row[count:] = -100
    return {"input_ids": ids, "labels": labels}


# The first label of a row has no prediction: a row with 1 label counts nothing.
BATCHES = [_batch([7, 2, 4, 3, 6]), _batch([2, 1, 7, 1, 1])]


def _steps(line: str, devices: Any = None) -> list[testing.StepRecord]:
    return testing.plan_steps(_build, mw.Plan.parse(line), BATCHES, devices=devices)


def _assert_close(records: list[testing.StepRecord]) -> None:
    # The model computes its loss in float32 whatever its weights are, so this is the bound of float32.
    expected = testing.oracle_steps(_build, BATCHES)
    for record, plain in zip(records, expected, strict=True):
        assert record.loss == pytest.approx(plain.loss, rel=FLOAT32)
        testing.assert_parity(record.gradients, plain.gradients, FLOAT32)


@pytest.mark.parametrize("line", ["dp=2", "dp=4,micro_batches=2"])
def test_a_llama_over_ranks(line: str) -> None:
    per_rank = testing.run_ranks(_steps, mw.Plan.parse(line).num_ranks, line)
    _assert_close(per_rank[0])
    assert_ranks_agree(per_rank)


@pytest.mark.parametrize("line", ["single", "mode=data_parallel,dp=2", "mode=model_parallel,pp=2,micro_batches=2"])
def test_a_llama_in_one_process(line: str) -> None:
    _assert_close(_steps(line, None if line == "single" else ["cpu", "cpu"]))


def test_counting_the_shifted_labels_matters() -> None:
    # The control: weighting by all labels, the first of each row included, is another loss.
    def by_all_labels(outputs: Any, batch: Any) -> mw.Loss:
        weight = (batch["labels"] != -100).sum()
        return mw.Loss(outputs.loss * weight, weight)

    def shares(batch: Any) -> list[list[Any]]:
        return [[{name: t[:3] for name, t in batch.items()}], [{name: t[3:] for name, t in batch.items()}]]

    wrong = testing.oracle_steps(_build, BATCHES[:1], by_all_labels, shares=shares)[0]
    with pytest.raises(AssertionError, match="differ by more than"):
        testing.assert_parity(wrong.gradients, testing.oracle_steps(_build, BATCHES[:1])[0].gradients, 100 * FLOAT32)


# ---- in float64


class _Float32Operators(TorchDispatchMode):
    """Notes what computes in less than float64, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        values = out if isinstance(out, tuple | list) else [out]
        if any(isinstance(v, torch.Tensor) and v.is_floating_point() and v.dtype != torch.float64 for v in values):
            self.names.add(str(func))
        return out


def _float32_operators(model: nn.Module, case: cases.Case) -> set[str]:
    with _Float32Operators() as found:
        whole_batch_loss(model, case.batches(3)[0], case.loss_fn).backward()
    return found.names


@pytest.mark.parametrize("name", cases.HUGGING_FACE)
def test_under_test_nothing_computes_in_float32(name: str) -> None:
    # Otherwise the bound of 1e-11 in the grids would be a matter of luck.
    case = cases.find(name)
    assert _float32_operators(case.build(), case) == set()


def test_as_they_are_parts_compute_in_float32() -> None:
    # The control: what the builders of these tests change matters, and is seen.
    assert _float32_operators(_build().double(), cases.find("hf_llama_own_loss")) != set()


IN_ONE_PROCESS = ("mode=data_parallel,dp=2", "mode=model_parallel,pp=2")


@pytest.mark.parametrize(
    ("name", "line"),
    [
        (name, line)
        for index, name in enumerate(cases.HUGGING_FACE)
        for place, line in enumerate(IN_ONE_PROCESS)
        if FULL_GRID or (index + place) % 2 == 0
    ],
)
def test_one_process_equals_one_device(name: str, line: str) -> None:
    setting = Setting(num_samples=7, micro_batches=2, max_grad_norm=0.05)
    testing.assert_parity(run_case(name, line, setting, devices=["cpu"] * 2), reference(name, setting), FLOAT64)
