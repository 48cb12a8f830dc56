"""Models named on a command line: a catalogue name, `package.module:callable`, or a Hugging Face config.json, as a ModelSpec.

torch is imported only where a module has to be built.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshwright.errors import ConfigError
from meshwright.plan.plan_table import read_model
from meshwright.spec.model import Autocast, ModelSpec
from meshwright.texts import is_directory, parse_json, read_text
from meshwright.train.config.imports import check_callable, import_callable

__all__: list[str] = []

_DEFAULT_SEQUENCE = 1024
_BATCH_FORMS = (
    "name one with --batch package.module:callable, or have the callable return a pair (build_model, example_batch), or give the "
    "model's class an attribute or method example_batch"
)


def find_model(
    text: str,
    *,
    batch_size: int | None = None,
    sequence: int | None = None,
    batch: str | None = None,
    autocast: Autocast = "none",
) -> ModelSpec:
    """Describe the model that a text names.

    Args:
        text: A name of the catalogue; or "package.module:callable", looked up in the present directory too; or a config.json of
            transformers, or its folder; or what `describe --json` wrote; or a configuration, "NAME.toml".
        batch_size: Samples of the example batch [samples]; the description is for one sample whatever it is.
        sequence: Tokens of a sample; None means the batch's own, for a config.json 1024 or what the model allows [tokens].
        batch: "package.module:callable" that returns an example batch; it may take batch_size and sequence.
        autocast: As `describe_model` takes it.

    Raises:
        ConfigError: There is no such model or batch.
        MissingDependencyError: A config.json needs transformers.
    """
    path = Path(text)
    if is_directory(path) or path.suffix == ".json":
        return _describe_file(path, batch_size, sequence, batch, autocast)
    if path.suffix == ".toml":
        return _describe_config(path, batch_size, sequence, batch, autocast)
    if ":" in text:
        return _describe_callable(text, batch_size, sequence, batch, autocast)
    if batch is not None:
        raise ConfigError(
            f"--batch {batch} for '{text}' (rule: a model of the catalogue is only sizes)", fix="leave --batch out"
        )
    _refuse_autocast(text, autocast)
    return read_model(text, sequence=sequence)


def _describe_config(
    path: Path, batch_size: int | None, sequence: int | None, batch: str | None, autocast: Autocast
) -> ModelSpec:
    from meshwright.train.config.load import load_config
    from meshwright.train.planning.config_model import describe_config

    given = {"--batch-size": batch_size, "--sequence": sequence, "--batch": batch}
    for option, value in given.items():
        if value is not None:
            raise ConfigError(
                f"{option} {value} for '{path}' (rule: the configuration names its data)", fix=f"leave {option} out"
            )
    return describe_config(load_config(path), autocast).model


def _refuse_autocast(text: str, autocast: Autocast) -> None:
    if autocast != "none":
        raise ConfigError(
            f"--autocast {autocast} for '{text}' (rule: only a module that runs has casts)", fix="leave --autocast out"
        )


def _describe_callable(
    text: str, batch_size: int | None, sequence: int | None, batch: str | None, autocast: Autocast
) -> ModelSpec:
    from torch import nn

    from meshwright.describe.describing import describe_model

    named = _import(text, "model")
    example = None if batch is None else _call_with_sizes(_import(batch, "--batch"), batch_size, sequence)
    build = named
    if example is None and not (isinstance(named, type) and issubclass(named, nn.Module)):
        build, example = _pair_of(named)
    if example is None:
        example = _own_batch(build, batch_size, sequence)
    if example is None:
        raise ConfigError(f"'{text}' names a model and no example batch", fix=_BATCH_FORMS)
    return describe_model(build, _resized(example, batch_size, sequence), autocast=autocast)


def _pair_of(named: Callable[..., Any]) -> tuple[Any, Any]:
    """Return (build_model, example_batch) where a function returns both; (the function, None) where it returns a module."""
    from torch import nn

    from meshwright.describe.fakes import build_fake, make_fake_mode

    try:
        found, _ = build_fake(named, make_fake_mode())
    except Exception:  # noqa: BLE001 - describe_model tries again, and says what is wrong
        return named, None
    if not (isinstance(found, tuple) and len(found) == 2):
        return named, None
    if isinstance(found[0], nn.Module):
        return functools.partial(_first_of, named), found[1]
    return named()


def _first_of(named: Callable[[], tuple[Any, Any]]) -> Any:
    return named()[0]


def _own_batch(build: Any, batch_size: int | None, sequence: int | None) -> Any:
    """Return the example batch of a model's class, or None."""
    from torch import nn

    from meshwright.describe.fakes import build_fake, make_fake_mode

    if isinstance(build, nn.Module) or (isinstance(build, type) and hasattr(build, "example_batch")):
        module = build
    else:
        try:
            module, _ = build_fake(build, make_fake_mode())
        except Exception:  # noqa: BLE001 - describe_model says what is wrong, once there is a batch
            return None
    if isinstance(module, type):
        module = module()
    example = getattr(module, "example_batch", None)
    return _call_with_sizes(example, batch_size, sequence) if callable(example) else example


def _import(text: str, key: str) -> Callable[..., Any]:
    here = [os.getcwd()]
    check_callable(text, key=key, roots=here)
    return import_callable(text, here)


def _call_with_sizes(function: Callable[..., Any], batch_size: int | None, sequence: int | None) -> Any:
    """Call a function with the sizes that it takes."""
    taken = inspect.signature(function).parameters
    sizes = {"batch_size": batch_size, "sequence": sequence, "sequence_length": sequence}
    return function(**{name: size for name, size in sizes.items() if name in taken and size is not None})


def _resized(batch: Any, batch_size: int | None, sequence: int | None) -> Any:
    """Return the batch with other sizes, where they are asked for."""
    import torch

    from meshwright.describe.batches import BatchSplitter
    from meshwright.describe.fakes import sized_batch
    from meshwright.describe.module_facts import sequence_of
    from meshwright.trees import map_tensors

    if batch_size is not None:
        batch = sized_batch(batch, BatchSplitter().count(batch), batch_size)
    have = sequence_of(batch)
    if sequence is None or sequence == have:
        return batch
    if have is None:
        raise ConfigError(
            f"--sequence {sequence}, but the example batch has no integer input of two dims (rule: its dim 1 is the sequence)",
            fix="leave --sequence out, and give the example batch the length",
        )

    def resize(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() < 2 or tensor.shape[1] != have:
            return tensor
        if tensor.is_floating_point():
            return tensor.new_zeros((tensor.shape[0], sequence, *tensor.shape[2:]))
        return tensor[:, torch.arange(sequence) % have]

    return map_tensors(batch, resize)


def _describe_file(
    path: Path, batch_size: int | None, sequence: int | None, batch: str | None, autocast: Autocast
) -> ModelSpec:
    place = path / "config.json" if is_directory(path) else path
    try:
        config = parse_json(read_text(place))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{place} cannot be read: {error}", fix="name a config.json that transformers wrote"
        ) from error
    if isinstance(config, dict) and config.get("format") == "meshwright.model":
        _refuse_autocast(str(place), autocast)
        return read_model(str(place), sequence=sequence)
    if not isinstance(config, dict) or "model_type" not in config:
        raise ConfigError(
            f"{place} has no model_type (rule: a config.json that transformers wrote has one)",
            fix="name the config.json of a Hugging Face model",
        )
    from meshwright.describe.describing import describe_model
    from meshwright.train.models import build_hf_model

    build = functools.partial(build_hf_model, str(place), {})
    if batch is not None:
        example = _resized(_call_with_sizes(_import(batch, "--batch"), batch_size, sequence), batch_size, sequence)
    else:
        example = _token_batch(batch_size or 1, sequence or _allowed_sequence(config))
    return describe_model(build, example, autocast=autocast)


def _allowed_sequence(config: dict[str, Any]) -> int:
    given = (config.get(word) for word in ("max_position_embeddings", "n_positions", "n_ctx"))
    return min([_DEFAULT_SEQUENCE, *(size for size in given if isinstance(size, int) and size > 0)])


def _token_batch(batch_size: int, sequence: int) -> dict[str, Any]:
    """Return ids and labels of a causal language model, [batch_size, sequence] each."""
    import torch

    ids = torch.zeros((batch_size, sequence), dtype=torch.int64)
    return {"input_ids": ids, "labels": ids.clone()}
