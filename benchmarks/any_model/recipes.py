"""Recipes: which class, configuration, batch and loss make a model of an architecture that trains on a CPU.

A recipe is JSON, so that every rank builds the same model from it. Heads are taken from `transformers`' auto mappings, the first
whose tiny model trains; inputs by the names of the forward's arguments; the loss is the model's own where it has one over labels.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import re
from typing import Any

import torch
from benchmarks.any_model import configs
from torch import Tensor, nn

SAMPLES, LENGTH = 5, 9
CLASSES = 3
HEADS = (
    ("seq2seq", "SEQ_TO_SEQ_CAUSAL_LM"),
    ("speech seq2seq", "SPEECH_SEQ_2_SEQ"),
    ("image-text", "IMAGE_TEXT_TO_TEXT"),
    ("multimodal", "MULTIMODAL_LM"),
    ("causal", "CAUSAL_LM"),
    ("masked", "MASKED_LM"),
    ("image", "IMAGE_CLASSIFICATION"),
    ("audio", "AUDIO_CLASSIFICATION"),
    ("ctc", "CTC"),
    ("video", "VIDEO_CLASSIFICATION"),
    ("text", "SEQUENCE_CLASSIFICATION"),
    ("segmentation", "SEMANTIC_SEGMENTATION"),
    ("depth", "DEPTH_ESTIMATION"),
    ("detection", "OBJECT_DETECTION"),
    ("base", ""),
)
_LABELS_PER_TOKEN = ("causal", "masked", "seq2seq", "speech seq2seq", "image-text", "multimodal")
_LABELS_PER_SAMPLE = ("image", "audio", "video", "text")


def heads_of(model_type: str) -> list[tuple[str, str]]:
    """Return kinds and class names of an architecture, in the order in which they are tried."""
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    found = []
    for kind, name in HEADS:
        mapping = getattr(auto, f"MODEL_FOR_{name}_MAPPING_NAMES" if name else "MODEL_MAPPING_NAMES")
        value = mapping.get(model_type)
        if value is not None:
            found.append((kind, value if isinstance(value, str) else value[0]))
    return found


def build(recipe: dict[str, Any]) -> nn.Module:
    """Build the model of a recipe, in float64 and without dropout, all its parameters moved off zero and one."""
    library, cls, fields = recipe["library"], recipe["class"], copy.deepcopy(recipe["config"])
    if library == "transformers":
        return build_hf(recipe)
    if library == "timm":
        return prepared(importlib.import_module("timm").create_model(cls, num_classes=CLASSES, **fields))
    module = importlib.import_module("benchmarks.any_model.graphs" if library == "torch_geometric" else library)
    return prepared(getattr(module, cls)(**fields))


def build_hf(recipe: dict[str, Any]) -> nn.Module:
    """Build the model of a recipe, in float64 and with its rate of dropout, all its parameters moved off zero and one."""
    import transformers

    config_class = transformers.CONFIG_MAPPING[recipe["type"]]
    # torch's grouped product, which experts run by default, knows no float64.
    config = config_class(**copy.deepcopy(recipe["config"]), experts_implementation="eager")
    if "num_labels" in recipe:
        config.num_labels = recipe["num_labels"]
    for name, token in (("decoder_start_token_id", 1), ("pad_token_id", 0)):
        if getattr(config, name, None) is None:
            setattr(config, name, token)
    model = getattr(transformers, recipe["class"])(config)
    return prepared(model, 0.0 if recipe.get("mixes") else recipe.get("dropout", 0.0))


def prepared(model: nn.Module, dropout: float = 0.0) -> nn.Module:
    """Return the model in float64, with this rate in all dropouts, and with values that hide nothing: zeros and ones do."""
    model = model.double().train()
    for module in model.modules():
        for name, value in list(vars(module).items()):
            is_rate = (
                re.search(r"(drop|layerdrop|^p$)", name) and isinstance(value, float) and not isinstance(value, bool)
            )
            if is_rate and (name != "p" or "Drop" in type(module).__name__):
                setattr(module, name, dropout if "dropout" in name or name == "p" else 0.0)
            if value is torch.float32:  # to which a forward casts: a router's
                setattr(module, name, torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.add_(torch.randn_like(parameter), alpha=0.03)
    return model


def make_batch(recipe: dict[str, Any], step: int) -> dict[str, Tensor]:
    """Return the global batch of a step."""
    generator = torch.Generator().manual_seed(1000 + step)
    batch: dict[str, Tensor] = {}
    for name, kind, *facts in recipe["batch"]:
        if kind == "ids":
            low, high, *shape = facts
            batch[name] = torch.randint(low, high, (SAMPLES, *shape), generator=generator)
        elif kind == "normal":
            batch[name] = torch.randn(SAMPLES, *facts, generator=generator, dtype=torch.float64)
        elif kind == "ones":
            batch[name] = torch.ones(SAMPLES, *facts, dtype=torch.int64)
        elif kind == "boxes":
            corner = torch.randint(0, 20, (SAMPLES, *facts, 2), generator=generator)
            batch[name] = torch.cat([corner, corner + 5], -1)
        elif kind == "image tokens":
            token, count = facts
            batch["input_ids"][:, 1 : 1 + count] = token
    return batch


class OutputsLoss:
    """Mean over the samples of a smooth function of the tensors that a model gives for each sample.

    Args:
        paths: The tensors' places in the outputs; None: all that have as many entries as there are samples.
    """

    def __init__(self, paths: list[str] | None) -> None:
        self.paths = paths

    def __call__(self, outputs: Any, batch: Any) -> Tensor:
        # Those that are named may have no gradient: a loss is tried out without.
        found = per_sample_tensors(outputs, len(next(iter(batch.values()))), needs_grad=self.paths is None)
        paths = sorted(found) if self.paths is None else self.paths
        total = None
        for index, path in enumerate(paths):
            flat = found[path].flatten(1)
            weights = torch.cos(torch.arange(flat.shape[1], device=flat.device) * 0.7 + index).to(flat.dtype)
            term = ((flat * weights).sum(1) / flat.shape[1] + flat.square().mean(1)).mean()
            total = term if total is None else total + term
        if total is None:
            raise ValueError("no output with a gradient whose dim 0 is the sample")
        return total


_MIXED = re.compile(r"logits_per_|similarity|past_key_values|loss$")


def per_sample_tensors(outputs: Any, count: int, path: str = "", *, needs_grad: bool = True) -> dict[str, Tensor]:
    """Return the tensors, with a gradient, that have so many entries in dim 0, by their places."""
    if isinstance(outputs, Tensor):
        fits = outputs.is_floating_point() and outputs.dim() > 0 and len(outputs) == count
        fits = fits and (outputs.requires_grad or not needs_grad)
        return {path: outputs} if fits else {}
    found: dict[str, Tensor] = {}
    items = outputs.items() if hasattr(outputs, "items") else ()
    items = enumerate(outputs) if isinstance(outputs, tuple | list) else items
    for key, value in items:
        if not _MIXED.search(str(key)):
            found |= per_sample_tensors(value, count, f"{path}.{key}", needs_grad=needs_grad)
    return found


def paths_of_samples(model: nn.Module, recipe: dict[str, Any]) -> list[str]:
    """Return the places of the outputs whose dim 0 is the sample: they follow the number of samples."""
    batch = make_batch(recipe, 0)
    found: list[set[str]] = []
    for count in (SAMPLES, SAMPLES - 1):
        outputs = model(**{name: value[:count] for name, value in batch.items()})
        found.append(set(per_sample_tensors(outputs, count)))
    return sorted(found[0] & found[1])


def loss_of(recipe: dict[str, Any]) -> Any:
    """Return the loss function of a recipe; None: the model's own."""
    return None if recipe["loss"] == "own" else OutputsLoss(recipe.get("outputs"))


# ---- proposing


def _find(config: Any, names: tuple[str, ...], default: Any) -> Any:
    """Return the first field of these names, in the configuration or in its parts."""
    for name in names:
        value = getattr(config, name, None)
        if value is not None:
            return value
    for key in (
        "vision_config",
        "text_config",
        "audio_config",
        "encoder",
        "encoder_config",
        "backbone_config",
        "decoder",
    ):
        part = getattr(config, key, None)
        if part is not None and hasattr(part, "to_dict"):
            value = _find(part, names, None)
            if value is not None:
                return value
    return default


def _pair(value: Any) -> list[int]:
    return list(value)[:2] if isinstance(value, list | tuple) else [value, value]


def propose_batches(config: Any, module: nn.Module, kind: str) -> list[list[list[Any]]]:
    """Return batches that a model may take, in the order in which they are tried."""
    names = list(inspect.signature(module.forward).parameters)
    vocabulary = int(_find(config, ("vocab_size",), configs.VOCABULARY))
    low = min(20, max(0, vocabulary - 8))
    ids = ["ids", low, vocabulary, LENGTH]
    base: list[list[Any]] = []
    for name in ("input_ids", "decoder_input_ids"):
        if name in names and not (name == "decoder_input_ids" and kind in _LABELS_PER_TOKEN):
            base.append([name, *ids])
    if "bbox" in names:
        base.append(["bbox", "boxes", LENGTH])
    channels = int(_find(config, ("num_channels", "in_channels", "in_chans"), 3))
    sides = [_pair(_find(config, ("image_size", "img_size"), configs.IMAGE)), [64, 64], [32, 32]]
    mels = int(_find(config, ("num_mel_bins", "n_mels", "feature_size", "input_dim"), 16))
    frames = 2 * int(_find(config, ("max_source_positions",), 32))
    options: list[list[list[Any]]] = []
    if "pixel_values" in names:
        options += [[["pixel_values", "normal", channels, *side]] for side in sides]
        count = int(_find(config, ("num_frames",), 4))
        options += [[["pixel_values", "normal", count, channels, *side]] for side in sides[:1]]
    if "pixel_values_videos" in names and kind == "video":
        options += [[["pixel_values_videos", "normal", 8, channels, *sides[0]]]]
    if "input_features" in names:
        options += [
            [["input_features", "normal", *shape]]
            for shape in ((mels, frames), (frames, mels), (1, frames, mels), (64, mels))
        ]
    if "input_values" in names:
        options += [
            [["input_values", "normal", *shape]] for shape in ((1600,), (1, 1600), (frames, mels), (1024, mels))
        ]
    if "past_values" in names:
        options += [[["past_values", "normal", *shape]] for shape in ((64, 7), (64, 1), (64,), (32, 1))]
    if "inputs_embeds" in names and not base and not options:
        options += [[["inputs_embeds", "normal", LENGTH, configs.HIDDEN]]]
    if "hidden_states" in names and not base and not options:
        options += [[["hidden_states", "normal", LENGTH, configs.HIDDEN]]]
    proposals = [base + option for option in options] if options else [base]
    if base and options:
        proposals += [*options, base]
    return [_labelled(batch, kind, names, ids) for batch in proposals if batch]


def _labelled(batch: list[list[Any]], kind: str, names: list[str], ids: list[Any]) -> list[list[Any]]:
    if "labels" in names and kind in _LABELS_PER_TOKEN:
        return [*batch, ["labels", *ids]]
    if "labels" in names and kind in _LABELS_PER_SAMPLE:
        return [*batch, ["labels", "ids", 0, CLASSES]]
    if "labels" in names and kind == "ctc":
        return [*batch, ["labels", "ids", 3, 20, 2]]
    return batch
