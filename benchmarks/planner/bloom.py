"""Plans for BLOOM-176B on 384 A100-80GB, as BigScience's engineers might have asked before their hundred runs.

    python -m benchmarks.planner.bloom

Every split of 384 devices over tp, pp and dp, with the micro-batches and the software that they had: Megatron-DeepSpeed, ZeRO-1,
full recompute, bf16, 2,048 sequences. They found TP4 PP12 DP8 and micro-batches of 2 by trial.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from benchmarks.planner.errors import Row
from benchmarks.planner.evaluate import Judge

_DEVICES, _SEQUENCES, _LAYERS = 384, 2048, 70

_HOLDS = 80e9
"""What nvidia-smi may show of a plan that is chosen: a device holds 5 GB more, which a long run does not count on [bytes]."""

WITHIN_TWO_PERCENT = {(4, 12, 8, 2), (4, 12, 8, 4), (4, 6, 16, 2), (2, 12, 16, 2)}
"""(tp, pp, dp, micro-batch): the fastest, and those measured within 2 % of it in the same weeks on a model of 72 layers (110.5,
111.9, 111.7 and 112.5 s). Source: bigscience-workshop/bigscience, train/tr11-176B-ml/chronicles-prequel.md, 02-25."""


def row_of(tp: int, pp: int, dp: int, micro: int) -> Row:
    """Return a plan in the words of a published row."""
    return {
        "id": f"tp{tp} pp{pp} dp{dp} mbs{micro}",
        "group": "bigscience",
        "source": "Megatron-DeepSpeed: bigscience-workshop/bigscience, train/tr11-176B-ml",
        "model": {
            "arch": "bloom", "layers": _LAYERS, "hidden": 14336, "heads": 112, "kv_heads": 112, "ffn_hidden": 57344,
            "vocab": 250880, "seq": 2048, "gated_mlp": False, "tied_embeddings": True,
        },
        "hardware": {
            "gpu": "A100-SXM4-80GB", "gpus": _DEVICES, "gpus_per_node": 8, "nvlink_domain": 8, "intra_bw_GBps": 300,
            "inter_bw_GBps_per_gpu": 6.25, "gpu_mem_GB": 80, "peak_bf16_dense_tflops": 312,
            "notes": "Jean Zay, 4x100 Gb/s Omni-Path per 8-GPU node",
        },
        "parallel": {"dp": dp, "tp": tp, "pp": pp, "cp": 1, "vpp": 1, "sp": False, "zero_stage": 1, "schedule": "1f1b"},
        "batch": {"global": _SEQUENCES, "micro": micro, "grad_accum": _SEQUENCES // (dp * micro)},
        "precision": "bf16",
        "recompute": "full",
        "flash_attention": False,
        "mem_kind": "nvidia-smi",
        "measured": {},
    }  # fmt: skip


def space() -> Iterator[tuple[int, int, int, int]]:
    """Yield (tp, pp, dp, micro-batch) of every split whose stages have as many blocks each."""
    for tp in (1, 2, 4, 8):
        for pp in range(1, _DEVICES // tp + 1):
            dp, rest = divmod(_DEVICES, tp * pp)
            is_even = _LAYERS % pp == 0 or (_LAYERS + 2) % pp == 0
            if rest == 0 and is_even and pp <= _LAYERS:
                yield from ((tp, pp, dp, micro) for micro in (1, 2, 4, 8) if _SEQUENCES % (dp * micro) == 0)


def ranked() -> list[tuple[float, tuple[int, int, int, int]]]:
    """Return seconds and split of what fits into the devices, the fastest first."""
    judge = Judge()
    answers = ((judge.answer(row_of(*split)), split) for split in space())
    return sorted((answer["step_time_s"], split) for answer, split in answers if answer["peak_memory_bytes"] <= _HOLDS)


def main() -> None:
    print(f"{'plan':28}{'predicted':>11}")
    for seconds, (tp, pp, dp, micro) in ranked()[:10]:
        print(f"tp={tp} pp={pp} dp={dp} micro-batch={micro:<6}{seconds:8.1f} s")


if __name__ == "__main__":
    sys.exit(main())
