"""Shared memory between the ranks of one host: a torch.distributed backend named "shm", its C++ under `csrc/` (ADR 0006).

backend           register_shm(), and the choice between shared memory and gloo for each group
attach            a group's segment, mapped by all of its ranks or by none
build             the extension, compiled once for this torch and this machine
transport_errors  what exchanges raise, as classes

To add a collective, touch `csrc/collectives.cpp`, and add a row in `tests/transport`.
"""

from __future__ import annotations

__all__: list[str] = []
