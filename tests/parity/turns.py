"""Which cells of a large table are run by default: every model meets some plans, and plans and settings take turns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from tests.parity import cases
from tests.parity.harness import Setting
from tests.scopes import FULL_GRID

Plan = TypeVar("Plan")

FORMS = [name for name in cases.CASES if name.startswith("output_")]
"""Models that differ in the form of their outputs alone: each meets a pipeline, every second one tensor parallelism."""


def some_of_hugging_face(names: Iterable[str], turn: int) -> list[str]:
    """Keep every fourth one of Hugging Face's models, which take as long as ten others; `benchmarks/any_model` has hundreds.

    Args:
        names: Models, of any kind.
        turn: 0 to 3, another one for each kind of plan.
    """
    kept = list(cases.HUGGING_FACE) if FULL_GRID else list(cases.HUGGING_FACE)[turn::4]
    return [name for name in names if name in kept or name not in cases.HUGGING_FACE]


def some_of_forms(names: Iterable[str]) -> list[str]:
    """Keep every second one of the models that differ in the form of their outputs alone."""
    left_out = () if FULL_GRID else FORMS[1::2]
    return [name for name in names if name not in left_out]


def every_second(names: Iterable[str], turn: int) -> list[str]:
    """Return every second model; the others, of the other turn, 0 or 1, meet plans of the same exchanges elsewhere."""
    return [name for index, name in enumerate(names) if FULL_GRID or index % 2 == turn]


def is_cheap(name: str, plan: tuple[str, int]) -> bool:
    """Whether a model may have this plan's number of ranks: each further pool imports `transformers`, which takes seconds."""
    return FULL_GRID or name not in cases.HUGGING_FACE or plan[1] in (2, 4)


def take_turns(
    names: Iterable[str],
    plans: Sequence[Plan],
    settings: Sequence[Setting],
    *,
    num_plans: int,
    fits: Callable[[str, Plan], bool] = lambda name, plan: True,
    is_sound: Callable[[str, Plan, Setting], bool] = lambda name, plan, setting: True,
) -> list[tuple[str, Plan, Setting]]:
    """Choose cells: each model gets the plans that were taken least, each with the setting that was taken least with it.

    Args:
        names: The models.
        plans: What they may be trained under.
        settings: What they may be trained with.
        num_plans: How many plans each model gets, or as many as fit it [count].
        fits: Whether a model can be trained under a plan.
        is_sound: Whether such a cell can be exact with a setting.

    Returns:
        The cells, model by model; all that there are where `FULL_GRID` is set.
    """
    rows: list[tuple[str, Plan, Setting]] = []
    taken: Counter[object] = Counter()
    for name in names:
        cells = {plan: [s for s in settings if is_sound(name, plan, s)] for plan in plans if fits(name, plan)}
        if FULL_GRID:
            rows += [(name, plan, setting) for plan, sound in cells.items() for setting in sound]
            continue
        for turn in range(min(num_plans, len(cells))):
            # A model's plans are to be unlike each other, and neighbours in the list are alike.
            first = turn * len(plans) // num_plans
            plan = min(cells, key=lambda plan, first=first: (taken[plan], (plans.index(plan) - first) % len(plans)))
            setting = min(cells.pop(plan), key=lambda s, plan=plan: (taken[plan, s], taken[s]))
            taken.update([plan, setting, (plan, setting)])
            rows.append((name, plan, setting))
    return rows
