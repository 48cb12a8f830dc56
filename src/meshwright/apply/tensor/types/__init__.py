"""Types of tensors over the tp axis, checked on the run that the proof makes (docs/types.md).

lattice     the types: replicated, varying, partial, shard(dim)
typed_run   what the whole run calls, in order, with the user's line
marked      sizes of sharded dims: integers that remember the full size
operation   one call of a torch function, as a rule sees it
pointwise   rules of elementwise functions
views       rules of views
products    rules of products
reductions  rules of reductions
indexing    rules of indexing
rules       function name -> rule; what has none is refused
gradients   which gradients are terms of a sum
checker     the mode that follows one shard
state       what it knows
edges       what it meets
ending      what it leaves
report      what it found

To add a rule: the function's name in a family's table; a new family goes into `rules.py`.
"""

__all__: list[str] = []
