"""DeepSpeed as it ships: ZeRO 0 to 3, and PipelineModule.

It gets torch's AdamW, since its own would be compiled, and no clipping, which its own default would do and nobody else does.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from typing import Any

from competitors.layers import layers_of
from side import Batch, MakeOptimizer, Side, Step, loss_fn
from torch import Tensor, nn

PACKAGES = ("torch", "deepspeed")
ENVIRONMENT = (("DS_ACCELERATOR", "cpu"), ("LOCAL_SIZE", "2"))


def start_deepspeed() -> Any:
    """Import it quietly, and have it use the group that is there."""
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)  # it tells its whole configuration otherwise
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # Its shared-memory kernel, which inference alone uses, would be compiled here, on every rank at once.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    return deepspeed


def configuration(stage: int, micro_batches: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,  # it only counts samples with this; the batches come as they are
        "gradient_accumulation_steps": micro_batches,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }


def make_deepspeed(model: nn.Module, make_optimizer: MakeOptimizer, *, stage: int) -> Step:
    """ZeRO. Stage 0 is data parallelism, gradients averaged in one flat copy after backward."""
    library = start_deepspeed()
    optimizer, config = make_optimizer(model.parameters()), configuration(stage, 1)
    engine, *_ = library.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)

    def step(batch: Batch) -> float:
        loss = loss_fn(engine(batch[0]), batch)
        engine.backward(loss)
        engine.step()
        return loss.item()

    return step


def micro_loss(outputs: Tensor, labels: Tensor) -> Tensor:
    return loss_fn(outputs, (outputs, labels))


def make_deepspeed_pipeline(model: nn.Module, make_optimizer: MakeOptimizer, *, micro_batches: int) -> Step:
    """PipelineModule over a list of layers, as its tutorial has it: 1F1B, its only schedule for training."""
    library = start_deepspeed()
    from deepspeed.pipe import PipelineModule

    with contextlib.redirect_stdout(None):  # it prints its partition
        pipeline = PipelineModule(layers=layers_of(model), num_stages=2, loss_fn=micro_loss)
    optimizer, config = make_optimizer(pipeline.parameters()), configuration(0, micro_batches)
    engine, *_ = library.initialize(model=pipeline, optimizer=optimizer, config=config, dist_init_required=False)

    def step(batch: Batch) -> float:
        ids, labels = batch
        parts = zip(ids.chunk(micro_batches), labels.chunk(micro_batches), strict=True)
        return engine.train_batch(data_iter=parts).item()

    return step


def deepspeed(name: str, *, stage: int) -> Side:
    make = functools.partial(make_deepspeed, stage=stage)
    return Side(name, make, "gloo", packages=PACKAGES, environment=ENVIRONMENT)


DEEPSPEED_PIPELINE = Side(
    "deepspeed-pipeline",
    make_deepspeed_pipeline,
    "gloo",
    packages=PACKAGES,
    environment=ENVIRONMENT,
    shares_batch=True,
    in_micro_batches=True,
)
