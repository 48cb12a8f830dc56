"""The proof: shards of a region, as threads of one process, must give what the whole gives, gradients and side effects included.

proof                 the proof of one region
conditions            calls and modes that a layout is proven under
shards_against_whole  comparison of results, and the error that says where they differ
effects               what a forward leaves behind
threads               collectives between threads
unchecked             checks of shapes that torch's kernels leave out

To prove something more: `conditions.py` says under what, `effects.py` what is compared.
"""

__all__: list[str] = []
