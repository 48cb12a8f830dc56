"""Recompute (activation checkpointing): a layer keeps its inputs and runs its forward again in backward.

Full recompute repeats the whole layer; selective recompute keeps the results of matrix products and convolutions.

checkpointing     layers that run again, full or selective
foreign_writes    writes that neither a version counter nor an operator shows
held_arguments    calls of a checkpoint before torch 2.13
inputs            inputs that the layer writes over
kept              results that selective recompute keeps
operator_results  one result, and whether it was written over
repetition        comparison of the second run with the first

To keep more results, touch `kept.py`.
"""

__all__: list[str] = []
