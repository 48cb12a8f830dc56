"""Keys of a DeepSpeed configuration as data: allowed values, DeepSpeed's default, and their treatment here.

There are three kinds. A key may decide something, and a function of `parallelism`, `zero` or `training` reads it. Or it changes
no number, because its request is met in another way or means nothing here; `hint` says how. Or only its default can be honoured;
`only` says why. A key that is not in the table is unknown.

Source: deepspeed 0.19.8, `runtime/config.py`, `runtime/constants.py`, `runtime/zero/config.py`, `runtime/zero/offload_config.py`,
`runtime/precision_config.py`, `runtime/activation_checkpointing/config.py`, read 2026-11. Where its documentation gives another
default than its code, the table has the code's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final, Literal

__all__: list[str] = []

Kind = Literal["positive", "count", "whole", "number", "switch", "text", "list", "any"]


@dataclasses.dataclass(frozen=True, slots=True)
class Key:
    """The allowed values of a key.

    Args:
        kind: "positive" and "count" are whole numbers from 1 and from 0, "number" is at least 0, "switch" is true or false.
        default: DeepSpeed's own, by its code; None where it has none.
        hint: Where no value of it changes a number: how it is met here.
        only: Where only the default can be honoured: why.
    """

    kind: Kind
    default: Any = None
    hint: str = ""
    only: str = ""


_TOP: Final[Mapping[str, Key]] = {
    "train_batch_size": Key("positive"),
    "train_micro_batch_size_per_gpu": Key("positive"),
    "gradient_accumulation_steps": Key("positive"),
    "managed_gradient_accumulation": Key(
        "switch", True, only="the training loop counts the micro-batches of a step itself"
    ),
    "steps_per_print": Key("any"),
    "gradient_clipping": Key("number", 1.0),
    "seed": Key("count"),
    "dataloader_drop_last": Key("switch", False),
    "sequence_parallel_size": Key("positive", 1),
    "communication_data_type": Key("text"),
    "seq_parallel_communication_data_type": Key(
        "text", "fp32", hint="sequences are exchanged in the model's own dtype"
    ),
    "prescale_gradients": Key(
        "switch", False, hint="losses are weighted before backward, so that gradients are summed"
    ),
    "gradient_predivide_factor": Key(
        "number", 1.0, hint="losses are weighted before backward, so that gradients are summed"
    ),
    "gradient_allreduce_op": Key(
        "text", "mean", only="a step's gradient is the mean over its samples, as on one device"
    ),
    "sparse_gradients": Key("switch", False, hint="a module's own choice (nn.Embedding(sparse=True)) is kept"),
    "zero_allow_untested_optimizer": Key("switch", False, hint="ZeRO here works with any torch.optim.Optimizer"),
    "zero_force_ds_cpu_optimizer": Key("switch", True, hint="the optimizer is torch's own, on every device"),
    "use_data_before_expert_parallelism": Key("switch", False, hint="there is no expert axis"),
    "disable_allgather": Key("switch", False, hint="the collective is chosen by what is exchanged"),
    "wall_clock_breakdown": Key("switch", False, hint="events.jsonl has each step's seconds"),
    "memory_breakdown": Key("switch", False, hint="events.jsonl has the peak memory of each step"),
    "graph_harvesting": Key("switch", False, only="modules keep their own kernels"),
    "dump_state": Key("switch", False, hint="record.json has the configuration and the plan"),
    "disable_python_gc": Key("switch", False, hint="Python's garbage collector is left alone"),
    "log_level": Key("any", hint="warnings and errors are always shown"),
    "vocabulary_size": Key("any", hint="read off the model"),
    "timers": Key("any", hint="steps are always timed"),
    "aio": Key("any", hint="nothing is swapped to a disk"),
    "checkpoint": Key("any", hint="checkpoints have a form of their own"),
    "autotuning": Key("any", hint="nothing is tuned in a training run"),
}

_NO_NUMERICS: Final = "memory layout only"

_ZERO: Final[Mapping[str, Key]] = {
    "stage": Key("count", 0),
    "overlap_comm": Key("switch"),
    "reduce_bucket_size": Key("count", 500_000_000),
    "allgather_bucket_size": Key("count", 500_000_000),
    "contiguous_gradients": Key("switch", True, hint="gradients always lie side by side in flat memory"),
    "sub_group_size": Key("count", 1_000_000_000, hint="the optimizer steps over this rank's shards at once"),
    "stage3_prefetch_bucket_size": Key("count", 50_000_000),
    "stage3_param_persistence_threshold": Key("count", 100_000),
    "stage3_model_persistence_threshold": Key("count"),
    "stage3_max_live_parameters": Key(
        "count", 1_000_000_000, hint="a layer is whole while it computes, and the next one while it is fetched"
    ),
    "stage3_max_reuse_distance": Key(
        "count", 1_000_000_000, hint="a layer is let go after its use, and gathered again"
    ),
    "stage3_gather_16bit_weights_on_model_save": Key(
        "switch", False, hint="full_state_dict() gathers the weights in their own dtype"
    ),
    "stage3_module_granularity_threshold": Key(
        "count", 0, hint="what is gathered together is found in the model: its layers"
    ),
    "stage3_use_all_reduce_for_fetch_params": Key(
        "switch", False, hint="the collective is chosen by what is exchanged"
    ),
    "stage3_allgather_sequential": Key("switch", False, hint="layers are gathered one after another"),
    "round_robin_gradients": Key("switch", False, hint=_NO_NUMERICS),
    "reduce_scatter": Key("switch", True, hint="ZeRO here always sums a rank's shard only"),
    "allgather_partitions": Key("switch", True, hint="the collective is chosen by what is exchanged"),
    "use_multi_rank_bucket_allreduce": Key("switch", True, hint="the collective is chosen by what is exchanged"),
    "compute_grad_norm": Key("switch", True, hint="the norm is always known: StepResult.grad_norm"),
    "load_from_fp32_weights": Key("switch", True, hint="checkpoints have a form of their own"),
    "elastic_checkpoint": Key("switch", False, hint="checkpoints have a form of their own"),
    "pipeline_loading_checkpoint": Key("switch", False, hint="checkpoints have a form of their own"),
    "ignore_unused_parameters": Key(
        "switch", True, hint="parameters that no rank used are found in every step, and left alone"
    ),
    "legacy_stage1": Key("switch", False, hint=_NO_NUMERICS),
    "parameter_alignment": Key("switch", False, hint=_NO_NUMERICS),
    "memory_efficient_linear": Key("switch", True, hint="modules keep their own forward"),
    "override_module_apply": Key("switch", True, hint="the whole model is built, then cut"),
    "log_trace_cache_warnings": Key("switch", False, hint="nothing is traced"),
    "enable_sanity_checks": Key("switch", False, hint="ranks always check that they agree"),
    "save_muon_momentum_buffer_in_memory": Key("switch", False, hint="the optimizer is torch's own, on every device"),
    "leaf_module": Key("any", hint="what is gathered together is found in the model: its layers"),
    "cpu_offload_use_pin_memory": Key("switch", True, hint=_NO_NUMERICS),
    "cpu_offload_param": Key("switch", False, only="parameters stay on their device"),
    "zenflow": Key("any", only="an optimizer that lags behind gives other numbers"),
    "zero_hpz_partition_size": Key("count", 1),
    "mics_shard_size": Key("whole", -1),
    "mics_hierarchical_params_gather": Key("switch", False, hint="a gather stays inside the shard's neighbours"),
    "zero_quantized_weights": Key("switch", False, only="quantized weights give other numbers"),
    "zero_quantized_nontrainable_weights": Key("switch", False, only="quantized weights give other numbers"),
    "zero_quantized_gradients": Key("switch", False, only="quantized gradients give other numbers"),
    "zeropp_loco_param": Key("any", only="quantized gradients give other numbers"),
    "offload_optimizer.device": Key("text", "none"),
    "offload_optimizer.nvme_path": Key("text", hint="nothing is swapped to a disk"),
    "offload_optimizer.buffer_count": Key("count", 4, hint=_NO_NUMERICS),
    "offload_optimizer.pin_memory": Key("switch", True, hint=_NO_NUMERICS),
    "offload_optimizer.pipeline": Key("switch", False, hint=_NO_NUMERICS),
    "offload_optimizer.pipeline_read": Key("switch", False, hint=_NO_NUMERICS),
    "offload_optimizer.pipeline_write": Key("switch", False, hint=_NO_NUMERICS),
    "offload_optimizer.fast_init": Key("switch", False, hint=_NO_NUMERICS),
    "offload_optimizer.ratio": Key("number", 1.0, only="the whole state of a rank's shards is offloaded, or none"),
    "offload_optimizer.super_offload": Key(
        "switch", False, only="the optimizer waits for all gradients, as on one device"
    ),
    "offload_optimizer.cpuadam_cores_perc": Key(
        "number", 0.8, hint="torch's threads are the rank's share of the cores"
    ),
    "offload_param.device": Key("text", "none"),
    "offload_param.nvme_path": Key("text", hint="nothing is swapped to a disk"),
    "offload_param.buffer_count": Key("count", 5, hint=_NO_NUMERICS),
    "offload_param.buffer_size": Key("count", 100_000_000, hint=_NO_NUMERICS),
    "offload_param.max_in_cpu": Key("count", 1_000_000_000, hint=_NO_NUMERICS),
    "offload_param.pin_memory": Key("switch", True, hint=_NO_NUMERICS),
}

_FP16_IS_OFF: Final = "for fp16, which is off"

_OTHERS: Final[Mapping[str, Mapping[str, Key]]] = {
    "pipeline": {
        "stages": Key("any", "auto"),
        "partition": Key("text", "best"),
        "seed_layers": Key(
            "switch", False, hint="the whole model is built under one seed, so its cut changes no first value"
        ),
        "activation_checkpoint_interval": Key("count", 0),
        "pipe_partitioned": Key("switch", True, hint=_NO_NUMERICS),
        "grad_partitioned": Key("switch", True, hint=_NO_NUMERICS),
        "use_reentrant": Key(
            "switch", True, hint="recompute is torch's non-reentrant one, which also sees keyword arguments"
        ),
        # DeepSpeed copies these three keys and never reads them.
        "activation_checkpointing": Key("switch", False),
        "partition_activations": Key("switch", False),
        "contiguous_memory_optimization": Key("switch", False),
    },
    "activation_checkpointing": {
        "partition_activations": Key("switch", False),
        "cpu_checkpointing": Key("switch", False),
        "contiguous_memory_optimization": Key("switch", False),
        "number_checkpoints": Key("any"),
        "synchronize_checkpoint_boundary": Key("switch", False, hint="for timing only"),
        "profile": Key("switch", False, hint="for timing only"),
    },
    "fp16": {
        "enabled": Key("switch", False),
        "auto_cast": Key("switch", False, hint=_FP16_IS_OFF),
        "loss_scale": Key("number", 0, hint=_FP16_IS_OFF),
        "initial_scale_power": Key("count", 16, hint=_FP16_IS_OFF),
        "loss_scale_window": Key("count", 1000, hint=_FP16_IS_OFF),
        "hysteresis": Key("count", 2, hint=_FP16_IS_OFF),
        "consecutive_hysteresis": Key("switch", False, hint=_FP16_IS_OFF),
        "min_loss_scale": Key("number", 1, hint=_FP16_IS_OFF),
        "fp16_master_weights_and_grads": Key("switch", False, hint=_FP16_IS_OFF),
    },
    "bf16": {
        "enabled": Key("switch", False),
        "immediate_grad_update": Key(
            "switch", False, hint="gradients are added up in the parameters' own dtype at once"
        ),
        "check_grad_overflow": Key(
            "switch", True, hint="every gradient is checked; train.non_finite says what follows"
        ),
        "bf16_master_weights_and_grads": Key(
            "switch", False, only="parameters and gradients keep their full precision"
        ),
        "bf16_optimizer_states": Key("switch", False, only="the optimizer's state keeps its full precision"),
    },
    "torch_autocast": {
        "enabled": Key("switch", False),
        "dtype": Key("text"),
        "lower_precision_safe_modules": Key("list", only="torch.autocast's own list decides"),
    },
    "tensor_parallel": {
        "autotp_size": Key("count", 0),
        "tp.tp_size": Key("count", 1),
        "tp.tp_grain_size": Key("count", 1, hint="what is cut is found in the model, and proven"),
        "tp_overlap_comm": Key("switch", False, hint="the plan's overlap decides"),
        "dtype": Key("text", hint="the model's own"),
        "preset_model": Key("text", hint="what is cut is found in the model, and proven"),
        "vocab_parallel_lm_head": Key("switch", hint="what is cut is found in the model, and proven"),
        "vocab_parallel_ce_backend": Key("text", "torch", hint="torch's own operations"),
        "partition_config": Key("any", only="what is cut is found in the model; a saved plan's layouts override it"),
        "injection_policy_tuple": Key(
            "any", only="what is cut is found in the model; a saved plan's layouts override it"
        ),
        "keep_module_on_host": Key("switch", False, hint=_NO_NUMERICS),
        "replace_with_kernel_inject": Key("switch", False, only="modules keep their own kernels"),
    },
    "data_types": {
        "grad_accum_dtype": Key("text"),
        "param_dtype": Key("text", only="parameters keep the model's own dtype"),
        "buffer_dtype": Key("text", only="buffers keep the model's own dtype"),
        "keep_in_fp32_modules": Key("any", "auto", hint="parameters keep the model's own dtype"),
    },
    "compile": {
        "deepcompile": Key("switch", False, only="the model is passed as it should run"),
        **{
            name: Key("any", hint="for DeepCompile, which is off")
            for name in (
                "autoep_non_moe",
                "free_activation",
                "free_activation_threshold",
                "offload_activation",
                "offload_activation_pin_memory",
                "offload_opt_states",
                "offload_parameters",
                "double_buffer",
                "symmetric_memory",
                "debug_log",
                "sync_before_reduce",
                "sync_after_reduce",
                "sync_before_allgather",
                "sync_after_allgather",
                "keep_int_input_tensors",
                "keep_all_input_tensors",
                "passes",
            )
        },
    },
    "comms_logger": {
        name: Key("any", hint="every collective is counted; record.json has the bytes sent")
        for name in ("enabled", "verbose", "prof_all", "debug", "prof_ops")
    },
}

KEYS: Final[Mapping[str, Key]] = {
    **_TOP,
    **{f"zero_optimization.{name}": key for name, key in _ZERO.items()},
    **{f"{block}.{name}": key for block, keys in _OTHERS.items() for name, key in keys.items()},
    "optimizer.type": Key("text"),
    "optimizer.legacy_fusion": Key("switch", False, hint="the optimizer is torch's own, on every device"),
    "scheduler.type": Key("text"),
}

FREE_BLOCKS: Final = ("optimizer.params", "scheduler.params")
"""Objects whose keys are an optimizer's or a scheduler's arguments."""

BLOCKS: Final = frozenset(
    {".".join(parts[:depth]) for parts in (key.split(".") for key in KEYS) for depth in range(1, len(parts))}
    | set(FREE_BLOCKS)
)

REFUSED_IF_ENABLED: Final[Mapping[str, str]] = {
    "amp": "NVIDIA's apex is not used",
    "flops_profiler": "there is no FLOPs profiler",
    "tensorboard": "events are written to events.jsonl only",
    "wandb": "events are written to events.jsonl only",
    "csv_monitor": "events are written to events.jsonl only",
    "comet": "events are written to events.jsonl only",
    "elasticity": "the number of devices is the plan's",
    "data_efficiency": "samples come as the dataset gives them",
    "curriculum_learning": "samples come as the dataset gives them",
    "progressive_layer_drop": "the model's own layers all run",
    "eigenvalue": "there is no quantization that would need them",
    "hybrid_engine": "a run only trains",
    "expert_parallel": "there is no expert axis",
    "compression_training": "the model's own layers are trained, not compressed ones",
    "quantize_training": "the model's own layers are trained, not quantized ones",
    "nebula": "checkpoints have a form of their own",
}
"""Blocks that are off unless they say "enabled": true, and why they cannot be on."""

REFUSED: Final[Mapping[str, str]] = {
    "sparse_attention": "the model's own attention is used",
    "weight_quantization": "the model's own weights are trained",
}
"""Blocks that are on where they are there, and why they cannot be."""

ALIASES: Final[Mapping[str, str]] = {
    "bfloat16": "bf16",
    **{
        f"zero_optimization.{old}": f"zero_optimization.stage3_{old}"
        for old in (
            "prefetch_bucket_size",
            "param_persistence_threshold",
            "model_persistence_threshold",
            "max_live_parameters",
            "max_reuse_distance",
            "gather_16bit_weights_on_model_save",
            "module_granularity_threshold",
            "use_all_reduce_for_fetch_params",
            "allgather_sequential",
        )
    },
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": (
        "zero_optimization.stage3_gather_16bit_weights_on_model_save"
    ),
    "tensor_parallel.tensor_parallel": "tensor_parallel.tp",
    "tensor_parallel.kernel_inject": "tensor_parallel.replace_with_kernel_inject",
}
"""Other spellings that DeepSpeed reads."""
