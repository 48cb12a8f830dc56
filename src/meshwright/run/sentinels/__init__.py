"""Sentinels: what ranks must have alike is compared while they train (ADR 0012).

sentinels     what is compared when, and what a hit does
circles       ranks that must say the same
digest        64-bit digests of tensors
settings      settings that must be alike
batch_check   different batches on ranks that share layers
copies_check  copies compared bit by bit
imprint       sums that show that an entry has changed
writes        writes between steps

To compare something more: a saying in `sentinels.py`; a fault of it in `benchmarks/sentinels/faults.py`.
"""

__all__: list[str] = []
