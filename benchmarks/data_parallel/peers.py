"""The same training step as each library ships it: ours, torch's DDP, Accelerate, DeepSpeed, and one plain process.

Every maker is called on a rank whose default group exists, if there is one, takes the model and the optimizer's factory, and
returns ``step(batch) -> loss`` over the rank's share of the batch. The loss is the rank's own mean, or, from ours, the mean
of all ranks; the average over the ranks is the same number. Nothing is tuned: each side has the options that its user gets.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import logging
from collections.abc import Callable
from typing import Any

import torch
from bench import loss_fn
from torch import nn

Batch = tuple[torch.Tensor, torch.Tensor]
Step = Callable[[Batch], float]
MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


@dataclasses.dataclass(frozen=True)
class Side:
    """One competitor: how many processes it has, and how its step is made on each of them."""

    name: str
    make: Callable[[nn.Module, MakeOptimizer], Step]
    backend: (
        str | None
    )  # the default group must be this: checked on the ranks, since a figure under a wrong name is worse than none
    ranks: int = 2
    threads: int = 1
    packages: tuple[str, ...] = ("torch",)
    environment: tuple[tuple[str, str], ...] = ()
    shares_batch: bool = False
    """Whether every rank takes the whole global batch, as ranks do that share each layer."""

    @property
    def is_ours(self) -> bool:
        return self.name.startswith("ours")


def make_ours(model: nn.Module, make_optimizer: MakeOptimizer, preset: str = "distributed") -> Step:
    """Ours: a plan by its preset's name, over whatever transport this rank was started with."""
    import meshwright as mw

    plan = mw.Plan.parse(preset, mw.join_world().world_size)
    trained = mw.apply_plan(model, plan, loss_fn=loss_fn, optimizer=make_optimizer)
    return lambda batch: trained.step(batch).loss


def plain_step(forward: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(batch: Batch) -> float:
        optimizer.zero_grad()
        loss = loss_fn(forward(batch[0]), batch)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


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

    def step(batch: Batch) -> float:
        optimizer.zero_grad()
        loss = loss_fn(wrapped(batch[0]), batch)
        accelerator.backward(loss)
        optimizer.step()
        return loss.item()

    return step


def make_deepspeed(model: nn.Module, make_optimizer: MakeOptimizer, stage: int = 0) -> Step:
    """DeepSpeed. ZeRO stage 0 is data parallelism, gradients averaged in one flat copy after backward."""
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)  # it tells its whole configuration otherwise
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # Its shared-memory kernel, which inference alone uses, would be compiled here, on every rank at once.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    config = {
        "train_micro_batch_size_per_gpu": 1,  # it only counts samples with this; the batches come as they are
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,  # its own default is 1.0, which the other sides do not do
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    optimizer = make_optimizer(model.parameters())
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)

    def step(batch: Batch) -> float:
        loss = loss_fn(engine(batch[0]), batch)
        engine.backward(loss)
        engine.step()
        return loss.item()

    return step


def make_one_process(model: nn.Module, make_optimizer: MakeOptimizer) -> Step:
    """Plain PyTorch: the whole batch in one process, which computes with all the threads."""
    return plain_step(model, make_optimizer(model.parameters()))


def ours(transport: str, preset: str) -> Side:
    environment = (("MESHWRIGHT_TRANSPORT", transport),)
    make = functools.partial(make_ours, preset=preset)
    packages = ("torch", "meshwright")
    shares_batch = preset.startswith("tensor")
    return Side(
        f"ours-{transport}", make, transport, packages=packages, environment=environment, shares_batch=shares_batch
    )


PEERS = {
    side.name: side
    for side in (
        Side("ddp", make_ddp, "gloo"),
        Side("ddp-view", make_ddp_view, "gloo"),
        Side("accelerate", make_accelerate, "gloo", packages=("torch", "accelerate")),
        Side(
            "deepspeed",
            make_deepspeed,
            "gloo",
            packages=("torch", "deepspeed"),
            environment=(("DS_ACCELERATOR", "cpu"), ("LOCAL_SIZE", "2")),
        ),
        Side("one-process", make_one_process, None, ranks=1, threads=2),
    )
}
KEEP_FREED_MEMORY = (("MALLOC_MMAP_THRESHOLD_", "1073741824"), ("MALLOC_TRIM_THRESHOLD_", "2147483647"))
"""What our ranks ask of the C library, for a user of another library who knows of it."""


def versions(side: Side) -> dict[str, str]:
    return {package: importlib.metadata.version(package) for package in side.packages}
