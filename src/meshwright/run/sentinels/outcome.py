"""Comparison of a step's loss and gradient norm, which every rank computes."""

from __future__ import annotations

import struct

import torch

from meshwright.apply.engine import Engine
from meshwright.apply.finding import Finding
from meshwright.run.sentinels.copies_check import allowed_difference

__all__: list[str] = []


def compare_outcome(engine: Engine, loss: float, norm: float, *, step: int) -> list[Finding]:
    """Return a finding where this rank's loss or norm of a step differs from the first rank's; every rank calls it."""
    mine = torch.tensor([loss, norm], dtype=torch.float64, device=engine.device)
    first = engine.everyone.all_gather(mine)[0].tolist()
    tolerance = max(allowed_difference(engine.device, torch.float32), roundings(engine))
    findings = []
    for part, value, usual in (("loss", loss, first[0]), ("gradient norm", norm, first[1])):
        difference = abs(value - usual) / max(abs(usual), 1e-300)
        if bits_of(value) != bits_of(usual) and not difference <= tolerance:
            text = f"the {part} of step {step} is {value!r}, and {usual!r} on rank {engine.everyone.ranks[0]}"
            findings.append(Finding(part=part, difference=difference, tolerance=tolerance, text=text))
    return findings


def digest_outcome(loss: float, norm: float) -> int:
    """Return a digest of a step's loss and norm, by their bits."""
    return int.from_bytes(bits_of(loss), "little") + 3 * int.from_bytes(bits_of(norm), "little")


def roundings(engine: Engine) -> float:
    """Return a few roundings of the coarsest dtype of the parameters, relative; 0 where no ranks share layers.

    Where ranks that share layers each compute the loss, they may add up in another order.
    """
    if engine.copies == 1:
        return 0.0
    dtypes = [parameter.dtype for parameter in engine.parameters if parameter.is_floating_point()]
    return 64 * max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0)


def bits_of(value: float) -> bytes:
    """Return the eight bytes of a number, which tell NaN from NaN and 0 from -0."""
    return struct.pack("<d", value)
