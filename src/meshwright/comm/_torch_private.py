"""The one place that imports names of torch that are not documented as public. Checked on torch 2.13.0."""

from __future__ import annotations

import torch
from torch.distributed.distributed_c10d import ProcessGroup, ProcessGroupGloo
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["ProcessGroupGloo", "TorchDispatchMode", "cpu_backend_name", "foreach_mul_", "foreach_norm"]

# One call for a list of tensors; torch's own optimizers and clipping are written with them.
foreach_mul_ = torch._foreach_mul_  # pyright: ignore[reportPrivateImportUsage]
foreach_norm = torch._foreach_norm  # pyright: ignore[reportPrivateImportUsage]


def cpu_backend_name(group: ProcessGroup) -> str:
    """Return what exchanges a group's CPU tensors: "gloo", "shm"; "" where nothing does."""
    try:
        return group._get_backend(torch.device("cpu")).name()
    except RuntimeError:
        return ""
