"""Time of the search for a tensor layout by the number of equal blocks: a Llama with the blocks and heads of the 405B.

    python -m benchmarks.planner.layout_times --out benchmarks/planner/results/layout_times.json

Its width is a thirty-second of the 405B's, so that it fits; the search runs the model, and proofs run its layers. Each size is a
process of its own: seconds of the wall clock and of the processor, from the model to the layout, and the memory at the peak.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.surroundings import environment

_SHARE = 32
_SIZES: dict[str, Any] = {
    "hidden_size": 16384 // _SHARE,
    "intermediate_size": 53248 // _SHARE,
    "vocab_size": 128256 // _SHARE,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 64,
}


def search(num_layers: int, num_ranks: int, *, keeps_cache: bool) -> dict[str, Any]:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from meshwright.apply.tensor.search.search import Search

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**_SIZES, num_hidden_layers=num_layers, use_cache=keeps_cache))
    ids = torch.randint(0, _SIZES["vocab_size"], (2, 16))
    began, began_cpu = time.perf_counter(), time.process_time()
    layout = Search(model, num_ranks, lambda module: module(input_ids=ids, labels=ids), patience_s=3600.0).layout()
    return {
        "layers": num_layers,
        "tp": num_ranks,
        "keeps_cache": keeps_cache,
        "seconds": time.perf_counter() - began,
        "cpu_seconds": time.process_time() - began_cpu,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "regions": len(layout.regions),
        "layout": layout.hash,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 8, 16, 32, 64, 126])
    parser.add_argument("--tp", type=int, default=8)
    parser.add_argument("--cache", action="store_true", help="the model keeps keys and values, as for generation")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", action="store_true", help="search in this process, and print the row")
    given = parser.parse_args()
    if given.one:
        print(json.dumps(search(given.layers[0], given.tp, keeps_cache=given.cache)))
        return
    rows: list[dict[str, Any]] = []
    for _ in range(given.rounds):
        for layers in given.layers:
            flags = ["--one", "--layers", str(layers), "--tp", str(given.tp), *(["--cache"] if given.cache else [])]
            command = [sys.executable, "-m", "benchmarks.planner.layout_times", *flags]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=3600)
            rows.append(json.loads(done.stdout.splitlines()[-1]))
            print(
                f"{layers} blocks: {rows[-1]['seconds']:.1f} s, {rows[-1]['cpu_seconds']:.1f} s of the processor",
                flush=True,
            )
    if given.out is not None:
        given.out.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
