"""Settings of ZeRO: the stage, and the groups over which it shards and replicates."""

from __future__ import annotations

import dataclasses

from meshwright.comm.communicator import Communicator
from meshwright.traffic import WHOLE_BELOW_BYTES

__all__: list[str] = []

REDUCE_BYTES = 32 * 2**20
"""Whole gradients that ZeRO-2 lets lie before it sums them; DeepSpeed's `reduce_bucket_size` is 5e8 elements [bytes]."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sharding:
    """ZeRO's settings for one rank.

    Args:
        zero: 1, 2 or 3.
        shard_group: The ranks that hold one copy of the model between them.
        replica_group: The ranks that hold the same segment as this one.
        prefetches: Whether the next unit may be gathered while this one computes.
        whole_below: Layers with fewer bytes of parameters stay whole under ZeRO-3 [bytes].
        offload: Whether the optimizer works in the host's memory.
        compress: Compression of the gradients sent between replicas where there are any, else between shards.
        per_step: Whether to gather values once before a step's first micro-batch and reduce gradients once after its last. In a
            pipeline, forwards and backwards of several micro-batches alternate.
        reduce_bytes: Size at which the gradients of layers that are always whole are summed [bytes].
    """

    zero: int
    shard_group: Communicator
    replica_group: Communicator
    prefetches: bool = True
    whole_below: int = WHOLE_BELOW_BYTES
    offload: bool = False
    compress: str = "none"
    per_step: bool = False
    reduce_bytes: int = REDUCE_BYTES
