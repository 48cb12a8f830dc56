"""Arguments of transformers' Trainer that a plan replaces, or cannot have: refused when the Trainer is made."""

from __future__ import annotations

import math
import os
from typing import Any

from torch import nn

from meshwright.errors import ApplyError, ConfigError, NonFiniteError
from meshwright.spec import Plan

__all__: list[str] = []

_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_LAUNCHERS = (
    "ACCELERATE_USE_FSDP",
    "ACCELERATE_USE_DEEPSPEED",
    "ACCELERATE_USE_MEGATRON_LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG",
)


def refuse_arguments(args: Any) -> None:
    """Raise ConfigError for TrainingArguments that do not go with a plan."""
    wrong: list[tuple[bool, str, str]] = [
        (bool(args.fsdp), "fsdp shards the model, and so does a plan", "leave fsdp out, and use plan='dp=N,zero=3'"),
        (
            bool(args.deepspeed),
            "deepspeed shards the model, and so does a plan",
            "leave deepspeed out, and use plan='dp=N,zero=3'",
        ),
        (
            getattr(args, "parallelism_config", None) is not None,
            "parallelism_config lays the model over devices, and so does a plan",
            "leave parallelism_config out, and write its degrees into the plan: plan='dp=2,tp=2'",
        ),
        (args.fp16, "fp16=True scales losses against overflow, which plans do not", "bf16=True, or neither"),
        (
            args.auto_find_batch_size,
            "auto_find_batch_size=True repeats what ran out of memory on one rank, and the others wait for it",
            "auto_find_batch_size=False, with a per_device_train_batch_size that fits",
        ),
        (
            bool(getattr(args, "enable_jit_checkpoint", False)),
            "enable_jit_checkpoint=True saves when one process is asked to end, and the others would wait for it",
            "enable_jit_checkpoint=False, with save_steps",
        ),
        (args.torch_compile, "torch_compile=True compiles a module that the plan then changes", "torch_compile=False"),
        (
            args.bf16_full_eval or args.fp16_full_eval,
            "bf16_full_eval and fp16_full_eval cast parameters of which ranks hold parts",
            "leave them out; bf16=True evaluates in bf16 too",
        ),
        (
            str(getattr(args.optim, "value", args.optim)) in ("lomo", "adalomo"),
            "optim='lomo' and 'adalomo' step inside of backward",
            "optim='adamw_torch'",
        ),
    ]
    for is_wrong, what, fix in wrong:
        if is_wrong:
            raise ConfigError(f"TrainingArguments: {what}", fix=fix)
    launcher = next((name for name in _LAUNCHERS if os.environ.get(name, "false").lower() in ("1", "true")), None)
    if launcher is not None:
        raise ConfigError(
            f"{launcher} is set, as by 'accelerate launch' with a configuration that shards the model, and so does a plan",
            fix="start the script with torchrun, or with mw.launch",
        )


def refuse_generation(args: Any, plan: Plan) -> None:
    """Raise ConfigError for evaluation by `generate` where ranks hold parts: it calls the model's layers by itself."""
    if getattr(args, "predict_with_generate", False) and (plan.tp > 1 or (plan.zero == 3 and plan.dp > 1)):
        raise ConfigError(
            f"predict_with_generate=True generates with the user's own module, of which ranks have parts under the plan '{plan}'",
            fix="predict_with_generate=False, or a plan of dp with zero=2 at most; after training, generate with the saved model",
        )


def refuse_plan(plan: Plan) -> None:
    """Raise ConfigError for plans without loops of one's own."""
    if plan.mode != "ranks" or plan.pp > 1:
        raise ConfigError(
            f"the Trainer calls forward and backward itself, and under the plan '{plan}' they are one work of several "
            f"{'stages' if plan.mode != 'data_parallel' else 'threads'}",
            fix="a plan of dp, zero and tp: plan='dp=2,zero=3'; or model.step(batch) in a loop of your own",
        )
    if plan.micro_batches > 1 or plan.micro_batch_size:
        raise ConfigError(
            f"the plan '{plan}' cuts batches into micro-batches, and the Trainer runs forward and backward itself",
            fix="leave micro_batches out of the plan, and set gradient_accumulation_steps in TrainingArguments",
        )


def refuse_model(model: nn.Module, plan: Plan) -> None:
    """Raise ApplyError for layers that mix the samples of a batch while they train, where ranks have parts of it."""
    name = next((name for name, child in model.named_modules() if isinstance(child, _NORMS)), None)
    if plan.num_shares > 1 and name is not None:
        raise ApplyError(
            f"'{name}' normalises over the batch, of which each rank has a part under the plan '{plan}': its losses would not be "
            "one process'",
            fix="a plan with batch=whole or dp=1, such as plan='tp=2', or a norm over channels (nn.GroupNorm) in its place",
        )


def finite(norm: float, step: int) -> float:
    """Return a gradient's norm, which all ranks have alike.

    Raises:
        NonFiniteError: It is not finite. transformers goes on, with parameters that are no numbers any more.
    """
    if math.isfinite(norm):
        return norm
    raise NonFiniteError(
        f"the gradient of step {step} is not finite (its norm is {norm}); the parameters are unchanged",
        fix="a lower learning_rate or more warmup_steps where the loss grew before, else look into the batch of this step; "
        "transformers.Trainer goes on over such a step, with NaN in the parameters",
    )
