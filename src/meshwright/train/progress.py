"""Display of a run for people: a bar on a terminal, plain lines elsewhere. The launching process draws it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from meshwright.texts import clean
from meshwright.units import format_bytes, format_seconds

__all__: list[str] = []

LINE_EVERY_S = 2.0


class ProgressView:
    """Shows a run's events.

    Args:
        stream: Where to; None is the standard output.
        clock: Seconds, for the rate of plain lines.
        print_every: Steps between plain lines; 0: none; None: a line every two seconds [count].
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        print_every: int | None = None,
    ) -> None:
        self._stream = stream or sys.stdout
        self._clock = clock
        self._print_every = print_every
        self._console = Console(file=self._stream, highlight=False)
        self._bar: Progress | None = None
        self._task: Any = None
        self._eval_loss: float | None = None
        self._skipped: set[int] = set()
        self._last_line_at: float | None = None
        self._unshown: dict[str, Any] | None = None

    def note(self, text: str) -> None:
        """Show a line."""
        if self._bar is not None:
            self._bar.console.print(escape(clean(text)))
        else:
            print(clean(text), file=self._stream, flush=True)

    def show(self, event: dict[str, Any]) -> None:
        """Show an event."""
        handler = getattr(self, f"_on_{event.get('event')}", None)
        if handler is not None:
            handler(event)

    def close(self) -> None:
        """Show held-back lines, and restore the terminal."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        self._flush()

    def __enter__(self) -> ProgressView:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _on_resumed(self, event: dict[str, Any]) -> None:
        self.close()
        for skipped in event["skipped"]:
            self.note(f"skipped {skipped['path']}: {skipped['reason']}")
        for text in event["notes"]:
            self.note(text)
        self.note(f"continued from {event['checkpoint']}, after step {event['step']} of {event['steps']}")
        self._on_run_started(event)

    def _on_run_started(self, event: dict[str, Any]) -> None:
        self.close()  # of ranks that were lost
        ranks = event["num_ranks"]
        self.note(
            f"{event['name']}: {event['num_parameters']:,} parameters, plan '{event['plan']}' on {ranks} "
            f"{'process' if ranks == 1 else 'processes'} ({event['device']}, {event['threads']} "
            f"{'thread' if event['threads'] == 1 else 'threads'} each), {event['steps']} steps of "
            f"{event['global_batch_size']} samples"
        )
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[numbers]}"),
                console=self._console,
            )
            done = event.get("step", 0)
            self._task = self._bar.add_task(
                escape(clean(event["name"])), total=event["steps"], completed=done, numbers=""
            )
            self._bar.start()

    def _on_step(self, event: dict[str, Any]) -> None:
        if event["skipped"]:
            self._skipped.add(event["step"])
        else:  # where a restart has done it again
            self._skipped.discard(event["step"])
        if self._bar is not None:
            self._bar.update(self._task, completed=event["step"], numbers=escape(self._numbers(event, " ")))
            return
        now = self._clock()
        if self._print_every is not None:
            if self._print_every and event["step"] % self._print_every == 0:
                self._print_step(event, now)
            return
        is_edge = event["step"] in (1, event["steps"])
        if is_edge or self._last_line_at is None or now - self._last_line_at >= LINE_EVERY_S:
            self._print_step(event, now)
        else:
            self._unshown = event

    def _on_planned(self, event: dict[str, Any]) -> None:
        for reason in event["plan"]["reasons"]:
            if reason not in event.get("warned", ()):
                self.note(f"plan: {reason}")

    def _on_evaluated(self, event: dict[str, Any]) -> None:
        self._eval_loss = event["loss"]
        self._flush()
        self.note(
            f"step {event['step']}: held-out loss {event['loss']:.4f} on {event['num_samples']:,} samples "
            f"({format_seconds(event['seconds'])})"
        )

    def _on_saved(self, event: dict[str, Any]) -> None:
        self._flush()
        best = ", the lowest held-out loss so far" if event["is_best"] else ""
        seconds, stall = event["seconds"], event.get("stall_seconds", event["seconds"])
        waited = f", {format_seconds(stall)} of training" if stall < seconds / 2 else ""
        self.note(f"step {event['step']}: saved {event['path']} ({format_seconds(seconds)}{waited}{best})")
        if "warning" in event:
            self.note(f"warning: {event['warning']}")

    def _on_traced(self, event: dict[str, Any]) -> None:
        self._flush()
        left_out = f"; {event['num_left_out']:,} spans were left out" if event["num_left_out"] else ""
        self.note(f"step {event['step']}: traced, {event['path']} ({format_seconds(event['seconds'])}{left_out})")

    def _on_trace_failed(self, event: dict[str, Any]) -> None:
        self._flush()
        self.note(f"warning: step {event['step']}: no trace: {event['text']}")

    def _on_save_failed(self, event: dict[str, Any]) -> None:
        self._flush()
        self.note(f"warning: step {event['step']} was not saved: {event['text']}")

    def _on_restarting(self, event: dict[str, Any]) -> None:
        self.close()
        self.note(f"{event['cause']}")
        self.note(
            f"restart {event['number']} of {event['most']} in {format_seconds(event['pause_s'])}, after step {event['step']}"
        )

    def _on_stopped(self, event: dict[str, Any]) -> None:
        self.close()
        self.note(f"stopped after step {event['step']} of {event['steps']}{self._skips()}")

    def _on_finished(self, event: dict[str, Any]) -> None:
        self.close()
        why = " (max_seconds)" if event.get("reason") == "max_seconds" else ""
        self.note(f"finished {event['step']} steps in {format_seconds(event['seconds'])}{why}{self._skips()}")

    def _skips(self) -> str:
        if not self._skipped:
            return ""
        first, last, number = min(self._skipped), max(self._skipped), len(self._skipped)
        where = f"step {first}" if number == 1 else f"{number} steps, the first {first}, the last {last}"
        return f"; skipped, since the loss or a gradient was not finite: {where}"

    def _print_step(self, event: dict[str, Any], now: float) -> None:
        self._last_line_at, self._unshown = now, None
        self.note(f"step {event['step']}/{event['steps']}  {self._numbers(event, '  ')}")

    def _flush(self) -> None:
        if self._unshown is not None:
            self._print_step(self._unshown, self._clock())

    def _numbers(self, event: dict[str, Any], gap: str) -> str:
        held_out = [] if self._eval_loss is None else [f"held-out {self._eval_loss:.4f}"]
        is_text = event["num_tokens"] != event["num_samples"]
        rate = f"{event['tokens_per_s']:,.0f} tokens/s" if is_text else f"{event['samples_per_s']:,.0f} samples/s"
        parts = [
            f"loss {event['loss']:.4f}" + (" (skipped)" if event["skipped"] else ""),
            *held_out,
            rate,
            f"{format_seconds(event['seconds'])}/step",
            format_bytes(event["peak_memory_bytes"]),
            f"{_clock_text(event['eta_s'])} left",
        ]
        return gap.join(parts)


def _clock_text(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
