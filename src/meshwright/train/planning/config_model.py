"""Description of a configuration's model: made by one rank, since it takes torch and runs the user's code."""

from __future__ import annotations

import dataclasses
from typing import Any, Final, Literal

from meshwright.errors import ApplyError
from meshwright.host import resident_bytes
from meshwright.ranks.launch import QUICK_STOP_S, launch
from meshwright.spec.model import Autocast, ModelSpec
from meshwright.spec.train import TrainSpec
from meshwright.train.config.types import TrainConfig

__all__: list[str] = []

_SAMPLES: Final = 8
"""Samples of the example batch at most: the description is for one sample, whatever it is [samples]."""

_MOST_BYTES: Final = 256 * 2**20
"""Parameters of a model that is built and run once, to see whether its batch may be cut, at most [bytes]."""

_KINDS: Final[dict[int, Literal["sgd", "momentum", "adamw"]]] = {0: "sgd", 4: "momentum", 8: "adamw"}


@dataclasses.dataclass(frozen=True, slots=True)
class Described:
    """What is known of a configuration before it runs."""

    model: ModelSpec
    train: TrainSpec
    loaded_bytes: int
    """Memory of the data and of what the user's code imports, which every process has [bytes]."""
    why_whole: str = ""
    """Why a plan may not cut the batch: a loss that compares samples, for example. Empty: it may, or nothing was tried."""


def describe_config(config: TrainConfig, autocast: Autocast) -> Described:
    """Return a configuration's model and the numbers of its training, found by a rank of this host.

    Args:
        config: The configuration.
        autocast: As `describe_model` takes it.

    Raises:
        ConfigError: The model or the data cannot be described.
        Exception: Whatever the user's code raises.
    """
    found = launch(describe_on_rank, 1, config.model_dump_json(), autocast, stop_grace_s=QUICK_STOP_S)[0]
    state_bytes = min(_KINDS, key=lambda size: abs(size - found["optimizer_bytes"]))
    train = TrainSpec(
        global_batch_size=config.train.global_batch_size,
        optimizer=_KINDS[state_bytes],
        precision=precision_of(config),
    )
    return Described(ModelSpec.from_json(found["spec"]), train, found["loaded_bytes"], found["why_whole"])


def precision_of(config: TrainConfig) -> Literal["fp32", "bf16"]:
    """Return what a configuration trains in, where a plan does not say otherwise."""
    return config.train.precision or config.plan.precision


def describe_on_rank(config_json: str, autocast: Autocast) -> dict[str, Any]:
    """Describe the model on this rank; return its JSON, what the optimizer keeps for a parameter, and what was loaded [bytes]."""
    from meshwright.describe.describing import describe_model
    from meshwright.train.config.imports import add_to_path
    from meshwright.train.losses import make_loss
    from meshwright.train.models import make_build_model

    config = TrainConfig.model_validate_json(config_json)
    add_to_path(config.import_roots)
    _describe_something()  # what that imports is no part of a training
    before = resident_bytes()
    batch = example_batch(config, min(_SAMPLES, config.train.global_batch_size))
    # A start's weights may lie in files; shapes do not depend on them.
    build = make_build_model(config, starts=False)
    spec = describe_model(build, batch, loss_fn=make_loss(config), autocast=autocast)
    loaded_bytes = max(0, resident_bytes() - before)
    is_tried = config.plan_is_auto and spec.params_bytes <= _MOST_BYTES
    return {
        "spec": spec.to_json(),
        "optimizer_bytes": _optimizer_bytes(config),
        "loaded_bytes": loaded_bytes,
        "why_whole": why_whole(config, batch) if is_tried else "",
    }


def why_whole(config: TrainConfig, batch: Any) -> str:
    """Return why a step of this batch cannot be taken in two parts, where it can be taken whole; empty where it can, or neither.

    Args:
        config: The configuration.
        batch: At least two samples.
    """
    from meshwright.run.applying import apply_plan
    from meshwright.train.losses import make_loss
    from meshwright.train.models import make_build_model

    told = ""
    for plan in ("micro_batches=2", "single"):
        try:
            with apply_plan(make_build_model(config, starts=False), plan, loss_fn=make_loss(config)) as model:
                model.step(batch)
        except Exception as error:  # noqa: BLE001 - the user's code may raise anything; the run itself will show it
            if not isinstance(error, ApplyError) or plan == "single":
                return ""
            told = error.message
        else:
            return told
    return told


def example_batch(config: TrainConfig, num_samples: int) -> Any:
    """Return the first samples of the configuration's data, as one batch."""
    from torch.utils.data import DataLoader

    from meshwright.train.data.loader import make_loader
    from meshwright.train.data.sources import load_data, make_collate

    data = load_data(config, "train")
    if isinstance(data, DataLoader):  # whose batches are as large as the run's
        return _first_samples(next(iter(data)), num_samples)
    loader = make_loader(
        data,
        _OneDevice(),
        global_batch_size=num_samples,
        shuffle=False,
        collate_fn=make_collate(config),
        prefetch=0,
    )
    return next(iter(loader))


def _first_samples(batch: Any, num_samples: int) -> Any:
    """Return the first samples of a batch, or the batch where it has no more, or cannot be cut along dim 0."""
    from meshwright.describe.batches import count_samples, split_samples

    try:
        count = count_samples(batch)
    except ApplyError:
        return batch
    return split_samples(batch, [num_samples, count - num_samples])[0] if count > num_samples else batch


def _describe_something() -> None:
    import torch

    from meshwright.describe.describing import describe_model

    describe_model(torch.nn.Linear(2, 2), (torch.zeros(2, 2),))


class _OneDevice:
    """What a loader asks of a model, for one that takes every sample."""

    dp_size = 1
    dp_rank = 0
    splitter = None


def _optimizer_bytes(config: TrainConfig) -> float:
    """Return the state that the optimizer has for an element of a parameter after one step [bytes]."""
    import torch

    from meshwright.train.optim import OptimizerFactory
    from meshwright.trees import tensors_in

    parameter = torch.nn.Parameter(torch.zeros(64, 64))
    parameter.grad = torch.ones_like(parameter)
    without_rules = config.optimizer.model_copy(update={"param_groups": ()})  # which name the model's parameters
    optimizer = OptimizerFactory(config.model_copy(update={"optimizer": without_rules})).build_named(
        [("weight", parameter)]
    )
    optimizer.step()
    held = sum(tensor.nbytes for tensor in tensors_in(dict(optimizer.state)) if tensor.numel() > 1)
    return held / parameter.numel()
