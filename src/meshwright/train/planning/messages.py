"""Messages of a plan in a step, foreseen by one rank that builds the configuration's model and asks what the runtime will do."""

from __future__ import annotations

from typing import Final, Literal

from meshwright.ranks.launch import QUICK_STOP_S, launch
from meshwright.spec.plan import Plan
from meshwright.train.config.types import TrainConfig

__all__: list[str] = []

_MOST_BYTES: Final = 2 * 2**30
"""Parameters of a model that is built for this, at most: every process of a run builds the whole model, too [bytes]."""


def foreseen_axis(plan: Plan, params_bytes: int) -> Literal["pp", "dp"] | None:
    """Return the axis whose messages are foreseen here, by one process and without the search for a tensor layout.

    Those of stages hang on the model's own code between layers; those of compressed gradients on the shape of each. For all other
    messages the planner's formulas are exact.
    """
    is_even = plan.micro_batch_size is None and plan.precision == "fp32"
    if plan.tp > 1 or not is_even or params_bytes > _MOST_BYTES:
        return None
    if plan.pp > 1 and plan.mode in ("ranks", "model_parallel"):
        return "pp"
    return "dp" if plan.compress != "none" and plan.dp > 1 and plan.pp == 1 and plan.zero == 0 else None


def foresee(config: TrainConfig, plan: Plan) -> float:
    """Return what a rank sends along the foreseen axis in a step, in the mean; of one process, what its devices move [bytes].

    Raises:
        MeshwrightError: The model cannot be built, or cut into such stages.
        Exception: Whatever the user's code raises.
    """
    sent = launch(foresee_on_rank, 1, config.model_dump_json(), plan.to_json(), stop_grace_s=QUICK_STOP_S)[0]
    return sum(sent) / len(sent)


def foresee_on_rank(config_json: str, plan_json: str) -> list[float]:
    """Return what each pp rank, or any dp rank, sends to the others in a step, or one process moves [bytes]."""
    from meshwright.apply.data.expected_bytes import foresee_gradients
    from meshwright.apply.one_process.rehearsal import foresee_moves
    from meshwright.apply.pipeline.rehearsal import foresee_messages
    from meshwright.train.config.imports import add_to_path
    from meshwright.train.losses import make_loss
    from meshwright.train.models import make_build_model
    from meshwright.train.planning.config_model import example_batch

    config, plan = TrainConfig.model_validate_json(config_json), Plan.from_json(plan_json)
    add_to_path(config.import_roots)
    build_model = make_build_model(config, starts=False)
    if plan.pp == 1:
        return [foresee_gradients(build_model(), plan.dp, plan.compress)]
    num_samples = max(1, config.train.global_batch_size // plan.num_shares // plan.micro_batches)
    batch = example_batch(config, num_samples)
    if plan.mode == "model_parallel":
        sent = [foresee_moves(build_model, plan, batch)]
    else:
        sent = foresee_messages(build_model, plan, batch, make_loss(config))
    # Shares may be uneven: all samples are sent by somebody.
    scale = config.train.global_batch_size / (num_samples * plan.num_shares * plan.micro_batches)
    return [scale * one for one in sent]
