"""Types of tensors over the tp axis, checked during the runs of the proof (docs/types.md).

A type says how a rank's tensor relates to the whole one; a rule for each operation derives the result's type.

lattice     the types: replicated, varying, partial, shard(dim)
typed_run   calls of the whole run, in order, with the user's line
marked      sizes of sharded dims: integers that remember the full size
operation   one call of a torch function, as a rule sees it
pointwise   rules of elementwise functions
views       rules of views
products    rules of products
reductions  rules of reductions
indexing    rules of indexing
rules       function name -> rule; functions without one are refused
gradients   gradients that are terms of a sum
checker     the mode that follows one shard
state       types known so far
edges       exchanges, and modules that run our code
ending      results, kept tensors and gradients after the forward
report      the report

To add a rule, touch a family's table; a new family goes into `rules.py`.
"""

__all__: list[str] = []
