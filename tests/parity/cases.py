"""What is trained in the parity tests: model, data and loss by name, so that ranks can find them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from tests.parity import losses
from tests.parity.models import containers, hf_models, tensor_convolutions, tensor_models, tutorial_models
from tests.parity.models import small_models as models
from torch import nn

BIAS_OF_ANOTHER_STAGE = "The size of tensor a (3) must match the size of tensor b (6)"
"""A bias of heads that an earlier stage has made is whole, and a layer that was proven with its slice runs whole."""
AROUND_ALL_STAGES = "that is outside of it"
"""Two layers at a model's root are a part around all stages, which a rank cannot prove: others' parameters are NaN there."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One model with its data; `batch(num_samples, seed)` makes a global batch."""

    build: Callable[[], nn.Module]
    batch: Callable[[int, int], Any]
    loss_fn: Callable[[Any, Any], Any] | None
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None
    runs_whole_in_stages: str = ""
    """Of the reason why calls of a part that is cut run whole where a pipeline's stages are cut, too; where some do."""

    def batches(self, num_samples: int, num_steps: int = 3) -> list[Any]:
        """Return different global batches, each with samples of different sizes."""
        return [self.batch(num_samples, step) for step in range(num_steps)]


def _normal(seed: int, *shape: int) -> torch.Tensor:
    # Sample i is i + 1 times as large: with data of one size a missing reduction can look right.
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(1000 + seed), dtype=torch.float64)
    sizes = torch.arange(1, shape[0] + 1, dtype=torch.float64) / shape[0]
    return x * sizes.reshape(-1, *[1] * (len(shape) - 1))


def _integers(seed: int, high: int, *shape: int) -> torch.Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(2000 + seed))


def regression(num_samples: int, seed: int) -> Any:
    return _normal(seed, num_samples, 7), _normal(seed + 100, num_samples, 5)


def regression_by_key(num_samples: int, seed: int) -> Any:
    return {"x": _normal(seed, num_samples, 7), "targets": _normal(seed + 100, num_samples, 5)}


def keywords(num_samples: int, seed: int) -> Any:
    inputs, targets = regression(num_samples, seed)
    return {
        "x": inputs,
        "mask": None if seed % 2 else inputs[:, :5] > 0,
        "scale": 1.5,
        "temperature": torch.tensor(2.0, dtype=torch.float64),
        "settings": models.Settings(factor=0.5 + seed),
        "targets": targets,
    }


def data_dependent(num_samples: int, seed: int) -> Any:
    inputs = {"x": _normal(seed, num_samples, 7), "depth": 1 + _integers(seed, 3, num_samples)}
    return inputs, _normal(seed + 100, num_samples, 5)


def language(num_samples: int, seed: int, vocabulary: int = models.VOCABULARY, length: int = 7) -> Any:
    ids = _integers(seed, vocabulary, num_samples, length + 1)
    return ids[:, :-1], ids[:, 1:]


def padded_language(num_samples: int, seed: int) -> Any:
    """Sequences with 5, 1, 0, 3, 5, 1, ... valid labels."""
    ids, labels = language(num_samples, seed)
    labels = labels.clone()
    for row, valid in zip(labels, [5, 1, 0, 3] * num_samples, strict=False):
        row[valid:] = -100
    return ids, labels


def own_loss(num_samples: int, seed: int) -> Any:
    ids, labels = language(num_samples, seed, vocabulary=11)
    labels = labels.clone()
    for row, valid in zip(labels, [5, 1, 0, 3] * num_samples, strict=False):
        row[valid:] = -100
    return {"input_ids": ids, "labels": labels}


def images(num_samples: int, seed: int) -> Any:
    return _normal(seed, num_samples, 3, 7, 7), _integers(seed, 5, num_samples)


def classes(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs, batch[1])


def pairs_of_images(num_samples: int, seed: int) -> Any:
    return {"real": _normal(seed, num_samples, 2, 5, 5), "fake": 5 + _normal(seed + 1, num_samples, 2, 5, 5)}


def flagged(num_samples: int, seed: int) -> Any:
    """Step 0: all samples take branch A; step 1: the first half A, the others B; step 2: all B."""
    flag = torch.arange(num_samples) < {0: num_samples, 1: (num_samples + 1) // 2, 2: 0}[seed % 3]
    inputs, targets = regression(num_samples, seed)
    return (inputs, flag), targets


def sparse_ids(num_samples: int, seed: int) -> Any:
    """The last samples hold nothing but padding."""
    ids = _integers(seed, 50, num_samples, 3)
    ids[(num_samples + 1) // 2 :] = 0
    return ids, _normal(seed, num_samples, 5)


def sequences(num_samples: int, seed: int) -> Any:
    lengths = torch.tensor(([5, 3, 2, 1] * num_samples)[:num_samples])
    return (_normal(seed, num_samples, 5, 7), lengths), _normal(seed + 100, num_samples, 5)


def numbers(num_samples: int, seed: int, num_in: int, num_out: int) -> Any:
    return _normal(seed, num_samples, num_in), _normal(seed + 100, num_samples, num_out)


def large_images(num_samples: int, seed: int, size: int = 32, num_classes: int = 10) -> Any:
    return _normal(seed, num_samples, 3, size, size), _integers(seed, num_classes, num_samples)


# What Hugging Face's models take: keywords, and the targets beside them.


def prompts(num_samples: int, seed: int) -> Any:
    ids, labels = language(num_samples, seed)
    return {"input_ids": ids}, labels


def labelled(num_samples: int, seed: int) -> Any:
    """Labels for the model's own loss, which shifts them: rows that count 6, 1, 3, 0, 6, ..., of 7."""
    ids, _ = language(num_samples, seed)
    labels = ids.clone()
    for row, valid in zip(labels, [7, 2, 4, 1] * num_samples, strict=False):
        row[valid:] = -100
    return {"input_ids": ids, "labels": labels}


def _padding(num_samples: int, length: int) -> torch.Tensor:
    lengths = torch.tensor(([length, 3, 5, 2] * num_samples)[:num_samples])
    return (torch.arange(length) < lengths[:, None]).long()


def masked_tokens(num_samples: int, seed: int) -> Any:
    """Padded sequences in two segments; about a third of the tokens that are there have to be found."""
    ids, labels = language(num_samples, seed)
    mask = _padding(num_samples, ids.shape[1])
    hidden = (_integers(seed + 1, 3, *ids.shape) == 0) & (mask == 1)
    segments = (torch.arange(ids.shape[1]) > 2).long().expand_as(ids)
    inputs = {"input_ids": ids.masked_fill(hidden, 1), "attention_mask": mask, "token_type_ids": segments}
    return inputs, labels.masked_fill(~hidden, -100)


def padded_sentences(num_samples: int, seed: int) -> Any:
    ids, _ = language(num_samples, seed)
    inputs = {"input_ids": ids, "attention_mask": _padding(num_samples, ids.shape[1])}
    return inputs, _integers(seed + 1, hf_models.NUM_CLASSES, num_samples)


def translations(num_samples: int, seed: int) -> Any:
    """Padded sources of 7 tokens, targets of 5."""
    source, _ = language(num_samples, seed)
    before, target = language(num_samples, seed + 1, length=5)
    return {
        "input_ids": source,
        "attention_mask": _padding(num_samples, source.shape[1]),
        "decoder_input_ids": before,
    }, target


def pixel_values(num_samples: int, seed: int) -> Any:
    pixels, labels = large_images(num_samples, seed, size=9, num_classes=hf_models.NUM_CLASSES)
    return {"pixel_values": pixels}, labels


def single_branch_decay(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, weight_decay=0.3)


TUTORIALS: dict[str, Case] = {
    "tutorial_cnn": Case(
        lambda: tutorial_models.ConvNet().double(),
        large_images,
        classes,
        runs_whole_in_stages=AROUND_ALL_STAGES,
    ),
    "tutorial_mlp_100_50_10": Case(
        lambda: tutorial_models.FeedForward(100, 50, 10).double(),
        functools.partial(numbers, num_in=100, num_out=10),
        losses.square,
    ),
    "tutorial_mlp_10_10_5": Case(
        lambda: tutorial_models.FeedForward(10, 10, 5).double(),
        functools.partial(numbers, num_in=10, num_out=5),
        losses.square,
    ),
    "tutorial_encoder": Case(lambda: tutorial_models.EncoderLanguageModel().double(), language, losses.cross_entropy),
    "tutorial_albert": Case(lambda: tutorial_models.SharedBlocks().double(), language, losses.cross_entropy),
}

CASES: dict[str, Case] = {
    "mlp": Case(models.build_mlp, regression, losses.square),
    "example_mlp": Case(models.build_example_mlp, regression, losses.square),
    "gpt": Case(models.build_gpt, language, losses.cross_entropy),
    "gpt_padded": Case(models.build_untied_gpt, padded_language, losses.valid_tokens),
    "resnet": Case(models.build_resnet, images, classes),
    "lstm": Case(models.build_lstm, language, losses.cross_entropy),
    "tied": Case(lambda: models.Tied().double(), functools.partial(language, vocabulary=13), losses.cross_entropy),
    "branches": Case(
        lambda: models.Branches().double(), flagged, losses.square_of_first, optimizer=single_branch_decay
    ),
    "lora": Case(models.build_lora, regression, losses.weighted_square),
    "tiny": Case(lambda: models.Tiny().double(), regression, losses.square),
    "sparse": Case(lambda: models.SparseEmbedding().double(), sparse_ids, losses.square),
    "sparse_sums": Case(lambda: models.SparseEmbedding().double(), sparse_ids, losses.summed_square),
    "branches_sums": Case(lambda: models.Branches().double(), flagged, losses.summed_square_of_first),
    "shared": Case(lambda: models.Shared().double(), regression, losses.square),
    "odd_layouts": Case(lambda: models.OddLayouts().double(), regression, losses.square),
    "keywords": Case(lambda: models.Keywords().double(), keywords, losses.square_by_key),
    "in_place": Case(lambda: models.InPlace().double(), regression, losses.square),
    "own_loss": Case(lambda: models.OwnLoss().double(), own_loss, None),
    "recurrent": Case(lambda: models.Recurrent().double(), sequences, losses.square),
    "checkpointed": Case(lambda: models.Checkpointed(use_reentrant=False).double(), regression, losses.square),
    "reentrant": Case(lambda: models.Checkpointed(use_reentrant=True).double(), regression, losses.square),
    "hooked": Case(models.build_hooked, regression, losses.square),
    "old_weight_norm": Case(models.build_old_weight_norm, regression, losses.square),
    "penalty": Case(models.build_mlp, regression, losses.with_penalty),
    **{
        f"output_{kind}": Case(
            functools.partial(lambda kind: containers.WithOutput(kind).double(), kind), regression, losses.of_container
        )
        for kind in ("dict", "dataclass", "attributes", "namedtuple", "nested", "opaque")
    },
    **TUTORIALS,
}

# They take seconds of imports in every process that builds them.
HUGGING_FACE: dict[str, Case] = {
    "hf_llama": Case(hf_models.build_llama, prompts, losses.logits_cross_entropy),
    "hf_llama_tied": Case(hf_models.build_tied_llama, prompts, losses.logits_cross_entropy),
    "hf_llama_own_loss": Case(hf_models.build_llama, labelled, None),
    "hf_gpt2": Case(hf_models.build_gpt2, prompts, losses.logits_cross_entropy),
    "hf_bert": Case(hf_models.build_bert, masked_tokens, losses.logits_valid_tokens),
    "hf_bert_classifier": Case(
        hf_models.build_bert_classifier,
        padded_sentences,
        losses.logits_cross_entropy,
        runs_whole_in_stages=AROUND_ALL_STAGES,
    ),
    "hf_t5": Case(
        hf_models.build_t5,
        translations,
        losses.logits_cross_entropy,
        runs_whole_in_stages=BIAS_OF_ANOTHER_STAGE,
    ),
    "hf_vit": Case(hf_models.build_vit, pixel_values, losses.logits_cross_entropy),
    "hf_mixtral": Case(hf_models.build_mixtral, prompts, losses.logits_cross_entropy),
    "hf_albert": Case(hf_models.build_albert, prompts, losses.logits_cross_entropy),
}

# 5 million parameters, 21 in the full grid: few cells, few samples, one step.
WIDE: dict[str, Case] = {
    "tutorial_mlp_wide": Case(
        tutorial_models.build_wide_mlp,
        functools.partial(numbers, num_in=tutorial_models.WIDE, num_out=tutorial_models.WIDE),
        losses.square,
    ),
}

# One device does not compute these on the whole batch: their reference takes the same pieces as the ranks do.
PIECEWISE: dict[str, Case] = {
    "batch_norm": Case(models.build_resnet_batch_norm, images, classes),
    "discriminator": Case(lambda: models.Discriminator().double(), pairs_of_images, losses.difference_of_scores),
    "moving_average": Case(lambda: models.MovingAverage().double(), regression, losses.square),
    "parametrized": Case(models.build_parametrized, regression, losses.square),
    "data_dependent": Case(lambda: models.DataDependent().double(), data_dependent, losses.summed_square),
}


# Written the ways in which people write attention, feed-forward parts and convolutions: for tensor parallelism.
_short_language = functools.partial(language, vocabulary=tensor_models.VOCABULARY)
_small_images = functools.partial(large_images, size=9, num_classes=tensor_models.CLASSES)
_even_images = functools.partial(large_images, size=8, num_classes=tensor_models.CLASSES)


def dicts(num_samples: int, seed: int) -> Any:
    """One dict with all that the model takes, as its only argument."""
    ids, labels = _short_language(num_samples, seed)
    return {"batch": {"ids": ids, "scale": torch.tensor(1.5, dtype=torch.float64)}}, labels


TENSOR_STYLES: dict[str, Case] = {
    **{
        f"style_{kind}": Case(
            functools.partial(tensor_models.build_decoder, kind), _short_language, losses.cross_entropy
        )
        for kind in tensor_models.DECODERS
    },
    "style_dict": Case(lambda: tensor_models.DictDecoder().double(), dicts, losses.cross_entropy),
    "style_mixer": Case(lambda: tensor_models.Mixer().double(), _small_images, classes),
    "style_vit": Case(lambda: tensor_models.VisionTransformer().double(), _small_images, classes),
    "style_vgg": Case(tensor_models.build_vgg, _even_images, classes),
    "style_depthwise": Case(tensor_models.build_depthwise, _even_images, classes),
    "style_bottleneck": Case(tensor_models.build_bottlenecks, _even_images, classes),
    "style_neck": Case(lambda: tensor_convolutions.Neck().double(), _even_images, classes),
    "style_unet": Case(lambda: tensor_models.UNet().double(), _even_images, classes),
    "style_translator": Case(lambda: tensor_models.Translator().double(), _short_language, losses.cross_entropy),
}

# As many heads as ranks, or fewer.
HEADS: dict[str, Case] = {
    f"gpt_{heads}_heads_of_{kv_heads}": Case(
        functools.partial(models.build_gpt, num_heads=heads, num_kv_heads=kv_heads, hidden_size=width),
        language,
        losses.cross_entropy,
    )
    for heads, kv_heads, width in ((8, 8, 32), (8, 2, 32), (3, 3, 24), (2, 1, 24))
}


def find(name: str) -> Case:
    """Return a case by name."""
    return {**CASES, **PIECEWISE, **HUGGING_FACE, **WIDE, **TENSOR_STYLES, **HEADS}[name]
