"""Messages between a plan's stages, foreseen by one rank that cuts the configuration's model as the runtime does."""

from __future__ import annotations

from typing import Final

from meshwright.ranks.launch import QUICK_STOP_S, launch
from meshwright.spec.plan import Plan
from meshwright.train.config.types import TrainConfig

__all__: list[str] = []

_MOST_BYTES: Final = 2 * 2**30
"""Parameters of a model that is built for this, at most: every process of a run builds the whole model, too [bytes]."""


def can_be_foreseen(plan: Plan, params_bytes: int) -> bool:
    """Tell whether a plan's stages can be cut here: by one process, without the search for a tensor layout."""
    is_even = plan.micro_batch_size is None and plan.precision == "fp32"
    has_stages = plan.mode in ("ranks", "model_parallel") and plan.pp > 1 and plan.tp == 1
    return has_stages and is_even and params_bytes <= _MOST_BYTES


def foresee_stage_messages(config: TrainConfig, plan: Plan) -> float:
    """Return what a pp rank sends to the others in a step, in the mean; of one process, what its devices move [bytes].

    Raises:
        MeshwrightError: The model cannot be built, or cut into such stages.
        Exception: Whatever the user's code raises.
    """
    sent = launch(foresee_on_rank, 1, config.model_dump_json(), plan.to_json(), stop_grace_s=QUICK_STOP_S)[0]
    return sum(sent) / len(sent)


def foresee_on_rank(config_json: str, plan_json: str) -> list[float]:
    """Return what each pp rank sends to the others in a step, or one process moves [bytes]."""
    from meshwright.apply.one_process.rehearsal import foresee_moves
    from meshwright.apply.pipeline.rehearsal import foresee_messages
    from meshwright.train.config.imports import add_to_path
    from meshwright.train.losses import make_loss
    from meshwright.train.models import make_build_model
    from meshwright.train.planning.config_model import example_batch

    config, plan = TrainConfig.model_validate_json(config_json), Plan.from_json(plan_json)
    add_to_path(config.import_roots)
    num_samples = max(1, config.train.global_batch_size // plan.dp // plan.micro_batches)
    batch = example_batch(config, num_samples)
    build_model = make_build_model(config, starts=False)
    if plan.mode == "model_parallel":
        sent = [foresee_moves(build_model, plan, batch)]
    else:
        sent = foresee_messages(build_model, plan, batch, make_loss(config))
    # Shares may be uneven: all samples are sent by somebody.
    scale = config.train.global_batch_size / (num_samples * plan.dp * plan.micro_batches)
    return [scale * one for one in sent]
