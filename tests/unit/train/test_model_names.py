"""Models by name, as `meshwright describe` takes them: a configuration has its own data."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.errors import ConfigError
from meshwright.plan.catalogue.catalogue import find_model as known_model
from meshwright.spec import TrainSpec
from meshwright.spec.model import Autocast
from meshwright.train.config.load import load_config
from meshwright.train.config.types import TrainConfig
from meshwright.train.model_names import find_model
from meshwright.train.planning import config_model

EXAMPLE = Path(__file__).parents[3] / "examples" / "lstm_python.toml"


def test_a_configuration_is_described_with_its_own_data(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[TrainConfig, Autocast]] = []

    def describe(config: TrainConfig, autocast: Autocast) -> config_model.Described:
        asked.append((config, autocast))
        return config_model.Described(known_model("gpt2"), TrainSpec(global_batch_size=1), 0)

    monkeypatch.setattr(config_model, "describe_config", describe)
    assert find_model(str(EXAMPLE), autocast="cpu") == known_model("gpt2")
    assert asked == [(load_config(EXAMPLE), "cpu")]


def test_sizes_beside_a_configuration_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"--sequence 4 .* the configuration names its data"):
        find_model(str(EXAMPLE), sequence=4)
