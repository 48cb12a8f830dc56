"""Sentinels: comparison, during training, of what ranks must have alike (ADR 0012).

Cheap values are compared in every step, digests of all copies every `sentinel_every` steps.

sentinels      schedule of comparisons, and the effect of a finding
made           sentinels of an applied model, once settings are compared
circles        ranks that must have the same values
digest         64-bit digests of tensors
settings       settings that must be equal
name_orders    orders of names in lists, taken from the first rank
code_digest    digests of functions and classes
shared_batches batches that ranks share out, the same on all
batch_check    different batches on ranks that share layers, equal ones on ranks that do not
common_draws   generators that ranks have in common
batch_forms    keys, flags and types of the shares' batches
copies_check   copies compared bit by bit
copies_in_turn a part of the copies, in each step
between        what a script sets on modules between steps, on some ranks alone
insides        what containers, objects and variables hold, likewise
outcome        loss and norm of a step
apart          parameters of which a script has given ranks other values
imprint        sums that detect a changed entry
optimizer_writes  writes to the optimizer's state
writes         writes between steps

To compare something more, add a saying in `sentinels.py`, and a fault of it in `benchmarks/sentinels/faults.py`.
"""

__all__: list[str] = []
