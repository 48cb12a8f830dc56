"""Exchange of tensors between ranks, and a ledger of every byte of it.

All engines exchange through a `Communicator`, which names, counts and times each collective.

communicator  the only caller of torch.distributed's collectives
group_calls   collectives of torch's process group, called without torch's layers of Python
cuts          tensors in a row, cut where the slices of ranks end
functional    collectives with a backward
ledger        calls, bytes and waiting time, by collective and axis
spans         what a rank does from when to when, in steps that are traced
clocks        offsets between the ranks' clocks
peer_calls    the protocol of `ranks/calls.py`, as a communicator uses it
told_errors   errors by which ranks tell of another rank's
shm/          the backend `shm`: shared memory between CPU ranks of one host
compression/  compressed gradients with error feedback

To add a collective, touch `communicator.py`, its bytes in `ledger.py`, and add a row in `tests/transport`.
"""

from __future__ import annotations

__all__: list[str] = []
