"""Activation checkpointing: a layer keeps its inputs and runs its forward again in backward.

checkpointing  layers that run again, full or selective
inputs         inputs that the layer writes over
kept           results that selective recompute keeps
repetition     comparison of the second run with the first

To keep more results: `kept.py`.
"""

__all__: list[str] = []
