"""plan/deepspeed*.py: what each key of a DeepSpeed configuration decides."""

import pytest
from tests.unit.plan.deepspeed_files import apply_fix, optimizer, read, row, scheduler, zero

from meshwright.errors import ConfigError
from meshwright.plan.deepspeed.reader import Settings, read_deepspeed

# -- every key that decides something ---------------------------------------------------------------------------------

PERSISTENCE = [f"zero_optimization.stage3_{what}_persistence_threshold" for what in ("param", "model")]
TO_PLAN = [
    ({"tensor_parallel": {"autotp_size": 2}}, {"dp": 2, "tp": 2}, "tensor_parallel.autotp_size"),
    ({"tensor_parallel": {"autotp_size": 0}}, {"dp": 4, "tp": 1}, "tensor_parallel.autotp_size"),
    ({"tensor_parallel": {"tp": {"tp_size": 4}}}, {"dp": 1, "tp": 4}, "tensor_parallel.tp.tp_size"),
    ({"sequence_parallel_size": 2}, {"dp": 2, "cp": 2}, "sequence_parallel_size"),
    ({"pipeline": {"stages": 4}}, {"dp": 1, "pp": 4}, "pipeline.stages"),
    ({"pipeline": {"stages": "auto"}}, {"dp": 2, "pp": 2}, "pipeline.stages"),
    ({"pipeline": {"activation_checkpointing": True}}, {"recompute": "full"}, "pipeline.activation_checkpointing"),
    ({"pipeline": {"activation_checkpointing": False}}, {"recompute": "none"}, "pipeline.activation_checkpointing"),
    ({"pipeline": {"activation_checkpoint_interval": 2}}, {"recompute": "full"}, "pipeline.activation_checkpoint_interval"),
    ({"pipeline": {"activation_checkpoint_interval": 0}}, {"recompute": "none"}, "pipeline.activation_checkpoint_interval"),
    (zero(0), {"zero": 0, "overlap": True}, "zero_optimization.stage"),
    (zero(1), {"zero": 1, "overlap": False}, "zero_optimization.overlap_comm"),
    (zero(2), {"zero": 2, "overlap": False}, "zero_optimization.overlap_comm"),
    (zero(3), {"zero": 3, "overlap": True}, "zero_optimization.overlap_comm"),
    ({"zero_optimization": True}, {"zero": 1}, "zero_optimization.stage"),
    ({"zero_optimization": False}, {"zero": 0}, "zero_optimization.stage"),
    (zero(2, overlap_comm=True), {"overlap": True}, "zero_optimization.overlap_comm"),
    (zero(3, overlap_comm=False), {"overlap": False}, "zero_optimization.overlap_comm"),
    (zero(2, overlap_comm="auto"), {"overlap": False}, "zero_optimization.overlap_comm"),
    (zero(0, reduce_bucket_size=5e8), {"bucket_bytes": 2_000_000_000}, "zero_optimization.reduce_bucket_size"),
    (zero(1, reduce_bucket_size=5e8), {"bucket_bytes": None}, "zero_optimization.reduce_bucket_size"),
    (zero(2, reduce_bucket_size=5e6), {"bucket_bytes": 20_000_000}, "zero_optimization.reduce_bucket_size"),
    (zero(3, reduce_bucket_size=5e8), {"bucket_bytes": None}, "zero_optimization.reduce_bucket_size"),
    (zero(2, allgather_bucket_size=5e8), {"bucket_bytes": None}, "zero_optimization.allgather_bucket_size"),
    (zero(3, stage3_prefetch_bucket_size=0), {"overlap": False}, "zero_optimization.stage3_prefetch_bucket_size"),
    (zero(2, stage3_prefetch_bucket_size=0), {"overlap": False}, "zero_optimization.stage3_prefetch_bucket_size"),
    (zero(3, prefetch_bucket_size=5e7), {"overlap": True}, "zero_optimization.stage3_prefetch_bucket_size"),
    (zero(3, stage3_param_persistence_threshold=1e5), {"whole_below": 400_000}, PERSISTENCE[0]),
    (zero(2, stage3_param_persistence_threshold=1e5), {"whole_below": None}, PERSISTENCE[0]),
    (
        zero(3, stage3_param_persistence_threshold=1e5, stage3_model_persistence_threshold=1e6),
        {"whole_below": 0},
        PERSISTENCE[1],
    ),
    (zero(3, stage3_model_persistence_threshold=2**63 - 1), {"whole_below": None}, PERSISTENCE[1]),
    (zero(3, mics_shard_size=2), {"shard": 2}, "zero_optimization.mics_shard_size"),
    (zero(3, mics_shard_size=-1), {"shard": None}, "zero_optimization.mics_shard_size"),
    (zero(3, zero_hpz_partition_size=2), {"shard": 2}, "zero_optimization.zero_hpz_partition_size"),
    (zero(3, zero_hpz_partition_size=1), {"shard": None}, "zero_optimization.zero_hpz_partition_size"),
    (zero(1, offload_optimizer={"device": "cpu"}), {"offload": "optimizer"}, "zero_optimization.offload_optimizer.device"),
    (zero(2, cpu_offload=True), {"offload": "optimizer"}, "zero_optimization.offload_optimizer.device"),
    (zero(2, offload_optimizer={"device": "none"}), {"offload": "none"}, "zero_optimization.offload_optimizer.device"),
    ({"bf16": {"enabled": True}}, {"precision": "bf16"}, "bf16.enabled"),
    ({"bfloat16": {"enabled": True}}, {"precision": "bf16"}, "bf16.enabled"),
    ({"bf16": {"enabled": "auto"}}, {"precision": "fp32"}, "bf16.enabled"),
    ({"fp16": {"enabled": "auto", "loss_scale": 0}}, {"precision": "fp32"}, "fp16.enabled"),
    ({"torch_autocast": {"enabled": True, "dtype": "torch.bfloat16"}}, {"precision": "bf16"}, "torch_autocast.enabled"),
    ({"communication_data_type": "bf16"}, {"compress": "bf16"}, "communication_data_type"),
    ({"communication_data_type": "fp32"}, {"compress": "none"}, "communication_data_type"),
]  # fmt: skip


@pytest.mark.parametrize(("entries", "fields", "key"), TO_PLAN, ids=lambda value: str(value)[:60])
def test_keys_that_decide_the_plan(entries, fields, key):
    resolution = read(entries)
    assert {name: getattr(resolution.plan, name) for name in fields} == fields
    assert row(resolution, key).why


TO_TRAINING = [
    ({}, "train", {"max_grad_norm": 1.0, "global_batch_size": 16}),
    ({"gradient_clipping": 0}, "train", {"max_grad_norm": None}),
    ({"gradient_clipping": 0.5}, "train", {"max_grad_norm": 0.5}),
    ({"gradient_clipping": "auto"}, "train", {"max_grad_norm": 1.0}),
    ({"steps_per_print": 100}, "train", {"print_every": 100}),
    ({"steps_per_print": 1e1}, "train", {"print_every": 10}),
    ({"steps_per_print": None}, "train", {"print_every": 0}),
    ({"steps_per_print": float("inf")}, "train", {"print_every": 0}),
    ({"seed": 7}, "train", {"seed": 7}),
    ({"dataloader_drop_last": True}, "data", {"drop_last": True}),
    (
        optimizer("Adam", lr=2e-4, betas=[0.8, 0.99], eps=1e-6, weight_decay=0.1),
        "optimizer",
        {"name": "adamw", "lr": 2e-4, "betas": (0.8, 0.99), "weight_decay": 0.1, "kwargs": {"eps": 1e-6}},
    ),
    (optimizer("AdamW"), "optimizer", {"name": "adamw", "lr": 1e-3, "betas": None, "weight_decay": 0.0}),
    (
        optimizer("adam", adam_w_mode=False, torch_adam=True, bias_correction=True),
        "optimizer",
        {"name": "torch.optim:Adam", "betas": None, "kwargs": {"betas": (0.9, 0.999)}},
    ),
    (
        optimizer("SGD", lr=0.1, momentum=0.9, nesterov=True),
        "optimizer",
        {"name": "sgd", "momentum": 0.9, "kwargs": {"nesterov": True}},
    ),
    (
        optimizer("Adagrad", lr=0.1, lr_decay=0.5),
        "optimizer",
        {"name": "torch.optim:Adagrad", "kwargs": {"lr_decay": 0.5}},
    ),
    (
        scheduler("WarmupLR", warmup_min_lr=1e-4, warmup_max_lr=1e-3, warmup_num_steps=1e2),
        "schedule",
        {"kind": "WarmupLR", "warmup_steps": 100, "warmup_type": "log", "start_fraction": 0.1},
    ),
    (scheduler("WarmupLR", warmup_max_lr=1e-3), "optimizer", {"lr": 1e-3}),
    (
        scheduler("WarmupDecayLR", total_num_steps=50, warmup_num_steps=1, warmup_type="linear"),
        "schedule",
        {"kind": "WarmupDecayLR", "total_steps": 50, "warmup_steps": 2, "warmup_type": "linear"},
    ),
    (
        scheduler("WarmupCosineLR", total_num_steps=50, warmup_min_ratio=0.5),
        "schedule",
        {"kind": "WarmupCosineLR", "start_fraction": 0.5, "min_lr_fraction": 0.0001},
    ),
]


@pytest.mark.parametrize(("entries", "section", "expected"), TO_TRAINING, ids=lambda value: str(value)[:60])
def test_keys_that_change_the_training(entries, section, expected):
    changes = read(entries).changes[section]
    assert {name: changes[name] for name in expected} == expected


def test_auto_takes_the_training_configurations_values():
    entries = {
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        **optimizer("AdamW", lr="auto", betas="auto", eps="auto", weight_decay="auto"),
        **scheduler(
            "WarmupDecayLR", warmup_min_lr="auto", warmup_max_lr="auto", warmup_num_steps="auto", total_num_steps="auto"
        ),
    }
    resolution = read(
        entries,
        max_grad_norm=0.3,
        precision="bf16",
        lr=3e-4,
        betas=(0.9, 0.95),
        weight_decay=0.2,
        steps=70,
        warmup_steps=9,
    )
    changes = resolution.changes
    assert changes["train"]["max_grad_norm"] == 0.3
    assert resolution.plan.precision == "bf16"
    assert dict(changes["optimizer"]) | {"kwargs": {}} == {
        "name": "adamw",
        "lr": 3e-4,
        "betas": (0.9, 0.95),
        "weight_decay": 0.2,
        "momentum": None,
        "kwargs": {},
    }
    schedule = changes["schedule"]
    assert (schedule["warmup_steps"], schedule["total_steps"], schedule["start_fraction"]) == (9, 70, 0.0)
    assert row(resolution, "optimizer.params.lr").why == "auto: the configuration's"
    # Where nobody says, clipping is on as it is in DeepSpeed, and the table says whose number that is.
    assert row(read(), "gradient_clipping").why == "not given: DeepSpeed's default"
    assert read(max_grad_norm=0.3).changes["train"]["max_grad_norm"] == 0.3


def test_the_example_of_transformers_documentation():
    # Everything that the Trainer fills in is "auto"; only parameters in the host's memory are refused.
    cpu = {"device": "cpu", "pin_memory": True}
    entries = {
        "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16},
        "bf16": {"enabled": "auto"},
        **optimizer("AdamW", lr="auto", betas="auto", eps="auto", weight_decay="auto"),
        **scheduler("WarmupLR", warmup_min_lr="auto", warmup_max_lr="auto", warmup_num_steps="auto"),
        **zero(
            3,
            offload_optimizer=cpu,
            offload_param=cpu,
            sub_group_size=1e9,
            reduce_bucket_size="auto",
            stage3_max_live_parameters=1e9,
            stage3_max_reuse_distance=1e9,
            stage3_gather_16bit_weights_on_model_save=True,
        ),
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "steps_per_print": 2000,
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "wall_clock_breakdown": False,
    }
    known = Settings(global_batch_size=32, lr=3e-4, precision="bf16", hidden_size=64, warmup_steps=10, steps=100)
    with pytest.raises(ConfigError, match="parameters stay on their device") as caught:
        read_deepspeed(entries, num_devices=4, settings=known)
    entries, _ = apply_fix(entries, 4, caught.value.fix)
    resolution = read_deepspeed(entries, num_devices=4, settings=known)
    assert str(resolution.plan) == "dp=4,zero=3,precision=bf16,offload=optimizer,micro_batch_size=8"
    assert resolution.changes["optimizer"]["lr"] == 3e-4
    assert resolution.changes["schedule"]["warmup_steps"] == 10


def test_partitioned_activations_are_sequence_parallelism():
    entries = {
        "tensor_parallel": {"autotp_size": 2},
        "pipeline": {"stages": 1, "activation_checkpointing": True, "partition_activations": True},
        "activation_checkpointing": {"partition_activations": True, "number_checkpoints": 4},
    }
    resolution = read(entries)
    assert resolution.plan.uses_sequence_parallel
    assert row(resolution, "activation_checkpointing.partition_activations").resolved == "sequence_parallel=on"
    assert row(read({"pipeline": {"partition_activations": True}}), "pipeline.partition_activations").resolved == "-"


def test_the_block_that_wraps_nothing_wraps_nothing():
    entries = {"activation_checkpointing": {"partition_activations": True, "cpu_checkpointing": True}}
    resolution = read(entries)
    assert resolution.plan.recompute == "none"
    found = row(resolution, "activation_checkpointing.cpu_checkpointing")
    assert found.why.startswith("warning: this block wraps nothing")
