"""Settings that a run keeps when it is continued, and the refusal of others. Never imports torch."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

from meshwright.errors import ConfigError
from meshwright.train.config.targets import hf_config_path
from meshwright.train.config.types import TrainConfig

__all__: list[str] = []

_LOG = logging.getLogger("meshwright")

_CHANGEABLE = {
    "model": {"pretrained"},  # where it began; the directory may be gone
    "data": {"num_workers", "prefetch"},
    "train": {
        *("steps", "max_seconds", "max_restarts", "timeout_s", "name", "directory", "print_every"),
        *("trace", "profiler", "log"),
        *("plan", "devices", "micro_batches", "precision"),  # which make the plan
        *("eval_every", "eval_batches", "non_finite", "sentinel_every", "on_finding"),
    },
}
"""What may be another after a stop, by section. What is added to a configuration must stay as it was, unless it stands here."""

_SINCE = {("train", "rng"): "torch", ("train", "sync_batch_norm"): False}
"""Settings that former releases did not write, with what they did."""

_SECTIONS = ("model", "data", "optimizer", "schedule", "train")
_ABSENT = "(not set)"


def fixed_settings(config: TrainConfig) -> dict[str, Any]:
    """Return the settings that a run keeps from its start to its end, as JSON: "section.key" -> value."""
    dumped = json.loads(config.model_dump_json(include=set(_SECTIONS)))
    settings = {
        f"{section}.{key}": value
        for section in _SECTIONS
        for key, value in dumped[section].items()
        if key not in _CHANGEABLE.get(section, ()) and _SINCE.get((section, key)) != value
    }
    if config.model.target.startswith("hf:"):
        # The file may say something else by now, which no shape need show: the number of heads, for example.
        settings["the file of model.target"] = json.loads(hf_config_path(config).read_text(encoding="utf-8"))
    return settings


def as_it_began(config: TrainConfig, saved: Mapping[str, Any]) -> TrainConfig:
    """Return a configuration with what the run did in settings that former releases did not write; a change is logged.

    Ranks cannot tell a default from what somebody has asked for: they get the whole configuration.

    Args:
        config: The configuration.
        saved: The settings that the run's checkpoint has.
    """
    for (section, key), value in _SINCE.items():
        part = getattr(config, section)
        if f"{section}.{key}" not in saved and getattr(part, key) != value:
            _LOG.warning("%s.%s: this run began with %r, and goes on with it", section, key, value)
            config = config.model_copy(update={section: part.model_copy(update={key: value})})
    return config


def refuse_changes(saved: Mapping[str, Any], now: Mapping[str, Any], where: str) -> None:
    """Refuse to continue a run under settings that would change what it computes.

    Args:
        saved: The settings that its checkpoint has.
        now: The settings of this configuration.
        where: The checkpoint, for the message.

    Raises:
        ConfigError: Some differ; the message lists them.
    """
    names = [name for name in {**saved, **now} if saved.get(name, _ABSENT) != now.get(name, _ABSENT)]
    if not names:
        return
    rows = "".join(
        f"\n  {name}: {_text(saved.get(name, _ABSENT))} in the checkpoint, {_text(now.get(name, _ABSENT))} now"
        for name in names
    )
    settings = [_set(name, saved[name]) for name in names if name in saved and "." in name and " " not in name]
    back = " ".join(setting for setting in settings if setting)
    raise ConfigError(
        f"{where} is of a run with other settings (rule: plan, devices, steps, evaluations, checkpoints and output may change; "
        f"what decides the numbers may not):{rows}",
        fix=f"put them back{': ' + back if back else ''}, or start a new run: --set train.name=NAME, without --resume",
    )


def _text(value: Any) -> str:
    text = value if value == _ABSENT else json.dumps(value)
    return text if len(text) <= 200 else text[:200] + "..."


def _set(name: str, value: Any) -> str:
    """Return the option that puts a setting back; "" where a command line cannot."""
    if value is None or isinstance(value, dict | list):
        return ""
    text = f"{name}={json.dumps(value)}"
    return f"--set '{text}'" if isinstance(value, str) else f"--set {text}"
