"""Types of tensors over the tp axis, checked on the run that the proof makes. See docs/types.md.

lattice.py     the types: replicated, varying, partial, shard(dim)
record.py      what the whole run calls, in order; where in the user's code a call stands
marked.py      sizes of sharded dims: integers that remember the full size and notice comparisons
operation.py   one call of a torch function, as a rule sees it
pointwise.py, views.py, products.py, reductions.py, indexing.py   rules, by family
rules.py       function name -> rule; what has none is refused
gradients.py   which gradients are terms of a sum, from the types of the forward
checker.py     the mode that follows one shard; state.py, edges.py and ending.py: what it knows, meets and leaves
report.py      what it found

To add a rule: give the function's name to a family's table; a new family goes into rules.py.
"""
