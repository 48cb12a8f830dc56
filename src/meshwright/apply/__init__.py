"""Application of a plan: a plain module becomes one that computes the same numbers on many devices.

There is one engine per strategy, and they nest: `PipelineEngine(TensorEngine(ShardedEngine))`.

engine        base class of all engines, which is also the engine of one device
nested        base class of an engine around another
passes        what a step gives an engine to run: micro-batches, losses, what ranks are told
one_by_one    micro-batches one after the other, as all engines but pipelines run them
batch_shares  which samples of a global batch a rank takes
own_passes    forwards and backwards that a user's own loop drives
data/         data parallelism and ZeRO: ranks that share a batch
tensor/       tensor parallelism: ranks that share each layer
pipeline/     pipeline parallelism: ranks that run some of the layers
one_process/  data_parallel and model_parallel: one process, several devices
recompute/    activation checkpointing
shards/       tensors of which a rank has a part, as user code may reach them
state/        buffers, attributes, globals and generators that forwards change, recorded and restored
randomness/   random numbers by their place, whatever the layout
modules/      copies, forwards and hooks of the user's modules
first_look    one rank's look at the first batch, told to the others
model_guard   checks that ranks hold one model, and that nobody changes it afterwards
held_state    what a rank holds of each tensor, as parts of the full ones
forecast      what a rank should send in a step, worked out beside a run
gradient_sums terms of gradients that several ranks have, and when gradients leave
finding       a difference from one device, as a value
differences   tolerances for two runs of one module
norm          global gradient norm and clipping

To add a strategy: a folder with an engine, one line in `run/assembly.py`, rows in the parity cases (docs/adding_a_strategy.md).
"""

__all__: list[str] = []
