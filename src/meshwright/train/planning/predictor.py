"""Predictions of a configuration's plans on this machine, and the choice of the best one."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from meshwright.errors import ApplyError, ConfigError, StoppedOnRequest
from meshwright.hardware import ClusterSpec
from meshwright.hardware.cluster import LinkSpec
from meshwright.host import usable_cores
from meshwright.measure.host_pace import has_other_pace, pace_text
from meshwright.measure.probe_cores import disturbed_text, is_disturbed
from meshwright.plan.search.ranking import make_plans, predict_plan
from meshwright.spec.model import Autocast
from meshwright.spec.plan import Plan
from meshwright.spec.prediction import Prediction
from meshwright.spec.supported import refuse_unbuilt
from meshwright.train.config.checks import check_config, visible_devices
from meshwright.train.config.types import TrainConfig
from meshwright.train.planning.config_model import Described, describe_config, precision_of
from meshwright.train.planning.measured import MeasuredPlan, measured_plans, reason_for
from meshwright.train.planning.messages import foresee, foreseen_axis
from meshwright.train.planning.this_machine import (
    is_named,
    is_outdated,
    is_switched_off,
    measure_this_machine,
    this_machine,
)

__all__: list[str] = []

_MOST_PLANS: Final = 5
"""Plans that are asked of the planner, of which the first that can be applied is taken [count]."""

_ALL_PLANS: Final = 2000
"""The same where some of a plan is given already [count]."""

_MEASURE: Final = "predicted: `meshwright plan CONFIG --refine 3` runs the best three, and auto then takes the fastest"


@dataclasses.dataclass(frozen=True, slots=True)
class Foreseen:
    """A prediction, or why there is none."""

    prediction: Prediction | None
    why_not: str = ""
    turn_s: float = 0.0
    """The pace of the machine when it was measured; see `ClusterSpec`."""


class Predictor:
    """What plans of one configuration should cost on this machine: the model is described once for each precision.

    Args:
        config: The configuration; its own plan does not matter.
        measure: Whether to measure the machine where nothing is kept of it.
        tell: Called with lines for the user.
    """

    def __init__(
        self, config: TrainConfig, *, measure: bool = True, tell: Callable[[str], None] = lambda _text: None
    ) -> None:
        self._config = config
        self._measure = measure
        self._tell = tell
        self._described: dict[Autocast, Described] = {}
        self._why_not = ""
        self._has_warned = False

    def predict(self, plan: Plan, threads: int | None = None, *, measure: bool = True) -> Foreseen:
        """Return what a step of a plan should cost.

        Args:
            plan: The plan.
            threads: Threads that one device computes with; None means what `train` gives it [count].
            measure: Whether to measure the machine where nothing is kept of it, and the predictor may.

        Raises:
            StoppedOnRequest: A signal asked to stop while the machine was measured.
        """
        threads = threads or threads_of(plan)
        try:
            cluster = self._cluster(plan.num_devices if plan.mode != "model_parallel" else 1, threads, measure)
            if cluster is None:
                return Foreseen(
                    None, "" if is_switched_off() else "this machine is not measured; `meshwright probe` does it"
                )
            known = self._description(cluster.autocast(plan.precision))
            cluster = _with_devices(_loaded(cluster, known), plan.num_devices)
            # A step of a plan in bf16 is one whatever the configuration's key says.
            train = dataclasses.replace(known.train, precision=plan.precision)
            prediction = predict_plan(known.model, cluster, train, plan)
            return Foreseen(self._with_messages(prediction, plan, known), turn_s=cluster.turn_s)
        except StoppedOnRequest:
            raise  # while the machine was measured
        except ConfigError as error:
            return Foreseen(None, error.message)
        except Exception as error:  # noqa: BLE001 - the user's code may raise anything; the run itself will show it
            return Foreseen(None, f"{type(error).__name__}: {error}")

    def best(self, num_devices: int, *, wanted: Mapping[str, object] | None = None) -> Plan:
        """Return the plan that was measured to be the fastest on that many devices, or else is expected to be: with its reasons.

        Args:
            num_devices: The devices, all of which are used [count].
            wanted: Fields that the plan must have.

        Raises:
            PlanError: No plan fits into the memory.
            ConfigError: The model cannot be described, or no plan that fits can be applied.
            Exception: Whatever the user's code raises.
        """
        cluster = self._cluster(num_devices, max(1, usable_cores() // num_devices))
        if cluster is None:
            raise ConfigError("this machine is not measured", fix="meshwright probe")
        known = self._description(cluster.autocast(precision_of(self._config)))
        refusals: list[str] = []
        wanted = wanted or {}
        top = _ALL_PLANS if wanted or known.why_whole else _MOST_PLANS
        for plan in itertools.chain(
            (plan for plan, _ in self.measured(known, num_devices)), _lazily(known, _loaded(cluster, known), top=top)
        ):
            if any(getattr(plan, name) != value for name, value in wanted.items()):
                continue
            if known.why_whole and _cuts_the_batch(plan):
                refusals.append(f"'{plan}': {known.why_whole}")
                continue
            try:
                refuse_unbuilt(plan)
                check_config(self._config.model_copy(update={"plan": plan}))
            except (ApplyError, ConfigError) as error:
                refusals.append(f"'{plan}': {error.message}")
                continue
            whole = f"plans that cut the batch are left out: {known.why_whole}" if known.why_whole else ""
            return plan.replace(reasons=(*plan.reasons, whole)) if whole else plan
        raise ConfigError("; ".join(refusals) or f"no plan has {', '.join(f'{k}={v}' for k, v in wanted.items())}")

    def measured(self, known: Described, num_devices: int) -> Iterator[tuple[Plan, float]]:
        """Yield plans that were run here for this training, the fastest first, each with its step [s]; nothing is measured.

        Each is predicted as it is asked for: what stages send takes a rehearsal.
        """
        ran = [] if is_named() else measured_plans(known, num_devices)
        for one in ran:
            yield self._with_reason(one, ran), one.step_s

    def _with_reason(self, one: MeasuredPlan, ran: Sequence[MeasuredPlan]) -> Plan:
        predicted = self.predict(one.plan, measure=False).prediction
        return one.plan.replace(prediction=predicted, reasons=(reason_for(one, ran),))

    def task(self, num_devices: int, cluster: ClusterSpec | None = None) -> tuple[Described, ClusterSpec]:
        """Return the model with its training, and so many devices of a cluster, or of this machine.

        Raises:
            ConfigError: The model cannot be described, or the machine may not be measured.
            Exception: Whatever the user's code raises.
        """
        if cluster is None:
            cluster = self._cluster(num_devices, max(1, usable_cores() // num_devices))
        if cluster is None:
            raise ConfigError("this machine is not measured", fix="unset MESHWRIGHT_CLUSTER, or --cluster 8xh100-sxm")
        if num_devices > cluster.num_devices:
            raise ConfigError(
                f"{num_devices} devices of '{cluster.name}' (rule: at most the {cluster.num_devices} that it has)",
                fix=f"devices={cluster.num_devices}",
            )
        known = self._description(cluster.autocast(precision_of(self._config)))
        return known, _loaded(_part_of(cluster, num_devices), known)

    def _with_messages(self, prediction: Prediction, plan: Plan, known: Described) -> Prediction:
        """Return a prediction with messages that no formula knows: the model's own calls, or its tensors' shapes, decide them."""
        axis = foreseen_axis(plan, known.model.params_bytes)
        if axis is None:
            return prediction
        try:
            sent = foresee(self._config, plan)
        except Exception:  # noqa: BLE001 - the run itself will say what is wrong with the model
            return prediction
        return dataclasses.replace(prediction, sent_bytes={**prediction.sent_bytes, axis: round(sent)})

    def _description(self, autocast: Autocast) -> Described:
        if self._why_not:
            raise ConfigError(self._why_not)
        if autocast not in self._described:
            try:
                self._described[autocast] = describe_config(self._config, autocast)
            except ConfigError as error:
                self._why_not = error.message
                raise
        return self._described[autocast]

    def _cluster(self, num_ranks: int, threads: int, measure: bool = True) -> ClusterSpec | None:
        cluster = this_machine(num_ranks, threads, measure=False)
        if cluster is not None:
            cluster = _part_of(cluster, num_ranks)  # of one that was named
        if measure and self._measure and not is_switched_off() and (cluster is None or is_outdated(cluster)):
            ranks = (
                f"{num_ranks} rank{'' if num_ranks == 1 else 's'} with {threads} thread{'' if threads == 1 else 's'}"
            )
            self._tell(f"measuring this machine for {ranks}, once; it is kept for later runs")
            cluster = measure_this_machine(num_ranks, threads)
        if cluster is not None and not self._has_warned:
            self._warn(cluster)
        return cluster

    def _warn(self, cluster: ClusterSpec) -> None:
        disturbed = is_disturbed(cluster)
        self._has_warned = disturbed or (not is_named() and has_other_pace(cluster))
        if self._has_warned:
            self._tell(f"warning: {disturbed_text(cluster) if disturbed else pace_text(cluster)}")


def threads_of(plan: Plan) -> int:
    """Return the threads that `train` gives each device of a plan [count]."""
    # model_parallel computes on one device at a time.
    shares = 1 if plan.mode == "model_parallel" else plan.num_devices
    return max(1, usable_cores() // shares)


def _cuts_the_batch(plan: Plan) -> bool:
    """Tell whether a plan takes the batch in parts."""
    return (
        plan.num_shares > 1
        or plan.micro_batches > 1
        or plan.micro_batch_size is not None
        or plan.mode == "data_parallel"
    )


def _lazily(known: Described, cluster: ClusterSpec, *, top: int) -> Iterator[Plan]:
    """Yield plans by what is predicted: nothing is searched before the first one is asked for."""
    hint = (_MEASURE,) if cluster.num_devices > 1 and not is_named() else ()
    for plan in make_plans(known.model, cluster, known.train, top=top):
        yield plan.replace(reasons=(*plan.reasons, *hint))


def _loaded(cluster: ClusterSpec, known: Described) -> ClusterSpec:
    """Return the cluster with what each process holds besides the model, where that is in the devices' memory."""
    efficiency = cluster.efficiency
    if efficiency is None or not efficiency.process_bytes:
        return cluster
    more = dataclasses.replace(efficiency, process_bytes=efficiency.process_bytes + known.loaded_bytes)
    return dataclasses.replace(cluster, efficiency=more)


def _part_of(cluster: ClusterSpec, num_devices: int) -> ClusterSpec:
    """Return so many devices of a cluster, at most all of them: whole hosts, or a part of one."""
    if num_devices >= cluster.num_devices:
        return cluster
    hosts, rest = divmod(num_devices, cluster.devices_per_host)
    if hosts and rest:
        raise ConfigError(
            f"{num_devices} devices of '{cluster.name}' (rule: whole hosts, of {cluster.devices_per_host} devices each)",
            fix=f"devices={hosts * cluster.devices_per_host}",
        )
    per_host = cluster.devices_per_host if hosts else num_devices
    return dataclasses.replace(cluster, num_hosts=max(1, hosts), devices_per_host=per_host)


def _with_devices(cluster: ClusterSpec, num_devices: int) -> ClusterSpec:
    """Return a cluster that was measured by fewer ranks with as many devices: those of one process."""
    if cluster.num_devices >= num_devices:
        return cluster
    # What one process hands on is not copied.
    link = cluster.link or LinkSpec(name="one-process", bytes_per_s=1e15, latency_s=0.0)
    return dataclasses.replace(cluster, devices_per_host=num_devices, link=link)


def default_devices(config: TrainConfig) -> int:
    """Return how many devices "auto" is for: the configuration's, else the GPUs or cores, a sample each [count]."""
    return config.train.devices or min(visible_devices()[0], config.train.global_batch_size)
