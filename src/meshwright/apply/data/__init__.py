"""apply.data: ranks that share a global batch, with whole copies of the model or with shards of it.

base         what every such engine does: copies equal at the start, buffers, sparse gradients
distributed  whole copies, gradients summed (DDP): buckets during backward, or loose ones after it
buckets      flat memory that owns gradients and is summed during backward
loose        gradients that stay where autograd put them, summed once backward has ended
sharded      ZeRO 1, 2, 3 and HSDP: flat units whose optimizer state, gradients and values are sharded
units        which parameters lie in one unit
flat         where parameters lie in a unit's flat memory, and which part is whose (no tensors)
unit         one unit: its memory, its pieces for the optimizer, how its gradients are summed
gathering    ZeRO-3: units that are whole only while they are needed, in one order on all ranks
sharding     what is sharded, and over whom
requests     units that a rank needs beside the score, agreed on at the end of a phase
score        that order: which unit is gathered or summed when (no tensors)
watch        noticing that a parameter of a unit is looked up
optimizer    which optimizers may work on pieces or on some parameters alone, tried out; giving them the pieces
"""

__all__: list[str] = []
