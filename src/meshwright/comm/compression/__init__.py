"""comm.compression: gradients that are sent as less than they are, and nothing of them lost. See docs/adr/0010-compression.md.

reducer    what sums gradients over ranks; the plain one, which compresses nothing; exchanges that have several stages
codecs     numbers as bf16, int8 or int4 in blocks, and back (pure functions of tensors)
blockwise  the reducer that sends codes
low_rank   one step of PowerSGD (pure functions of tensors)
power_sgd  the reducer that sends low-rank factors
choose     from a plan's word to a reducer
"""

__all__: list[str] = []
