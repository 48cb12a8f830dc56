"""Building blocks of tensor and sequence parallelism, for models that are written with them.

    group = mw.join_world().default_group           # or any Communicator
    up = mw.nn.ColumnParallelLinear(1024, 4096, group=group)
    down = mw.nn.RowParallelLinear(4096, 1024, group=group)
    y = down(torch.relu(up(x)))                     # one all-reduce forward, one backward

Every module states the part of each full tensor that it holds (`layouts`), and can gather the full tensors (`full_state_dict`).

linear         Linear cut by columns and by rows
embedding      Embedding cut by rows
cross_entropy  cross-entropy of logits that are cut
module         base class: layouts, full state
shards         shards taken and joined

To add a module, add a subclass of `ShardedModule`, and its parity test in `tests/parity/test_nn.py`.
"""

from __future__ import annotations

from meshwright.nn.cross_entropy import vocab_parallel_cross_entropy
from meshwright.nn.embedding import VocabParallelEmbedding
from meshwright.nn.linear import ColumnParallelLinear, RowParallelLinear
from meshwright.nn.module import ShardedModule
from meshwright.nn.shards import gather_full, join_shards, take_shard

__all__ = [
    "ColumnParallelLinear",
    "RowParallelLinear",
    "ShardedModule",
    "VocabParallelEmbedding",
    "gather_full",
    "join_shards",
    "take_shard",
    "vocab_parallel_cross_entropy",
]
