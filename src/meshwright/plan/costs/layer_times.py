"""Cost of one layer on one rank: seconds of its passes and of their collectives, bytes kept for backward."""

from __future__ import annotations

import dataclasses
from typing import Final

from meshwright.hardware.efficiency import ELEMENTWISE_BACKWARD
from meshwright.plan.costs.machine import Machine, Moved, issued_s, product_bytes
from meshwright.plan.costs.setup import Setup
from meshwright.spec.layer import HostCalls, LayerSpec
from meshwright.spec.layer_operators import LOSS_BYTES
from meshwright.spec.operator import CAST, CONVOLUTION, OperatorSpec

__all__: list[str] = []

_FUSED_BACKWARD: Final = 2.5
"""FLOPs of fused attention's backward over its forward: five products for two, one of them the scores again.
Source: Dao 2023, FlashAttention-2, arXiv:2307.08691, section 4.1."""

_ATTENTION_OPERANDS: Final = 4
"""Queries, keys, values and results, each of one size [count]."""

_RUNS_BACKWARD: Final = 2.0
"""Runs that backward walks for each of forward: a product's gradient, and its way back into the whole tensor [ratio]."""

_CAST_BYTES: Final = 3.0
"""Traffic that fp8 adds for each element of a product's input: it is read in 16 bits and written in 8. [bytes]"""

_SEVERAL_KERNELS: Final = ("rotary", "gate", "rms_norm", "rms_norm1", "rms_norm2")
"""Operators of a transformer made from sizes that PyTorch has no one kernel for; a described module lists what it runs."""

_LOSS_PARTS: Final = 3
"""Numbers of each token that ranks with a part of the vocabulary sum up: maximum, sum and the label's logit [count]."""

_SUM_BYTES: Final = 4.0
"""Of each of them [bytes]."""

_LOW_PRECISION: Final = ("fp8", "mxfp8", "nvfp4")

_BYTES: Final = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0}

_WEIGHT_CAST_BYTES: Final = 6.0
"""Traffic of an element that autocast casts to bfloat16, and of its gradient that is cast back: 4 bytes and 2 [bytes]."""

_CAST_HOST: Final = 0.3
"""Host time of a cast, forward and backward, over that of the mean operator with the views around it [ratio].
Measured by benchmarks/planner/cast_times.py on a CPU: 0.21 to 0.31."""

_REPEAT_HOST: Final = 3.0
"""Host time of a layer that torch's checkpoint repeats, over that of its forward: hooks see each saved tensor twice [ratio].
Measured on a CPU (docs/adr/0032-selective-recompute.md); 2.9 to 3.7 on one H200."""


@dataclasses.dataclass(slots=True)
class LayerTimes:
    """Seconds and bytes of one layer for one micro-batch on one rank."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    core_s: float = 0.0
    """Of forward: the attention core, which selective recompute runs again."""
    elementwise_s: float = 0.0
    """Of forward: what is neither product nor attention, which this project's selective recompute runs again."""
    product_s: float = 0.0
    """Of forward: products with weights."""
    forward_comm_s: float = 0.0
    """Collectives of tensor and context parallelism, which nothing hides."""
    backward_comm_s: float = 0.0
    sent_bytes: float = 0.0
    """Bytes that a rank sends over tp in forward and backward [bytes]."""
    saved_bytes: float = 0.0
    saved_core_bytes: float = 0.0
    product_bytes: float = 0.0
    """Results of products and of attention [bytes]."""
    cast_bytes: float = 0.0
    """Copies of weights in bfloat16 that backward needs, whatever the samples; what runs again makes them again [bytes]."""
    input_bytes: float = 0.0
    """What full recompute keeps [bytes]."""
    loss_bytes: float = 0.0
    """What the loss needs beside what is kept, where this layer is the last one [bytes]."""
    num_params: float = 0.0
    """Elements of this rank's part [count]."""
    partial_params: float = 0.0
    """Elements whose gradients tp ranks sum at the end of a step: each has seen its own part of the sequence [count]."""
    runs_on_slices: bool = False
    """Whether sequence parallelism runs it on slices of the sequence, which somebody cuts before and gathers behind it."""
    num_operators: float = 0.0
    """Operators that the host issues; a cast is a part of one [count]."""
    host: HostCalls | None = None
    """What the host issues, where that was counted."""
    num_collectives: int = 0
    forward_moved: Moved = dataclasses.field(default_factory=Moved)
    backward_moved: Moved = dataclasses.field(default_factory=Moved)
    repeat_host: float = 1.0
    """Host time of its repetition over that of its forward [ratio]."""

    def passes_s(
        self, machine: Machine, recompute: str, kept_bytes: float = 0.0, waits: bool = False
    ) -> tuple[float, float, float]:
        """Return seconds of forward, backward and recompute of one micro-batch; the host may be slower than the device.

        Args:
            machine: The devices.
            recompute: What runs again.
            kept_bytes: What all layers of a rank keep between forward and backward [bytes].
            waits: Whether the host waits for each kernel.
        """
        ahead = machine.efficiency.issues_ahead and not waits
        host_s, host_backward_s = self.host_s(machine)
        traffic_bytes = self.forward_moved.traffic_bytes
        longer = 1.0 + (machine.efficiency.skew if self.num_collectives else 0.0)
        whole = (self.forward_s + machine.far_s(self.forward_moved, kept_bytes)) * longer
        forward = issued_s(whole + self.forward_comm_s, host_s, ahead=ahead)
        backward_s = (self.backward_s + machine.far_s(self.backward_moved, kept_bytes)) * longer
        backward = issued_s(backward_s + self.backward_comm_s, host_backward_s, ahead=ahead)
        elementwise_s = self.elementwise_s + machine.far_s(Moved(traffic_bytes=traffic_bytes), kept_bytes)
        repeated = {"full": whole + self.forward_comm_s, "all_but_products": elementwise_s}
        host_s *= self.repeat_host
        repeated = {kind: issued_s(seconds, host_s, ahead=ahead) for kind, seconds in repeated.items()}
        repeated["selective"] = self.core_s
        repeated["every_other_product"] = elementwise_s + self.product_s / 2
        again = repeated.get(recompute, 0.0)
        return forward, backward, again

    def host_s(self, machine: Machine) -> tuple[float, float]:
        """Return the host's time in forward and in backward [s]."""
        efficiency, calls = machine.efficiency, self.host
        exchanges_s = self.num_collectives * (efficiency.collective_host_s + efficiency.runtime_each_s("tensor") / 2)
        if calls is None or not efficiency.host:
            both = self.num_operators * efficiency.operator_s + exchanges_s
            return both, both
        forward, backward = machine.issue_s(calls)
        return forward + exchanges_s, backward + exchanges_s

    def kept_bytes(self, recompute: str) -> float:
        """Return what one micro-batch keeps between forward and backward [bytes]."""
        if recompute == "full":
            return min(self.input_bytes, self.saved_bytes)
        if recompute in ("all_but_products", "every_other_product"):
            products = self.product_bytes / (2 if recompute == "every_other_product" else 1)
            return min(self.input_bytes + products, self.saved_bytes)
        return self.saved_bytes + self.cast_bytes - (self.saved_core_bytes if recompute == "selective" else 0.0)


def layer_times(
    layer: LayerSpec, setup: Setup, machine: Machine, *, model_bytes: float, is_last: bool = False
) -> LayerTimes:
    """Return the cost of a layer.

    Args:
        layer: The layer, with its operators; one without has its sums alone.
        setup: Degrees, batch and numerics.
        machine: The cluster.
        model_bytes: Size of an element in the layer's own numbers [bytes].
        is_last: Whether its results go to the loss, which takes them in parts.
    """
    times = LayerTimes(host=layer.host, repeat_host=_REPEAT_HOST if setup.is_eager else 1.0)
    scale = _scale(setup, model_bytes)
    rows_cut = setup.tp if setup.sequence_parallel else 1
    times.input_bytes = layer.output_bytes * scale / rows_cut
    divided = setup.tp if any(operator.split == "columns" for operator in layer.operators) else 1
    outputs = layer.output_elements or layer.output_bytes / model_bytes
    times.loss_bytes = setup.loss_kept * outputs * setup.micro_batch_size / setup.cp / divided
    if not layer.operators:
        _add_sums(times, layer, setup, machine, scale)
        return times
    splits = {operator.split for operator in layer.operators if operator.kind == "matmul" or operator.split == "rows"}
    times.runs_on_slices = rows_cut > 1 and splits >= {"rows", "inner"}
    column: OperatorSpec | None = None
    for operator in layer.operators:
        cut = {"whole": 1, "rows": rows_cut}.get(operator.split, setup.tp)
        if operator.kind == "elementwise":
            _add_elementwise(times, operator, setup, machine, scale / (1 if operator.split == "inner" else cut))
        elif operator.kind == "attention":
            _add_attention(times, operator, setup, machine, cut)
        else:
            _add_product(times, operator, setup, machine, cut)
        parts = 1 if operator.split in ("whole", "rows", "inside") else setup.tp
        times.num_params += operator.num_params / parts
        _add_weight_casts(times, operator, setup, machine, parts)
        times.saved_bytes += operator.saved_bytes * scale / cut
        times.saved_core_bytes += operator.saved_bytes * scale / cut if operator.is_core else 0.0
        times.num_operators += _issued_operators(operator)
        if times.runs_on_slices:
            times.partial_params += _partial_params(operator)
        if operator.kind != "elementwise":
            parts = rows_cut if operator.split == "inner" else cut
            times.product_bytes += _result_bytes(operator, setup, model_bytes) * scale / parts
        if setup.tp > 1:
            if operator.split == "columns":
                column = column or operator
            elif operator.split == "inner":
                _add_exchange(times, operator, setup, machine, forward=True)
                if column is not None:
                    _add_exchange(times, column, setup, machine, forward=False)
                column = None
    if column is not None:  # nothing sums its results, but the gradient of its input
        _add_ending(times, column, setup, machine, is_last=is_last)
    return times


def _partial_params(operator: OperatorSpec) -> int:
    """Return the elements whose gradients see a slice of the sequence: those of norms, and biases of row products."""
    bias = max(0, operator.num_params - operator.inner * operator.columns) if operator.kind == "matmul" else 0
    return {"rows": operator.num_params, "inner": bias}.get(operator.split, 0)


def _issued_operators(operator: OperatorSpec) -> float:
    """Return for how many operators of mean size the host works."""
    return (_CAST_HOST if operator.function == CAST else 1) + _CAST_HOST * operator.num_casts


def _scale(setup: Setup, model_bytes: float) -> float:
    """Return what bytes of one sample grow by: the samples, and the size of an element where all have one."""
    samples = setup.micro_batch_size / setup.cp
    return samples if setup.own_dtypes else samples * setup.element_bytes / model_bytes


def _result_bytes(operator: OperatorSpec, setup: Setup, model_bytes: float) -> float:
    elements = operator.rows * operator.count * (operator.inner if operator.kind == "attention" else operator.columns)
    return elements * (_numerics(operator, setup)[1] if setup.own_dtypes else model_bytes)


def _add_sums(times: LayerTimes, layer: LayerSpec, setup: Setup, machine: Machine, scale: float) -> None:
    flops = layer.forward_flops * setup.micro_batch_size / setup.cp / setup.tp
    seconds = flops / machine.flops_per_s(setup.dtype) + machine.traffic_s(2 * layer.output_bytes * scale)
    times.forward_s += seconds
    times.backward_s += 2 * seconds
    times.saved_bytes += layer.activation_bytes * scale
    times.num_params += layer.num_params / setup.tp
    times.num_operators += 1


def _add_elementwise(times: LayerTimes, operator: OperatorSpec, setup: Setup, machine: Machine, scale: float) -> None:
    passes = machine.efficiency.elementwise_passes if setup.is_eager and operator.name in _SEVERAL_KERNELS else 1.0
    traffic = operator.traffic_bytes * scale * passes
    backward = 1.0 if operator.function == CAST else ELEMENTWISE_BACKWARD  # another cast, of as many bytes
    if operator.name == "loss" and not operator.function:  # of a model that is made from sizes
        traffic *= setup.loss_traffic[0] / LOSS_BYTES
        backward = setup.loss_traffic[1] / setup.loss_traffic[0]
    ratio, ratio_backward = machine.efficiency.functions.get(operator.function, (1.0, 1.0))
    runs_s = operator.num_runs * scale * machine.efficiency.run_s
    forward = machine.traffic_s(traffic) * ratio + runs_s
    times.forward_s += forward
    times.elementwise_s += forward
    times.backward_s += machine.traffic_s(backward * traffic) * ratio_backward + _RUNS_BACKWARD * runs_s
    times.forward_moved.traffic_bytes += traffic
    times.backward_moved.traffic_bytes += backward * traffic
    times.core_s += forward if operator.is_core else 0.0


def _add_attention(times: LayerTimes, operator: OperatorSpec, setup: Setup, machine: Machine, cut: int) -> None:
    efficiency = machine.efficiency
    peak = machine.peak(_plain(_numerics(operator, setup)[0]))
    peak *= efficiency.native_attention if setup.native_attention else setup.attention_speed
    if operator.causal:  # of a short sequence more lies in tiles that the mask cuts, or waits for the last ones
        peak *= operator.columns / (operator.columns + efficiency.attention_ramp)
    flops = operator.forward_flops * setup.micro_batch_size / setup.cp / cut
    scores = flops / (4.0 * operator.inner)
    forward = flops / (peak * efficiency.attention_forward) + scores * efficiency.score_forward_s
    backward = _FUSED_BACKWARD * flops / (peak * efficiency.attention_backward) + scores * efficiency.score_backward_s
    forward, backward = max(forward, efficiency.kernel_s), max(backward, efficiency.kernel_s)
    times.forward_s += forward
    times.backward_s += backward
    times.core_s += forward
    width = operator.count * operator.inner / cut * setup.micro_batch_size / setup.cp
    moved = _ATTENTION_OPERANDS * operator.rows * width * _numerics(operator, setup)[1]
    times.forward_moved.product_bytes += moved
    times.backward_moved.product_bytes += 2 * moved
    if setup.cp > 1:
        _add_ring(times, operator, setup, machine, (forward, backward))


def _add_ring(
    times: LayerTimes, operator: OperatorSpec, setup: Setup, machine: Machine, hidden: tuple[float, float]
) -> None:
    # Keys and values of all other ranks pass by while the scores of those before are computed.
    heads = operator.count * setup.kv_share / setup.tp
    own = 2 * operator.rows * operator.inner * heads * setup.micro_batch_size / setup.cp * setup.element_bytes
    inside = setup.tp * setup.cp <= machine.cluster.devices_per_host
    seconds = (setup.cp - 1) * machine.message_s(own, inside=inside)
    times.forward_comm_s += max(0.0, seconds - hidden[0])
    times.backward_comm_s += max(0.0, 2 * seconds - hidden[1])
    times.num_collectives += setup.cp - 1


def _add_product(times: LayerTimes, operator: OperatorSpec, setup: Setup, machine: Machine, cut: int) -> None:
    samples = setup.micro_batch_size / setup.cp
    rows, inner, columns, count = float(operator.rows), operator.inner, operator.columns, float(operator.count)
    has_weight = operator.kind == "matmul"
    if has_weight:
        rows *= samples
        if operator.split == "columns":
            columns = -(-columns // cut)
        elif operator.split == "inner":
            inner = -(-inner // cut)
        elif operator.split == "rows":
            rows /= cut
    else:
        count *= samples / (cut if operator.split == "inside" else 1)
    aligned = has_weight or (inner % 8 == 0 and columns % 8 == 0)
    dtype, element_bytes = _numerics(operator, setup)
    dtype = dtype if has_weight and operator.name != "head" else _plain(dtype)
    height = max(1, round(rows))

    # A recurrent layer's steps are run by a kernel of its own, where the probe has measured one.
    if has_weight and count > 1 and machine.efficiency.product_curve:
        rate = machine.flops_per_s(dtype)
        flops = 2.0 * height * inner * columns * count
        times.forward_s += flops / (rate * machine.efficiency.recurrence_forward)
        times.backward_s += 2 * flops / (rate * machine.efficiency.recurrence_backward)
        return

    if operator.function == CONVOLUTION and (found := machine.convolution_s(2.0 * height * inner * columns * count)):
        times.forward_s += found[0]
        times.product_s += found[0]
        times.backward_s += found[1]
        return

    def seconds(rows: int, inner: int, columns: int) -> float:
        return machine.product_s((rows, inner, columns), count, dtype, element_bytes, aligned=aligned)

    forward = seconds(height, inner, columns)
    times.forward_s += forward
    times.core_s += forward if operator.is_core else 0.0
    times.product_s += forward if has_weight else 0.0
    times.backward_s += seconds(height, columns, inner)
    moved = product_bytes((height, inner, columns), count, element_bytes)
    times.forward_moved.product_bytes += moved
    times.backward_moved.product_bytes += moved
    if not has_weight or setup.trains_weights:
        times.backward_s += seconds(inner, height, columns)
        times.backward_moved.product_bytes += moved
    if has_weight and dtype in _LOW_PRECISION:
        cast = machine.traffic_s(_CAST_BYTES * height * inner * count)
        times.forward_s += cast
        times.backward_s += cast


def _numerics(operator: OperatorSpec, setup: Setup) -> tuple[str, float]:
    """Return in what an operator computes, and the size of an element of its result [bytes]."""
    if setup.own_dtypes and operator.dtype:
        return operator.dtype, _BYTES[operator.dtype]
    return setup.dtype, setup.element_bytes


def _add_weight_casts(times: LayerTimes, operator: OperatorSpec, setup: Setup, machine: Machine, parts: int) -> None:
    """Add copies of weights that autocast makes once in each forward, and their gradients' way back; each is a kernel."""
    if not operator.num_casts:
        return
    moved = _WEIGHT_CAST_BYTES * operator.cast_params / parts
    seconds = machine.traffic_s(moved) + (operator.num_casts - 1) * machine.efficiency.kernel_s
    times.forward_s += seconds
    times.elementwise_s += seconds
    times.backward_s += seconds if setup.trains_weights else 0.0
    times.cast_bytes += operator.cast_saved_bytes / parts


def _plain(dtype: str) -> str:
    return "bf16" if dtype in _LOW_PRECISION else dtype


def _add_exchange(times: LayerTimes, operator: OperatorSpec, setup: Setup, machine: Machine, *, forward: bool) -> None:
    """Add the sum over tp of an operator's results, or of the gradients of its input."""
    elements = operator.rows * operator.count * operator.columns if forward else operator.input_elements
    num_bytes = elements * setup.micro_batch_size / setup.cp * _numerics(operator, setup)[1]
    spread = -(-setup.tp // machine.cluster.devices_per_host)
    # Gather and scatter have the sum of an all-reduce's bytes.
    low = setup.gathers_low and setup.dtype in _LOW_PRECISION
    shares = {"all_gather": 0.5 if low else 1.0, "reduce_scatter": 1.0}
    shares = shares if setup.sequence_parallel else {"all_reduce": 1.0}
    seconds = sum(machine.collective_s(kind, num_bytes * share, setup.tp, spread) for kind, share in shares.items())
    if setup.overlaps_tp and setup.sequence_parallel:
        seconds *= 1 - machine.efficiency.tp_overlap
    if forward:
        times.forward_comm_s += seconds
    else:
        times.backward_comm_s += seconds
    times.num_collectives += len(shares)
    times.num_operators += setup.tp_operators
    times.sent_bytes += 2 * (setup.tp - 1) / setup.tp * num_bytes


def _add_ending(times: LayerTimes, column: OperatorSpec, setup: Setup, machine: Machine, *, is_last: bool) -> None:
    """Add what follows columns that no row product sums: their results are gathered, or the loss sums its parts of them."""
    _add_exchange(times, column, setup, machine, forward=False)
    rows = column.rows * column.count * setup.micro_batch_size / setup.cp
    others = (setup.tp - 1) / setup.tp
    if is_last:
        times.sent_bytes += 2 * others * _LOSS_PARTS * _SUM_BYTES * rows
        return
    num_bytes = rows * column.columns * _numerics(column, setup)[1]
    spread = -(-setup.tp // machine.cluster.devices_per_host)
    times.forward_comm_s += machine.collective_s("all_gather", num_bytes, setup.tp, spread)
    times.num_collectives += 1
    times.sent_bytes += others * num_bytes
