"""What the software of a published row fuses, overlaps and sends, by what its documents or sources say."""

from __future__ import annotations

import dataclasses
from typing import Any, Final


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
    calls_per_layer: float = 1.0
    """Collectives in which ZeRO-3 gathers a layer [count]."""
    bucket_params: tuple[float, float] | None = None
    """Smallest bucket of gradients, and what each data-parallel rank adds to its size; None: a bucket for each layer [count]."""
    sent_gradient_bytes: float = 4.0
    """Of a bf16 model's gradient element as it is reduced [bytes]."""
    source: str


_OLD: Final = Software(
    fused=True,
    native_attention=False,
    overlaps_tp=False,
    sends_slices=True,
    accumulated_bytes=6.0,
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

_FOUNDRY: Final = dataclasses.replace(
    _EAGER,
    attention_speed=0.55,
    source=(
        "MPT in llm-foundry of 2023 (configuration_mpt.py: attn_impl is triton): FlashAttention-2 is 1.3 to 2.5 times as fast as "
        "Triton's (Dao 2023, arXiv:2307.08691, section 4.1)"
    ),
)

_MEGATRON: Final = Software(
    fused=True,
    native_attention=True,
    overlaps_tp=True,
    sends_slices=True,
    accumulated_bytes=6.0,
    bucket_params=(40e6, 1e6),
    sent_gradient_bytes=2.0,
    source=(
        "Transformer Engine's fused layers, cuDNN's attention and userbuffers (docs.nvidia.com, NeMo: performance guide, "
        "'Communication overlap'; Transformer Engine: 'Attention backends'); buckets: Megatron-LM, "
        "core/distributed/distributed_data_parallel.py; bf16 sums: NeMo's recipes, grad_reduce_in_fp32 = false"
    ),
)

_XLA: Final = dataclasses.replace(
    _MEGATRON,
    overlaps_tp=False,
    bucket_params=None,
    source="XLA fuses elementwise operators, and calls cuDNN (JAX-Toolbox, README)",
)

_DEEPSPEED: Final = dataclasses.replace(
    _OLD,
    sends_slices=False,
    accumulated_bytes=10.0,
    calls_per_layer=12.0,
    source=(
        "Megatron-DeepSpeed: Megatron's kernels; its pipeline engine adds gradients up by autograd, and ZeRO-3 of 2021 gathers "
        "each parameter by itself (a GPT block has 12: six layers with weight and bias)"
    ),
)

_TABLE: Final = (
    (("paxml", "maxtext", "jax"), _XLA),
    (("torchtitan",), _EAGER),
    (("llm-foundry", "mosaicml"), _FOUNDRY),
    (("nanotron", "internlm", "internevo", "colossal", "fsdp"), _EAGER),
    (("megatron-deepspeed", "bigscience", "deepspeed"), _DEEPSPEED),
    (("nemo", "megatron", "dgxc", "mlperf", "transformer engine", "transformer-engine", "megascale"), _MEGATRON),
)
"""Words of a row's group, source and notes -> its software; the first that is found."""


def software_of(row: dict[str, Any], *, recent: bool) -> Software:
    """Return the properties of a row's software; ``recent`` tells that it is of 2023 or later."""
    text = " ".join(str(row.get(name) or "") for name in ("group", "source", "notes")).lower()
    found = next((software for words, software in _TABLE if any(word in text for word in words)), _EAGER)
    if not recent and found in (_MEGATRON, _EAGER, _FOUNDRY):
        found = _OLD
    if recent and found is _DEEPSPEED:
        found = _EAGER
    parallel = row["parallel"]
    if parallel.get("torch_compile") is not None:
        found = dataclasses.replace(found, fused=bool(parallel["torch_compile"]))
    if parallel.get("async_tp") is not None:
        found = dataclasses.replace(found, overlaps_tp=bool(parallel["async_tp"]))
    if parallel.get("scatter_gather") is not None:
        found = dataclasses.replace(found, sends_slices=bool(parallel["scatter_gather"]))
    return found
