"""comm: what ranks send each other, and a ledger of every byte of it.

communicator  the only caller of torch.distributed's collectives
functional    collectives with a backward
ledger        calls, bytes and waiting time, by collective and axis
peer_calls    what a communicator asks of the calls of `ranks/calls.py`
shm/          the backend `shm`: shared memory between CPU ranks of one host
compression/  gradients sent as less than they are

To add a collective: `communicator.py`, its bytes in `ledger.py`, a row in `tests/transport`.
"""

from __future__ import annotations

__all__: list[str] = []
