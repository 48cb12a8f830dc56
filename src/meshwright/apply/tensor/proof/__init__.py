"""Proof of a region: its shards, run as threads of one process, must equal the whole in results, gradients and side effects.

The threads run the code of the real ranks on copies, in float64 on the CPU, with random weights and a small input.

proof                 the proof of one region
scope_values          random values that all runs of a scope share
exact                 mode in which all runs compute, and draw, alike
conditions            calls and modes under which a layout is proven
shards_against_whole  comparison of results, and the error for a difference
twins                 comparison of two scopes: is an experiment with one that with the other?
place_reads           reads of a module's own position, noticed while experiments run
effects               side effects of a forward
threads               collectives between threads
unchecked             shape checks that torch's kernels lack

To prove under more conditions, touch `conditions.py`; to compare more, touch `effects.py`.
"""

__all__: list[str] = []
