"""The one place that imports names of torch that are not documented as public. Checked on torch 2.13.0."""

from __future__ import annotations

from torch.distributed.distributed_c10d import ProcessGroupGloo
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["ProcessGroupGloo", "TorchDispatchMode"]
