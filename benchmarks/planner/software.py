"""What the software of a published row fuses, overlaps and sends, by what its documents or sources say."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any, Final

from meshwright.plan.costs.setup import StateBytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """Properties of a code base that its rows do not print."""

    fused: bool
    """Bias, activation, norm and rotary in fused or compiled kernels, not one PyTorch operator after the other."""
    native_attention: bool
    """cuDNN's attention, written for the device's generation; not FlashAttention-2 or older."""
    overlaps_tp: bool
    """Sequence parallelism's collectives in pieces, beside their products."""
    sends_slices: bool
    """Stages hand on a slice from each tp rank."""
    accumulated_bytes: float
    """Traffic of one gradient element that a further micro-batch adds [bytes]."""
    attention_speed: float = 1.0
    """Of its fused attention over FlashAttention-2 [ratio]."""
    gathers_low: bool = False
    """Sequence parallelism gathers in fp8 what products in fp8 read."""
    tp_operators: float = 0.0
    """Operators of mean size that an exchange over tp adds beside it [count]."""
    calls_per_layer: float = 1.0
    """Collectives in which ZeRO-3 gathers a layer [count]."""
    bucket_params: tuple[float, float] | None = None
    """Smallest bucket of gradients, and what each data-parallel rank adds to its size; None: a bucket for each layer [count]."""
    sent_gradient_bytes: float = 4.0
    """Of a bf16 model's gradient element as it is reduced [bytes]."""
    states: dict[str, StateBytes] = dataclasses.field(default_factory=dict)
    """Precision -> what it keeps for a parameter; others keep 2, 4 and 12 bytes, and 2, 2 and 12 where gradients are fp16."""
    gathered_bytes: dict[str, float] = dataclasses.field(default_factory=dict)
    """Precision -> size of a parameter's element as ZeRO gathers it, where that is not 2 [bytes]."""
    zero: int = 0
    """Stage of ZeRO that its users have where a row says nothing."""
    cuts_by_shares: bool = False
    """A stage takes blocks until its share of the work is full."""
    cuts_evenly: bool = False
    """Stages have as many blocks each."""
    blocks_on_messages: bool = False
    """Stages wait for each message by itself."""
    waits_for_device_from: float = math.inf
    """GPUs of a job from which its host waits for each kernel [count]."""
    loss_traffic: tuple[float, float] = (16.0, 24.0)
    """What cross-entropy moves for each logit in forward and in backward [bytes]."""
    loss_kept: float = 8.0
    """What it keeps for each logit beside the logits [bytes]."""
    copies_per_rank: float = 0.0
    """Copies that ZeRO-3 issues for each rank of a gathering [count]."""
    keeps_gathered: bool = False
    """Layers that run again keep the whole sequence meanwhile, not slices."""
    selective: str = "selective"
    """What its selective recompute runs again, in the words of `Setup.recompute`."""
    source: str


_MEGATRON_LOSS: Final = (38.0, 14.0)
"""To fp32 (6), maximum (4), difference in place (8), exponential (8), sum (4) and quotient in place (8); then gradients in place
(8) and to 16 bits (6). Source: Megatron-LM, core/tensor_parallel/cross_entropy.py, read 2026-11-24."""

_FUSED_LOSS: Final = (2.0, 4.0)
"""16-bit logits are read once in each pass, and their gradients written. Source: flash-attention, ops/triton/cross_entropy.py and
csrc/xentropy, read 2026-11-27."""

_OLD: Final = Software(
    fused=True,
    native_attention=False,
    overlaps_tp=False,
    sends_slices=True,
    accumulated_bytes=6.0,
    cuts_evenly=True,
    loss_traffic=_MEGATRON_LOSS,
    source=(
        "Megatron-LM of 2020 to 2022: fused bias, GELU, dropout and softmax kernels, scatter and gather of what stages send "
        "(Narayanan et al. 2021, arXiv:2104.04473, sections 4.1 and 4.2), and --no-gradient-accumulation-fusion says the rest"
    ),
)

_EAGER: Final = Software(
    fused=False,
    native_attention=False,
    overlaps_tp=False,
    sends_slices=False,
    accumulated_bytes=10.0,
    source="PyTorch, one operator after the other, with the FlashAttention-2 that it or a package brings",
)

_TORCHTITAN: Final = dataclasses.replace(
    _EAGER,
    states={"bf16": StateBytes(parameter=4.0, gradient=4.0, optimizer=8.0)},
    gathered_bytes={"fp8": 1.0},
    selective="every_other_product",
    loss_kept=10.0,
    keeps_gathered=True,
    source=(
        "torchtitan: FSDP2 shards parameters in fp32 and gathers them in bf16 or fp8 (docs/float8.md); selective recompute of "
        "operators runs every second product again (distributed/activation_checkpoint.py); logits are let go "
        "before backward, in which log-softmax's result and two gradients are in fp32 (train.py, components/loss.py); products "
        "keep the input that they gathered, as PyTorch's ColwiseParallel does (torch.distributed.tensor.parallel)"
    ),
)

_COMPILED_LOSS: Final = {"loss_traffic": (4.0, 6.0), "loss_kept": 2.0}
"""Of torchtitan since January 2025, which compiles its loss, so that logits are never in fp32: components/loss.py,
`build_cross_entropy_loss`."""

_FOUNDRY: Final = dataclasses.replace(
    _EAGER,
    attention_speed=0.55,
    loss_traffic=(34.0, 4.0),
    loss_kept=2.0,
    states={"bf16": StateBytes(parameter=4.0, gradient=4.0, optimizer=8.0)},
    source=(
        "MPT in llm-foundry of 2023 (configuration_mpt.py: attn_impl is triton): FlashAttention-2 is 1.3 to 2.5 times as fast as "
        "Triton's (Dao 2023, arXiv:2307.08691, section 4.1); loss: modeling_mpt.py, loss_fn is "
        "fused_crossentropy, which reads logits once, and train_metrics are two that take PyTorch's of them in fp32 once more"
    ),
)

_NANOTRON: Final = dataclasses.replace(
    _EAGER,
    loss_traffic=_MEGATRON_LOSS,
    cuts_by_shares=True,
    tp_operators=4.0,
    source=(
        "nanotron: blocks go to stages by shares of the work (src/nanotron/models/base.py, build_model); under tp a product is "
        "cut into three beside its gather, and backward gathers again (parallel/tensor_parallel/functional.py; the benchmark's "
        "scripts/scaling_benchmarks.py turns that on): copies, views and buffers of an exchange are counted as four operators; "
        "its loss is Megatron's (_ShardedCrossEntropy)"
    ),
)

_INTERN: Final = dataclasses.replace(
    _EAGER,
    fused=True,
    loss_traffic=_FUSED_LOSS,
    loss_kept=2.0,
    source=(
        "InternEvo: flash-attention's loss and rotary embedding and apex's norm (internlm/model/losses/ce_loss.py, "
        "internlm/model/ops)"
    ),
)

_MEGATRON: Final = Software(
    fused=True,
    native_attention=True,
    overlaps_tp=True,
    sends_slices=True,
    accumulated_bytes=6.0,
    cuts_evenly=True,
    bucket_params=(40e6, 1e6),
    loss_traffic=_MEGATRON_LOSS,
    sent_gradient_bytes=2.0,
    gathers_low=True,
    gathered_bytes={"fp8": 1.0, "mxfp8": 1.0},
    source=(
        "Transformer Engine's fused layers, cuDNN's attention and userbuffers (docs.nvidia.com, NeMo: performance guide, "
        "'Communication overlap'; Transformer Engine: 'Attention backends'); buckets: Megatron-LM, "
        "core/distributed/distributed_data_parallel.py, max(40e6, 1e6 x dp); bf16 sums: NeMo's recipes, "
        "grad_reduce_in_fp32 = false; gathers in fp8: "
        "docs.nvidia.com, NeMo: communication overlap, 'fp8_param_gather'; activations are cast before they are gathered: "
        "Transformer Engine, pytorch/distributed.py, gather_along_first_dim"
    ),
)

_NEMO: Final = dataclasses.replace(
    _MEGATRON,
    accumulated_bytes=2.0,
    states={"bf16": StateBytes(parameter=2.0, gradient=2.0, optimizer=12.0)},
    source=_MEGATRON.source + "; NeMo keeps gradients as it sums them, in bf16: grad_sync_dtype, grad_reduce_in_fp32",
)

_XLA: Final = dataclasses.replace(
    _MEGATRON,
    overlaps_tp=False,
    gathers_low=False,
    bucket_params=None,
    loss_traffic=(4.0, 6.0),
    source="XLA fuses elementwise operators, and calls cuDNN (JAX-Toolbox, README)",
)

_DEEPSPEED: Final = dataclasses.replace(
    _OLD,
    accumulated_bytes=10.0,
    calls_per_layer=4.0,
    copies_per_rank=1.0,
    # Beside the usual: ZeRO-1's shard of gradients in fp32, and under bf16 the gradients of the pass that is being added up.
    states={
        "fp16": StateBytes(parameter=2.0, gradient=2.0, optimizer=16.0),
        "bf16": StateBytes(parameter=2.0, gradient=6.0, optimizer=12.0),
    },
    zero=1,
    blocks_on_messages=True,
    source=(
        "Megatron-DeepSpeed: Megatron's kernels; its pipeline engine adds gradients up by autograd, and ZeRO-3 gathers each "
        "parameter of 100,000 elements or more by itself (a GPT block has 4; stage3_param_persistence_threshold); messages go "
        "one by one: DeepSpeed, runtime/pipe/engine.py and p2p.py; ZeRO-3 "
        "gathers into a list with a tensor for each rank (runtime/zero/partition_parameters.py of 2021), which torch copies each "
        "(ProcessGroupNCCL.cpp, allgather); states: runtime/zero/stage_1_and_2.py and "
        "runtime/bf16_optimizer.py"
    ),
)

_BLOOM: Final = {"waits_for_device_from": 320}
"""Of the runs before BLOOM's training, which hung without CUDA_LAUNCH_BLOCKING=1 on 320 GPUs: bigscience-workshop/bigscience,
train/tr11-176B-ml/chronicles-prequel.md, "dealing with JZ hanging on the large model" and "Hanging Issue"."""

_YEAR: Final = re.compile(r"(20[23]\d)-?[01]\d")
"""Of a month in the name of a source."""

_TABLE: Final = (
    (("paxml", "maxtext", "jax"), _XLA),
    (("torchtitan",), _TORCHTITAN),
    (("llm-foundry", "mosaicml"), _FOUNDRY),
    (("nemo", "megatron-bridge", "dgxc"), _NEMO),  # which have an FSDP of their own
    (("nanotron",), _NANOTRON),
    (("internlm", "internevo"), _INTERN),
    (("colossal", "fsdp"), _EAGER),
    (("megatron-deepspeed", "bigscience", "deepspeed"), _DEEPSPEED),
    (("megatron", "mlperf", "transformer engine", "transformer-engine", "megascale"), _MEGATRON),
)
"""Words of a row's source, group or notes -> its software; the first that is found in the first of these that has one."""


def software_of(row: dict[str, Any], *, recent: bool) -> Software:
    """Return the properties of a row's software; ``recent`` tells that it is of 2023 or later."""
    texts = [str(row.get(name) or "").lower() for name in ("source", "group", "notes")]
    text = " ".join(texts)
    # Notes may name what a row is compared with: what names the source says more.
    named = (software for part in texts for words, software in _TABLE if any(word in part for word in words))
    found = next(named, _EAGER)
    if not recent and found is _MEGATRON and (row["parallel"].get("zero_stage") or 0) >= 3:
        found = _DEEPSPEED  # no other tool of those years had ZeRO-3 for it
    if not recent and found in (_MEGATRON, _NEMO, _EAGER, _FOUNDRY):
        found = _OLD
    if recent and found is _DEEPSPEED:
        found = _EAGER
    parallel = row["parallel"]
    if found is _DEEPSPEED and "tr11-176b" in text:
        found = dataclasses.replace(found, **_BLOOM)
    if found is _TORCHTITAN and parallel.get("torch_compile") and (_YEAR.findall(text) or ["2025"])[-1] >= "2025":
        found = dataclasses.replace(found, **_COMPILED_LOSS)
    if parallel.get("torch_compile") is not None:
        found = dataclasses.replace(found, fused=bool(parallel["torch_compile"]))
    if parallel.get("async_tp") is not None:
        found = dataclasses.replace(found, overlaps_tp=bool(parallel["async_tp"]))
    if parallel.get("scatter_gather") is not None:
        found = dataclasses.replace(found, sends_slices=bool(parallel["scatter_gather"]))
    return found
