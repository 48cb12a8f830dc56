"""Fields of published rows as numbers and words: numbers in text are read, and what cannot be is unknown or a reason.

`cleaned` returns a row that `rows.py` can read. Sizes and degrees without which nothing can be said must be there and possible;
anything else that cannot be is taken as not printed, and named in the row's "unknown".
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, Final

_SIZES: Final = {
    "model": {
        "layers": (1, 2_000), "hidden": (1, 10**6), "heads": (1, 10**5), "kv_heads": (1, 10**5), "head_dim": (1, 10**5),
        "ffn_hidden": (1, 10**7), "vocab": (1, 10**8), "seq": (1, 10**8), "experts": (1, 10**4), "experts_per_token": (1, 10**4),
    },
    "hardware": {"gpus": (1, 10**6), "gpus_per_node": (1, 10**5), "nvlink_domain": (1, 10**5)},
    "parallel": {
        "dp": (1, 10**6), "tp": (1, 10**5), "pp": (1, 10**4), "cp": (1, 10**5), "ep": (1, 10**5), "vpp": (1, 10**4),
        "zero_stage": (0, 3), "fsdp_size": (1, 10**6),
    },
    "batch": {"global": (1, 10**9), "micro": (1, 10**8), "grad_accum": (1, 10**8), "tokens": (1, 10**13)},
}  # fmt: skip
"""Part of a row -> whole numbers of it, and the least and the most that anybody has."""

_RATES: Final = {
    "hardware": {
        "intra_bw_GBps": (0.1, 1e4), "inter_bw_GBps_per_gpu": (0.01, 1e4), "gpu_mem_GB": (1.0, 1e4),
        "peak_bf16_dense_tflops": (0.1, 1e5),
    },
}  # fmt: skip
"""Part of a row -> other numbers of it."""

_SWITCHES: Final = {
    "model": ("gated_mlp", "tied_embeddings"),
    "parallel": ("sp", "fsdp", "torch_compile", "async_tp", "scatter_gather", "cpu_offload"),
    "": ("flash_attention",),
}

_SYNONYMS: Final = {
    "experts": ("num_experts", "n_experts", "moe_experts", "num_moe_experts"),
    "experts_per_token": ("active_experts", "topk", "top_k", "moe_topk", "moe_router_topk"),
}

_NEEDED: Final = (("model", "layers"), ("model", "hidden"), ("model", "heads"))

_DEGREES: Final = ("dp", "tp", "pp", "cp")

_FIRST_TOKENS: Final = 16_384
"""Tokens of a micro-batch where a row without stages does not print it [count]."""

_PRECISIONS: Final = (
    ("nvfp4", ("nvfp4", "mxfp4", "fp4")),
    ("mxfp8", ("mxfp8",)),
    ("fp8", ("fp8", "float8", "e4m3", "int8")),
    ("bf16", ("bf16", "bfloat16")),
    ("fp16", ("fp16", "float16", "half")),
    ("tf32", ("tf32",)),
    ("fp32", ("fp32", "float32", "single")),
)
"""Precision -> words for it; the first that is found."""

_NO_TRAINING: Final = ("infer", "serv", "generate", "generation", "prefill", "decod", "eval")

_NUMBER: Final = re.compile(r"\s*([-+]?[0-9][0-9,]*\.?[0-9]*(?:[eE][-+]?[0-9]+)?)\s*([A-Za-z/%]*)\s*")


def cleaned(row: Any) -> dict[str, Any]:
    """Return a row with numbers, switches and words that are what they are called.

    Raises:
        ValueError: The row lacks what is needed, or says what cannot be.
    """
    if not isinstance(row, Mapping):
        raise ValueError(f"a row is an object with fields, not {type(row).__name__}")
    task = str(row.get("task") or "").lower()
    if any(word in task for word in _NO_TRAINING):
        raise ValueError(f"task '{task}' is no training")
    unknown: list[str] = []
    found: dict[str, Any] = {**row, "unknown": unknown}
    for part in ("model", "hardware", "parallel", "batch", "measured"):
        found[part] = dict(row[part]) if isinstance(row.get(part), Mapping) else {}
    for name, others in _SYNONYMS.items():
        found["model"].setdefault(name, next((found["model"][one] for one in others if found["model"].get(one)), None))
    _read_numbers(found, unknown)
    for name in ("group", "source", "notes", "mem_kind", "task"):
        found[name] = str(found.get(name) or "")
    for name in ("arch", "name"):
        found["model"][name] = str(found["model"].get(name) or "").lower()
    found["hardware"]["gpu"] = str(found["hardware"].get("gpu") or "")
    found["precision"] = precision_of(row.get("precision"))
    found["recompute"], found["recompute_layers"] = _recompute(row.get("recompute"))
    _require(found, row)
    _complete_degrees(found, row)
    _complete_batch(found)
    return found


def _read_numbers(found: dict[str, Any], unknown: list[str]) -> None:
    """Set numbers and switches to what they are called; None where they cannot be, which is named."""
    for part, sizes in _SIZES.items():
        for name, (least, most) in sizes.items():
            _set(found[part], name, _whole(found[part].get(name), least, most), unknown, part)
    for part, rates in _RATES.items():
        for name, (least, most) in rates.items():
            value = number(found[part].get(name))
            _set(found[part], name, value if value is not None and least <= value <= most else None, unknown, part)
    for part, names in _SWITCHES.items():
        place = found[part] if part else found
        for name in names:
            _set(place, name, _switch(place.get(name)), unknown, part)


def number(value: object) -> float | None:
    """Return a finite number, also of a text such as "1,024" or "80 GB"; None where it is none."""
    if isinstance(value, bool):
        return None
    if isinstance(value, str):
        match = _NUMBER.fullmatch(value)
        value = float(match[1].replace(",", "")) if match else None
    if not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def precision_of(value: object) -> str:
    """Return a precision by the words that name it; bf16 where none does.

    >>> precision_of("FP8 (delayed scaling)"), precision_of("amp_bf16"), precision_of(None)
    ('fp8', 'bf16', 'bf16')
    """
    text = str(value or "").lower()
    return next((name for name, words in _PRECISIONS if any(word in text for word in words)), "bf16")


def _whole(value: object, least: int, most: int) -> int | None:
    found = number(value)
    return int(found) if found is not None and found == int(found) and least <= found <= most else None


def _switch(value: object) -> bool | None:
    if isinstance(value, bool | int) and value in (0, 1):
        return bool(value)
    return {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}.get(str(value).lower())


def _set(place: dict[str, Any], name: str, value: object, unknown: list[str], part: str) -> None:
    if value is None and place.get(name) not in (None, ""):
        unknown.append(f"{part}.{name}={str(place[name])[:40]}")
    if name in place or value is not None:
        place[name] = value


def _recompute(value: object) -> tuple[str | None, int | None]:
    """Return what runs again, None where nobody says, and in how many layers of a rank where that is said."""
    if value is None or isinstance(value, Mapping | list):
        return None, None
    text = str(value).lower()
    layers = None if isinstance(value, bool) else number(text.split()[0]) if text.split() else None
    if layers is not None:
        return ("full", int(layers)) if 0 < layers <= _SIZES["model"]["layers"][1] else ("none", None)
    if any(word in text for word in ("select", "core_attn", "attn")):
        return "selective", None
    if any(word in text for word in ("full", "uniform", "block", "true", "yes", "layer", "all")):
        return "full", None
    return ("none", None) if text in ("none", "false", "no", "off", "") else (None, None)


def _require(found: dict[str, Any], row: Mapping[str, Any]) -> None:
    for part, name in _NEEDED:
        if found[part].get(name) is None:
            given = row[part].get(name) if isinstance(row.get(part), Mapping) else None
            least, most = _SIZES[part][name]
            raise ValueError(f"{part}.{name}={str(given)[:40]} (rule: a whole number, {least} to {most:,})")
    degrees = found["parallel"]
    for name in _DEGREES:
        if any(text.startswith(f"parallel.{name}=") for text in found["unknown"]):
            raise ValueError(f"parallel.{name}={str(row['parallel'][name])[:40]} (rule: a whole number, at least 1)")
    model = found["model"]
    if model.get("kv_heads") and model["heads"] % model["kv_heads"]:
        found["unknown"].append(f"model.kv_heads={model['kv_heads']}")
        model["kv_heads"] = None
    if (model.get("experts_per_token") or 1) > (model.get("experts") or 1):
        raise ValueError(
            f"model.experts_per_token={model['experts_per_token']} of experts={model.get('experts')} (rule: at most all)"
        )
    if (degrees.get("ep") or 1) > 1 and not model.get("experts"):
        raise ValueError(f"parallel.ep={degrees['ep']}, and model.experts is not given (rule: its experts are known)")
    stages = (degrees.get("pp") or 1) * (degrees.get("vpp") or 1)
    if (degrees.get("pp") or 1) > model["layers"] + 2:
        raise ValueError(f"parallel.pp={degrees['pp']} of {model['layers']} layers (rule: a stage has a layer)")
    if stages > model["layers"] + 2:
        found["unknown"].append(f"parallel.vpp={degrees['vpp']}")
        degrees["vpp"] = None


def _complete_degrees(found: dict[str, Any], row: Mapping[str, Any]) -> None:
    """Set the degrees that are not printed: the devices that are left are data-parallel."""
    degrees, hardware = found["parallel"], found["hardware"]
    known = math.prod(degrees.get(name) or 1 for name in _DEGREES)
    if hardware.get("gpus") is None:
        if any("hardware.gpus=" in text for text in found["unknown"]) or not any(
            degrees.get(name) for name in _DEGREES
        ):
            given = row["hardware"].get("gpus") if isinstance(row.get("hardware"), Mapping) else None
            raise ValueError(f"hardware.gpus={str(given)[:40]} (rule: a whole number, or all degrees)")
        hardware["gpus"] = known
    if degrees.get("dp") is None:
        degrees["dp"] = max(1, hardware["gpus"] // known)


def _complete_batch(found: dict[str, Any]) -> None:
    """Set sizes of the batch and of the sequence that follow from others, or are usual."""
    batch, model, dp = found["batch"], found["model"], found["parallel"]["dp"]
    seq, tokens = model.get("seq"), batch.get("tokens")
    if batch.get("global") is None:
        if tokens and seq:
            batch["global"] = max(1, round(tokens / seq))
        elif batch.get("micro"):
            batch["global"] = batch["micro"] * (batch.get("grad_accum") or 1) * dp
        else:
            raise ValueError("batch.global is not known (rule: it, or micro-batches and their number, or tokens)")
    if seq is None:
        model["seq"] = max(1, round(tokens / batch["global"])) if tokens else 2048
    if batch.get("micro") is None:
        share = max(1, round(batch["global"] / dp))
        staged = (found["parallel"].get("pp") or 1) > 1
        most = 1 if staged else max(1, _FIRST_TOKENS // model["seq"])
        batch["micro"] = max(1, round(share / batch["grad_accum"])) if batch.get("grad_accum") else min(share, most)
