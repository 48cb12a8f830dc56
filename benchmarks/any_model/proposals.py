"""Batches that a model may take, proposed from the names of its forward's arguments and the fields of its configuration."""

from __future__ import annotations

import inspect
from typing import Any

from benchmarks.any_model import configs, recipes
from torch import nn


def _find(config: Any, names: tuple[str, ...], default: Any) -> Any:
    """Return the first field of these names, in the configuration or in its parts."""
    for name in names:
        value = _field(config, name)
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
        part = _field(config, key)
        if part is not None and hasattr(part, "to_dict"):
            value = _find(part, names, None)
            if value is not None:
                return value
    return default


def _field(config: Any, name: str) -> Any:
    try:
        return getattr(config, name, None)
    except Exception:  # a field that each layer has its own of
        return None


def _pair(value: Any) -> list[int]:
    return list(value)[:2] if isinstance(value, list | tuple) else [value, value]


def propose_batches(config: Any, module: nn.Module, kind: str) -> list[list[list[Any]]]:
    """Return batches that a model may take, in the order in which they are tried."""
    names = list(inspect.signature(module.forward).parameters)
    vocabulary = int(_find(config, ("vocab_size",), configs.VOCABULARY))
    low = min(20, max(0, vocabulary - 8))
    ids = ["ids", low, vocabulary, recipes.LENGTH]
    base: list[list[Any]] = [entry for entry in _beside(config) if entry[0] in names]
    for name in ("input_ids", "decoder_input_ids"):
        if name in names and not (name == "decoder_input_ids" and kind in recipes.LABELS_PER_TOKEN):
            base.append([name, *ids])
    if "bbox" in names:
        base.append(["bbox", "boxes", recipes.LENGTH])
    options = [*_images(config, names, kind), *_sounds(config, names), *_series(config, names)]
    for name in ("inputs_embeds", "hidden_states"):
        if name in names and not base and not options:
            options += [[[name, "normal", recipes.LENGTH, configs.HIDDEN]]]
    proposals = [base + option for option in options] if options else [base]
    if base and options:
        proposals += [*options, base]
    return [_labelled(batch, kind, names, ids) for batch in proposals if batch]


def _images(config: Any, names: list[str], kind: str) -> list[list[list[Any]]]:
    channels = int(_find(config, ("num_channels", "in_channels", "in_chans"), 3))
    sides = [_pair(_find(config, ("image_size", "img_size"), configs.IMAGE)), [64, 64], [32, 32]]
    frames = int(_find(config, ("num_frames",), 4))
    patch, depth = (_pair(_find(config, (name,), 1))[0] for name in ("patch_size", "temporal_patch_size"))
    options: list[list[list[Any]]] = []
    if "pixel_values" in names:
        options += [[["pixel_values", "normal", channels, *side]] for side in sides]
        options += [[["pixel_values", "normal", frames, channels, *side]] for side in sides[:1]]
    if {"pixel_values", "spatial_shapes"} <= set(names):
        shapes = [["pixel_attention_mask", "ones", 16], ["spatial_shapes", "constant", 4, 4]]
        options = [[["pixel_values", "normal", 16, channels * patch**2], *shapes], *options]
    if "patches" in names:
        options += [[["patches", "normal", 16, channels * patch**2 * n]] for n in dict.fromkeys((depth, 1, 2))]
        options += [[["patches", "normal", 16, channels, patch, patch]]]
    if "pixel_values_videos" in names and kind == "video":
        options += [[["pixel_values_videos", "normal", 8, channels, *sides[0]]]]
    if "pixel_values_videos" in names:
        options += [[["pixel_values_videos", "normal", frames, channels, *sides[0]]]]
    return options


def _sounds(config: Any, names: list[str]) -> list[list[list[Any]]]:
    mels = int(_find(config, ("num_mel_bins", "n_mels", "feature_size", "input_dim"), 16))
    frames = 2 * int(_find(config, ("max_source_positions",), 32))
    options: list[list[list[Any]]] = []
    if "input_features" in names:
        shapes = [(mels, frames), (frames, mels), (1, frames, mels), (64, mels)]
        widths = [_find(config, (name,), 0) for name in ("input_feat_per_channel", "feature_projection_input_dim")]
        shapes += [(64, int(width)) for width in widths if width]
        options += [[["input_features", "normal", *shape]] for shape in shapes]
        if "input_features_mask" in names:
            lengths = [max(shape[-2:]) for shape in shapes]
            pairs = zip(list(options), lengths, strict=True)
            options = [[*option, ["input_features_mask", "ones", size]] for option, size in pairs] + options
    if "input_values" in names:
        shapes = [(1600,), (1, 1600), (frames, mels), (1024, mels)]
        options += [[["input_values", "normal", *shape]] for shape in shapes]
    return options


def _series(config: Any, names: list[str]) -> list[list[list[Any]]]:
    options: list[list[list[Any]]] = []
    if "past_time_features" in names:
        length = int(_find(config, ("context_length",), 8)) + max(_find(config, ("lags_sequence",), [0]))
        after = int(_find(config, ("prediction_length",), 4) or 4)
        features = int(_find(config, ("num_time_features",), 0))
        past = [["past_values", "normal", length], ["past_time_features", "normal", length, features]]
        future = [["future_values", "normal", after], ["future_time_features", "normal", after, features]]
        options += [[*past, ["past_observed_mask", "ones", length], *future]]
    if "past_values" in names:
        options += [[["past_values", "normal", *shape]] for shape in ((64, 7), (64, 1), (64,), (32, 1))]
    return options


def _beside(config: Any) -> list[list[Any]]:
    """Return inputs that are known by their names alone."""
    hidden = int(_find(config, ("hidden_size", "d_model"), configs.HIDDEN))
    found: list[list[Any]] = [
        ["visual_feats", "normal", 5, int(_find(config, ("visual_feat_dim",), hidden))],
        ["visual_pos", "normal", 5, int(_find(config, ("visual_pos_dim",), 4))],
        ["states", "normal", recipes.LENGTH, int(_find(config, ("state_dim",), 8))],
        ["actions", "normal", recipes.LENGTH, int(_find(config, ("act_dim",), 4))],
        ["rewards", "normal", recipes.LENGTH, 1],
        ["returns_to_go", "normal", recipes.LENGTH, 1],
        ["timesteps", "ids", 0, 8, recipes.LENGTH],
    ]
    if hasattr(config, "cross_attention_frequency"):
        found += [["query_embeds", "normal", 6, hidden]]
        found += [["encoder_hidden_states", "normal", 7, int(_find(config, ("encoder_hidden_size",), hidden))]]
    return found


def packing_of(module: nn.Module) -> list[Any] | None:
    """Return how patches of samples are packed for a model that takes those of all images in one row; None for any other."""
    names = list(inspect.signature(module.forward).parameters)
    grid = next((name for name in ("grid_thw", "image_grid_thw") if name in names), None)
    if grid is None or "input_ids" in names or names[0] not in ("hidden_states", "pixel_values"):
        return None
    return [names[0], grid, [1, 4, 4], {name: 1 for name in names if name == "merge_sizes"}]


def _labelled(batch: list[list[Any]], kind: str, names: list[str], ids: list[Any]) -> list[list[Any]]:
    if "labels" in names and kind in recipes.LABELS_PER_TOKEN:
        return [*batch, ["labels", *ids]]
    if "labels" in names and kind in recipes.LABELS_PER_SAMPLE:
        return [*batch, ["labels", "ids", 0, recipes.CLASSES]]
    if "labels" in names and kind == "ctc":
        return [*batch, ["labels", "ids", 3, 20, 2]]
    return batch
