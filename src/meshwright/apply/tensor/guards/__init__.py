"""Guards of proofs: the conditions under which a part was proven, checked at each of its calls.

Where a guard fails, all ranks prove the part again, or run it whole.

part_guard   the guard of one part: its proven calls, and the proof of a new one
signatures   structure of modules and signature of calls, as values
described    attributes and arguments, as values that compare equal where code does the same
ambient      gradient mode, autocast, default dtype
asked        values that code reads from its tensors
asked_sizes  sizes that code reads as numbers
asked_shapes  runs of a call that compute shapes alone

To guard something more, touch `signatures.py` for modules and calls, `ambient.py` for modes around them.
"""

__all__: list[str] = []
