"""Entry points: functions that the launching process names for the ranks to call. They import torch only when called."""

from __future__ import annotations

from typing import Any

__all__: list[str] = []


def train_on_rank(config_json: str) -> dict[str, Any]:
    """Train on this rank; see `session.train`.

    Args:
        config_json: A `TrainConfig` as JSON.
    """
    from meshwright.train.config.types import TrainConfig
    from meshwright.train.session import train

    return train(TrainConfig.model_validate_json(config_json))
