"""plan/deepspeed*.py: what of a DeepSpeed configuration cannot be honoured is refused with a fix that works."""

import re

import pytest
from tests.unit.plan.deepspeed_files import BATCH, apply_fix, optimizer, read, scheduler, zero

from meshwright.errors import ConfigError
from meshwright.plan.deepspeed.reader import read_deepspeed

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
