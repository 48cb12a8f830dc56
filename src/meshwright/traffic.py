"""Bytes that a plan should send in a step, by strategy. Pure functions, no torch: the planner and the runs use the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from meshwright.errors import ConfigError

__all__: list[str] = []


def ring_gradient_bytes(gradient_bytes: float, num_ranks: int) -> float:
    """Return what each rank of ``distributed`` sends in a step: ``2 (n - 1) / n`` of the gradients.

    Args:
        gradient_bytes: Gradients of all trainable dense parameters [bytes].
        num_ranks: n [count].

    Returns:
        Bytes sent by one rank [bytes]; 0 for one rank.

    Raises:
        ConfigError: A number is out of range.

    Source:
        Patarasuk & Yuan 2009, doi:10.1016/j.jpdc.2008.09.002: a ring's reduce-scatter and all-gather, (n - 1) / n each.

    >>> ring_gradient_bytes(100, 2), ring_gradient_bytes(100, 1)
    (100.0, 0.0)
    """
    require_devices(num_ranks)
    _require_bytes(gradient_bytes)
    return 2 * (num_ranks - 1) * gradient_bytes / num_ranks


def sharded_bytes(
    gradient_bytes: float,
    parameter_bytes: float,
    gathered_bytes: float,
    *,
    zero: int,
    shards: int,
    replicas: int,
    passes: int,
    per_step: bool = False,
    replicated_bytes: float | None = None,
) -> float:
    """Return what each rank sends in a step of ZeRO: ``2P`` at stages 1 and 2, ``3P`` at stage 3, times ``(n - 1) / n``.

    Gradients are reduce-scattered, once at stage 1 and in each micro-batch above it. Values that are kept whole are
    all-gathered after the optimizer; those that are not (stage 3), in each forward and each backward. With several replicas
    (HSDP) the sums of a shard are all-reduced over them once a step.

    Args:
        gradient_bytes: Gradients of all trainable dense parameters [bytes].
        parameter_bytes: Trainable dense parameters that are kept whole [bytes].
        gathered_bytes: Parameters that are gathered where they are needed [bytes].
        zero: 1, 2 or 3.
        shards: n, ranks that hold one copy between them [count].
        replicas: Copies [count].
        passes: Micro-batches of a step [count].
        per_step: Values are gathered once before a step, and gradients summed once after it, whatever the micro-batches.
        replicated_bytes: What the gradients are sent as between replicas; None: as they are [bytes].

    Raises:
        ConfigError: A number is out of range.

    Source:
        Rajbhandari et al. 2020, doi:10.1109/SC41405.2020.00024, section 7.

    >>> sharded_bytes(100, 100, 0, zero=1, shards=4, replicas=1, passes=1)
    150.0
    >>> sharded_bytes(100, 0, 100, zero=3, shards=4, replicas=1, passes=1)
    225.0
    >>> sharded_bytes(100, 0, 100, zero=3, shards=4, replicas=1, passes=8, per_step=True)  # in a pipeline
    150.0
    """
    require_devices(shards)
    require_devices(replicas)
    for number in (gradient_bytes, parameter_bytes, gathered_bytes):
        _require_bytes(number)
    times = passes if zero > 1 and not per_step else 1
    gathers = 1 if per_step else 2 * passes
    over_shards = (times * gradient_bytes + parameter_bytes + gathers * gathered_bytes) * (shards - 1) / shards
    across = gradient_bytes if replicated_bytes is None else replicated_bytes
    return over_shards + 2 * (replicas - 1) / replicas * across / shards


@dataclasses.dataclass(frozen=True, slots=True)
class TensorExchange:
    """Tensors that one rank passes to the collectives of tensor parallelism in a step [bytes]."""

    all_reduce: int
    all_gather: int
    reduce_scatter: int

    @property
    def tensor_bytes(self) -> int:
        """All of it, as the ledger counts tensors [bytes]."""
        return self.all_reduce + self.all_gather + self.reduce_scatter

    def sent_bytes(self, num_ranks: int) -> float:
        """Return what one of n ranks sends over rings: ``2 (n - 1) / n`` of an all-reduce, else half of that [bytes]."""
        require_devices(num_ranks)
        return (2 * self.all_reduce + self.all_gather + self.reduce_scatter) * (num_ranks - 1) / num_ranks


WHOLE_BELOW_BYTES = 64 * 2**10
"""A layer with fewer parameters than this stays whole under ZeRO-3: to gather it would take longer than it saves [bytes].
Norms, biases and small heads; DeepSpeed keeps parameters below 1e5 elements (its stage3_param_persistence_threshold)."""

NORM_BYTES = 16
"""What the gradient's norm costs: two sums of squares in float64, of shards and of whole tensors [bytes]."""


def tensor_bytes(
    num_tokens: int,
    width: int,
    itemsize: int,
    *,
    regions: int,
    regions_on_slices: int = 0,
    chains: int = 0,
    embeddings: int = 0,
    heads: int = 0,
    partial_bytes: int = 0,
) -> TensorExchange:
    """Return what a rank hands to the collectives of tensor parallelism in a step.

    With ``S = num_tokens x width x itemsize``: a region (columns, then a row; two in a block of a transformer) all-reduces S
    forward and S backward. On slices of the sequence it all-gathers S and reduce-scatters S forward, and again backward; where
    such layers begin, the gradient is gathered, and where they end, the output. An embedding cut by rows all-reduces S
    forward; a head cut by columns S backward, and its cross-entropy one number a token (the largest logit) and then two (the
    sum of exponentials, the target's logit). Whole parameters that see only a slice have their gradients all-reduced.

    Args:
        num_tokens: T, tokens of a rank in a step, over all micro-batches [count].
        width: H, entries of what layers hand on for a token [count].
        itemsize: Bytes of an entry [bytes].
        regions: Regions, those on slices left out [count].
        regions_on_slices: Regions in layers that run on slices of the sequence [count].
        chains: Runs of such layers [count].
        embeddings: Embeddings cut by rows [count].
        heads: Heads cut by columns, each with a plain cross-entropy [count].
        partial_bytes: Whole parameters with partial gradients, that are added up once a step, and an entry for each [bytes].

    Returns:
        Bytes by collective; the gradient's norm is in it, the step's agreements over all ranks are not.

    Raises:
        ConfigError: A number is negative.

    Source:
        Shoeybi et al. 2019, arXiv:1909.08053, section 3 (f and g, the vocabulary); Korthikanti et al. 2022,
        arXiv:2205.05198, section 4.2.2 (sequence parallelism).

    >>> tensor_bytes(24, 16, 8, regions=4).tensor_bytes - NORM_BYTES  # two blocks: 4 x 2 x 3072
    24576
    >>> tensor_bytes(24, 16, 8, regions=0, regions_on_slices=4, chains=1)
    TensorExchange(all_reduce=16, all_gather=30720, reduce_scatter=24576)
    """
    for number in (num_tokens, width, itemsize, regions, regions_on_slices, chains, embeddings, heads, partial_bytes):
        _require_bytes(number)
    stream = num_tokens * width * itemsize
    of_losses = heads * 3 * num_tokens * itemsize
    return TensorExchange(
        all_reduce=(2 * regions + embeddings + heads) * stream + of_losses + partial_bytes + NORM_BYTES,
        all_gather=2 * (regions_on_slices + chains) * stream,
        reduce_scatter=2 * regions_on_slices * stream,
    )


def cut_activation_bytes(
    output_bytes: Sequence[int],
    stages: Sequence[int],
    num_samples: float,
    returns: Sequence[int | None] | None = None,
) -> float:
    """Return what ``model_parallel`` moves between devices in a step: ``C = sum(s_i x b) x 2`` over the cuts.

    An activation crosses wherever the next layer stands on another stage, and its gradient comes back the same way. What
    else a model hands from layer to layer (masks, tables, a residual around the cut) is not in it.

    Args:
        output_bytes: s_i, what each layer hands on for one sample, in the order in which layers run [bytes/sample].
        stages: Stage of each layer, in the same order.
        num_samples: b, samples in the step [count].
        returns: For each layer, the stage that its output goes to although no layer follows there (a tied head that is
            computed outside every layer), or None.

    Returns:
        C [bytes].

    Raises:
        ConfigError: The lists differ in length, or a number is negative.

    >>> cut_activation_bytes([100, 100, 10], [0, 0, 1], num_samples=8)
    1600
    """
    back = list(returns) if returns is not None else [None] * len(stages)
    if not len(output_bytes) == len(stages) == len(back):
        raise ConfigError(
            f"{len(output_bytes)} outputs, {len(stages)} stages, {len(back)} returns (rule: one per layer)"
        )
    if num_samples < 0:
        raise ConfigError(f"{num_samples} samples (rule: not negative)")
    crossing = 0
    for index, (size, stage) in enumerate(zip(output_bytes, stages, strict=True)):
        _require_bytes(size)
        place, to = stage, back[index]
        if to is not None and to != place:
            crossing += size
            place = to
        if index + 1 < len(stages) and stages[index + 1] != place:
            crossing += size
    return crossing * num_samples * 2


def replica_copy_bytes(parameter_bytes: int, gradient_bytes: int, num_other_devices: int) -> int:
    """Return what ``data_parallel`` moves in a step: parameters to each further device, gradients back from it.

    Replicas on the first replica's own device (CPU "devices" are all one) share its memory, so nothing moves.

    Args:
        parameter_bytes: All parameters [bytes].
        gradient_bytes: Gradients of the trainable ones [bytes].
        num_other_devices: Replicas on another device than the first: n - 1 GPUs, or 0 on the CPU [count].

    Returns:
        Bytes moved [bytes].

    Raises:
        ConfigError: A number is negative.

    >>> replica_copy_bytes(100, 80, 3), replica_copy_bytes(100, 80, 0)
    (540, 0)
    """
    _require_bytes(parameter_bytes)
    _require_bytes(gradient_bytes)
    if num_other_devices < 0:
        raise ConfigError(f"{num_other_devices} other devices (rule: not negative)")
    return num_other_devices * (parameter_bytes + gradient_bytes)


def require_devices(num_devices: int) -> None:
    """Raise a ConfigError for a number of devices below 1."""
    if num_devices < 1:
        raise ConfigError(f"{num_devices} devices (rule: at least 1)")


def _require_bytes(num_bytes: float) -> None:
    if num_bytes < 0:
        raise ConfigError(f"{num_bytes} bytes (rule: not negative)")
