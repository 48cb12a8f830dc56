"""Choice of a run's plan where the configuration says "auto", and its prediction where it says another."""

from __future__ import annotations

from meshwright.errors import ConfigError, PlanError
from meshwright.spec.plan_text import parse_line
from meshwright.train.config.checks import check_config
from meshwright.train.config.types import TrainConfig
from meshwright.train.planning.predictor import Predictor, default_devices
from meshwright.train.planning.this_machine import is_switched_off

__all__: list[str] = []


def foresee(config: TrainConfig, *, can_measure: bool) -> tuple[TrainConfig, list[str]]:
    """Return the configuration with its plan chosen, where that is "auto", and with a prediction, where there can be one.

    Args:
        config: The configuration; the plan of "auto" is data parallel so far.
        can_measure: Whether this process may start ranks of its own; one that belongs to a job may not.

    Returns:
        The configuration, and lines for the user.

    Raises:
        PlanError: "auto", and no plan fits into the memory.
        Exception: "auto", and the user's code raised while the model was described.
    """
    if is_switched_off() or not can_measure:
        why = "nothing is predicted here" if is_switched_off() else "a job's ranks do not measure themselves"
        lines = [f"plan auto: '{config.plan}', data parallel, since {why}"] if config.plan_is_auto else []
        return config, lines
    lines: list[str] = []
    predictor = Predictor(config, measure=config.plan_is_auto, tell=lines.append)
    if config.plan_is_auto:
        chosen, reasons = choose(config, predictor)
        return chosen, lines + reasons
    foreseen = predictor.predict(config.plan)
    if foreseen.prediction is None:
        return config, lines
    return config.model_copy(update={"plan": config.plan.replace(prediction=foreseen.prediction)}), lines


def choose(config: TrainConfig, predictor: Predictor) -> tuple[TrainConfig, list[str]]:
    """Return the configuration with the plan that is expected to be the fastest, and why.

    Raises:
        PlanError: No plan fits into the memory.
        Exception: Whatever the user's code raises while the model is described.
    """
    try:
        plan = predictor.best(default_devices(config), wanted=_wanted(config))
    except PlanError:
        raise
    except ConfigError as error:
        return config, [f"plan auto: '{config.plan}', data parallel, since no other can be chosen: {error.message}"]
    chosen = check_config(config.model_copy(update={"plan": plan, "notes": ()}))
    return chosen, [f"plan auto: '{plan}'", *(f"- {reason}" for reason in plan.reasons)]


def _wanted(config: TrainConfig) -> dict[str, object]:
    """Return what the configuration itself says of the plan: keys after "auto", and the [train] section's."""
    _, entries = parse_line(config.train.plan)
    known = {name: getattr(config.plan, name) for name in entries}
    if config.train.micro_batches is not None:
        known["micro_batches"] = config.plan.micro_batches
    return known
