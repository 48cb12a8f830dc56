"""Data parallelism over processes against one plain process, 2, 3 and 4 ranks, in float64: half of the models, ZeRO has the rest.

Shares are unequal in all settings; with 2 samples on 3 or 4 ranks, some are empty. Small buckets make many of them, so that
their order and what is reduced while backward still runs matter, as in large models. MESHWRIGHT_FULL_GRID=1 runs every model
with every setting.
"""

from __future__ import annotations

import dataclasses

import pytest
from tests.parity import cases
from tests.parity.harness import Setting, assert_distributed_parity, assert_wide_parity
from tests.parity.turns import every_second, some_of_hugging_face
from tests.scopes import FULL_GRID

SMALL_BUCKETS = ",bucket_bytes=64B"

# (samples, micro-batches, clipping) so that every pair of values meets; each case gets one of them for each world size.
SETTINGS = (
    Setting(num_samples=7, micro_batches=1, plan_words=SMALL_BUCKETS),
    Setting(num_samples=7, micro_batches=3, max_grad_norm=0.05, plan_words=SMALL_BUCKETS),
    Setting(num_samples=2, micro_batches=3, plan_words=SMALL_BUCKETS),
    Setting(num_samples=5, micro_batches=1, max_grad_norm=0.05),
    Setting(num_samples=11, micro_batches=3, plan_words=",overlap=off"),
    Setting(num_samples=2, micro_batches=1, max_grad_norm=0.05, plan_words=SMALL_BUCKETS),
)


def _matrix() -> list[tuple[str, int, Setting]]:
    if FULL_GRID:
        names = [*cases.CASES, *cases.HUGGING_FACE]
        return [(name, num_ranks, setting) for name in names for num_ranks in (2, 3, 4) for setting in SETTINGS]
    turns = [(2, 0), (3, 1), (4, 3)]  # each number of ranks meets each setting
    rows = []
    for index, name in enumerate(every_second(cases.CASES, 0)):
        num_ranks, turn = turns[index % 3]
        rows.append((name, num_ranks, SETTINGS[(index // 3 + turn) % len(SETTINGS)]))
    large = [setting for setting in SETTINGS if SMALL_BUCKETS not in setting.plan_words]  # else thousands of buckets
    dear = enumerate(some_of_hugging_face(cases.HUGGING_FACE, 1))
    rows += [(name, 2 + 2 * (index % 2), large[index % len(large)]) for index, name in dear]
    return rows


@pytest.mark.parametrize(("name", "num_ranks", "setting"), _matrix(), ids=str)
def test_equals_one_process(name: str, num_ranks: int, setting: Setting) -> None:
    if name == "own_loss" and setting.num_samples == 2:
        setting = dataclasses.replace(setting, num_samples=3)
    assert_distributed_parity(name, num_ranks, setting)


@pytest.mark.parametrize("num_ranks", [2, 3, 4] if FULL_GRID else [2])
@pytest.mark.slow
@pytest.mark.parametrize("name", cases.WIDE)
def test_a_wide_model_equals_one_process(name: str, num_ranks: int) -> None:
    # 5 million parameters: buckets as large as they are by default, two of them (21 million in three in the full grid).
    assert_wide_parity(name, num_ranks, Setting(num_samples=5, num_steps=1), f"dp={num_ranks}")


@pytest.mark.parametrize(
    ("name", "num_ranks", "micro_batches"),
    [
        (name, num_ranks, micro_batches)
        for index, name in enumerate(cases.PIECEWISE)
        for num_ranks in (2, 3, 4)
        for micro_batches in (1, 2)
        if FULL_GRID or (index + num_ranks + micro_batches) % 2
    ],
)
def test_equals_one_process_that_takes_the_same_pieces(name: str, num_ranks: int, micro_batches: int) -> None:
    # E018, E019, E020, E106, E118: what is normalised together, or branches on values, depends on the cutting; the
    # reference cuts likewise, and keeps the buffers that rank 0's pieces leave behind.
    setting = Setting(num_samples=18, micro_batches=micro_batches, plan_words=SMALL_BUCKETS)
    assert_distributed_parity(name, num_ranks, setting, piecewise=True)


def test_batch_normalisation_differs_from_one_process() -> None:
    # The control of the test above: cut or not is a difference that these comparisons see.
    with pytest.raises(AssertionError, match="step 0 loss"):
        assert_distributed_parity("batch_norm", 2, Setting(num_samples=18))


@pytest.mark.parametrize("name", ["branches", "gpt", "lora"])
def test_an_empty_step_leaves_no_state_behind(name: str) -> None:
    # E075: 3 samples on 4 ranks, then a normal batch, and again.
    assert_distributed_parity(name, 4, Setting(num_samples=3, num_steps=4, plan_words=SMALL_BUCKETS))
    assert_distributed_parity(name, 4, Setting(num_samples=8, plan_words=SMALL_BUCKETS))
