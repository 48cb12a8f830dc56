"""The same training step on shards, as each library ships it: ZeroRedundancyOptimizer, FSDP2, DeepSpeed ZeRO 1 to 3, DTensor."""

from __future__ import annotations

import functools
from typing import Any

import torch
from bench import loss_fn
from peers import Batch, MakeOptimizer, Side, Step, make_deepspeed, plain_step
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


def deepspeed(stage: int) -> Side:
    return Side(
        f"deepspeed-{stage}",
        functools.partial(make_deepspeed, stage=stage),
        "gloo",
        packages=("torch", "deepspeed"),
        environment=(("DS_ACCELERATOR", "cpu"), ("LOCAL_SIZE", "2")),
    )


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


ZERO_REDUNDANCY = Side("zero-redundancy", make_zero_redundancy, "gloo")
FSDP2 = Side("fsdp2", make_fsdp2, "gloo")
DTENSOR = Side("dtensor", make_dtensor, "gloo", shares_batch=True)
