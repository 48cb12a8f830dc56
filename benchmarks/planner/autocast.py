"""Models described under autocast beside the same models run: operators by dtype from torch's profiler, and kept bytes.

python -m benchmarks.planner.autocast --out benchmarks/planner/results/autocast.json
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from benchmarks.gpu import gpt
from benchmarks.surroundings import environment
from torch import Tensor, nn

import meshwright as mw

Counts = collections.Counter[tuple[str, str]]
"""(operator, dtype) -> calls."""

PRODUCTS = ("addmm", "mm", "bmm", "baddbmm", "convolution", "_scaled_dot_product_flash_attention_for_cpu")
SUMS = ("add", "add_", "sub", "mul", "mul_", "div")
TYPES = {"float": "fp32", "c10::BFloat16": "bf16"}
SIZES = {"fp32": 4, "bf16": 2}
BF16_OF_TORCH = "15"
"""c10::ScalarType::BFloat16 in the profiler's list of arguments."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A model with batches of any size."""

    build: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    loss: Callable[[Any, Any], Tensor] | None = None


def gpt_case() -> Case:
    size = gpt.Size(layers=2, hidden=64, heads=4, seq=32, samples=2, vocab=128)
    return Case(
        functools.partial(gpt.GPT, size),
        lambda samples: gpt.batch_of(dataclasses.replace(size, samples=samples), torch.device("cpu")),
        gpt.loss_fn,
    )


def bert_case() -> Case:
    config = transformers.BertConfig(
        vocab_size=96, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
    )

    def batch(samples: int) -> dict[str, Tensor]:
        ids = torch.arange(samples * 16).reshape(samples, 16) % 96
        return {"input_ids": ids, "labels": torch.zeros(samples, dtype=torch.int64)}

    return Case(lambda: transformers.BertForSequenceClassification(config), batch)


def resnet_case() -> Case:
    config = transformers.ResNetConfig(embedding_size=16, hidden_sizes=[16, 32], depths=[2, 2], layer_type="basic")

    def batch(samples: int) -> dict[str, Tensor]:
        return {"pixel_values": torch.randn(samples, 3, 32, 32), "labels": torch.zeros(samples, dtype=torch.int64)}

    return Case(lambda: transformers.ResNetForImageClassification(config), batch)


CASES = {"GPT": gpt_case, "BERT of transformers": bert_case, "ResNet of transformers": resnet_case}


def run(module: nn.Module, batch: Any, loss: Callable[[Any, Any], Tensor] | None) -> None:
    """Run a forward and its loss under the CPU's autocast."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = module(**batch) if isinstance(batch, dict) else module(batch[0])
        if loss is not None:
            loss(outputs, batch)


def kept_bytes(case: Case, samples: int) -> int:
    """Return what autograd keeps of a real run, each memory once, without parameters and buffers [bytes]."""
    module = case.build()
    own = {tensor.untyped_storage().data_ptr() for tensor in (*module.parameters(), *module.buffers())}
    found: dict[int, Any] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage  # held, so that no other memory has its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run(module, case.batch(samples), case.loss)
    return sum(storage.nbytes() for storage in found.values())


def profiled(case: Case, samples: int) -> tuple[Counts, dict[str, int]]:
    """Return the calls of a real run, and the bytes that its casts to each dtype move."""
    module, batch = case.build(), case.batch(samples)
    run(module, batch, case.loss)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        run(module, batch, case.loss)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    calls: Counts = collections.Counter()
    moved: dict[str, int] = collections.Counter()
    for event in _outermost([one for one in events if one.get("cat") == "cpu_op"]):
        name, given = event["name"].removeprefix("aten::"), event["args"]
        dtypes = [TYPES[kind] for kind in given.get("Input type", []) if kind in TYPES]
        if not dtypes or name in WITHOUT_A_KERNEL:
            continue
        dtype = "fp32" if name in SUMS and "fp32" in dtypes else dtypes[0]
        if name == "_to_copy":
            dtype = "bf16" if given["Concrete Inputs"][1] == BF16_OF_TORCH else "fp32"
            elements = 1
            for length in given["Input Dims"][0]:
                elements *= length
            moved[dtype] += elements * (SIZES[dtypes[0]] + SIZES[dtype])
        calls[name, dtype] += 1
    return calls, dict(moved)


MADE_OF_OTHERS = (
    "to", "linear", "matmul", "layer_norm", "dropout", "batch_norm", "_batch_norm_impl_index", "conv2d", "reshape", "log_softmax",
    "softmax", "cross_entropy_loss", "nll_loss", "nll_loss_nd", "scaled_dot_product_attention", "flatten", "contiguous",
    "adaptive_avg_pool2d", "max_pool2d", "expand_as", "type_as", "_scaled_dot_product_attention_math", "chunk",
)  # fmt: skip
"""Calls whose parts the profiler shows inside them."""

WITHOUT_A_KERNEL = ("view", "_unsafe_view", "t", "transpose", "permute", "unbind", "select", "expand", "empty_like")
"""Calls that move nothing, which a description leaves out."""


def _outermost(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the calls that lie in no other call, where a call that is made of others is none."""
    found: list[dict[str, Any]] = []
    end = -1.0
    for event in sorted(events, key=lambda one: (one["ts"], -one["dur"])):
        if event["name"].removeprefix("aten::") in MADE_OF_OTHERS:
            continue
        if event["ts"] >= end:
            found.append(event)
            end = event["ts"] + event["dur"]
    return found


def described(case: Case, samples: int) -> tuple[mw.ModelSpec, Counts, dict[str, float]]:
    """Return the description under the CPU's autocast, its calls, and the bytes that casts to each dtype move."""
    spec = mw.describe_model(case.build, case.batch(2), loss_fn=case.loss, autocast="cpu")
    calls: Counts = collections.Counter()
    moved: dict[str, float] = collections.Counter()
    for layer in spec.layers:
        for operator in layer.operators:
            calls["product" if operator.kind != "elementwise" else operator.function, operator.dtype] += 1
            calls["_to_copy", "bf16"] += operator.num_casts
            moved["bf16"] += 6 * operator.cast_params
            if operator.function == "_to_copy":
                moved[operator.dtype] += operator.traffic_bytes * samples
    return spec, calls, dict(moved)


def compare(name: str, samples: int = 4) -> dict[str, Any]:
    """Return a model's calls and bytes, described and measured."""
    case = CASES[name]()
    spec, calls, moved = described(case, samples)
    real, real_moved = profiled(case, samples)
    joined: Counts = collections.Counter()
    for (function, dtype), count in real.items():
        joined["product" if function in PRODUCTS else function, dtype] += count
    kept = {count: kept_bytes(case, count) for count in (2, samples)}
    growth = (kept[samples] - kept[2]) / (samples - 2)
    casts = sum(operator.cast_saved_bytes for layer in spec.layers for operator in layer.operators)
    keys = sorted({key for key in (*calls, *joined) if calls[key] or joined[key]})
    return {
        "model": name,
        "calls": {f"{function} {dtype}": [calls[function, dtype], joined[function, dtype]] for function, dtype in keys},
        "cast bytes": {dtype: [moved.get(dtype, 0), real_moved.get(dtype, 0)] for dtype in ("bf16", "fp32")},
        "kept of a sample": [sum(layer.activation_bytes for layer in spec.layers), growth],
        "kept of weights": [casts, kept[2] - 2 * growth],
        "notes": list(spec.notes),
    }


def main() -> int:
    """Compare, print and write; return 1 where calls or cast bytes differ, or what a sample keeps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows = [compare(name) for name in CASES]
    differing = 0
    for row in rows:
        pairs = [*row["calls"].values(), *row["cast bytes"].values(), row["kept of a sample"]]
        unequal = sum(one != other for one, other in pairs)
        differing += unequal
        calls = sum(one for one, _ in row["calls"].values())
        kept, copies = row["kept of a sample"], row["kept of weights"]
        print(f"{row['model']}: {calls} calls of {len(row['calls'])} kinds, {unequal} of all numbers differ")
        print(
            f"    kept of a sample {kept[0]} described, {kept[1]:.0f} run; weights and tables {copies[0]}, {copies[1]:.0f} B"
        )
    if arguments.out is not None:
        arguments.out.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1) + "\n")
    return 1 if differing else 0


if __name__ == "__main__":
    raise SystemExit(main())
