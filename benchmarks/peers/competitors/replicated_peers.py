"""Data parallelism as each library ships it: DDP, Accelerate, Lightning Fabric, DeepSpeed at stage 0, and one plain process."""

from __future__ import annotations

import torch.distributed as dist
from competitors.deepspeed_peers import deepspeed
from side import MakeOptimizer, Side, Step, plain_step
from torch import nn


def make_ddp(model: nn.Module, make_optimizer: MakeOptimizer) -> Step:
    """torch's DistributedDataParallel with its defaults."""
    wrapped = nn.parallel.DistributedDataParallel(model)
    return plain_step(wrapped, make_optimizer(wrapped.parameters()))


def make_ddp_view(model: nn.Module, make_optimizer: MakeOptimizer) -> Step:
    """DistributedDataParallel whose gradients live in its buckets, which saves the copies."""
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    return plain_step(wrapped, make_optimizer(wrapped.parameters()))


def make_accelerate(model: nn.Module, make_optimizer: MakeOptimizer) -> Step:
    """Accelerate's loop as its guide has it. On the CPU it wraps the model in DistributedDataParallel."""
    from accelerate import Accelerator
    from accelerate.utils import DistributedType

    accelerator = Accelerator(cpu=True)
    if accelerator.distributed_type is not DistributedType.MULTI_CPU:
        raise RuntimeError(f"Accelerate took these ranks for {accelerator.distributed_type}, not for MULTI_CPU")
    wrapped, optimizer = accelerator.prepare(model, make_optimizer(model.parameters()))
    return plain_step(wrapped, optimizer, accelerator.backward)


def make_fabric(model: nn.Module, make_optimizer: MakeOptimizer) -> Step:
    """Lightning Fabric as its guide has it, on ranks that torchrun has started."""
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator="cpu", strategy="ddp", devices=dist.get_world_size())
    fabric.launch()
    wrapped, optimizer = fabric.setup(model, make_optimizer(model.parameters()))
    return plain_step(wrapped, optimizer, fabric.backward)


def make_one_process(model: nn.Module, make_optimizer: MakeOptimizer) -> Step:
    """Plain PyTorch: the whole batch in one process, which computes with all the threads."""
    return plain_step(model, make_optimizer(model.parameters()))


REPLICATED = (
    Side("ddp", make_ddp, "gloo"),
    Side("ddp-view", make_ddp_view, "gloo"),
    Side("accelerate", make_accelerate, "gloo", packages=("torch", "accelerate")),
    Side(
        "fabric",
        make_fabric,
        "gloo",
        packages=("torch", "lightning-fabric"),
        environment=(("TORCHELASTIC_RUN_ID", "none"),),  # how it knows torchrun's ranks, and starts none itself
    ),
    deepspeed("deepspeed", stage=0),
    Side("one-process", make_one_process, None, ranks=1, threads=2),
)
