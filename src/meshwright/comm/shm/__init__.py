"""Shared memory between the ranks of one host: a torch.distributed backend named "shm", its C++ under `csrc/`.

`backend.py` registers it and decides, group by group, between it and gloo; `attach.py` brings the ranks of a group to one
segment; `build.py` compiles the extension once for this torch and this machine.
"""

from __future__ import annotations

__all__: list[str] = []
