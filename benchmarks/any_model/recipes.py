"""Recipes: which class, configuration, batch and loss make a model of an architecture that trains on a CPU.

A recipe is JSON, so that every rank builds the same model from it. Heads are taken from `transformers`' auto mappings, the first
whose tiny model trains; inputs by the names of the forward's arguments; the loss is the model's own where it has one over labels.
"""

from __future__ import annotations

import copy
import importlib
import re
from typing import Any

import torch
from benchmarks.any_model import vision
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
LABELS_PER_TOKEN = ("causal", "masked", "seq2seq", "speech seq2seq", "image-text", "multimodal")
LABELS_PER_SAMPLE = ("image", "audio", "video", "text")


def heads_of(model_type: str) -> list[tuple[str, str]]:
    """Return kinds and class names of an architecture, in the order in which they are tried."""
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    found = []
    for kind, name in HEADS:
        mapping = getattr(auto, f"MODEL_FOR_{name}_MAPPING_NAMES" if name else "MODEL_MAPPING_NAMES")
        value = mapping.get(model_type)
        if value is not None:
            found.append((kind, value if isinstance(value, str) else value[0]))
    return found or [("base", name) for name in _classes_of(model_type)]


def _classes_of(model_type: str) -> list[str]:
    """Return the models that take a configuration which no auto mapping has: towers of larger models, and heads of few.

    The larger classes first: those that hold others have a loss or outputs of their own.
    """
    import transformers

    config = transformers.CONFIG_MAPPING[model_type]
    try:
        modeling = _modeling_of(config)
    except ModuleNotFoundError:
        return []  # LayoutXLM has LayoutLMv2's
    found = [
        name
        for name, cls in vars(modeling).items()
        if isinstance(cls, type)
        and issubclass(cls, transformers.PreTrainedModel)
        and cls.config_class is config
        and cls.__module__ == modeling.__name__
        and cls.forward is not nn.Module.forward
    ]
    return sorted(found, key=lambda name: ("For" not in name, name.endswith("PreTrainedModel"), len(name)))


def _modeling_of(config: type) -> Any:
    package = config.__module__.rpartition(".")[0]
    return importlib.import_module(f"{package}.modeling_{package.rpartition('.')[2]}")


def build(recipe: dict[str, Any]) -> nn.Module:
    """Build the model of a recipe, in float64 and with its rate of dropout, all its parameters moved off zero and one."""
    library, cls, fields = recipe["library"], recipe["class"], copy.deepcopy(recipe["config"])
    if library == "transformers":
        return build_hf(recipe)
    return prepared(_build_other(library, cls, fields), rate_of(recipe))


def _build_other(library: str, cls: str, fields: dict[str, Any]) -> nn.Module:
    if library == "timm":
        return importlib.import_module("benchmarks.any_model.families").build(cls, fields)
    if library == "torchvision":
        return vision.build(cls, fields)
    if library == "torch_geometric":
        return getattr(importlib.import_module("benchmarks.any_model.graphs"), cls)(**fields)
    if library == "named":
        return importlib.import_module("benchmarks.any_model.named").build(cls, fields)
    return getattr(importlib.import_module(library), cls)(**fields)


def rate_of(recipe: dict[str, Any]) -> float:
    """Return the rate of dropout [fraction]; none where samples are mixed, since the plain loop takes shares there.

    None either where plain torch itself refuses it (`without_dropout`: it writes into what backward needs).
    """
    return 0.0 if recipe.get("mixes") or recipe.get("without_dropout") else recipe.get("dropout", 0.0)


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
    cls = getattr(transformers, recipe["class"], None) or getattr(_modeling_of(config_class), recipe["class"])
    if isinstance(wanted := cls.config_class, type) and not isinstance(config, wanted):
        config = next((part for part in vars(config).values() if isinstance(part, wanted)), config)
    model = cls(config)
    if "packed" in recipe:
        model = Packed(model, *recipe["packed"])
    if "flattened" in recipe:
        model = Flattened(model, recipe["flattened"])
    return prepared(model, rate_of(recipe))


class Packed(nn.Module):
    """A model that takes the patches of all images in one row, and gets those of each sample from a batch.

    Args:
        model: The model.
        name: Its argument for patches.
        grid: Its argument for each image's frames, rows and columns of patches.
        sizes: Those numbers [count].
        more: Other arguments of one number for each image.
    """

    def __init__(self, model: nn.Module, name: str, grid: str, sizes: list[int], more: dict[str, int]) -> None:
        super().__init__()
        self.model = model
        self.names = name, grid
        self.sizes = sizes
        self.more = more

    @property
    def config(self) -> Any:
        """The model's configuration."""
        return self.model.config

    def forward(self, patches: Tensor) -> dict[str, Tensor]:
        """Return what the model gives for each sample.

        Args:
            patches: Of shape [samples, patches, features].
        """
        name, grid = self.names
        count = len(patches)
        more = {key: torch.full((count,), value) for key, value in self.more.items()}
        sizes = torch.tensor(self.sizes).expand(count, 3)
        outputs = self.model(**{name: patches.flatten(0, 1), grid: sizes}, **more)
        items = outputs.items() if hasattr(outputs, "items") else enumerate([outputs])
        found = {str(key): value for key, value in items if isinstance(value, Tensor) and len(value) % count == 0}
        return {key: value.unflatten(0, (count, -1)) for key, value in found.items()}


class Flattened(nn.Module):
    """A model that takes some of its inputs for all samples in one row, and gets those of each sample from a batch.

    Args:
        model: The model.
        names: The inputs, of shape [samples, entries of a sample, ...].
    """

    def __init__(self, model: nn.Module, names: list[str]) -> None:
        super().__init__()
        self.model = model
        self.names = names

    @property
    def config(self) -> Any:
        """The model's configuration."""
        return self.model.config

    def forward(self, **batch: Tensor) -> Any:
        """Return what the model gives."""
        rows = {name: batch[name].flatten(0, 1) for name in self.names}
        return self.model(**{**batch, **rows})


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


def samples_of(recipe: dict[str, Any]) -> int:
    """Return how many samples the batch of a recipe has."""
    return recipe.get("samples", SAMPLES)


def make_batch(recipe: dict[str, Any], step: int) -> dict[str, Tensor]:
    """Return the global batch of a step."""
    samples = samples_of(recipe)
    generator = torch.Generator().manual_seed(1000 + step)
    batch: dict[str, Tensor] = {}
    for name, kind, *facts in recipe["batch"]:
        if kind == "ids":
            low, high, *shape = facts
            batch[name] = torch.randint(low, high, (samples, *shape), generator=generator)
        elif kind == "normal":
            batch[name] = torch.randn(samples, *facts, generator=generator, dtype=torch.float64)
        elif kind == "constant":
            batch[name] = torch.tensor(facts).expand(samples, len(facts)).clone()
        elif kind == "rows":
            rows = [facts[0][(index + step) % len(facts[0])] for index in range(samples)]
            batch[name] = torch.tensor(rows)
        elif kind == "filled":
            batch[name] = torch.full((samples, *facts[1:]), facts[0])
        elif kind == "ones":
            batch[name] = torch.ones(samples, *facts, dtype=torch.int64)
        elif kind == "boxes":
            corner = torch.randint(0, 20, (samples, *facts, 2), generator=generator)
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


def keeps_batch_statistics(model: nn.Module, recipe: dict[str, Any]) -> bool:
    """Tell, by a trial, whether samples see one another through statistics of the batch: BatchNorm of whatever class.

    A forward in training mode writes numbers into buffers, and gives samples other outputs where one less is beside them.
    """
    batch, trial = make_batch(recipe, 0), copy.deepcopy(model).train()
    before = {name: buffer.clone() for name, buffer in trial.named_buffers() if buffer.is_floating_point()}
    with torch.no_grad():
        whole = per_sample_tensors(trial(**batch), SAMPLES, needs_grad=False)
        if all(torch.equal(buffer, before.get(name, buffer)) for name, buffer in trial.named_buffers()):
            return False
        few = per_sample_tensors(
            trial(**{name: value[:-1] for name, value in batch.items()}), SAMPLES - 1, needs_grad=False
        )
    return any(not torch.allclose(few[path], whole[path][:-1]) for path in few.keys() & whole.keys())


def loss_of(recipe: dict[str, Any]) -> Any:
    """Return the loss function of a recipe; None: the model's own."""
    if recipe["loss"] == "terms":
        return sum_of_terms
    return None if recipe["loss"] == "own" else OutputsLoss(recipe.get("outputs"))


def sum_of_terms(outputs: dict[str, Tensor], _: Any) -> Tensor:
    """Return the sum of the terms that a detector gives."""
    return torch.stack(list(outputs.values())).sum()
