"""Ranking of plans: every mix is costed, those that fit are sorted by the time of a step."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from meshwright.errors import ConfigError, PlanError
from meshwright.hardware import ClusterSpec
from meshwright.plan.costs.setup import Setup, run_again
from meshwright.plan.costs.step_cost import PassesCost
from meshwright.plan.costs.step_costs import StepCosts
from meshwright.plan.search.candidate import Candidate, base_setup, plan_of, setup_of
from meshwright.plan.search.explanation import reasons_for
from meshwright.plan.search.mixes import Fastest, Group, Mix, Split
from meshwright.plan.search.space import (
    Choice,
    Rejected,
    Task,
    all_degrees,
    all_orders,
    all_shardings,
    rule_against,
)
from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import Plan
from meshwright.spec.prediction import Prediction
from meshwright.spec.train import TrainSpec
from meshwright.texts import html_block, html_table
from meshwright.units import format_bytes, format_seconds

__all__: list[str] = []

USABLE_FRACTION: Final = 0.92
"""Share of a device's memory that a plan may fill: the rest is for the allocator's gaps and the libraries. An estimate."""

_KEPT: Final = 4
"""Candidates that are kept for each plan that is asked for: cut as the runtime does it, they may change places [count]."""


_MOST_NEAR: Final = 20
"""Candidates just above the memory whose stages are cut as the runtime does it, where few fit: they may need less [count]."""


_FASTER: Final = 0.98
"""Of the time of the best plan that fits: what is at most as long, and does not fit, would be worth more memory [ratio]."""

_PEAK: Final = operator.attrgetter("peak")


@dataclasses.dataclass(slots=True)
class FoundPlans:
    """What a search found."""

    task: Task
    fitting: list[Candidate]
    """The best of those that fit, the fastest first."""
    misses: list[Candidate]
    """Where none fits, those that need the least more memory, the least first."""
    faster_misses: list[Candidate]
    """Those that would be faster than the best one if they fitted, by the memory that they lack."""
    examples: dict[str, Rejected]
    """Rule -> the first degrees that it left out."""
    num_mixes: int
    """All mixes that no rule leaves out [count]."""
    limit_bytes: float


class RankedPlans(list[Plan]):
    """Plans, the fastest first: a list that a notebook shows as a table."""

    def _repr_html_(self) -> str:
        rows: list[tuple[str, ...]] = []
        for rank, plan in enumerate(self, start=1):
            cost = plan.prediction
            cells = ("-",) * 4
            if cost is not None:
                mfu = "-" if cost.mfu is None else f"{cost.mfu:.0%}"
                cells = (format_seconds(cost.step_s), format_bytes(cost.peak_bytes), f"{cost.bubble_fraction:.0%}", mfu)
            rows.append((str(rank), str(plan), *cells))
        why = [[reason] for reason in self[0].reasons] if self else []
        parts = [html_table(["", "plan", "step", "memory", "bubble", "MFU"], rows)]
        return html_block("plans, the fastest first", *parts, html_table([f"why {self[0]}"], why) if why else "")


def make_plans(
    spec: ModelSpec, cluster: ClusterSpec, train: TrainSpec, *, top: int = 5, memory_fraction: float = USABLE_FRACTION
) -> list[Plan]:
    """Return the best plans for a model on a cluster, the fastest first.

    Args:
        spec: The model.
        cluster: The devices; all of them are used.
        train: Global batch, optimizer and precision.
        top: Plans to return at most [count].
        memory_fraction: Share of a device's memory that a plan may fill; 0 to 1.

    Returns:
        Plans with ``prediction`` and ``reasons``, at least one.

    Raises:
        PlanError: No plan fits into the memory; the message names the nearest ones, and by how much they miss. Or the model has
            no parameters.
        ConfigError: An argument is out of range.

    >>> from meshwright.hardware import load_cluster
    >>> gpt = ModelSpec.transformer(layers=12, hidden=768, heads=12, vocab=50257, sequence=1024)
    >>> plans = make_plans(gpt, load_cluster("8xa100-sxm-80gb"), TrainSpec(global_batch_size=64, precision="bf16"))
    >>> plans[0].num_devices
    8
    """
    if top < 1:
        raise ConfigError(f"top={top} (rule: it is at least 1)", fix="top=5")
    if not 0 < memory_fraction <= 1:
        raise ConfigError(
            f"memory_fraction={memory_fraction} (rule: 0 < memory_fraction <= 1)", fix="memory_fraction=0.92"
        )
    _require_its_sequence(spec, train)
    if not spec.num_params:
        raise PlanError(
            f"'{spec.name}' has no parameters, so that there is nothing to train (rule: one or more)",
            fix="make nn.Parameter of what is to be trained; buffers are not trained",
        )
    costs = StepCosts(spec, cluster)
    found = search(costs, Task(spec, cluster, train), top=top, memory_fraction=memory_fraction)
    if not found.fitting:
        raise _nothing_fits(found)
    base = dataclasses.replace(base_setup(spec, train), cut_by_work=True)
    return RankedPlans(
        plan_of(candidate, train).replace(
            prediction=costs.predict(setup_of(base, candidate.degrees, candidate.choice, train)),
            reasons=reasons_for(
                candidate,
                found.task,
                best=found.fitting[0],
                faster_misses=found.faster_misses,
                limit_bytes=found.limit_bytes,
            ),
        )
        for candidate in found.fitting
    )


def predict_plan(spec: ModelSpec, cluster: ClusterSpec, train: TrainSpec, plan: Plan) -> Prediction:
    """Return what a step of any plan is expected to cost.

    Args:
        spec: The model.
        cluster: The devices.
        train: Global batch, optimizer and precision.
        plan: The plan; it may use fewer devices than the cluster has.

    Raises:
        ConfigError: The plan uses more devices than the cluster has, or has more stages than the model layers; or the
            training's sequences are not those that the model is described for.
    """
    _require_its_sequence(spec, train)
    if plan.num_devices > cluster.num_devices:
        raise ConfigError(
            f"plan: '{plan}' uses {plan.num_devices} devices, the cluster '{cluster.name}' has {cluster.num_devices}",
            fix="use a cluster with more devices",
        )
    if plan.num_stages > len(spec.layers):
        raise ConfigError(
            f"plan: '{plan}' has {plan.num_stages} stages, the model {len(spec.layers)} layers (rule: a layer for each stage)",
            fix=f"pp={max(1, len(spec.layers) // plan.virtual)}",
        )
    return StepCosts(spec, cluster).predict(Setup.of(spec, plan, train))


def _require_its_sequence(spec: ModelSpec, train: TrainSpec) -> None:
    wanted, described = train.sequence_length, spec.sequence_length
    if wanted is not None and described is not None and wanted != described:
        raise ConfigError(
            f"sequence_length={wanted}, and '{spec.name}' is described for {described} tokens (rule: its costs are for those)",
            fix=f"describe the model for {wanted} tokens, or leave sequence_length out",
        )


def search(costs: StepCosts, task: Task, *, top: int, memory_fraction: float) -> FoundPlans:
    """Cost every mix that may matter, and keep the best."""
    limit = task.cluster.device.memory_bytes * memory_fraction
    base = base_setup(task.model, task.train)
    found = FoundPlans(task, [], [], [], {}, 0, limit)
    # What is quick at best comes first, so that the rest need not be costed.
    groups = sorted(_all_groups(costs, base, found), key=operator.attrgetter("least_key"))
    fitting, missing, num_costed = Fastest(_KEPT * top), list[Mix](), 0
    while num_costed < len(groups) and fitting.may_take_any(groups[num_costed]):
        for mix in _mixes_of(groups[num_costed], base, costs, task):
            if mix.peak > limit:
                missing.append(mix)
            elif fitting.may_take(mix, costs):
                fitting.take(mix.candidate(costs), mix.place)
        num_costed += 1
    rest = groups[num_costed:]
    recut = _as_cut(fitting.ranked(), base, costs, task)
    near: list[Mix] = []
    if sum(one.peak <= limit for one in recut) < top:  # stages as they will be cut may need less
        missing = _with_others(missing, rest, base, costs, found)
        rest = []
        near = heapq.nsmallest(_MOST_NEAR, missing, key=_PEAK)
        recut += _as_cut([mix.candidate(costs) for mix in near], base, costs, task)
    found.fitting = sorted((one for one in recut if one.peak <= limit), key=Candidate.key)[:top]
    if found.fitting:
        limit_s = _FASTER * found.fitting[0].cost.step_s
        missing = _with_others(missing, [one for one in rest if one.least_s < limit_s], base, costs, found)
    tried = set(map(id, near))
    others = [mix for mix in missing if id(mix) not in tried]
    _note_misses(found, others, [one for one in recut if one.peak > limit], costs)
    return found


def _all_groups(costs: StepCosts, base: Setup, found: FoundPlans) -> Iterator[Group]:
    """Yield every mix of degrees and order with the least time of its steps; note what rules leave out."""
    task = found.task
    for degrees in all_degrees(task):
        rejected = rule_against(degrees, task)
        if rejected is not None:
            found.examples.setdefault(rejected.rule, rejected)
            continue
        shardings = list(all_shardings(degrees, task))
        # Passes see nothing of these, and what data parallelism adds nothing of the order.
        setups = [
            setup_of(base, degrees, Choice(zero, shard, "1f1b", 1, "none", offload), task.train)
            for zero, shard, offload in shardings
        ]
        split = Split(degrees, shardings, setups)
        for schedule, virtual, recompute in all_orders(degrees, task):
            least_s = costs.least_order_s(setups[0], schedule, virtual, run_again(recompute))
            yield Group(found.num_mixes, split, schedule, virtual, recompute, least_s)
            found.num_mixes += len(shardings)


def _mixes_of(group: Group, base: Setup, costs: StepCosts, task: Task) -> list[Mix]:
    """Return a group's mixes with their memory, but for those that run something again and save nothing."""
    split, without = group.split, group.split.without
    order = (group.schedule, group.virtual)

    def costed(recompute: str) -> tuple[PassesCost, list[float]]:
        choice = Choice(0, None, *order, recompute, "none")
        passes = costs.passes(setup_of(base, split.degrees, choice, task.train))
        return passes, [costs.memory_with(passes, setup).peak for setup in split.setups]

    passes, peaks = costed(group.recompute)
    if group.recompute == "none":
        without[order] = peaks
    elif order not in without:
        without[order] = costed("none")[1]
    return [
        Mix(group, index, passes, peak)
        for index, (peak, least) in enumerate(zip(peaks, without[order], strict=True))
        if group.recompute == "none" or peak < least
    ]


def _with_others(
    missing: list[Mix], groups: Iterable[Group], base: Setup, costs: StepCosts, found: FoundPlans
) -> list[Mix]:
    """Return mixes that miss the memory and those of further groups, in the order of all mixes."""
    more = (mix for group in groups for mix in _mixes_of(group, base, costs, found.task))
    return sorted([*missing, *(mix for mix in more if mix.peak > found.limit_bytes)], key=operator.attrgetter("place"))


def _note_misses(found: FoundPlans, missing: Sequence[Mix], recut: Sequence[Candidate], costs: StepCosts) -> None:
    """Note the mixes that miss the memory by the least, where none fits; else those faster than the best; the nearest first.

    Args:
        found: What the search found; it has the plans that fit.
        missing: Those that miss: all of them where none fits, else at least those that may be faster.
        recut: Those that do so with the stages that the runtime will make.
        costs: Costs them.
    """
    nearest = sorted([*missing, *recut], key=_PEAK)
    if not found.fitting:
        found.misses = [one.candidate(costs) for one in nearest[:3]]
        return
    limit_s = _FASTER * found.fitting[0].cost.step_s
    quick = (one.candidate(costs) for one in nearest if one.least_s(costs) < limit_s)
    found.faster_misses = list(itertools.islice((one for one in quick if one.cost.step_s < limit_s), 3))


def _as_cut(candidates: Iterable[Candidate], base: Setup, costs: StepCosts, task: Task) -> list[Candidate]:
    """Return candidates with the cost of the stages that the runtime will make: too slow to find for every mix.

    Those are left out that run something again and save nothing by it under that cut.
    """
    found: list[Candidate] = []
    for candidate in candidates:
        setup = setup_of(base, candidate.degrees, candidate.choice, task.train)
        cost = costs.cost(setup := dataclasses.replace(setup, cut_by_work=True))
        is_again = candidate.choice.recompute != "none"
        if is_again and cost.memory.peak >= costs.cost(dataclasses.replace(setup, recompute="none")).memory.peak:
            continue
        found.append(dataclasses.replace(candidate, cost=cost))
    return found


def _nothing_fits(found: FoundPlans) -> PlanError:
    if not found.misses:
        rules = "; ".join(rejected.reason for rejected in found.examples.values())
        return PlanError(
            f"no plan for {found.task.cluster}: every split of its devices breaks a rule: {rules}",
            fix=f"use a global batch of {found.task.cluster.num_devices} samples or more, or fewer devices",
        )
    limit = found.limit_bytes
    lines = "".join(
        f"\n  {plan_of(miss, found.task.train)}: {format_bytes(miss.cost.memory.peak)}, "
        f"{format_bytes(miss.cost.memory.peak - limit)} too much"
        for miss in found.misses
    )
    return PlanError(
        f"no plan fits: a device of {found.task.cluster.name} has {format_bytes(limit)} to fill; the nearest are{lines}",
        fix="use more devices, devices with more memory, a smaller batch or shorter sequences",
    )
