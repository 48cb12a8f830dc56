"""Tensor parallelism as others ship it: torch's DTensor, and the plans that come with the models of transformers."""

from __future__ import annotations

import tempfile
from typing import Any

import torch.distributed as dist
from side import Batch, MakeOptimizer, Side, Step, loss_fn
from torch import nn


def mixed_step(model: nn.Module, make_optimizer: MakeOptimizer) -> Step:
    """One optimizer for each kind of tensor: torch's multi-tensor kernels refuse a list that has both."""
    from torch.distributed.tensor import DTensor

    cut = [parameter for parameter in model.parameters() if isinstance(parameter, DTensor)]
    whole = [parameter for parameter in model.parameters() if not isinstance(parameter, DTensor)]
    optimizers = [make_optimizer(parameters) for parameters in (whole, cut) if parameters]

    def step(batch: Batch) -> float:
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = loss_fn(model(batch[0]), batch)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        return loss.item()

    return step


def make_dtensor(model: nn.Module, make_optimizer: MakeOptimizer) -> Step:
    """DTensor's `parallelize_module` as its tutorial has it: columns and rows of each block, by name."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    columns = ("attention.query", "attention.key", "attention.value", "ffn.gate", "ffn.up")
    rows = ("attention.output", "ffn.down")
    for block in model.get_submodule("layers").children():
        styles: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in columns}
        parallelize_module(block, mesh, styles | {name: RowwiseParallel() for name in rows})
    return mixed_step(model, make_optimizer)


def make_transformers(model: nn.Module, make_optimizer: MakeOptimizer) -> Step:
    """transformers' `from_pretrained` with the plan that comes with the model, the one way in that it documents."""
    from transformers import LlamaForCausalLM
    from transformers.distributed.configuration_utils import DistributedConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    llama: Any = model
    with tempfile.TemporaryDirectory() as mine:
        directories = [mine]
        dist.broadcast_object_list(directories)  # among ranks only the first one writes
        llama.save_pretrained(directories[0])
        dist.barrier()
        plan = DistributedConfig(tp_size=dist.get_world_size(), tp_plan="auto")
        parallel = LlamaForCausalLM.from_pretrained(directories[0], distributed_config=plan)
        dist.barrier()
    parallel.train()
    return mixed_step(parallel, make_optimizer)


DTENSOR = Side("dtensor", make_dtensor, "gloo", shares_batch=True)
TRANSFORMERS = Side("transformers", make_transformers, "gloo", packages=("torch", "transformers"), shares_batch=True)
