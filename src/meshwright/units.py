"""Bytes, seconds and bandwidth: parse and print. No other module converts a unit.

Binary prefixes count memory (1 GiB = 2^30 bytes), decimal ones traffic (1 GB = 1e9 bytes).
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
_SECONDS: Final[dict[str, float]] = {
    "ns": 1e-9,
    "us": 1e-6,
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
    match = _NUMBER.fullmatch(str(text))
    if match is None:
        raise ConfigError(f"{text!r} is not a valid size", fix="write a number and a unit, as in '25 MiB'")
    digits, unit = match[1].replace("_", ""), match[2]
    number = int(digits) if re.fullmatch(r"[+-]?[0-9]{1,30}", digits) else float(digits)
    factor = {name.lower(): size for name, size in _BYTES.items()}.get(unit.lower()) if unit else 1
    size = number * (factor or 1)
    problem = None
    if not math.isfinite(size):
        problem = "it must be finite"
    elif number < 0:
        problem = "it must not be negative"
    elif factor is None:
        problem = f"the unit '{unit}' is unknown{did_you_mean(unit, _BYTES)}; known: {', '.join(_BYTES)}"
    if problem is not None:
        raise ConfigError(f"{text!r} is not a valid size: {problem}", fix="write it as in '25 MiB'")
    return round(size)


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


def format_seconds(seconds: float) -> str:
    """Return a time in the unit that reads best.

    >>> format_seconds(0.0015), format_seconds(90), format_seconds(7260)
    ('1.5 ms', '1.5 min', '2.017 h')
    """
    return _format(seconds, _SECONDS)


def format_bandwidth(bytes_per_s: float) -> str:
    """Return a bandwidth in decimal units.

    >>> format_bandwidth(9e11)
    '900 GB/s'
    """
    return f"{_format(bytes_per_s, {'B': 1, 'kB': 10**3, 'MB': 10**6, 'GB': 10**9, 'TB': 10**12})}/s"


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
