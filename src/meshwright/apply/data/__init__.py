"""Data parallelism: ranks that share a global batch, with whole copies of the model or with shards of it (ADR 0004, 0007).

base             base class: equal copies at the start, buffers, sparse gradients
sparse           names of parameters with sparse gradients
distributed      whole copies whose gradients are summed (DDP)
buckets          flat memory that owns gradients and is summed during backward
unbucketed       gradients that stay where autograd put them, summed after backward
sharded          ZeRO 1, 2, 3 and HSDP
sharding         what is sharded, and over whom
unit_parameters  choice of the parameters of one unit
flat_unit        one unit: its flat memory, pieces for the optimizer, reduction
flat             offsets of parameters in a unit's flat memory (no tensors)
gathering        ZeRO-3: units gathered when needed, in one order on all ranks
exchange_order   that order, as lists of numbers
requests         units needed beside the order, agreed on per phase
lookup_hooks     callbacks for the lookup of a parameter
held             what a rank has of sharded parameters between steps
optimizer        test of which optimizers may work on pieces, and the pieces given to them
expected_bytes   bytes that a step should send

To add another way of summing gradients: `comm/compression`.
"""

__all__: list[str] = []
