"""Tensor parallelism: any module, cut by proof. See docs/adr/0008.

trace.py       what feeds what, in one forward of the plain model
proposals.py   pairs of products that might be cut
options.py     the ways in which each might be, in the order in which they are tried
proof.py       shards run beside the whole: equal, or not cut
search.py      the three together: model and batch -> layout
sequences.py   which layers run on slices between their regions
copies.py      copies of modules and calls, to try things on
region.py      the layout, as a value
cutting.py     a layout applied to a module, and taken off
roles.py       what modules at the edge of a region do while the model runs; running.py: what that needs to remember
engine.py      the step: when the layout is found, what shards exchange beside their layers
matrices.py    whole matrices for optimizers that need them
attention.py, slices.py, sizes.py   nn.MultiheadAttention; logits in slices; code that computes sizes itself
"""
