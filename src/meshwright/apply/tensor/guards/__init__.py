"""Guards of a proof: when one fails, the part is proven again by all ranks, or runs whole.

part_guard   the guard of one part: calls that are proven, and the proof of a new one
signatures   structure of modules and signature of calls, as values
described    attributes and arguments, as values that compare equal where code does the same
ambient      gradient mode, autocast, default dtype
asked        numbers that code reads from its tensors
asked_sizes  sizes whose value code takes

To guard something more: `signatures.py` for modules and calls, `ambient.py` for what surrounds them.
"""

__all__: list[str] = []
