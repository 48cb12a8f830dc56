"""What is trained in the parity tests: model, data and loss by name, so that ranks can find them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from parity import containers, losses, models


@dataclasses.dataclass(frozen=True)
class Case:
    """One model with its data; `batch(num_samples, seed)` makes a global batch."""

    build: Callable[[], nn.Module]
    batch: Callable[[int, int], Any]
    loss_fn: Callable[[Any, Any], Any] | None
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None

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


def single_branch_decay(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, weight_decay=0.3)


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
}

# One device does not compute these on the whole batch: their reference takes the same pieces as the ranks do.
PIECEWISE: dict[str, Case] = {
    "batch_norm": Case(models.build_resnet_batch_norm, images, classes),
    "discriminator": Case(lambda: models.Discriminator().double(), pairs_of_images, losses.difference_of_scores),
    "moving_average": Case(lambda: models.MovingAverage().double(), regression, losses.square),
    "parametrized": Case(models.build_parametrized, regression, losses.square),
    "data_dependent": Case(lambda: models.DataDependent().double(), data_dependent, losses.square),
}


def find(name: str) -> Case:
    """Return a case by name."""
    return CASES.get(name) or PIECEWISE[name]
