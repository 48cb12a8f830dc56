"""What constants of `efficiency.toml` are expected to be before any row is seen, and how far they may be from it.

A constant is fitted as the logarithm of its ratio to what is expected, and costs as much as that is of its spread. So a device
or a term that few rows show stays where documents and measurements of single kernels put it.
"""

from __future__ import annotations

import dataclasses
from typing import Final


@dataclasses.dataclass(frozen=True, slots=True)
class Prior:
    """What a constant is expected to be."""

    value: float
    spread: float
    """Of its logarithm."""
    why: str


COMMON: Final = {
    "memory": Prior(0.85, 0.06, "copies of large tensors reach 85 to 92 % of the data sheet on A100 and H100"),
    "inner_overhead": Prior(96.0, 0.5, "start and end of a tile: about a deep pipeline's stages of 32 elements"),
    "elementwise_passes": Prior(2.5, 0.3, "a gate is two kernels, an RMS norm five, a rotary embedding in fp32 six"),
    "kernel_s": Prior(4e-6, 0.4, "an empty kernel takes 2 to 5 us"),
    "operator_s": Prior(
        4.5e-5, 0.4, "PyTorch takes 10 to 25 us for a kernel with its autograd; an operator here is two or three"
    ),
    "collective_host_s": Prior(6e-5, 0.5, "a collective of torch.distributed takes 30 to 100 us of a host's core"),
    "link": Prior(0.75, 0.12, "NCCL's tests: 230 of 300 GB/s on A100, 360 of 450 on H100"),
    "network": Prior(0.8, 0.12, "NCCL's tests over InfiniBand: 19 to 23 of 25 GB/s"),
    "rails": Prior(
        0.6, 0.5, "NCCL's rings use all ports of a host; collectives of a training step are shorter than its tests"
    ),
    "link_latency_s": Prior(1.5e-5, 0.5, "small all-reduces inside a host take 10 to 25 us"),
    "network_latency_s": Prior(2.5e-5, 0.5, "small all-reduces of two hosts take 20 to 40 us"),
    "hop_s": Prior(
        3.4e-6,
        0.3,
        "NCCL's src/graph/tuning.cc, hwLatencies, ring, Simple: 3.4 us a step over NVLink",
    ),
    "network_hop_s": Prior(1.4e-5, 0.3, "the same: 14 us over a network (9.6 in old ones)"),
    "attention_ramp": Prior(
        700.0,
        0.3,
        "FlashAttention-3 without a mask: 430, 517, 566, 590, 614, 621 TFLOP/s for 512 to 16,384 keys (pytorch/benchmark#2391), "
        "half of all with 200; a causal mask halves the keys of a row and cuts its last tile",
    ),
    "tp_overlap": Prior(0.6, 0.25, "NeMo's guide: most of sequence parallelism's exchange is hidden, not all of it"),
    "interference": Prior(
        0.12, 0.5, "Galvatron's cost model: overlapped work takes 1.3 times as long where it is not profiled"
    ),
    "overlap": Prior(0.8, 0.12, "the rest of a pass waits for something else"),
    "optimizer_bytes": Prior(
        40.0, 0.2, "Adam reads 16 and writes 14; a norm, a scale and zeros are passes of their own"
    ),
    "step_s": Prior(4e-3, 0.6, "clipping, logging and the loop"),
}
"""Constants of all devices."""

MATMUL: Final = {
    "v100-sxm2-16gb": {"bf16": 0.75},
    "v100-sxm2-32gb": {"bf16": 0.75},
    "v100-sxm3-32gb": {"bf16": 0.80},
    "a100-sxm-40gb": {"bf16": 0.869},
    "a100-sxm-80gb": {"bf16": 0.869},
    "h100-sxm": {"bf16": 0.803, "fp8": 0.709},
    "h100-hbm2e-500w": {"bf16": 0.68, "fp8": 0.60},
    "h200-sxm": {"bf16": 0.803, "fp8": 0.734},
    "b200": {"bf16": 0.776, "fp8": 0.763, "fp4": 0.65},
    "gb200": {"bf16": 0.729, "fp8": 0.723, "fp4": 0.65},
    "b300": {"bf16": 0.722, "fp8": 0.684, "fp4": 0.65},
    "gb300": {"bf16": 0.722, "fp8": 0.684, "fp4": 0.65},
    "h100-pcie": {"bf16": 0.57, "fp8": 0.50},
    "mi300x": {"bf16": 0.514, "fp8": 0.45},
    "mi325x": {"bf16": 0.604, "fp8": 0.53},
    "mi355x": {"bf16": 0.68, "fp8": 0.6, "fp4": 0.5},
}
"""Share of the dense peak that one product alone reaches at most.

Source: Machine Learning Engineering Open Book, compute/accelerator, "Maximum Achievable Matmul FLOPS" (A100 271 of 312, H100 795
of 989, B200 1,745 of 2,250, GB200 1,822 of 2,500, B300 1,769 of 2,450, MI300X 668 of 1,300, MI325X 785 of 1,300, MI355X 1,565 of
2,300; fp8: H100 1,403 of 1,979, B200 3,432 of 4,500). V100, GB300, fp4 and fp8 of AMD's are estimates. Of an H100 that is held to
500 or 350 of 700 W: the root of that ratio, for its clock falls more slowly than its power.
"""

TRAINING: Final = {
    "half": Prior(0.9, 0.08, "products of a step follow one another on a warm device, at their own sizes"),
    "fp8": Prior(0.85, 0.12, "the same, and scales and transposes"),
    "fp4": Prior(0.75, 0.2, "the same, and scales of blocks and rotations"),
}
"""Share of that which products of a training step reach: one number for all devices."""

DEVICE_SPREAD: Final = 0.06
"""How far one device may be from all [spread of the logarithm]."""

GENERATION: Final = {
    "h100-sxm": "hopper",
    "h100-hbm2e-500w": "hopper",
    "h200-sxm": "hopper",
    "h100-pcie": "hopper",
    "mi300x": "hopper",
    "mi325x": "hopper",
    "mi355x": "hopper",
    "b200": "blackwell",
    "gb200": "blackwell",
    "b300": "blackwell",
    "gb300": "blackwell",
}
"""Device -> generation that shares an attention of its own; the others have FlashAttention-2 on what it was written for."""

ATTENTION: Final = {
    "ampere": {
        "attention_forward": Prior(
            0.62, 0.12, "FlashAttention-2, arXiv:2307.08691, figures 4 to 6: 190 to 220 of 312 TFLOP/s"
        ),
        "attention_backward": Prior(0.52, 0.12, "the same: 150 to 190"),
    },
    "hopper": {
        "attention_forward": Prior(
            0.35, 0.12, "FlashAttention-3, arXiv:2407.08608, figure 5, causal: version 2 has 300 to 370 of 989"
        ),
        "attention_backward": Prior(0.27, 0.15, "the same, figure 6: 230 to 290"),
        "native_attention": Prior(1.6, 0.12, "the same: cuDNN and version 3 are 1.5 to 2 times as fast"),
    },
    "blackwell": {
        "attention_forward": Prior(0.55, 0.15, "cuDNN on B200: 1,200 to 1,500 of 2,250; an estimate"),
        "attention_backward": Prior(0.42, 0.15, "an estimate"),
    },
}

POWER: Final = {"h100-hbm2e-500w": 0.845, "h100-pcie": 0.71}
"""Device -> its rate over that of its generation: the root of its power."""


def kind_of(dtype: str) -> str:
    """Return which of `TRAINING` a dtype has."""
    return dtype if dtype in TRAINING else "half"
