"""Tensor parallelism: any module, cut by proof. See docs/adr/0008, and docs/adr/0012 for guards, types and inspections.

What is found:

trace.py        what feeds what, in one forward of the plain model
operations.py   torch functions, by what they do with a parameter
proposals.py    pairs of products that might be cut
options.py      the ways in which each might be, in the order in which they are tried
proving.py      proposals tried one after the other; each scope is proven for itself
search.py       the whole of it: model and batch -> layout
sequences.py    which layers run on slices between their regions
region.py       the layout, as a value
attention.py    nn.MultiheadAttention, cut by its heads

What is proven:

proof.py        shards run beside the whole: equal, or not cut
conditions.py   the calls and modes that a layout of one scope is proven under
unchecked.py    calls that torch lets read past the end of a tensor
comparison.py   what shards gave and left, beside the whole's
effects.py      what a forward leaves behind beside its results
mirror.py       attributes that the forward of a copy leaves, shown on the model
asked.py        sizes and numbers that code asks for
asked_sizes.py  integers that are sizes, and tell where their value is taken
threads.py      ranks that are threads of one process for a moment
copies.py       copies of modules and calls, to try things on
types/          types of tensors over the ranks, checked on the same run (see its __init__)

What runs:

cutting.py      the layout applied to a module, and taken off
held_buffers.py a buffer that is cut, where a script assigns another
roles.py        what modules at the edge of a region do while the model runs
running.py      what that needs to remember
part.py         a part of a cut model, and the ways in which a call of it runs
guard.py        the calls of a part that are proven, and the proof of a new one
signatures.py   structure of modules and signatures of calls, as values
described.py    values that stand for attributes and arguments
whole.py        a part run as one device runs it, with gathered parameters
inspection.py   a part run a second time as one device runs it, and compared
ambient.py      what surrounds a call: gradients, inference, autocast
slices.py       a tensor that lies in slices, and looks whole
data_alias.py   memory of such a tensor that autograd does not watch
sizes.py        sizes that code computes from the full model, translated
matrices.py     whole matrices for optimizers that need them
engine.py       the step: when the layout is found, what shards exchange beside their layers
"""
