"""Space of plans: every mix of degrees, schedules, ZeRO and recompute, and the rules that leave some out."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Final

from meshwright.hardware import ClusterSpec
from meshwright.hardware.cluster import HOST_DEVICE
from meshwright.spec.model import ModelSpec
from meshwright.spec.operator import OperatorSpec
from meshwright.spec.train import TrainSpec

__all__: list[str] = []

_MAX_TP_HOSTS: Final = 1
"""Hosts that one tensor parallel group may be on: its collectives are in every layer, and nothing hides them [count]."""

_MAX_MICRO_BATCH: Final = 64
"""Samples of one forward on a rank that are tried [samples]."""


@dataclasses.dataclass(frozen=True, slots=True)
class Degrees:
    """How the devices and the batch are split: what decides the layers' costs."""

    dp: int
    tp: int
    pp: int
    micro_batches: int
    micro_batch_size: int


@dataclasses.dataclass(frozen=True)
class Task:
    """What is planned for."""

    model: ModelSpec
    cluster: ClusterSpec
    train: TrainSpec

    def num_pieces(self, tp: int) -> int:
        """Return how many stages a pipeline can have at most [count]."""
        return self._pieces_under_tp if tp > 1 else self._pieces

    @functools.cached_property
    def _pieces(self) -> int:
        return self.model.num_pieces(under_tp=False)

    @functools.cached_property
    def _pieces_under_tp(self) -> int:
        return self.model.num_pieces(under_tp=True)

    @functools.cached_property
    def splits_inside_stages(self) -> bool:
        """Whether tensor parallelism has something to split inside a pipeline's stages."""
        has_sums_alone = not any(layer.operators for layer in self.model.layers)
        return has_sums_alone or self.model.splits_inside_stages


@dataclasses.dataclass(frozen=True, slots=True)
class Rejected:
    """Degrees that a rule leaves out."""

    degrees: Degrees
    rule: str
    reason: str


Rule = Callable[[Degrees, Task], str | None]
"""Returns why such degrees are left out, with the numbers; None where they may stay."""


def heads_divide(degrees: Degrees, task: Task) -> str | None:
    """A rank of tensor parallelism has whole heads."""
    heads = task.model.num_heads
    if heads is not None and heads % degrees.tp:
        return f"tp={degrees.tp} does not divide {heads} heads"
    return None


def key_value_heads_divide(degrees: Degrees, task: Task) -> str | None:
    """A rank of tensor parallelism has whole key and value heads."""
    heads = task.model.num_kv_heads
    if heads is not None and heads % degrees.tp:
        return f"tp={degrees.tp} does not divide {heads} key and value heads"
    return None


def something_to_split(degrees: Degrees, task: Task) -> str | None:
    """Tensor parallelism needs layers that it can split."""
    if degrees.tp == 1:
        return None
    operators = [operator for layer in task.model.layers for operator in layer.operators]
    if operators and not any(_has_a_part_for_each(degrees.tp, operator) for operator in operators):
        return f"tp={degrees.tp}, and no layer has a product that it can split"
    return None


def _has_a_part_for_each(tp: int, operator: OperatorSpec) -> bool:
    """Tell whether an operator's weight can be divided over so many ranks, each with a part."""
    if operator.split not in ("columns", "inner"):
        return False
    if operator.kind == "elementwise":
        return operator.num_params >= tp
    return (operator.columns if operator.split == "columns" else operator.inner) * operator.count >= tp


def tp_inside_a_host(degrees: Degrees, task: Task) -> str | None:
    """Tensor parallelism stays where the links are fast."""
    in_host = task.cluster.devices_per_host
    if degrees.tp > _MAX_TP_HOSTS * in_host:
        return f"tp={degrees.tp} is more than the {in_host} devices of a host, whose links alone are fast enough"
    if task.cluster.num_hosts > 1 and in_host % degrees.tp:
        return f"tp={degrees.tp} does not divide the {in_host} devices of a host: some neighbours would be on two hosts"
    return None


def a_layer_for_each_stage(degrees: Degrees, task: Task) -> str | None:
    """Every stage of a pipeline has a layer, or layers that it must leave together."""
    layers, pieces = len(task.model.layers), task.num_pieces(degrees.tp)
    if degrees.pp > pieces:
        cut = "" if pieces == layers else f", which make {pieces} pieces that a pipeline can cut"
        return f"pp={degrees.pp} is more than the {layers} layers{cut}"
    return None


def something_to_split_inside_stages(degrees: Degrees, task: Task) -> str | None:
    """Tensor parallelism inside a pipeline splits what lies within one stage."""
    if degrees.tp > 1 and degrees.pp > 1 and not task.splits_inside_stages:
        return f"tp={degrees.tp} with pp={degrees.pp}, and what could be split lies around layers of several stages"
    return None


def a_sample_for_each_rank(degrees: Degrees, task: Task) -> str | None:
    """Every data parallel rank has a sample."""
    batch = task.train.global_batch_size
    if degrees.dp > batch:
        return f"dp={degrees.dp} is more than the {batch} samples of a step"
    return None


def a_full_pipeline(degrees: Degrees, task: Task) -> str | None:
    """A pipeline has at least as many micro-batches as ranks, where the batch has that many."""
    share = -(-task.train.global_batch_size // degrees.dp)
    if degrees.micro_batches >= min(degrees.pp, share):
        return None
    return f"{degrees.micro_batches} micro-batches leave most of pp={degrees.pp} ranks idle; {share} samples allow more"


RULES: Final[tuple[Rule, ...]] = (
    heads_divide,
    key_value_heads_divide,
    something_to_split,
    something_to_split_inside_stages,
    tp_inside_a_host,
    a_layer_for_each_stage,
    a_sample_for_each_rank,
    a_full_pipeline,
)


def rule_against(degrees: Degrees, task: Task) -> Rejected | None:
    """Return the first rule that leaves these degrees out."""
    for rule in RULES:
        reason = rule(degrees, task)
        if reason is not None:
            return Rejected(degrees, rule.__name__, reason)
    return None


def all_degrees(task: Task) -> Iterator[Degrees]:
    """Yield every way to split the devices over tp, pp and dp, and a rank's samples into micro-batches."""
    devices, batch = task.cluster.num_devices, task.train.global_batch_size
    for tp in _divisors(devices):
        for pp in _divisors(devices // tp):
            dp = devices // tp // pp
            share = -(-batch // dp)
            for size in _sizes(share):
                yield Degrees(dp, tp, pp, -(-share // size), size)


def _sizes(share: int) -> list[int]:
    """Return sizes of the largest micro-batch: those that divide a rank's samples, and powers of two for shares that few do."""
    sizes = {size for size in range(1, min(share, _MAX_MICRO_BATCH) + 1) if share % size == 0}
    powers = {2**power for power in range(7) if 2**power <= min(share, _MAX_MICRO_BATCH)}
    # Two sizes that make as many micro-batches are the same plan.
    return sorted({-(-share // size): size for size in sorted(sizes | powers)}.values())


def _divisors(number: int) -> list[int]:
    small = [one for one in range(1, int(number**0.5) + 1) if number % one == 0]
    return sorted({*small, *(number // one for one in small)})


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """What is chosen beside the degrees."""

    zero: int
    shard: int | None
    schedule: str
    virtual: int
    recompute: str
    offload: str


def all_choices(degrees: Degrees, task: Task) -> Iterator[Choice]:
    """Yield every mix of schedule, recompute, ZeRO and offload that these degrees can have."""
    shardings = list(all_shardings(degrees, task))
    for schedule, virtual, recompute in all_orders(degrees, task):
        for zero, shard, offload in shardings:
            yield Choice(zero, shard, schedule, virtual, recompute, offload)


def all_orders(degrees: Degrees, task: Task) -> Iterator[tuple[str, int, str]]:
    """Yield (schedule, virtual, recompute): what a rank runs when. Of each schedule the one without recompute comes first."""
    for schedule, virtual in _schedules(degrees, task):
        for recompute in ("none", "selective", "full"):
            yield schedule, virtual, recompute


def all_shardings(degrees: Degrees, task: Task) -> Iterator[tuple[int, int | None, str]]:
    """Yield (zero, shard, offload): where states of the parameters lie."""
    # A host's memory offloads nothing to itself.
    can_offload = task.train.optimizer_bytes_per_param and task.cluster.device.name != HOST_DEVICE
    for zero, shard in _sharding(degrees, task):
        yield zero, shard, "none"
        if zero and can_offload:
            yield zero, shard, "optimizer"


def _schedules(degrees: Degrees, task: Task) -> Iterator[tuple[str, int]]:
    yield "1f1b", 1
    if degrees.pp == 1:
        return
    yield "zb-h1", 1
    layers = task.num_pieces(degrees.tp)
    if 2 * degrees.pp <= layers:
        yield "zbv", 2
    for virtual in (2, 3, 4, 6, 8, 12):
        # The interleaved order takes micro-batches in rounds of pp.
        if virtual * degrees.pp <= layers and degrees.micro_batches % degrees.pp == 0:
            yield "interleaved", virtual


def _sharding(degrees: Degrees, task: Task) -> Iterator[tuple[int, int | None]]:
    yield 0, None
    if degrees.dp == 1:
        return
    in_host = max(1, task.cluster.devices_per_host // degrees.tp)
    for zero in (1, 2, 3):
        yield zero, None
        if 1 < in_host < degrees.dp and degrees.dp % in_host == 0:
            yield zero, in_host
