"""Catalogue of known architectures."""

from __future__ import annotations

import functools
import importlib
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from meshwright.errors import ConfigError, did_you_mean
from meshwright.spec.model import ModelSpec

__all__: list[str] = []

_NOT_SIZES: Final = ("source", "published_params", "architecture")

_MODULES: Final = {
    "bert": "encoders",
    "vit": "encoders",
    "t5": "encoders",
    "resnet": "resnets",
    "latent_experts": "latent_experts",
}
"""Architecture of a row -> the module whose function of that name makes a model of its sizes."""


def builder_of(architecture: str) -> Callable[..., ModelSpec]:
    """Return what makes a model of an architecture's sizes; its module loads now."""
    if architecture == "transformer":
        return ModelSpec.transformer
    return getattr(importlib.import_module(f"meshwright.plan.catalogue.{_MODULES[architecture]}"), architecture)


def known_models() -> tuple[str, ...]:
    """Return the names in the catalogue, in its order.

    >>> "llama3-8b" in known_models()
    True
    """
    return tuple(read_models()["models"])


def find_model(name: str, *, sequence: int | None = None) -> ModelSpec:
    """Return a known architecture.

    Args:
        name: Its name, such as "gpt3-175b"; case does not matter.
        sequence: Tokens of a sample; None means what the model was trained with [tokens].

    Raises:
        ConfigError: There is no such name, or the model takes no sequences and one is given.

    >>> find_model("gpt2").num_params
    124439808
    """
    table = read_models()["models"]
    key = name.strip().lower()
    if key not in table:
        raise ConfigError(
            f"there is no model '{name}' in the catalogue{did_you_mean(key, table)}; known: {', '.join(table)}",
            fix="use one of these, a config.json, or 'package.module:callable'",
        )
    sizes: dict[str, Any] = {field: value for field, value in table[key].items() if field not in _NOT_SIZES}
    if sequence is not None:
        if "sequence" not in sizes:
            raise ConfigError(
                f"model: '{key}' takes images, no sequence of {sequence} tokens", fix="leave the sequence out"
            )
        sizes["sequence"] = sequence
    return builder_of(table[key].get("architecture", "transformer"))(name=key, **sizes)


@functools.cache
def read_models() -> Mapping[str, Any]:
    """Return models.toml as it is: tables ``sources`` and ``models``."""
    return tomllib.loads(Path(__file__).with_name("models.toml").read_text("utf-8"))
