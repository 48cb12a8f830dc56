"""Bytes, FLOPs, seconds and bandwidth: parse and print. No other module converts a unit.

Binary prefixes count memory (1 GiB = 2^30 bytes), decimal ones traffic and maths (1 GB = 1e9 bytes, 1 TFLOP = 1e12).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Final

from meshwright.errors import ConfigError, did_you_mean

__all__: list[str] = []

KIB: Final = 2**10
MIB: Final = 2**20
GIB: Final = 2**30
TIB: Final = 2**40

_BYTES: Final[dict[str, int]] = {
    "B": 1,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "PB": 10**15,
    "KiB": KIB,
    "MiB": MIB,
    "GiB": GIB,
    "TiB": TIB,
    "PiB": 2**50,
}
_FLOPS: Final[dict[str, int]] = {
    "FLOP": 1,
    "kFLOP": 10**3,
    "MFLOP": 10**6,
    "GFLOP": 10**9,
    "TFLOP": 10**12,
    "PFLOP": 10**15,
    "EFLOP": 10**18,
}
_SECONDS: Final[dict[str, float]] = {
    "ns": 1e-9,
    "us": 1e-6,
    "µs": 1e-6,
    "ms": 1e-3,
    "s": 1.0,
    "min": 60.0,
    "h": 3600.0,
    "d": 86400.0,
}
_NUMBER: Final = re.compile(r"\s*([+-]?(?:[0-9][0-9_]*\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)\s*([A-Za-zµ/]*)\s*")


def parse_bytes(text: str | int) -> int:
    """Return a size in bytes.

    Args:
        text: A number with a unit, as in "25 MiB" or "1.5GB"; without a unit it counts bytes. Case does not matter.

    Returns:
        The size, rounded to a whole byte [bytes].

    Raises:
        ConfigError: The text is not a size, or is negative.

    >>> parse_bytes("25 MiB"), parse_bytes("1.5GB"), parse_bytes(4096)
    (26214400, 1500000000, 4096)
    """
    return round(_parse(text, _BYTES, what="size", example="25 MiB", bare=1))


def format_bytes(num_bytes: float) -> str:
    """Return a size of memory with three or four digits and a binary unit.

    >>> format_bytes(26214400), format_bytes(1536), format_bytes(7)
    ('25 MiB', '1.5 KiB', '7 B')
    """
    return _format(num_bytes, {"B": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": TIB, "PiB": 2**50})


def print_bytes_exactly(num_bytes: int) -> str:
    """Return a size without spaces that ``parse_bytes`` reads back to the same byte.

    >>> print_bytes_exactly(26214400), print_bytes_exactly(1000)
    ('25MiB', '1000')
    """
    for unit, factor in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if num_bytes >= factor and num_bytes % factor == 0:
            return f"{num_bytes // factor}{unit}"
    return str(num_bytes)


def parse_flops(text: str | float) -> float:
    """Return an amount of arithmetic.

    Args:
        text: As in "312 TFLOP"; a final s is allowed, and a bare number counts FLOPs. One multiply-add is 2 FLOPs.

    Returns:
        The amount [FLOPs].

    Raises:
        ConfigError: The text is not an amount, or is negative.

    >>> parse_flops("312 TFLOP"), parse_flops("1.5e3")
    (312000000000000.0, 1500.0)
    """
    if isinstance(text, str):
        text = re.sub(r"(?i)(?<=flop)s\s*$", "", text)
    return float(_parse(text, _FLOPS, what="amount of FLOPs", example="312 TFLOP", bare=1))


def format_flops(num_flops: float) -> str:
    """Return an amount of arithmetic with a decimal unit.

    >>> format_flops(3.12e14)
    '312 TFLOP'
    """
    return _format(num_flops, _FLOPS)


def parse_flops_per_s(text: str | float) -> float:
    """Return a rate of arithmetic, as in "989 TFLOP/s".

    Returns:
        The rate [FLOP/s].

    Raises:
        ConfigError: The text is not a rate, or is negative.

    >>> parse_flops_per_s("989 TFLOP/s")
    989000000000000.0
    """
    units = {f"{unit}/s": factor for unit, factor in _FLOPS.items()}
    return float(_parse(text, units, what="rate of FLOPs", example="989 TFLOP/s", bare=1))


def format_flops_per_s(flops_per_s: float) -> str:
    """Return a rate of arithmetic with a decimal unit.

    >>> format_flops_per_s(9.89e14)
    '989 TFLOP/s'
    """
    return f"{_format(flops_per_s, _FLOPS)}/s"


def parse_seconds(text: str | float) -> float:
    """Return a time, as in "1.5 ms"; a bare number counts seconds.

    Returns:
        The time [s].

    Raises:
        ConfigError: The text is not a time, or is negative.

    >>> parse_seconds("1.5 ms"), parse_seconds("2 min")
    (0.0015, 120.0)
    """
    return float(_parse(text, _SECONDS, what="time", example="1.5 ms", bare=1))


def format_seconds(seconds: float) -> str:
    """Return a time in the unit that reads best.

    >>> format_seconds(0.0015), format_seconds(90), format_seconds(7260)
    ('1.5 ms', '1.5 min', '2.017 h')
    """
    return _format(seconds, {unit: factor for unit, factor in _SECONDS.items() if unit != "µs"})


def parse_bandwidth(text: str | float) -> float:
    """Return a bandwidth, as in "900 GB/s"; a bare number counts bytes per second.

    Returns:
        The bandwidth [bytes/s].

    Raises:
        ConfigError: The text is not a bandwidth, or is negative.

    >>> parse_bandwidth("3.35 TB/s")
    3350000000000.0
    """
    units = {f"{unit}/s": factor for unit, factor in _BYTES.items()}
    return float(_parse(text, units, what="bandwidth", example="900 GB/s", bare=1))


def format_bandwidth(bytes_per_s: float) -> str:
    """Return a bandwidth in decimal units.

    >>> format_bandwidth(9e11)
    '900 GB/s'
    """
    return f"{_format(bytes_per_s, {'B': 1, 'kB': 10**3, 'MB': 10**6, 'GB': 10**9, 'TB': 10**12})}/s"


def _parse(text: str | float, units: Mapping[str, float], *, what: str, example: str, bare: float) -> float:
    if isinstance(text, (int, float)) and not isinstance(text, bool):
        number, unit = float(text) if isinstance(text, float) else text, ""
    else:
        match = _NUMBER.fullmatch(str(text))
        if match is None:
            raise ConfigError(f"{text!r} is not a valid {what}", fix=f"write a number and a unit, as in '{example}'")
        digits = match[1].replace("_", "")
        number = int(digits) if re.fullmatch(r"[+-]?[0-9]{1,30}", digits) else float(digits)
        unit = match[2]
    if isinstance(number, float) and not math.isfinite(number):
        raise ConfigError(f"{text!r} is not a valid {what}: it must be finite", fix=f"write it as in '{example}'")
    if number < 0:
        raise ConfigError(f"{text!r} is not a valid {what}: it must not be negative", fix=f"write it as in '{example}'")
    factor = bare if not unit else {name.lower(): size for name, size in units.items()}.get(unit.lower())
    if factor is None:
        known = ", ".join(units)
        raise ConfigError(
            f"{text!r} is not a valid {what}: the unit '{unit}' is unknown{did_you_mean(unit, units)}; known: {known}",
            fix=f"write it as in '{example}'",
        )
    product = number * factor
    if isinstance(product, float) and not math.isfinite(product):
        raise ConfigError(f"{text!r} is not a valid {what}: it must be finite", fix=f"write it as in '{example}'")
    return product


def _format(number: float, units: Mapping[str, float]) -> str:
    smallest = next(iter(units))
    if number == 0 or not math.isfinite(number):
        return f"{number:.4g} {smallest}"
    size = abs(number)
    unit = smallest
    for name, factor in units.items():
        # 1023.99 KiB would print as 1024 KiB: round before the unit is chosen.
        if float(f"{size:.4g}") >= factor:
            unit = name
    scaled = number / units[unit]
    return f"{round(scaled) if 1000 <= abs(scaled) < 1e6 else f'{scaled:.4g}'} {unit}"
