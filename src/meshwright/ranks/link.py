"""Connection of a rank to its launching process, as `World` uses it."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Sequence
from types import FrameType
from typing import Any

from meshwright.errors import ConfigError
from meshwright.ranks.channel import RankEnd
from meshwright.ranks.heartbeat import Pulse

__all__: list[str] = []


class RankLink:
    """A rank's end of that connection."""

    def __init__(self, channel: RankEnd, pulse: Pulse) -> None:
        self._channel = channel
        self._pulse = pulse
        self.stop = False
        self.signal_name: str | None = None
        """The stop signal that this rank itself got; the watchdog passes it on."""
        self.is_busy = threading.Event()
        """Set while the rank joins or runs a call."""
        self.is_busy.set()

    def emit(self, event: dict[str, Any]) -> None:
        """Send an event to the launching process, as JSON: to rebuild it there imports nothing, whatever stands in it.

        Raises:
            ConfigError: It is no plain data.
        """
        try:
            if (key := _other_key(event)) is not None:  # JSON would make text of it
                raise TypeError(f"{key} is the key of an entry")
            text = json.dumps(event)
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(
                f"an event of a rank is plain data, and this one is not: {error}",
                fix="emit numbers, text, lists and dicts with text as keys",
            ) from error
        self._channel.send(("event", text))

    def progress(self, step: int, phase: str) -> None:
        """Record what the rank is doing."""
        self._pulse.progress(step, phase)

    def ask_to_stop(self) -> None:
        """Ask the launching process to stop all ranks."""
        self._channel.send(("stop", None))

    def note_signal(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - the handler's signature
        """Record a stop signal. Nothing is sent here, since the handler may have interrupted a send."""
        self.stop = True
        self.signal_name = signal.Signals(number).name


def _other_key(value: object) -> str | None:
    """Return a key that is not text, of a dict anywhere inside; None where there is none."""
    if isinstance(value, dict):
        entries: dict[object, object] = value
        other = next((repr(key) for key in entries if not isinstance(key, str)), None)
        return other or next(filter(None, map(_other_key, entries.values())), None)
    if isinstance(value, (list, tuple)):
        several: Sequence[object] = value
        return next(filter(None, map(_other_key, several)), None)
    return None
