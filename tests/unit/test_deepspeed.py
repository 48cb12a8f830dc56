"""plan/deepspeed*.py: every key of a DeepSpeed configuration is honoured, or refused with a fix that works."""

import json
import re
from pathlib import Path

import pytest

from meshwright.errors import ConfigError
from meshwright.plan.deepspeed import Resolution, Settings, parse_text, read_deepspeed
from meshwright.plan.deepspeed_keys import BLOCKS, KEYS, REFUSED_IF_ENABLED

EXAMPLE = Path(__file__).parents[1] / "data" / "ds_pipeline_zero3.json"
BATCH = {"train_micro_batch_size_per_gpu": 4}


def read(entries=None, *, devices=4, **settings):
    return read_deepspeed(
        {**BATCH, **(entries or {})}, name="ds.json", num_devices=devices, settings=Settings(**settings)
    )


def zero(stage=3, **entries):
    return {"zero_optimization": {"stage": stage, **entries}}


def optimizer(kind, **params):
    return {"optimizer": {"type": kind, "params": params}}


def scheduler(kind, **params):
    return {"scheduler": {"type": kind, "params": params}}


def row(resolution, key):
    (found,) = [row for row in resolution.rows if row.key == key]
    return found


def merge(entries, others):
    for key, value in others.items():
        both = isinstance(value, dict) and isinstance(entries.get(key), dict)
        entries[key] = merge(dict(entries[key]), value) if both else value
    return entries


def apply_fix(entries, devices, fix):
    """Do to the file, or to the command line, what a fix says."""
    entries = json.loads(json.dumps(entries))
    for part in fix.split("; "):
        if part.startswith("--devices "):
            devices = int(part.removeprefix("--devices "))
        elif part.startswith('leave out "'):
            *blocks, last = part.removeprefix('leave out "').removesuffix('"').split(".")
            block = entries
            for name in blocks:
                block = block[name]
            del block[last]
        else:
            merge(entries, json.loads(f"{{{part}}}"))
    return entries, devices


# -- the text ---------------------------------------------------------------------------------------------------------


def test_comments_and_trailing_commas_pass():
    text = """\ufeff{
      // a line   # with another
      "a": [1, 2,], /* over
      lines, with "quotes" and , } */
      "b": "// no comment, # neither, /* nor */ ,]",  # the end
      "c": {"d": "\\",}",},
    }"""
    assert parse_text(text, "ds.json") == {
        "a": [1, 2],
        "b": "// no comment, # neither, /* nor */ ,]",
        "c": {"d": '",}'},
    }


@pytest.mark.parametrize("text", ['{"a": 1, "a": 2}', '{"b": {"a": 1, /* */ "a": 1}}'])
def test_a_key_given_twice_is_an_error(text):
    with pytest.raises(ConfigError, match=r'ds\.json: "a" is given twice'):
        parse_text(text, "ds.json")


def test_an_error_of_the_text_has_its_place():
    with pytest.raises(ConfigError, match="line 3, column 3"):
        parse_text('{ # one\n  "a": 1,\n  b: 2\n}', "ds.json")
    for text in ("[1]", "", "{'a': 1}", "[" * 100_000):
        with pytest.raises(ConfigError, match=r"ds\.json"):
            parse_text(text, "ds.json")


# -- the example of the issue -----------------------------------------------------------------------------------------


def test_a_bucket_of_zero_2_in_a_pipeline_has_nothing_to_size():
    entries = {"train_batch_size": 8, "pipeline": {"stages": 2}, **zero(2, reduce_bucket_size=5e6)}
    resolution = read_deepspeed(entries, num_devices=4)
    assert (resolution.plan.pp, resolution.plan.bucket_bytes) == (2, None)
    assert "at the end of the step" in row(resolution, "zero_optimization.reduce_bucket_size").why


@pytest.mark.parametrize(
    ("devices", "degrees", "batch"),
    [(1, (1, 1), 128), (2, (1, 2), 128), (3, (1, 3), 128), (4, (2, 2), 256), (8, (4, 2), 512), (7, (7, 1), 896)],
)
def test_the_example_of_the_issue(devices, degrees, batch):
    entries = parse_text(EXAMPLE.read_text(), EXAMPLE.name)
    resolution = read_deepspeed(entries, num_devices=devices, settings=Settings(hidden_size=128))
    plan = resolution.plan
    assert (plan.dp, plan.pp) == degrees
    assert (plan.zero, plan.micro_batches, plan.micro_batch_size) == (3, 8, 16)
    assert (plan.recompute, plan.overlap, plan.whole_below) == ("full", True, 10 * 128 * 4)
    assert dict(resolution.changes["train"]) == {"global_batch_size": batch, "print_every": 100, "max_grad_norm": 1.0}
    told = {row.key for row in resolution.rows}
    assert {f"zero_optimization.{key}" for key in entries["zero_optimization"]} <= told
    assert {f"pipeline.{key}" for key in entries["pipeline"]} <= told
    assert row(resolution, "zero_optimization.reduce_bucket_size").resolved.startswith("16,384 elements")
    assert row(resolution, "zero_optimization.stage3_prefetch_bucket_size").resolved.startswith("14,745 elements")
    for key in entries["pipeline"]:
        assert row(resolution, f"pipeline.{key}").why.startswith("warning: DeepSpeed ignores this key here")
    refused = "DeepSpeed refuses ZeRO-3 with a pipeline" in row(resolution, "zero_optimization.stage").why
    assert refused == (plan.pp > 1)


def test_without_a_width_auto_is_deepspeeds_default():
    entries = parse_text(EXAMPLE.read_text(), EXAMPLE.name)
    resolution = read_deepspeed(entries, num_devices=2)
    for name, elements in (
        ("reduce_bucket_size", "500,000,000"),
        ("stage3_prefetch_bucket_size", "50,000,000"),
        ("stage3_param_persistence_threshold", "100,000"),
    ):
        found = row(resolution, f"zero_optimization.{name}")
        assert f"{elements} elements" in found.resolved
        assert "auto: DeepSpeed's default, since the model names no hidden_size" in found.why
    assert resolution.plan.whole_below == 400_000


def test_a_resolution_survives_json():
    resolution = read(parse_text(EXAMPLE.read_text(), "x"))
    assert Resolution.from_json(resolution.to_json()) == resolution


# -- the batch --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "devices", "expected"),
    [
        ((256, 16, 8), 2, (256, 16, 8)),
        ((256, 16, None), 2, (256, 16, 8)),
        ((256, None, 8), 2, (256, 16, 8)),
        ((None, 16, 8), 2, (256, 16, 8)),
        ((256, None, None), 2, (256, 128, 1)),
        ((None, 16, None), 2, (32, 16, 1)),
    ],
)
def test_two_numbers_of_the_batch_give_the_third(given, devices, expected):
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    entries = {key: value for key, value in zip(keys, given, strict=True) if value is not None}
    resolution = read_deepspeed(entries, num_devices=devices)
    plan = resolution.plan
    found = (resolution.changes["train"]["global_batch_size"], plan.micro_batch_size, plan.micro_batches)
    assert found == expected
    assert [row(resolution, key).given == "-" for key in keys] == [value is None for value in given]


def test_three_numbers_and_no_devices_say_how_many():
    entries = {
        "train_batch_size": 96,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 8,
        "pipeline": {},
    }
    assert str(read_deepspeed(entries, available=8).plan).startswith("dp=3,pp=2,")
    assert str(read_deepspeed(entries, available=2).plan).startswith("dp=3,micro_batches")
    # Six devices leave two for each of the three ranks, by the same numbers.
    plan = read_deepspeed(entries, num_devices=6).plan
    assert (plan.dp, plan.pp) == (3, 2)
    del entries["pipeline"]
    assert read_deepspeed(entries, available=8).plan.num_devices == 3


def test_free_devices_are_used_as_far_as_the_batch_divides():
    assert read_deepspeed({"train_batch_size": 32}, available=3).plan.dp == 2
    assert read_deepspeed({"train_batch_size": 32, "gradient_accumulation_steps": 16}, available=8).plan.dp == 2


def test_auto_and_nothing_take_the_configurations_batch():
    auto = dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto")
    for entries in (auto, {"gradient_accumulation_steps": "auto"}):
        plan = read_deepspeed(entries, num_devices=2, settings=Settings(global_batch_size=64, micro_batches=4)).plan
        assert (plan.micro_batch_size, plan.micro_batches) == (8, 4)
    # What the file says beats the configuration.
    resolution = read_deepspeed(BATCH, num_devices=2, settings=Settings(global_batch_size=64))
    assert resolution.changes["train"]["global_batch_size"] == 8
    with pytest.raises(ConfigError, match='neither "train_batch_size" nor "train_micro_batch_size_per_gpu"'):
        read_deepspeed({"gradient_accumulation_steps": 2}, num_devices=2)


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


# -- every key ----------------------------------------------------------------------------------------------------------


def sample(key):
    """A value that a key may have: its default, or something of its kind."""
    known = KEYS[key]
    samples = {
        "positive": 1,
        "count": 1,
        "whole": -1,
        "number": 1.0,
        "switch": False,
        "text": "fp32",
        "list": [],
        "any": 1,
    }
    special = {
        "optimizer.type": "AdamW",
        "scheduler.type": "WarmupLR",
        "train_micro_batch_size_per_gpu": 4,
        "train_batch_size": 16,
    }
    if key in special:
        return special[key]
    return known.default if known.default is not None else samples[known.kind]


def nested(key, value):
    for name in reversed(key.split(".")):
        value = {name: value}
    return value


@pytest.mark.parametrize("key", [key for key in KEYS if not (KEYS[key].only and KEYS[key].default is None)])
def test_every_key_has_its_row(key):
    resolution = read(nested(key, sample(key)))
    found = row(resolution, key)
    assert found.given == json.dumps(sample(key))
    assert found.resolved
    assert len(found.why) > 3
    if key not in ("optimizer.type", "scheduler.type", "train_micro_batch_size_per_gpu"):
        assert row(read(nested(key, "auto")), key).given == '"auto"'


def test_a_key_is_one_of_three():
    assert not set(KEYS) & set(BLOCKS)
    for key, known in KEYS.items():
        assert not (known.hint and known.only), key


def test_comments_as_keys_are_named():
    assert row(read({"_comment": "mine"}), "_comment").why == "a comment"


@pytest.mark.parametrize("name", [*REFUSED_IF_ENABLED])
def test_what_is_switched_off_passes(name):
    assert row(read({name: {"enabled": False, "more": 3}}), name).why == "switched off"


# -- what cannot be honoured ------------------------------------------------------------------------------------------

REFUSALS = [
    (
        {"train_batch_size": 100, "gradient_accumulation_steps": 3},
        'is 100, and micro-batch x accumulation x dp is 4 x 3 x 4 = 48',
    ),
    ({"train_batch_size": 2}, 'is 2, and micro-batch x accumulation x dp is 4 x 1 x 4 = 16'),
    ({"train_micro_batch_size_per_gpu": 0}, "at least 1"),
    ({"train_micro_batch_size_per_gpu": "4"}, '"4" \\(rule: a whole number'),
    ({"train_batch_size": 16.5}, "a whole number"),
    ({"managed_gradient_accumulation": False}, "counts the micro-batches"),
    ({"steps_per_print": 0}, "at least 1"),
    ({"steps_per_print": float("nan")}, "at least 1"),
    ({"gradient_clipping": float("inf")}, "a number"),
    (scheduler("WarmupLR", warmup_num_steps=float("inf")), "at least 1"),
    ({"bf16": True}, "an object"),
    (zero("3"), "a whole number"),
    ({"expert_parallel": {"enabled": True}}, "expert axis"),
    ({"wandb": {"enabled": True}}, "events.jsonl"),
    ({"gradient_clipping": -1}, "at least 0"),
    ({"gradient_clipping": True}, "a number"),
    ({"gradient_allreduce_op": "sum"}, "the mean over its samples"),
    ({"communication_data_type": "fp16"}, "fp32 or bf16"),
    ({"fp16": {"enabled": True}}, "there is no loss scaling"),
    ({"bf16": {"bf16_optimizer_states": True}}, "full precision"),
    ({"bf16": {"bf16_master_weights_and_grads": True}}, "full precision"),
    ({"torch_autocast": {"enabled": True, "dtype": "float16"}}, "bfloat16"),
    ({"torch_autocast": {"enabled": True, "lower_precision_safe_modules": ["torch.nn.Linear"]}}, "own list"),
    ({"data_types": {"grad_accum_dtype": "fp23"}}, "did you mean 'fp32'"),
    ({"amp": {"enabled": True, "opt_level": "O1"}}, "apex"),
    ({"compression_training": {"weight_quantization": {"shared_parameters": {"enabled": True}}}}, "compressed"),
    ({"sparse_attention": {"mode": "fixed"}}, "own attention"),
    (zero(4), "0, 1, 2 or 3"),
    (zero(0, reduce_bucket_size=0), "at least 1 element"),
    (zero(3, zero_quantized_weights=True), "quantized weights give other numbers"),
    (zero(3, zero_quantized_nontrainable_weights=True), "quantized weights give other numbers"),
    (zero(3, zero_quantized_gradients=True), "quantized gradients give other numbers"),
    (zero(3, zeropp_loco_param={"err_beta": 0.8}), "quantized gradients"),
    (zero(3, zenflow={"topk_ratio": 0.1}), "lags behind"),
    (zero(3, mics_shard_size=3), "divides dp"),
    (zero(0, mics_shard_size=2), "with stage 0"),
    (zero(3, zero_hpz_partition_size=8), "divides dp"),
    (zero(0, offload_optimizer={"device": "cpu"}), "with stage 0"),
    (zero(3, offload_optimizer={"device": "nvme", "nvme_path": "/x"}), "not on a disk"),
    (zero(3, offload_optimizer={"device": "cpu", "ratio": 0.3}), "the whole state"),
    (zero(3, offload_param={"device": "cpu"}), "parameters stay on their device"),
    ({"zero_optimization": 3}, "an object"),
    ({"zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 1, "prefetch_bucket_size": 1}}, "are one key"),
    ({"tensor_parallel": {"autotp_size": 3}}, "does not divide 4 devices"),
    ({"tensor_parallel": {"autotp_size": 2, "tp": {"tp_size": 4}}}, "they are equal"),
    ({"tensor_parallel": {"partition_config": {"use_default_specs": True}}}, "found in the model"),
    ({"pipeline": {"stages": 3}}, "pp = 1 x 1 x 3 = 3 does not divide 4 devices"),
    ({"pipeline": {"stages": 0}}, "at least 1"),
    ({"pipeline": {"stages": 2, "partition": "type:Block"}}, "balanced by what their layers cost"),
    ({"pipeline": {"partition": "uniform"}}, "balanced by what their layers cost"),
    (
        {"pipeline": {"activation_checkpointing": True}, "activation_checkpointing": {"cpu_checkpointing": True}},
        "saved activations stay",
    ),
    (optimizer("Lamb", lr=0.1), "known: Adam, AdamW"),
    (optimizer("OneBitAdam", lr=0.1, freeze_step=3), "known: Adam, AdamW"),
    ({"optimizer": {"params": {"lr": 0.1}}}, "type\" is missing"),
    (optimizer("Adam", lr=0.1, max_grad_norm=1.0), "gradient_clipping"),
    (optimizer("Adam", lr=-0.1), "at least 0"),
    (optimizer("Adam", betas=[0.9]), "two numbers"),
    (optimizer("Adam", bias_correction=False), "always corrects"),
    (optimizer("AdamW", wieght_decay=0.1), "did you mean 'weight_decay'"),
    (scheduler("OneCycle", cycle_min_lr=0.1), "known: WarmupLR"),
    (scheduler("WarmupLr"), "did you mean 'WarmupLR'"),
    (scheduler("WarmupDecayLR", warmup_max_lr=0.1), "total_num_steps\" is missing"),
    (scheduler("WarmupLR", warmup_max_lr=0.001, warmup_min_lr=0.1), "min <= max"),
    (scheduler("WarmupLR", warmup_num_step=3), "did you mean 'warmup_num_steps'"),
    (scheduler("WarmupLR", warmup_type="cubic"), "log"),
    (scheduler("WarmupLR", last_batch_iteration=5), "starts at its first step"),
    ({"train_batchsize": 4}, "did you mean 'train_batch_size'"),
    ({"stage": 3}, "it belongs to zero_optimization.stage"),
    (zero(3, overlap_com=True), "did you mean 'overlap_comm'"),
    ({"pipeline": {"stage": 2}}, "did you mean 'stages'|belongs to"),
    ({"nonsense": 1}, 'unknown key "nonsense"'),
]  # fmt: skip


@pytest.mark.parametrize(("entries", "words"), REFUSALS, ids=lambda value: str(value)[:60])
def test_a_refusal_has_a_fix_that_works(entries, words):
    entries = {**BATCH, **entries}
    with pytest.raises(ConfigError, match=words) as caught:
        read_deepspeed(entries, name="ds.json", num_devices=4)
    assert str(caught.value).startswith("ds.json: ")
    # A fix may bring out the next problem (another optimizer has other arguments), and its fix the end.
    devices = 4
    for _ in range(3):
        entries, devices = apply_fix(entries, devices, caught.value.fix)
        error = refusal_of(entries, devices)
        if error is None:
            return
        assert not re.search(words, error.message), "the same problem again"
        caught.value.fix = error.fix
    pytest.fail(f"after three fixes: {entries}")


def refusal_of(entries, devices):
    try:
        plan = read_deepspeed(entries, name="ds.json", num_devices=devices).plan
    except ConfigError as error:
        return error
    assert plan.num_devices == devices
    return None


def test_all_problems_are_told_at_once():
    entries = {**zero(3, zero_quantized_weights=True), "fp16": {"enabled": True}, "nonsense": 1}
    with pytest.raises(ConfigError, match="3 problems") as caught:
        read(entries)
    fixed, _ = apply_fix({**BATCH, **entries}, 4, caught.value.fix)
    assert read_deepspeed(fixed, num_devices=4).plan.precision == "bf16"


def test_a_file_of_something_else_is_no_plan():
    with pytest.raises(ConfigError, match="no key of a DeepSpeed configuration"):
        read_deepspeed({})
