"""The entries of a loader's state, checked before a loader goes on from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.errors import ConfigError

__all__: list[str] = []

STATE_VERSION = 1
"""Version of states that this program writes and reads."""
_FIX = "load what a loader's state_dict() returned, unchanged"


def check_position(state: Any, counts: Mapping[str, int | None], flags: tuple[str, ...] = ()) -> None:
    """Refuse a state that no loader gives.

    Without it a count below 0 or a missing entry ends in an error of another place, and a fraction in other samples.

    Args:
        state: What `load_state_dict` got.
        counts: Name of each whole number -> the most that it may be, or None [count].
        flags: Names of what is true or false.

    Raises:
        ConfigError: It is no mapping, an entry is missing, of another kind or out of range, or the version is another one.
    """
    if not isinstance(state, Mapping):
        raise ConfigError(f"the loader's state is a {type(state).__name__} (rule: a mapping)", fix=_FIX)
    if (version := state.get("version")) != STATE_VERSION:
        raise ConfigError(f"the loader's state has version {version!r:.60}, this is {STATE_VERSION}")
    for name in (*counts, *flags):
        if name not in state:
            raise ConfigError(f"the loader's state has no {name!r}; it has {sorted(map(str, state))[:20]}", fix=_FIX)
    for name in flags:
        if type(state[name]) is not bool:
            raise ConfigError(f"the loader's state has {name}={state[name]!r:.60} (rule: true or false)", fix=_FIX)
    for name, most in counts.items():
        value = state[name]
        if type(value) is not int or value < 0 or (most is not None and value > most):
            rule = "at least 0" if most is None else f"between 0 and {most}"
            raise ConfigError(f"the loader's state has {name}={value!r:.60} (rule: a whole number, {rule})", fix=_FIX)
