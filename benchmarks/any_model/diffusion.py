"""Models of diffusers in small: shrunk by the names of their arguments, with inputs proposed from the names of forward's.

python -m benchmarks.any_model.diffusion --out benchmarks/any_model/others.jsonl
"""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
import math
import re
import time
from typing import Any

from benchmarks.any_model import float64

float64.install()

import torch  # noqa: E402
from benchmarks.any_model import finder, recipes  # noqa: E402
from torch import nn  # noqa: E402

_NO_MODELS = re.compile(
    r"ControlNet|Adapter|Mixin|Config$|^Auto(Model|encoderTiny)$|backend|Backend|Multi|Conditioner|Bank"
)
_MOST_PARAMETERS = 4_000_000
_WIDTH, _HEADS, _HEAD_DIM, _WORDS = 32, 4, 8, 7
_CHANNELS = 4

_RULES: tuple[tuple[str, Any], ...] = (
    (r".*(num_layers|num_single_layers|num_double_layers|_layers|depth|num_blocks|num_refiner_layers|n_layers)", 2),
    (r"layers_per_block|.*layers_per_block|transformer_layers_per_block", 1),
    (r".*(num_attention_heads|num_heads|_heads|n_heads)", _HEADS),
    (r".*(num_key_value_heads|num_kv_heads|kv_heads)", 2),
    (r"attention_head_dim|.*head_dim", _HEAD_DIM),
    (r"norm_num_groups|.*num_groups|groups", 4),
    (r"in_channels|out_channels|latent_channels|.*_in_channels|.*_out_channels|z_dim|num_channels_latents", _CHANNELS),
    (r"sample_size|sample_height|sample_width|image_size", 8),
    (r"sample_frames|num_frames", 4),
    (r".*(num_experts|n_experts|num_routed_experts)", 4),
    (r".*(vocab_size|num_embeds_ada_norm|num_vq_embeddings)", 64),
    (r".*(max_seq_len|max_seq_length|pos_embed_max_size|max_text_len|rope_max_seq_len)", 32),
    (
        r".*(cross_attention_dim|caption_channels|joint_attention_dim|text_dim|pooled_projection_dim|_embed_dim|embed_dim)",
        _WIDTH,
    ),
    (
        r".*(hidden_size|inner_dim|hidden_dim|ffn_dim|intermediate_size|dim|time_embed_dim|channels|_features|width)",
        _WIDTH,
    ),
)


def tiny(name: str, value: Any) -> Any:
    """Return the small value of an argument."""
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int):
        found = next((size for pattern, size in _RULES if re.fullmatch(pattern, name)), None)
        return value if found is None or value <= found else found
    if isinstance(value, list | tuple) and value and all(type(item) is int for item in value):
        if re.search(r"axes_dim|rope_dim|dims_rope", name):  # parts of a head's width
            return type(value)([_HEAD_DIM - 2 * (len(value) - 1), *[2] * (len(value) - 1)])
        if re.search(r"block_out_channels|channel|dims|widths", name):
            return type(value)(min(item, 16 * 2 ** min(index, 1)) for index, item in enumerate(value))
        if re.search(r"layers|depth|heads", name):
            return type(value)(min(item, 2 if "heads" in name else 1) for item in value)
    return value


def tiny_arguments(cls: Any) -> dict[str, Any]:
    """Return the small arguments of a class."""
    defaults = {name: p.default for name, p in inspect.signature(cls.__init__).parameters.items()}
    known = {name: value for name, value in defaults.items() if value is not inspect.Parameter.empty}
    return {name: new for name, value in known.items() if (new := tiny(name, value)) != value}


def propose_batches(module: nn.Module) -> list[list[list[Any]]]:
    """Return batches that a model may take: images, films, sequences, with what stands beside them in forward."""
    names = list(inspect.signature(module.forward).parameters)
    config = getattr(module, "config", {})

    def first(*fields: str) -> int:
        return next((config[name] for name in fields if isinstance(config.get(name), int)), _WIDTH)

    channels = first("in_channels", "latent_channels", "in_dim", "z_dim")
    side = first("sample_size") if isinstance(config.get("sample_size"), int) else 8
    words = first(
        "cross_attention_dim", "joint_attention_dim", "caption_channels", "text_dim", "text_embed_dim", "cap_feat_dim"
    )
    beside: list[list[Any]] = []
    if "timestep" in names or "timesteps" in names:
        beside.append(["timestep" if "timestep" in names else "timesteps", "ids", 0, 60])
    for name in ("encoder_hidden_states", "encoder_hidden_states_t5", "caption_feats"):
        if name in names:
            beside.append([name, "normal", _WORDS, words])
    pooled = first("pooled_projection_dim", "projection_class_embeddings_input_dim", "pooled_dim")
    beside += [[name, "normal", pooled] for name in ("pooled_projections", "pooled_embeds") if name in names]
    beside += [
        [name, "ones", _WORDS] for name in ("encoder_attention_mask", "encoder_hidden_states_mask") if name in names
    ]
    beside += [["class_labels", "ids", 0, 10]] if "class_labels" in names else []
    beside += [["txt_ids", "filled", 0.0, _WORDS, 3]] if "txt_ids" in names else []
    beside += [["guidance", "filled", 1.0]] if "guidance" in names else []
    optional = {"encoder_attention_mask", "guidance", "class_labels", "encoder_hidden_states_mask"}
    first_name = next((n for n in ("sample", "hidden_states", "x", "latents") if n in names), names[0])
    found = []
    square = int(math.sqrt(side)) if side > 16 else side
    for shape in (
        (channels, side, side),
        (channels, 3, square, square),
        (3, channels, square, square),
        (16, channels),
        (channels, 64),
    ):
        own = [[first_name, "normal", *shape]]
        if "img_ids" in names:
            own.append(["img_ids", "filled", 0.0, 16, 3])
        found += [[*own, *beside], [*own, *[entry for entry in beside if entry[0] not in optional]]]
    for side in (16, 32):  # for those of images
        found.append([[first_name, "normal", 3, side, side]])
    return [batch for place, batch in enumerate(found) if batch not in found[:place]]


def find(name: str) -> dict[str, Any]:
    """Return the recipe of a class, or what stood in the way."""
    cls = getattr(importlib.import_module("diffusers"), name)
    problems: dict[str, None] = {}
    small = tiny_arguments(cls)
    kept = {key: value for key, value in small.items() if not re.search(r"in_channels|out_channels|patch", key)}
    for fields in (small, kept):
        recipe = {"type": f"diffusers/{name}", "kind": "diffusion", "class": name, "config": fields}
        recipe |= {"library": "diffusers", "loss": "outputs", "mixes": False}
        try:
            count = _count_without_memory(cls, fields)
            if count > _MOST_PARAMETERS:
                problems[f"{count} parameters"] = None
                continue
            torch.manual_seed(0)
            module = recipes.build({**recipe, "batch": []})
            count = sum(p.numel() for p in module.parameters())
        except TimeoutError:
            raise
        except Exception as error:
            problems[_text(error)] = None
            continue
        for batch in propose_batches(module):
            try:
                return {**recipe, "batch": batch, "parameters": count, **_run(module, {**recipe, "batch": batch})}
            except TimeoutError:
                raise
            except Exception as error:
                problems[_text(error)] = None
    return {
        "type": f"diffusers/{name}",
        "library": "diffusers",
        "problem": " | ".join(itertools.islice(problems, 8))[:900],
    }


def _count_without_memory(cls: Any, fields: dict[str, Any]) -> int:
    try:
        with torch.device("meta"):
            return sum(p.numel() for p in cls(**fields).parameters())
    except (RuntimeError, NotImplementedError):  # code that reads values while it builds
        return 0


def _run(module: nn.Module, recipe: dict[str, Any]) -> dict[str, Any]:
    batch = recipes.make_batch(recipe, 0)
    begin = time.perf_counter()
    module.zero_grad()
    loss = recipes.OutputsLoss(None)(module(**batch), batch)
    loss.backward()
    reached = sum(p.numel() for p in module.parameters() if p.grad is not None)
    if not bool(torch.isfinite(loss)) or loss.dtype != torch.float64:
        raise ValueError(f"loss {float(loss)} in {loss.dtype}")
    return {"seconds": round(time.perf_counter() - begin, 3), "reached": reached}


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:130]}"


def main() -> None:
    arguments, rows = finder.begin(__doc__)
    diffusers = importlib.import_module("diffusers")
    diffusers.utils.logging.set_verbosity_error()
    known = {row["type"] for row in rows}
    names = [
        name
        for name in diffusers._import_structure["models"]
        if not _NO_MODELS.search(name) and f"diffusers/{name}" not in known
    ]
    finder.find_each("diffusers", ((name, functools.partial(find, name)) for name in names), arguments)


if __name__ == "__main__":
    main()
