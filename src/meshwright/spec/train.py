"""Settings of a training, beside the model, that decide what a plan costs."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Final, Literal

from meshwright.values import Problems, Value

__all__: list[str] = []

# State that the optimizer keeps for one parameter, in fp32 [bytes]. Adam keeps two moments, momentum one.
# Source: Rajbhandari et al. 2020 (ZeRO), arXiv:1910.02054, section 3.1; torch.optim keeps the same tensors.
_STATE_BYTES: Final = {"adamw": 8, "adam": 8, "momentum": 4, "sgd": 0}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainSpec(Value):
    """The numbers of a training.

    Args:
        global_batch_size: Samples of one step, over all devices and micro-batches [samples].
        sequence_length: Tokens of a sample; None means the model's own, or that there are none [tokens].
        optimizer: "adamw", "adam", "momentum" (SGD with momentum) or "sgd" (plain).
        precision: "fp32" computes in the model's own dtype, "bf16" in bfloat16 with full-precision parameters.

    Raises:
        ConfigError: A value is unknown, or a number is below 1.

    >>> TrainSpec(global_batch_size=64).optimizer_bytes_per_param
    8
    """

    FORMAT: ClassVar[str] = "train"

    global_batch_size: int
    sequence_length: int | None = None
    optimizer: Literal["adamw", "adam", "momentum", "sgd"] = "adamw"
    precision: Literal["fp32", "bf16"] = "fp32"

    def __post_init__(self) -> None:
        self._check_types()
        problems = Problems("train")
        for name in ("global_batch_size", "sequence_length"):
            number = getattr(self, name)
            problems.require(
                number is None or number >= 1, f"{name}={number} (rule: {name} is at least 1)", fix=f"{name}=1"
            )
        problems.check()

    @property
    def optimizer_bytes_per_param(self) -> int:
        """State that the optimizer keeps for one fp32 parameter [bytes]."""
        return _STATE_BYTES[self.optimizer]
