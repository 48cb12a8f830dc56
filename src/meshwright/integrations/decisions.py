"""Arguments, callbacks and metrics that each rank's Trainer decides by: they have to lead all ranks the same way.

Ranks run one process' loop side by side. One that saves, evaluates or stops where the others go on leaves them waiting, and
one that keeps another step for the best loads another model.
"""

from __future__ import annotations

import math
from typing import Any

from meshwright.errors import ApplyError
from meshwright.ranks.world import World

__all__: list[str] = []

_OWN = (
    *("log", "report_to", "run_name", "disable_tqdm", "local_rank", "ddp_", "hub_", "push_to_hub", "use_cpu", "debug"),
    *(
        "skip_memory_metrics",
        "project",
        "trackio",
        "output_dir",
        "overwrite_output_dir",
        "do_",
        "dataloader_num_workers",
    ),
    *(
        "dataloader_pin_memory",
        "dataloader_prefetch_factor",
        "dataloader_persistent_workers",
        "torch_empty_cache_steps",
    ),
)
"""Beginnings of arguments that a rank may have for itself: they decide nothing that others wait for."""
_FLAGS = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")
_TIMES = ("runtime", "per_second", "_time")
_NEAR = 1e-3
"""Metrics of ranks that differ less are one evaluation's, rounded in other orders."""


def refuse_other_arguments(world: World, args: Any) -> None:
    """Raise ApplyError where ranks have other TrainingArguments; every rank calls it."""
    mine = {name: repr(value) for name, value in args.to_dict().items() if not name.startswith(_OWN)}
    told = world.default_group.all_gather_json(mine, device=world.device)
    for rank, theirs in enumerate(told):
        for name, value in told[0].items():
            if theirs.get(name) != value:
                raise ApplyError(
                    f"TrainingArguments: {name} is {value} on rank 0 and {theirs.get(name)} on rank {rank} (rule: all ranks run "
                    "one loop)",
                    fix=f"give every rank the same; {name} must not depend on the rank",
                )


def follow_any(world: World, control: Any) -> None:
    """Set each flag of a TrainerControl that is set on any rank: a callback of one rank asks for all; every rank calls it."""
    mine = [bool(getattr(control, name)) for name in _FLAGS]
    told = world.default_group.all_gather_json(mine, device=world.device)
    for name, states in zip(_FLAGS, zip(*told, strict=True), strict=True):
        setattr(control, name, any(states))


def take_first(world: World, metrics: dict[str, Any]) -> None:
    """Replace an evaluation's numbers by rank 0's; every rank calls it.

    Raises:
        ApplyError: They differ by more than rounding.
    """
    mine = {
        name: value
        for name, value in metrics.items()
        if isinstance(value, int | float) and "_mem_" not in name and not name.endswith(_TIMES)
    }
    told: list[dict[str, float]] = world.default_group.all_gather_json(mine, device=world.device)
    for rank, theirs in enumerate(told):
        names = [name for name in told[0] | theirs if not _is_near(told[0].get(name), theirs.get(name))]
        if names:
            name = names[0]
            raise ApplyError(
                f"the evaluation's '{name}' is {told[0].get(name)} on rank 0 and {theirs.get(name)} on rank {rank} (rule: each "
                "rank evaluates all of it, and decides by it)",
                fix="give every rank the same eval_dataset, collator and compute_metrics",
            )
    metrics |= told[0]


def _is_near(first: float | None, second: float | None) -> bool:
    if first is None or second is None:
        return first is second
    if math.isnan(first) or math.isnan(second):
        return math.isnan(first) and math.isnan(second)
    return first == second or math.isclose(first, second, rel_tol=_NEAR, abs_tol=1e-12)
