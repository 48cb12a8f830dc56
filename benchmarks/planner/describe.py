"""Time and memory of a description: Llama 3 405B from a transformers config, and small models beside real runs.

    python benchmarks/planner/describe.py --out benchmarks/planner/results/describe.json

A Llama 3 405B (126 blocks, 8,192 tokens) is described in a process of its own: seconds of the wall clock and of the processor,
without the import of torch and transformers, and the process's peak memory. Bounds: 30 s and 2 GiB. Then `ModelSpec.transformer`
beside the description of a GPT-2 and a Llama of the same sizes.

Exit status 1 where a bound is exceeded, or parameters or FLOPs of the two ways differ.
"""

from __future__ import annotations

import argparse
import functools
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

import meshwright as mw

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from process_memory import read_memory  # noqa: E402
from surroundings import environment  # noqa: E402

MOST_SECONDS = 30.0
MOST_BYTES = 2 * 2**30
# Sizes: arXiv:2407.21783, table 3; the vocabulary with its reserved tokens.
LLAMA_405B: dict[str, Any] = {
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_hidden_layers": 126,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}
BESIDE: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gpt2-124m": (
        "GPT2Config",
        {"n_positions": 1024},
        {"layers": 12, "hidden": 768, "heads": 12, "vocab": 50257, "sequence": 1024, "tied": True},
    ),
    "gpt2-124m without dropout": (
        "GPT2Config",
        {"n_positions": 1024, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
        {"layers": 12, "hidden": 768, "heads": 12, "vocab": 50257, "sequence": 1024, "tied": True},
    ),
    "llama-1b": (
        "LlamaConfig",
        {
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
        },
        {
            **{"layers": 16, "hidden": 2048, "heads": 32, "kv_heads": 8, "intermediate": 8192, "vocab": 128256},
            **{"sequence": 1024, "gated": True},
        },
    ),
}


def build(config: str, sizes: dict[str, Any]) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_config(getattr(transformers, config)(**sizes, use_cache=False))


def describe(config: str, sizes: dict[str, Any], sequence: int) -> mw.ModelSpec:
    ids = torch.zeros((1, sequence), dtype=torch.int64)
    return mw.describe_model(functools.partial(build, config, sizes), {"input_ids": ids, "labels": ids})


def measure_large() -> dict[str, Any]:
    """Describe the 405B, in this process."""
    build(
        "LlamaConfig",
        {**LLAMA_405B, "hidden_size": 1024, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 8},
    )
    before, before_cpu = time.perf_counter(), time.process_time()
    spec = describe("LlamaConfig", LLAMA_405B, 8192)
    return {
        "seconds": time.perf_counter() - before,
        "processor_seconds": time.process_time() - before_cpu,
        "peak_bytes": read_memory()["peak"],
        "num_params": spec.num_params,
        "layers": len(spec.layers),
        "forward_flops": spec.forward_flops,
        "activation_bytes": sum(layer.activation_bytes for layer in spec.layers),
        "notes": list(spec.notes),
    }


def summed(spec: mw.ModelSpec) -> dict[str, float]:
    return {
        "num_params": spec.num_params,
        "forward_flops": spec.forward_flops,
        "activation_bytes": sum(layer.activation_bytes for layer in spec.layers),
        "block_activation_bytes": max(layer.activation_bytes for layer in spec.layers[1:-1]),
    }


def compare(name: str) -> dict[str, Any]:
    config, sizes, changes = BESIDE[name]
    described, made = summed(describe(config, sizes, 1024)), summed(mw.ModelSpec.transformer(**changes))
    ratios = {key: made[key] / described[key] for key in made}
    return {"described": described, "from_sizes": made, "ratio": ratios}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--large-alone", action="store_true", help="what a child process does")
    given = parser.parse_args()
    if given.large_alone:
        given.out.write_text(json.dumps(measure_large()))
        return 0
    rounds: list[dict[str, Any]] = []
    for _ in range(given.rounds):
        command = [sys.executable, __file__, "--large-alone", "--out", str(given.out)]
        subprocess.run(command, check=True, timeout=300)
        rounds.append(json.loads(given.out.read_text()))
        print(f"405B: {rounds[-1]['seconds']:.1f} s, {rounds[-1]['peak_bytes'] / 2**30:.2f} GiB", flush=True)
    beside = {name: compare(name) for name in BESIDE}
    for name, found in beside.items():
        print(name, {key: round(ratio, 4) for key, ratio in found["ratio"].items()}, flush=True)
    given.out.write_text(
        json.dumps({"environment": environment(), "llama3_405b": rounds, "beside_transformer": beside}, indent=1) + "\n"
    )
    is_bounded = all(one["seconds"] <= MOST_SECONDS and one["peak_bytes"] <= MOST_BYTES for one in rounds)
    is_equal = all(found["ratio"][key] == 1 for found in beside.values() for key in ("num_params", "forward_flops"))
    return 0 if is_bounded and is_equal else 1


if __name__ == "__main__":
    sys.exit(main())
