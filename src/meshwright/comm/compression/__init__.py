"""Compressed gradients, with error feedback so that nothing of them is lost (ADR 0010).

A reducer sums gradients over ranks; buckets and ZeRO units are given one and do not know what it sends.

reducer    sums of gradients over ranks; the plain reducer compresses nothing
codecs     numbers as bf16, int8 or int4 in blocks, and back
blockwise  the reducer that sends codes
low_rank   one step of PowerSGD
power_sgd  the reducer that sends low-rank factors
choose     reducer for a plan's `compress`

To add a codec, touch `codecs.py`, and its name in `choose.py`.
"""

__all__: list[str] = []
