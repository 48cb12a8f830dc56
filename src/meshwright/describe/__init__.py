"""Description of modules and batches, read without running them for real.

Planning and the one-process modes use it; it never changes the model.

describing    `describe_model`: any module as a ModelSpec
cast_kernels  the autocast of CUDA devices, or of CPUs, for a described forward
fakes         modules and batches without memory
function_caches  caches of functions, in which a trial leaves no tensor
left_tensors  tables in variables, in which a description leaves no tensor
recorder      record of one forward: operators, and what backward keeps
product_sizes operators that are products, with their sizes
memory_runs   runs of memory that an elementwise kernel walks
flop_counter  torch's counter of FLOPs
flow          which product feeds which: attention cores, candidates for splits
ownership     parameters: names, sizes, and what kinds of modules use them
per_sample    numbers of one sample
layer_specs   layers of a ModelSpec, from the record
module_facts  heads, width and vocabulary, from the config or the operators
model_table   the description as text
layers        layers of a module in the order in which they run
batches       forms of a batch, counts of its samples, its shares

To count another operator as a product, touch `product_sizes.py`; to accept another form of batch, touch `batches.py`.
"""

__all__: list[str] = []
