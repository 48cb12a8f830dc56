"""Strategy for people who know three numbers: the model's size, the batch and the devices."""

from __future__ import annotations

import math
import re
from typing import Final

from meshwright.errors import ConfigError
from meshwright.hardware import ClusterSpec, load_cluster
from meshwright.plan.catalogue.catalogue import find_model, known_models
from meshwright.plan.search.ranking import make_plans
from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import Plan
from meshwright.spec.train import TrainSpec

__all__: list[str] = []

_UNITS: Final = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
_SIZE: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?(?:e[0-9]+)?)\s*([kmbt]?)")
_VOCAB: Final = 50304
_HEAD_SIZE: Final = 128


def select_strategy(
    model_size: str | float,
    batch_size: int,
    num_devices: int,
    *,
    device: str = "a100-sxm-80gb",
    sequence_length: int = 2048,
    precision: str = "bf16",
) -> Plan:
    """Return the best plan for people who know three numbers.

    The model is taken for a GPT of that size: decoder blocks of the usual proportions.

    Args:
        model_size: Parameters, as a number or as in "7B" and "350M"; or a name of the catalogue, such as "llama3-8b" [count].
        batch_size: Samples of one step over all devices [samples].
        num_devices: Devices [count].
        device: What they are: a name of the table of devices; hosts have 8 of them.
        sequence_length: Tokens of a sample; of a known model too [tokens].
        precision: "bf16" or "fp32".

    Returns:
        The plan, whose ``str`` is its one-line form; ``reasons`` and ``prediction`` explain it.

    Raises:
        ConfigError: A number is out of range, or a name unknown.
        PlanError: No plan fits into the devices' memory.

    >>> str(select_strategy("125M", 64, 8))
    'dp=8,zero=2,precision=bf16'
    """
    if isinstance(num_devices, bool) or not isinstance(num_devices, int) or num_devices < 1:  # type: ignore[redundant-expr]
        raise ConfigError(f"num_devices={num_devices!r} (rule: a whole number, at least 1)", fix="num_devices=1")
    train = TrainSpec(global_batch_size=batch_size, precision=precision)  # type: ignore[arg-type]
    return make_plans(_model(model_size, sequence_length), _cluster(device, num_devices), train, top=1)[0]


def _cluster(device: str, num_devices: int) -> ClusterSpec:
    if num_devices <= 8:
        return load_cluster(f"{num_devices}x{device}")
    in_host = math.gcd(num_devices, 8)
    return load_cluster(f"{num_devices // in_host}x{in_host}x{device}")


def _model(size: str | float, sequence: int) -> ModelSpec:
    if isinstance(size, str) and size.strip().lower() in known_models():
        return find_model(size, sequence=sequence)
    wanted = _count(size)
    # A block has 12 h^2 parameters; published GPTs have about h / 128 blocks, from 12 at 125 million to 96 at 175 billion.
    hidden = max(_HEAD_SIZE, round((wanted * _HEAD_SIZE / 12) ** (1 / 3) / _HEAD_SIZE) * _HEAD_SIZE)
    layers = max(1, round((wanted - _VOCAB * hidden) / (12 * hidden**2)))
    return ModelSpec.transformer(
        name=f"gpt-{size}",
        layers=layers,
        hidden=hidden,
        heads=max(1, hidden // _HEAD_SIZE),
        vocab=_VOCAB,
        sequence=sequence,
        tied=True,
    )


def _count(size: str | float) -> float:
    match = _SIZE.fullmatch(str(size).strip().lower())
    count = float(match[1]) * _UNITS[match[2]] if match else 0.0
    if count < 1:
        raise ConfigError(
            f"model_size={size!r} is neither a number of parameters nor a known model",
            fix="write it as in '7B', '350M' or 'llama3-8b'",
        )
    return count
