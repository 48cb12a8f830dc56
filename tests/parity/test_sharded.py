"""ZeRO 1, 2, 3 and HSDP against one plain process: every model, 2, 3 and 4 ranks, in float64.

ZeRO-3 gathers every layer here, however small (`whole_below=0`): the default would leave these models whole. Shares are
unequal in all settings, and some are empty. Every model meets each stage once, and half of Hugging Face's one of them;
MESHWRIGHT_FULL_GRID=1 runs every model under every plan with every setting.
"""

from __future__ import annotations

import dataclasses

import pytest
from tests.parity import cases
from tests.parity.harness import Setting, assert_distributed_parity, assert_wide_parity
from tests.parity.turns import every_second, is_cheap, some_of_hugging_face, take_turns
from tests.scopes import FULL_GRID

PLANS = (
    ("dp=2,zero=1", 2),
    ("dp=3,zero=1", 3),
    ("dp=4,zero=1", 4),
    ("dp=2,zero=2", 2),
    ("dp=3,zero=2", 3),
    ("dp=4,zero=2", 4),
    ("dp=2,zero=3,whole_below=0B", 2),
    ("dp=3,zero=3,whole_below=0B", 3),
    ("dp=4,zero=3,whole_below=0B", 4),
    ("dp=4,zero=1,shard=2", 4),
    ("dp=4,zero=2,shard=2", 4),
    ("dp=4,zero=3,shard=2,whole_below=0B", 4),
    ("dp=2,zero=3", 2),
)

SETTINGS = (
    Setting(num_samples=7, micro_batches=1),
    Setting(num_samples=7, micro_batches=3, max_grad_norm=0.05),
    Setting(num_samples=2, micro_batches=3, plan_words=",recompute=selective"),
    Setting(num_samples=5, micro_batches=1, max_grad_norm=0.05, plan_words=",recompute=full"),
    Setting(num_samples=11, micro_batches=3),
)

KINDS = tuple(tuple(plan for plan in PLANS if ("zero=3" in plan[0]) == cuts) for cuts in (False, True))
"""Plans of ZeRO 1 and 2, and those of ZeRO-3."""


def _matrix() -> list[tuple[str, str, int, Setting]]:
    rows = []
    # The models that data parallelism leaves out (test_distributed.py) meet ZeRO 1 or 2, and all of them ZeRO-3.
    for plans, names in zip(KINDS, (every_second(cases.CASES, 1), list(cases.CASES)), strict=True):
        rows += take_turns(names, plans, SETTINGS, num_plans=1)
    rows += take_turns(some_of_hugging_face(cases.HUGGING_FACE, 3), PLANS, SETTINGS, num_plans=1, fits=is_cheap)
    return [(name, *plan, setting) for name, plan, setting in rows]


@pytest.mark.parametrize(("name", "plan", "num_ranks", "setting"), _matrix(), ids=str)
def test_equals_one_process(name: str, plan: str, num_ranks: int, setting: Setting) -> None:
    if name == "own_loss" and setting.num_samples == 2:
        setting = dataclasses.replace(setting, num_samples=3)
    assert_distributed_parity(name, num_ranks, setting, plan_text=plan)


@pytest.mark.skipif(not FULL_GRID, reason="half a minute: make test has it under dp=2, make test-grid here")
@pytest.mark.parametrize(("plan", "num_ranks"), [PLANS[0], PLANS[4], PLANS[6], PLANS[9]])
@pytest.mark.slow
@pytest.mark.parametrize("name", cases.WIDE)
def test_a_wide_model_equals_one_process(name: str, plan: str, num_ranks: int) -> None:
    # Sizes at which messages are cut, sums take other ways, and a unit is no longer small.
    assert_wide_parity(name, num_ranks, Setting(num_samples=5, num_steps=1), plan)


_IN_PIECES = take_turns(
    cases.PIECEWISE, [PLANS[1], PLANS[5], PLANS[7], PLANS[11]], [Setting(num_samples=18, micro_batches=2)], num_plans=2
)


@pytest.mark.parametrize(
    ("name", "plan", "num_ranks", "setting"), [(name, *plan, setting) for name, plan, setting in _IN_PIECES], ids=str
)
def test_equals_one_process_that_takes_the_same_pieces(name: str, plan: str, num_ranks: int, setting: Setting) -> None:
    # E118, E106: what is normalised together, or branches on values, depends on the cutting.
    assert_distributed_parity(name, num_ranks, setting, plan_text=plan, piecewise=True)
