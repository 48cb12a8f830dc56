"""`meshwright plan CONFIG`: plans for a configuration on this machine, and their refinement by short runs.

The best plans are run for a few steps, in turns. The fastest of them is what `--plan auto` takes from then on. What they took
over what was predicted makes one scalar for computing and one for exchanging, by which the machine's numbers are corrected; the
others are ranked by those. Free of torch.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from meshwright.compare.rows import Trial
from meshwright.compare.run_plans import run_trials
from meshwright.errors import ConfigError
from meshwright.hardware import ClusterSpec, load_cluster
from meshwright.hardware.cluster import HOST_DEVICE
from meshwright.plan.plan_table import list_plans
from meshwright.plan.search.ranking import make_plans, predict_plan
from meshwright.spec.plan import Plan
from meshwright.train.config.load import load_config
from meshwright.train.config.types import TrainConfig
from meshwright.train.planning.config_model import Described
from meshwright.train.planning.measured import MeasuredPlan, keep_measured, today
from meshwright.train.planning.predictor import Predictor, default_devices, threads_of
from meshwright.train.planning.this_machine import keep_cluster
from meshwright.train.progress import ProgressView
from meshwright.units import format_seconds

__all__: list[str] = []

_STEPS: Final = 10
"""Measured steps of a plan that is run [count]."""

_TURNS: Final = 3
"""How often each plan is run: two starts of one plan differ by some 5 % [count]."""

_BOUNDS: Final = (0.1, 10.0)
"""What a scalar may be: beyond it something else than the machine's speed is wrong [ratio]."""


_LEAST_WAITED: Final = 0.01
"""Share of the steps that waiting must be foreseen to take: less of it says nothing of the machine [ratio]."""


@dataclasses.dataclass(frozen=True, slots=True)
class Scalars:
    """Measured over predicted."""

    compute: float
    """Of what ranks do when they do not wait [ratio]."""
    exchange: float
    """Of waiting for exchanges [ratio]."""


def plan_config(
    path: Path,
    *,
    cluster: str | None = None,
    devices: int | None = None,
    top: int = 5,
    refine: int = 0,
    json_path: Path | None = None,
) -> str:
    """Return the best plans for a configuration as text, and write them as JSON where a path is given.

    Args:
        path: The TOML file.
        cluster: As `load_cluster` takes it; None means this machine.
        devices: How many devices to plan for; None means the configuration's [count].
        top: Plans to show at most [count].
        refine: How many of the best to run for a few steps before the list is made [count].
        json_path: Write the plans there.

    Raises:
        ConfigError: The configuration is wrong, the model cannot be described, or the machine not be measured.
        PlanError: No plan fits into the memory.
        Exception: What the first plan that was run raised, where none of them ran.
    """
    config = load_config(path, plan="auto", devices=devices)
    with ProgressView(sys.stderr) as view:
        predictor = Predictor(config, tell=view.note)
        if cluster is not None:
            whole = load_cluster(cluster)
            known, machine = predictor.task(devices or whole.num_devices, whole)
            return list_plans(known.model, machine, known.train, top=top, json_path=json_path)
        known, machine = predictor.task(count := default_devices(config))
        note = ""
        if refine:
            plans = [*make_plans(known.model, machine, known.train, top=refine), *_of_one_process(machine)]
            turns = _run_in_turns(config, plans, view)
            ranked = fastest_first(plans, turns)
            keep_measured(known, count, ranked)
            machine, aside = _corrected(machine, plans, turns)
            note = _held(plans, turns, known, machine) + _taken(ranked) + aside
        ran = list(predictor.measured(known, count))
    return list_plans(known.model, machine, known.train, top=top, json_path=json_path, ran=ran) + note


def _corrected(
    machine: ClusterSpec, plans: Sequence[Plan], turns: Sequence[Sequence[Trial]]
) -> tuple[ClusterSpec, str]:
    """Return the cluster as plans found it, which is kept; or as it was, and why."""
    try:
        found = learn(machine, [plan for _ in turns for plan in plans], [trial for turn in turns for trial in turn])
    except ConfigError as error:  # plans that ran are ranked by what they took all the same
        return machine, f"\nThe machine's numbers stay as they were: {error.message}; {error.fix}"
    keep_cluster(found, found.num_devices, threads_of(plans[0]))
    return found, ""


def _of_one_process(machine: ClusterSpec) -> list[Plan]:
    """Return what else uses the same cores: on a host whose devices are its cores, one process with all of them."""
    return [Plan.parse("single")] if machine.num_devices > 1 and machine.device.name == HOST_DEVICE else []


def _run_in_turns(config: TrainConfig, plans: Sequence[Plan], view: ProgressView) -> list[list[Trial]]:
    """Run plans in turns, and return the trials of each turn in the order of the plans.

    Each turn begins with another plan: what runs first finds the machine as the last one left it, and its speed drifts.
    """
    turns: list[list[Trial]] = []
    for turn in range(_TURNS):
        shift = turn % len(plans)
        made = run_trials(config, [*plans[shift:], *plans[:shift]], _STEPS, view)
        turns.append(made[len(plans) - shift :] + made[: len(plans) - shift])
    return turns


def fastest_first(plans: Sequence[Plan], turns: Sequence[Sequence[Trial]]) -> list[MeasuredPlan]:
    """Return plans that ran in every turn, by their medians over the turns of what they took over the turn's mean."""
    shares: dict[int, list[float]] = {}
    steps: dict[int, list[float]] = {}
    for trials in turns:
        took = {place: statistics.median(one.step_seconds) for place, one in enumerate(trials) if one.error is None}
        mean = statistics.geometric_mean(took.values())
        for place, step_s in took.items():
            shares.setdefault(place, []).append(step_s / mean)
            steps.setdefault(place, []).append(step_s)
    whole = [place for place, found in shares.items() if len(found) == len(turns)]
    return [
        MeasuredPlan(plans[place], statistics.median(steps[place]), today(), len(turns))
        for place in sorted(whole, key=lambda place: statistics.median(shares[place]))
    ]


def learn(cluster: ClusterSpec, plans: Sequence[Plan], trials: Sequence[Trial]) -> ClusterSpec:
    """Return the cluster with its numbers corrected by what some plans took.

    Raises:
        ConfigError: No plan ran, or what was measured is too far from what was predicted for a machine's speed.
    """
    scalars = scalars_of(plans, trials)
    for name, scalar in dataclasses.asdict(scalars).items():
        if not _BOUNDS[0] <= scalar <= _BOUNDS[1]:
            raise ConfigError(
                f"{name}: measured over predicted is {scalar:.3g} (rule: {_BOUNDS[0]} to {_BOUNDS[1]})",
                fix="measure the machine anew while it is idle: meshwright probe",
            )
    return scaled(cluster, scalars)


def scalars_of(plans: Sequence[Plan], trials: Sequence[Trial]) -> Scalars:
    """Return one scalar for each term, from plans with predictions and what they took.

    Raises:
        ConfigError: No plan ran.
    """
    computed: list[float] = []
    predicted: list[float] = []
    waited = foreseen = 0.0
    for plan, trial in zip(plans, trials, strict=True):
        if trial.error is not None or plan.prediction is None:
            continue
        time = plan.prediction.time
        waits = (
            statistics.median(statistics.fmean(ranks) for ranks in trial.wait_seconds) if trial.wait_seconds else 0.0
        )
        step = statistics.median(trial.step_seconds)
        computed.append((step - waits) / (time.forward_s + time.backward_s + time.recompute_s + time.optimizer_s))
        if plan.pp == 1:  # in a pipeline ranks also wait for each other's work
            waited, foreseen = waited + waits, foreseen + time.exposed_comm_s
            predicted.append(plan.prediction.step_s)
    if not computed:
        raise ConfigError("none of the plans ran: " + "; ".join(f"'{one.plan}': {one.error}" for one in trials))
    tells = waited > 0 and foreseen > _LEAST_WAITED * sum(predicted)
    return Scalars(statistics.median(computed), waited / foreseen if tells else 1.0)


def scaled(cluster: ClusterSpec, scalars: Scalars) -> ClusterSpec:
    """Return the cluster as fast as the scalars say."""
    device, link, efficiency = cluster.device, cluster.link, cluster.efficiency
    if efficiency is None:
        raise ConfigError(f"'{cluster.name}' was not measured", fix="meshwright probe")
    compute, exchange = scalars.compute, scalars.exchange
    note = f"; corrected by {compute:.3g} after runs"
    device = dataclasses.replace(
        device,
        peak_flops_per_s={dtype: rate / compute for dtype, rate in device.peak_flops_per_s.items()},
        memory_bytes_per_s=device.memory_bytes_per_s / compute if device.memory_bytes_per_s else None,
        sources={key: text.partition("; corrected")[0] + note for key, text in device.sources.items()},
    )
    if link is not None:
        latency = None if link.latency_s is None else link.latency_s * exchange
        link = dataclasses.replace(link, bytes_per_s=link.bytes_per_s / exchange, latency_s=latency)
    by_compute = ("operator_s", "step_s", "tensor_s", "score_forward_s", "score_backward_s", "kernel_s")
    by_exchange = ("link_latency_s", "collective_host_s", "hop_s")
    changes = {name: getattr(efficiency, name) * compute for name in by_compute}
    changes |= {name: getattr(efficiency, name) * exchange for name in by_exchange}
    changes["runtime"] = {kind: [compute * one for one in seconds] for kind, seconds in efficiency.runtime.items()}
    changes["exchanges"] = {
        kind: [(ranks, size, exchange * seconds) for ranks, size, seconds in rows]
        for kind, rows in efficiency.exchanges.items()
    }
    return dataclasses.replace(cluster, device=device, link=link, efficiency=dataclasses.replace(efficiency, **changes))


def _held(plans: Sequence[Plan], turns: Sequence[Sequence[Trial]], known: Described, cluster: ClusterSpec) -> str:
    """Return the plans that were run: predicted before, measured, predicted after."""
    lines = ["", "", f"Run in {len(turns)} turns of {_STEPS} steps:"]
    for place, plan in enumerate(plans):
        of_plan = [turn[place] for turn in turns]
        failed = next((one.error for one in of_plan if one.error is not None), None)
        if failed is not None:
            lines.append(f"- '{plan}': {failed}")
            continue
        measured = format_seconds(statistics.median(statistics.median(one.step_seconds) for one in of_plan))
        if plan.prediction is None:
            lines.append(f"- '{plan}' with all cores: {measured} measured")
            continue
        after = predict_plan(known.model, cluster, known.train, plan)
        lines.append(
            f"- '{plan}': {format_seconds(plan.prediction.step_s)} predicted, {measured} measured, "
            f"{format_seconds(after.step_s)} after the correction"
        )
    return "\n".join(lines)


def _taken(ranked: Sequence[MeasuredPlan]) -> str:
    if not ranked:
        return ""
    return f"\n`--plan auto` takes '{ranked[0].plan}' for this training here, until it is refined again."
