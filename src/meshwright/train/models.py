"""Model targets of a configuration, as functions that build the model."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from meshwright.errors import MissingDependencyError
from meshwright.run.building.pretrained import build_pretrained
from meshwright.train.config.imports import import_callable
from meshwright.train.config.targets import hf_config_path
from meshwright.train.config.types import TrainConfig

__all__: list[str] = []


def make_build_model(config: TrainConfig, *, starts: bool = True) -> Callable[[], nn.Module]:
    """Return a function without arguments that builds the configuration's model, with the weights that a start begins with.

    Raises:
        ConfigError: The target cannot be imported.
        MissingDependencyError: It needs a package that is not installed.
    """
    target, kwargs = config.model.target, config.model.kwargs
    if target.startswith("hf:"):
        build = functools.partial(build_hf_model, str(hf_config_path(config)), kwargs)
    else:
        build = functools.partial(import_callable(target, config.import_roots), **kwargs)
    if config.model.pretrained is None or not starts:
        return build
    return functools.partial(build_pretrained, build, str(Path(config.base_directory) / config.model.pretrained))


def build_hf_model(config_path: str, changes: dict[str, Any]) -> nn.Module:
    """Build a Hugging Face causal language model with random weights.

    Raises:
        MissingDependencyError: transformers is not installed.
    """
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError:
        raise MissingDependencyError(
            "a Hugging Face model needs the package transformers", fix="pip install 'meshwright[hf]'"
        ) from None
    config = AutoConfig.from_pretrained(config_path)
    # The cache of keys and values is for generation; in training it only takes memory.
    for name, value in {"use_cache": False, **changes}.items():
        setattr(config, name, value)
    return AutoModelForCausalLM.from_config(config)
