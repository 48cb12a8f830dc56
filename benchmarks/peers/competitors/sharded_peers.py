"""The same training step on shards, as torch ships it: ZeroRedundancyOptimizer and FSDP2."""

from __future__ import annotations

from typing import Any

import torch
from side import MakeOptimizer, Side, Step, plain_step
from torch import nn


def make_zero_redundancy(model: nn.Module, make_optimizer: MakeOptimizer) -> Step:
    """torch's ZeroRedundancyOptimizer over DistributedDataParallel, as its tutorial has it: whole parameters, one owner each."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    wrapped = nn.parallel.DistributedDataParallel(model)
    plain = make_optimizer([nn.Parameter(torch.zeros(1))])
    options: dict[str, Any] = {
        key: value for key, value in plain.defaults.items() if key in ("lr", "fused", "weight_decay", "betas", "eps")
    }
    optimizer = ZeroRedundancyOptimizer(wrapped.parameters(), optimizer_class=type(plain), **options)
    return plain_step(wrapped, optimizer)


def make_fsdp2(model: nn.Module, make_optimizer: MakeOptimizer) -> Step:
    """FSDP2 as its tutorial has it: each block, then the model."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for child in model.modules():
        if isinstance(child, nn.ModuleList):
            for block in child:
                fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return plain_step(model, make_optimizer(model.parameters()))


ZERO_REDUNDANCY = Side("zero-redundancy", make_zero_redundancy, "gloo")
FSDP2 = Side("fsdp2", make_fsdp2, "gloo")
