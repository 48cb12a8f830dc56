"""Names in a configuration: its model, data, optimizer and loss, looked up before a rank starts.

Nothing here imports torch or the user's code.
"""

from __future__ import annotations

import glob
import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path

from meshwright.errors import ConfigError, MissingDependencyError, closest_word, did_you_mean
from meshwright.texts import is_directory, parse_json, read_text
from meshwright.train.config.imports import check_callable
from meshwright.train.config.types import TrainConfig

__all__: list[str] = []

TEXT_SOURCES = ("python-stdlib", "files")
BUILT_IN_SOURCES = (*TEXT_SOURCES, "digits")
BUILT_IN_LOSSES = ("auto", "cross_entropy", "mse", "model")
BUILT_IN_OPTIMIZERS = ("adamw", "sgd")


def check_model(config: TrainConfig) -> None:
    """Check that there is the model that is named, and that its keys fit it.

    Raises:
        ConfigError: It is not there, or cannot be what its keys say.
        MissingDependencyError: An optional package is needed.
    """
    target, pretrained = config.model.target, config.model.pretrained
    if pretrained is not None and not is_directory(Path(config.base_directory) / pretrained):
        raise ConfigError(
            f"model.pretrained = {pretrained!r}: there is no directory {Path(config.base_directory) / pretrained}",
            fix="name a directory that save_pretrained wrote, relative to the configuration's folder",
        )
    if not target.startswith("hf:"):
        check_callable(target, key="model.target", roots=config.import_roots, keywords=config.model.kwargs)
        return
    path = hf_config_path(config)
    try:
        parse_json(read_text(path))
    except FileNotFoundError:
        fix = "name a Hugging Face config.json, or its folder, relative to the configuration's folder"
        raise ConfigError(f"model.target = {target!r}: there is no file {path}", fix=fix) from None
    except (OSError, ValueError) as error:
        fix = "write it anew, with config.save_pretrained(folder)"
        raise ConfigError(f"model.target = {target!r}: {path} is not readable JSON: {error}", fix=fix) from None
    _require_package("transformers", "hf", f"model.target = {target!r}")


def hf_config_path(config: TrainConfig) -> Path:
    """Return the Hugging Face config.json that "hf:path" names; a folder means the file in it."""
    path = Path(config.base_directory) / config.model.target.removeprefix("hf:")
    return path / "config.json" if is_directory(path) else path


def check_data(config: TrainConfig) -> None:
    """Check that there is the data that is named, and that its keys fit it.

    Raises:
        ConfigError: It is not there, or cannot be what its keys say.
        MissingDependencyError: An optional package is needed.
    """
    data = config.data
    if data.source not in BUILT_IN_SOURCES:
        if ":" not in data.source:
            raise _unknown("data.source", data.source, BUILT_IN_SOURCES)
        keywords = {"split": "train", **data.kwargs}
        rule = "called with split='train', with split='eval' for held-out data, and with data.kwargs"
        check_callable(data.source, key="data.source", roots=config.import_roots, keywords=keywords, rule=rule)
        return
    if data.kwargs:
        raise ConfigError(
            f"data.kwargs are for a callable source, data.source is {data.source!r}", fix="leave out data.kwargs"
        )
    if data.source != "files" and (data.files or data.eval_files):
        raise ConfigError(
            f'data.files are for data.source = "files", which is {data.source!r}', fix="--set data.source=files"
        )
    if data.source == "digits":
        _require_package("sklearn", "digits", 'data.source = "digits"')
    if data.source == "files":
        if not data.files:
            raise ConfigError('data.source = "files" needs data.files', fix='data.files = ["corpus/*.txt"]')
        _check_text(config, "data.files", data.files)
        if data.eval_files:
            _check_text(config, "data.eval_files", data.eval_files)


def data_files(config: TrainConfig, patterns: tuple[str, ...]) -> list[str]:
    """Return the files that match, sorted, each once; relative patterns start at the configuration's folder."""
    found = {
        path
        for pattern in patterns
        for path in glob.glob(os.path.join(config.base_directory, os.path.expanduser(pattern)), recursive=True)
        if os.path.isfile(path)
    }
    return sorted(found)


def check_optimizer(config: TrainConfig) -> None:
    """Check that there is the optimizer that is named, and that its keys fit it.

    Raises:
        ConfigError: It is not there, or cannot be what its keys say.
    """
    optimizer = config.optimizer
    if optimizer.betas is not None and optimizer.name != "adamw":
        raise ConfigError(
            f"optimizer.betas are adamw's, optimizer.name is {optimizer.name!r}", fix="leave out optimizer.betas"
        )
    if optimizer.betas is not None and not all(0 <= beta < 1 for beta in optimizer.betas):
        raise ConfigError(
            f"optimizer.betas = {list(optimizer.betas)} (rule: 0 <= beta < 1)", fix="--set optimizer.betas=[0.9,0.999]"
        )
    if optimizer.momentum is not None and optimizer.name != "sgd":
        raise ConfigError(
            f"optimizer.momentum is sgd's, optimizer.name is {optimizer.name!r}", fix="leave out optimizer.momentum"
        )
    if optimizer.name not in BUILT_IN_OPTIMIZERS:
        if ":" not in optimizer.name:
            raise _unknown("optimizer.name", optimizer.name, BUILT_IN_OPTIMIZERS)
        check_callable(optimizer.name, key="optimizer.name", roots=config.import_roots)


def check_loss(config: TrainConfig) -> None:
    """Check that there is the loss that is named, and that its keys fit it.

    Raises:
        ConfigError: It is not there, or cannot be what its keys say.
    """
    loss = resolve_loss(config)
    if loss in BUILT_IN_LOSSES:
        return
    if ":" not in loss:
        raise _unknown("train.loss", loss, BUILT_IN_LOSSES)
    check_callable(loss, key="train.loss", roots=config.import_roots, positional=2, keywords={})


def resolve_loss(config: TrainConfig) -> str:
    """Return what loss = "auto" stands for, or the loss that is named."""
    if config.train.loss != "auto":
        return config.train.loss
    if config.model.target.startswith("hf:"):
        return "model"
    if config.data.source in BUILT_IN_SOURCES:
        return "cross_entropy"
    raise ConfigError(
        f"train.loss = 'auto' cannot know the loss of data.source = {config.data.source!r}",
        fix='train.loss = "cross_entropy", "mse", "model" or "package.module:callable"',
    )


def _check_text(config: TrainConfig, key: str, patterns: tuple[str, ...]) -> None:
    found = data_files(config, patterns)
    if not found:
        raise ConfigError(
            f"{key} = {list(patterns)}: no file matches in {config.base_directory}",
            fix=f'{key} = ["*.txt"], with patterns that start in that folder, or whole paths',
        )
    size = 0
    for name in found:
        try:
            with open(name, "rb") as file:
                size += os.fstat(file.fileno()).st_size
        except OSError as error:
            fix = f"make it readable (chmod u+r {name}), or leave it out of {key}"
            raise ConfigError(f"{key}: {name} cannot be read: {error.strerror}", fix=fix) from None
    # Without held-out files each split needs at least one sample, and a sample one byte more than its length.
    held_out = 0.0 if key == "data.eval_files" or config.data.eval_files else config.data.eval_fraction
    smallest = min(size * held_out, size * (1 - held_out)) if held_out else size
    if smallest < config.data.sequence_length + 1:
        raise ConfigError(
            f"{key}: {len(found)} files hold {size} bytes (rule: training and held-out text have at least "
            f"data.sequence_length + 1 = {config.data.sequence_length + 1} bytes each)",
            fix="more text, or a smaller data.sequence_length",
        )


def _require_package(module: str, extra: str, what: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise MissingDependencyError(f"{what} needs the package '{module}'", fix=f"pip install 'meshwright[{extra}]'")


def _unknown(key: str, name: str, known: Sequence[str]) -> ConfigError:
    hint = did_you_mean(name, known)
    return ConfigError(
        f"{key} = {name!r}{hint}; known: {', '.join(known)}, package.module:callable",
        fix=f"--set {key}={closest_word(name, known) or known[0]}, or one's own as package.module:callable",
    )
