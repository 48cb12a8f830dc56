"""Tensor parallelism as torch ships it: DTensor."""

from __future__ import annotations

import torch
from side import Batch, MakeOptimizer, Side, Step, loss_fn
from torch import nn


def make_dtensor(model: nn.Module, make_optimizer: MakeOptimizer) -> Step:
    """DTensor's `parallelize_module` as its tutorial has it: columns and rows of each block, by name."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    columns = ("attention.query", "attention.key", "attention.value", "ffn.gate", "ffn.up")
    rows = ("attention.output", "ffn.down")
    for block in model.get_submodule("layers"):
        styles = {name: ColwiseParallel() for name in columns} | {name: RowwiseParallel() for name in rows}
        parallelize_module(block, mesh, styles)
    # One optimizer for each kind of tensor: torch's multi-tensor kernels refuse a list that has both.
    plain = [
        parameter for parameter in model.parameters() if not isinstance(parameter, torch.distributed.tensor.DTensor)
    ]
    cut = [parameter for parameter in model.parameters() if isinstance(parameter, torch.distributed.tensor.DTensor)]
    optimizers = [make_optimizer(plain), make_optimizer(cut)]

    def step(batch: Batch) -> float:
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = loss_fn(model(batch[0]), batch)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        return loss.item()

    return step


DTENSOR = Side("dtensor", make_dtensor, "gloo", shares_batch=True)
