"""Efficiency of a kind of device: which share of its data sheet a training step gets, and what every call costs."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import math
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final

from meshwright.hardware.exchanges import problems_of
from meshwright.values import FrozenMap, Problems, Value

__all__: list[str] = []

ELEMENTWISE_BACKWARD: Final = 1.5
"""Traffic of an elementwise operator's backward over its forward: it reads the gradient and an input, and writes one result
for two of forward. An estimate [ratio]."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency(Value):
    """Shares of the peaks of one kind of device, and fixed costs.

    Args:
        num_units: Processors that share the tiles of a product, such as streaming multiprocessors [count].
        matmul: dtype -> share of the dense peak that large products of a training step reach; 0 to 1.
        memory: Share of the memory's bandwidth that elementwise kernels reach; 0 to 1.
        attention_forward: Share of the bf16 peak that fused attention reaches; 0 to 1.
        attention_backward: The same for its backward.
        attention_ramp: Keys of which causal attention reaches half of these shares; it reaches more with more [elements].
        native_attention: How much faster attention is that is written for this generation of device; at least 1 [ratio].
        inner_overhead: Elements that a tile's start and end cost, added to the summed size of a product [elements].
        elementwise_passes: Traffic of rotary embeddings, gates and RMS norms as PyTorch runs them, over that of one fused pass
            [ratio].
        kernel_s: The shortest kernel [s].
        operator_s: Host time of one operator's forward, and of its backward, with the views around it [s].
        host: Kind of call that the host issues -> its time in forward and in backward [s]: "operator", "view", "module". Layers
            whose calls were counted take it; without it, and for others, `operator_s` says it.
        collective_host_s: Host time of one collective in a layer [s].
        link: Share of the link's bandwidth that a collective inside a host reaches; 0 to 1.
        network: The same between hosts, with one network port.
        rails: What each further port of a host adds, as a share of the first; 0 to 1.
        skew: What ranks that exchange in each layer wait for each other, over what they compute between two exchanges [ratio].
        link_latency_s: Fixed time of a collective inside a host [s].
        network_latency_s: The same between hosts, and of a message to a neighbour [s].
        hop_s: What a step of a ring inside a host waits, for large parts; `plan/costs/protocols` has others [s].
        network_hop_s: The same between hosts [s].
        tp_overlap: Share of tensor parallelism's collectives that software with overlapped sequence parallelism hides; 0 to 1.
        interference: Share of overlapped communication by which it slows the computation down; 0 to 1.
        overlap: Share of a pass that communication can hide behind; 0 to 1.
        optimizer_bytes: Traffic of the optimizer for one parameter of its shard [bytes].
        step_s: Fixed time of a step: clipping, logging, the loop [s].
        score_forward_s: Time that fused attention takes for each score, beside its products [s].
        score_backward_s: The same for its backward [s].
        tensor_s: Time of the optimizer's update that every parameter tensor adds, whatever its size [s].
        issues_ahead: Whether kernels run while the host issues the next ones; on a CPU the same core does both.
        product_curve: (FLOPs of one product, share of the rate of large ones), in ascending order; empty where tiles and waves
            say it.
        convolution: (FLOPs of one convolution, seconds of its forward, of its backward), in ascending order; empty where it is a
            product like any other.
        traffic_curve: (bytes that one elementwise kernel moves, share of the memory's bandwidth), in ascending order; empty means
            the same share for all.
        far_traffic: (bytes that a pass keeps, what each byte that elementwise kernels move takes longer then [s]), in ascending
            order: what lies in no cache any more; empty means nothing.
        far_product: The same of products and attention.
        run_s: What each run of memory adds to an elementwise kernel whose tensors do not lie in one piece [s].
        functions: ATen's name of an elementwise operator -> its time over that of a plain sum which moves as many bytes, forward
            and backward [ratio]; 1 for those that are not named.
        recurrence_forward: Rate of a recurrent layer's fused products over that of large products [ratio].
        recurrence_backward: The same for its backward [ratio].
        held: Memory that the allocator holds at the peak over activations that are alive [ratio].
        runtime: What this project's own steps add where the host does not run ahead, as (in any case, for each of many) [s]:
            "step" and its layers; "zero", which exchanges each parameter, and its tensors; "recompute" of a micro-batch and its
            layers; "stage" of a pipeline, for a micro-batch and all layers of the model; "half", gradients of weights that a
            stage puts off, and its own layers; "between", calls of the model's own code there;
            "tensor" parallelism of a step, and its exchanges.
        exchanges: Kind of exchange inside a host -> rows of (ranks, bytes, seconds), ascending; where a kind is not there, the
            link's latency and bandwidth say it.
        process_bytes: Memory of a process before it has a model: Python, torch, the transport; 0 where devices have memory of
            their own [bytes].

    Raises:
        ConfigError: A share or a time is out of range.
    """

    FORMAT: ClassVar[str] = "efficiency"

    num_units: int
    matmul: Mapping[str, float] = dataclasses.field(default_factory=FrozenMap[float])
    memory: float
    attention_forward: float
    attention_backward: float
    native_attention: float = 1.0
    inner_overhead: float
    elementwise_passes: float
    kernel_s: float
    operator_s: float
    collective_host_s: float
    link: float
    network: float
    rails: float
    link_latency_s: float
    network_latency_s: float
    hop_s: float
    tp_overlap: float
    interference: float
    overlap: float
    optimizer_bytes: float
    step_s: float
    network_hop_s: float = 0.0
    attention_ramp: float = 0.0
    skew: float = 0.0
    score_forward_s: float = 0.0
    score_backward_s: float = 0.0
    tensor_s: float = 0.0
    issues_ahead: bool = True
    product_curve: tuple[tuple[float, ...], ...] = ()
    convolution: tuple[tuple[float, ...], ...] = ()
    traffic_curve: tuple[tuple[float, ...], ...] = ()
    far_traffic: tuple[tuple[float, ...], ...] = ()
    far_product: tuple[tuple[float, ...], ...] = ()
    run_s: float = 0.0
    functions: Mapping[str, tuple[float, ...]] = dataclasses.field(default_factory=FrozenMap[tuple[float, ...]])
    recurrence_forward: float = 1.0
    recurrence_backward: float = 1.0
    held: float = 1.0
    runtime: Mapping[str, tuple[float, ...]] = dataclasses.field(default_factory=FrozenMap[tuple[float, ...]])
    host: Mapping[str, tuple[float, ...]] = dataclasses.field(default_factory=FrozenMap[tuple[float, ...]])
    exchanges: Mapping[str, tuple[tuple[float, ...], ...]] = dataclasses.field(
        default_factory=FrozenMap[tuple[tuple[float, ...], ...]]
    )
    process_bytes: float = 0.0

    def __post_init__(self) -> None:
        self._check_types()
        problems = Problems("efficiency")
        problems.require(self.num_units >= 1, f"num_units={self.num_units} (rule: it is at least 1)")
        for dtype, share in self.matmul.items():
            problems.require(0 < share <= 1, f"matmul['{dtype}']={share} (rule: 0 < share <= 1)")
        for name in ("memory", "attention_forward", "attention_backward", "link", "network"):
            share = getattr(self, name)
            problems.require(0 < share <= 1, f"{name}={share} (rule: 0 < share <= 1)")
        for name in _NOT_NEGATIVE:
            number = getattr(self, name)
            problems.require(number >= 0, f"{name}={number} (rule: it is not negative)")
        for name, least, rule in _CURVES:
            curve = getattr(self, name)
            if any(len(point) != 2 for point in curve):
                problems.add(f"{name}={list(curve)} (rule: pairs of a size and a number)")
                continue
            ascending = all(one[0] < other[0] for one, other in itertools.pairwise(curve))
            problems.require(ascending, f"{name}: sizes {[size for size, _ in curve]} (rule: they ascend)")
            in_range = all(size > 0 and number >= least for size, number in curve)
            problems.require(in_range, f"{name}={list(curve)} (rule: {rule})")
        is_rows = all(len(row) == 3 and min(row) > 0 for row in self.convolution)
        is_rows = is_rows and all(one[0] < other[0] for one, other in itertools.pairwise(self.convolution))
        problems.require(
            is_rows, f"convolution={list(self.convolution)} (rule: FLOPs and two times, positive, ascending)"
        )
        for field, kinds in (("runtime", _RUNTIME), ("host", _HOST)):
            for kind, numbers in getattr(self, field).items():
                problems.require(kind in kinds, f"{field}['{kind}'] (rule: one of {', '.join(kinds)})")
                is_pair = len(numbers) == 2 and all(number >= 0 for number in numbers)
                problems.require(is_pair, f"{field}['{kind}']={list(numbers)} (rule: two numbers, not negative)")
        for kind, rows in self.exchanges.items():
            for text in problems_of(kind, rows):
                problems.add(text)
        for function, ratios in self.functions.items():
            is_pair = len(ratios) == 2 and all(ratio >= 0 for ratio in ratios)
            problems.require(is_pair, f"functions['{function}']={list(ratios)} (rule: two ratios, not negative)")
        problems.check()

    def runtime_s(self, kind: str, count: float) -> float:
        """Return what one kind of work of a step adds, with so many layers or tensors [s]."""
        fixed, each = self.runtime.get(kind, (0.0, 0.0))
        return fixed + each * count

    def runtime_each_s(self, kind: str) -> float:
        """Return what one kind of work adds for each layer, tensor or exchange [s]."""
        return self.runtime.get(kind, (0.0, 0.0))[1]


_HOST = ("operator", "view", "module")
_RUNTIME = ("step", "zero", "recompute", "stage", "half", "between", "tensor")

_POSITIVE, _NO_LESS = "sizes and shares are positive", "sizes are positive, times are not negative"
_CURVES = (
    ("product_curve", sys.float_info.min, _POSITIVE),
    ("traffic_curve", sys.float_info.min, _POSITIVE),
    ("far_traffic", 0.0, _NO_LESS),
    ("far_product", 0.0, _NO_LESS),
)
"""Curves by size: the least number of a point, and the rule."""

_NOT_NEGATIVE = (
    "inner_overhead", "elementwise_passes", "kernel_s", "operator_s", "collective_host_s", "rails", "link_latency_s",
    "network_latency_s", "hop_s", "network_hop_s", "tp_overlap", "interference", "overlap", "optimizer_bytes", "step_s",
    "score_forward_s", "score_backward_s", "attention_ramp", "tensor_s", "recurrence_forward", "recurrence_backward", "held",
    "process_bytes", "run_s", "skew",
)  # fmt: skip


def share_at(size: float, curve: Sequence[Sequence[float]]) -> float:
    """Return what a curve of (size, share) says, straight between its points over the logarithm of the size; 1 without one."""
    return curve_at(size, curve) if curve else 1.0


def curve_at(size: float, curve: Sequence[Sequence[float]]) -> float:
    """Return what a curve of (size, number) says, straight between its points over the logarithm of the size; 0 without one."""
    if not curve:
        return 0.0
    index = bisect.bisect_left(curve, size, key=lambda point: point[0])
    if index in (0, len(curve)):
        return curve[min(index, len(curve) - 1)][1]
    (low, below), (high, above) = curve[index - 1], curve[index]
    return below + (above - below) * math.log(size / low) / math.log(high / low)


def time_of_work(work: float, rows: Sequence[Sequence[float]], column: int) -> float:
    """Return a time by the size of the work [s]: straight between rows over logarithms, and beyond the largest in proportion."""
    index = bisect.bisect_left(rows, work, key=lambda row: row[0])
    if index == 0:
        return rows[0][column]
    if index == len(rows):
        return rows[-1][column] * work / rows[-1][0]
    low, high = rows[index - 1], rows[index]
    share = math.log(work / low[0]) / math.log(high[0] / low[0])
    return low[column] * (high[column] / low[column]) ** share


@functools.cache
def efficiency_of(device: str) -> Efficiency:
    """Return the efficiency of a device of the table; that of devices in general where it has none of its own."""
    table = read_table()
    own = dict(table["devices"].get(device, table["devices"]["other"]))
    own.pop("source", None)
    own.pop("units_source", None)
    return Efficiency(**({key: value for key, value in table["all"].items() if key != "source"} | own))


@functools.cache
def read_table() -> Mapping[str, Any]:
    """Return efficiency.toml as it is: tables ``all`` and ``devices``."""
    return tomllib.loads(Path(__file__).with_name("efficiency.toml").read_text("utf-8"))
