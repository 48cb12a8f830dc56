"""Data parallelism: ranks that share a global batch, with full copies of the model or with shards of it (ADR 0004, 0007).

Gradients are summed over the ranks of a batch while backward runs or after it, and every rank updates what it owns.

base             base class: equal copies at the start, buffers, sparse gradients
buffers_apart    buffers that a forward changes by a rank's own samples
sparse           names of parameters with sparse gradients
distributed      whole copies whose gradients are summed (DDP)
buckets          flat memory that owns gradients and is summed during backward
unbucketed       gradients that stay where autograd put them, summed after backward
sharded          ZeRO 1, 2, 3 and HSDP
sharding         settings of ZeRO: stage, shard group, replica group
unit_parameters  choice of each unit's parameters
flat_unit        one unit: its flat memory, pieces for the optimizer, reduction
flat             offsets of parameters in a unit's flat memory (no tensors)
gathering        ZeRO-3: units gathered when needed, in one order on all ranks
own_gathering    whole units for what a script drives
exchange_order   that order, as lists of numbers
requests         units needed beyond the order, agreed on per phase
lookup_hooks     callbacks for the lookup of a parameter
saved_view       position of a tensor in a unit's memory, which autograd saves in place of the values
held             facts about sharded parameters between steps
optimizer        check of optimizers for work on pieces, and handover of the pieces
piece_groups     groups of an optimizer over pieces that a script has changed
expected_bytes   expected bytes of a step

To add another way of summing gradients, touch `comm/compression`.
"""

__all__: list[str] = []
