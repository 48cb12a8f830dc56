"""Gradients sent as less than they are, and nothing of them lost (ADR 0010).

reducer    sums of gradients over ranks; the plain one compresses nothing
codecs     numbers as bf16, int8 or int4 in blocks, and back
blockwise  the reducer that sends codes
low_rank   one step of PowerSGD
power_sgd  the reducer that sends low-rank factors
choose     from a plan's word to a reducer

To add a codec: `codecs.py`, its word in `choose.py`.
"""

__all__: list[str] = []
