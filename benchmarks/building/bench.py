"""Peak memory of ranks while they build a Llama under a plan, and whether every value is one device's.

    python benchmarks/building/bench.py --directory DIR --out benchmarks/building/results/NAME.json

A Llama (1.3B parameters, float32) is built from its config, and then from a directory that transformers wrote, on two ranks. What
a rank may need: its parts, the largest tensor, and 0.5 GiB. tp and pp cut at the first batch, which is included. Each rank saves
its parts; a plain process compares them bit by bit with the model that it builds under the same seed. The last one is exported,
and transformers loads that: its logits.

Exit status 1 where a value differs or a bound is exceeded.
"""

from __future__ import annotations

import argparse
import functools
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import meshwright as mw
from meshwright.checkpoint.open_checkpoint import OpenCheckpoint

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from process_memory import read_memory, reset_peak  # noqa: E402
from surroundings import environment  # noqa: E402

SLACK_BYTES = 2**29
SIZES: dict[str, dict[str, Any]] = {
    "1.3b": {
        "hidden_size": 2048,
        "intermediate_size": 5504,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
    },
    "small": {
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
    },
}


def build_llama(size: str) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SIZES[size], vocab_size=32000, max_position_embeddings=256, use_cache=False))


def batch() -> dict[str, torch.Tensor]:
    tokens = torch.arange(32).view(2, 16) % 100
    return {"input_ids": tokens, "labels": tokens}


def build_on_rank(size: str, plan: str, pretrained: str | None, directory: str) -> dict[str, Any]:
    """Build, tell the memory, and save."""
    import transformers.models.llama.modeling_llama  # noqa: F401 - imports are not the model's memory

    parsed = mw.Plan.parse(plan)
    waits = parsed.tp > 1 or parsed.pp > 1
    before = read_memory()
    reset_peak()
    began = time.perf_counter()
    model = mw.apply_plan(
        functools.partial(build_llama, size),
        plan,
        example_batch=batch() if waits else None,
        pretrained=pretrained,
        seed=7,
        sentinel_every=0,
    )
    seconds = time.perf_counter() - began
    after = read_memory()
    parts = model.engine.held_state()
    largest = max(torch.Size(part.full_shape).numel() * part.tensor.element_size() for part in parts)
    mw.save_checkpoint(model, directory, step=0)
    return {
        "before_bytes": before["resident"],
        "peak_bytes": after["peak"],
        "needed_bytes": after["peak"] - before["resident"],
        "parts_bytes": sum(part.tensor.nbytes for part in parts),
        "largest_bytes": largest,
        "seconds": seconds,
    }


def compare(model: nn.Module, directory: Path) -> list[str]:
    """Return names of the stored tensors that are not, bit for bit, the model's."""
    snapshot = OpenCheckpoint(directory / "step-00000000")
    named = {f"model/{name}": tensor.detach() for name, tensor in model.state_dict().items()}
    names = [name for name in (*snapshot.manifest.tensors, *snapshot.manifest.aliases) if name.startswith("model/")]
    wrong = sorted(set(named) ^ set(names))
    for name in set(names) & set(named):
        stored, own = snapshot.read(name), named[name]
        if stored.dtype != own.dtype or not torch.equal(stored.view(torch.uint8), own.contiguous().view(torch.uint8)):
            wrong.append(name)
    return wrong


def measure(size: str, plan: str, source: Path | None, expected: nn.Module, directory: Path) -> dict[str, Any]:
    shutil.rmtree(directory, ignore_errors=True)
    pretrained = None if source is None else str(source)
    rows = mw.launch(build_on_rank, mw.Plan.parse(plan).num_ranks, size, plan, pretrained, str(directory))
    bounds = [row["parts_bytes"] + row["largest_bytes"] + SLACK_BYTES for row in rows]
    found = {
        "plan": plan,
        "from": "config" if source is None else "directory",
        "ranks": rows,
        "share_of_bound": [row["needed_bytes"] / bound for row, bound in zip(rows, bounds, strict=True)],
        "different": compare(expected, directory),
    }
    pairs = zip(rows, bounds, strict=True)
    needs = ", ".join(f"{row['needed_bytes'] / 2**30:.2f} of {bound / 2**30:.2f} GiB" for row, bound in pairs)
    print(f"{plan} {found['from']}: {needs}, {rows[0]['seconds']:.0f} s, {len(found['different'])} differ", flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, required=True, help="an empty directory on a disk, for some 20 GB")
    parser.add_argument("--size", choices=SIZES, default="1.3b")
    parser.add_argument("--plans", default="zero=3,dp=2; tp=2; pp=2")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    plans = [plan.strip() for plan in arguments.plans.split(";")]
    torch.manual_seed(7)
    drawn = build_llama(arguments.size)
    rows = [measure(arguments.size, plan, None, drawn, arguments.directory / "saved") for plan in plans]
    source, exported = arguments.directory / "source", arguments.directory / "exported"
    drawn.save_pretrained(source, max_shard_size="1GB")
    rows += [measure(arguments.size, plan, source, drawn, arguments.directory / "saved") for plan in plans]
    command = [
        sys.executable,
        "-m",
        "meshwright",
        "checkpoint",
        "export",
        str(arguments.directory / "saved"),
        str(exported),
    ]
    subprocess.run([*command, "--format", "hf", "--config", str(source)], check=True, timeout=600)
    with torch.no_grad():
        expected = drawn(input_ids=batch()["input_ids"]).logits
        del drawn
        logits = type(build_llama("small")).from_pretrained(exported)(input_ids=batch()["input_ids"]).logits
    is_equal = torch.equal(expected, logits)
    print("logits of the exported model:", "equal" if is_equal else "different", flush=True)
    result = {**environment(), "size": arguments.size, "rows": rows, "exported_logits_equal": is_equal}
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    is_sound = is_equal and all(not row["different"] and max(row["share_of_bound"]) <= 1 for row in rows)
    return 0 if is_sound else 1


if __name__ == "__main__":
    sys.exit(main())
