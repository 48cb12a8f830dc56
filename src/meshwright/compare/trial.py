"""One plan of a comparison, as its ranks run it: the training of `session.py` without evaluations, timed step by step."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Sequence
from typing import Any

import psutil
import torch

from meshwright.apply.forecast import Forecast, SeenStep
from meshwright.errors import ConfigError, StoppedOnRequest
from meshwright.measure.host_pace import turn_s
from meshwright.ranks.join import join_world
from meshwright.run.assembly import choose_devices
from meshwright.run.parallel_model import ParallelModel
from meshwright.train.config.imports import add_to_path
from meshwright.train.config.targets import resolve_loss
from meshwright.train.config.types import TrainConfig
from meshwright.train.opening import apply_config, endless, open_loader, start_event
from meshwright.train.optim import LRSchedule
from meshwright.train.session import peak_memory_bytes

__all__: list[str] = []

SHOW_EVERY_S = 0.5
"""Least time between two events for the progress bar, which is drawn on the same cores [s]."""


@dataclasses.dataclass(slots=True)
class RankSamples:
    """Measurements of one rank; lists have one entry per step, warm-up steps included."""

    device: str = "cpu"
    """"cpu", or the GPU's name."""
    seconds: list[float] = dataclasses.field(default_factory=list)
    num_samples: list[int] = dataclasses.field(default_factory=list)
    num_tokens: list[int] = dataclasses.field(default_factory=list)
    losses: list[float | None] = dataclasses.field(default_factory=list)
    sent_bytes: list[float] = dataclasses.field(default_factory=list)
    wait_seconds: list[float] = dataclasses.field(default_factory=list)
    sees_waiting: bool = True
    """Whether the host stands still while devices exchange, so that `wait_seconds` mean something."""
    peak_memory_bytes: list[int] = dataclasses.field(default_factory=list)
    formula_bytes: float | None = None
    """What this rank should send in a step, where there is a formula [bytes]."""
    elapsed_s: float = 0.0
    """Wall time of the measured steps, reading of data included [s]."""
    own_busy_s: float = 0.0
    """Processor time of this rank and its data workers meanwhile [s]."""
    turn_s: float = 0.0
    """What a fixed piece of the interpreter's work took before and after the measured steps, in the mean [s]."""
    machine_busy_s: float = 0.0
    """Processor time of the whole machine meanwhile, time stolen from a virtual one included [s]."""


def run_trial(config: TrainConfig, num_warm_up: int, num_steps: int) -> RankSamples:
    """Take some steps of the configuration's training under its plan; every rank of the plan calls this.

    Raises:
        ConfigError: The data or the model cannot be loaded.
        StoppedOnRequest: A signal asked the ranks to stop.
        Exception: Whatever the user's code raises.
    """
    world = join_world()
    add_to_path(config.import_roots)
    devices = choose_devices(config.plan, None, world.device)
    samples = RankSamples(device=_name_of(devices[0]))
    # NCCL's wait() makes the stream wait, not the host; moves between devices of one process are not timed at all.
    samples.sees_waiting = devices[0].type == "cpu"
    with apply_config(config) as model:
        forecast = model.engine.forecast()
        first_batch = _take_steps(config, model, (num_warm_up, num_steps), samples, devices, forecast=forecast)
        samples.peak_memory_bytes = _peaks(devices)
        per_step = sum(samples.num_samples[num_warm_up:]) / num_steps
        learn_step(forecast, model, first_batch, per_step, is_cross_entropy=resolve_loss(config) == "cross_entropy")
    if world.stop_requested():  # since the last step began, which is when the ranks agree on it
        raise StoppedOnRequest("stopped on request after the last step")
    # After the peak was read, and with the hooks gone: describing a model copies its buffers.
    samples.formula_bytes = forecast.sent_bytes()
    return samples


def learn_step(
    forecast: Forecast, model: ParallelModel, batch: Any, num_samples: float, *, is_cross_entropy: bool
) -> None:
    """Have a forecast learn from a step of a model that is not closed yet.

    Args:
        forecast: Of the model's engine, from before the step.
        model: The applied model.
        batch: A batch as this rank gets it.
        num_samples: Samples in a step over all ranks, on average [count].
        is_cross_entropy: Whether the loss is cross-entropy.
    """
    step = SeenStep(
        plan=model.plan,
        batch=batch,
        num_samples=num_samples,
        splitter=model.splitter,
        is_cross_entropy=is_cross_entropy,
    )
    with model.engine.switch.plain():  # what this rank holds; user code would see the whole model's parameters listed
        forecast.learn(step)


def _take_steps(
    config: TrainConfig,
    model: ParallelModel,
    counts: tuple[int, int],
    samples: RankSamples,
    devices: Sequence[torch.device],
    *,
    forecast: Forecast,
) -> Any:
    """Take the steps, so many to warm up and so many measured, and return the first batch; the forecast watches that one."""
    if model.optimizer is None:
        raise ConfigError("the model has no optimizer")
    schedule = LRSchedule(model.optimizer, config)
    total = sum(counts)
    first_batch: Any = None
    own, machine, measured_from = 0.0, 0.0, 0.0
    shown_at = began = time.perf_counter()
    if model.world.rank == 0:
        model.world.emit(start_event(config, model, total))
    with contextlib.closing(endless(config, open_loader(config, model))) as batches:
        for number in range(total):
            model.world.report_progress(number, "load")
            batch = next(batches)
            first_batch = batch if number == 0 else first_batch
            schedule.set_step(number)
            if number == counts[0]:
                samples.turn_s = turn_s()
                own, machine, measured_from = _own_busy_s(), _machine_busy_s(), time.perf_counter()
            sent, waited = model.ledger.sent_bytes, model.ledger.wait_s
            start = time.perf_counter()
            result = model.step(batch)
            _finish(devices)
            if number == 0:
                forecast.end_watching()
            now = time.perf_counter()
            samples.seconds.append(now - start)
            samples.num_samples.append(result.num_samples)
            samples.num_tokens.append(result.num_tokens)
            samples.losses.append(result.loss if math.isfinite(result.loss) else None)
            samples.sent_bytes.append(model.ledger.sent_bytes - sent)
            samples.wait_seconds.append(model.ledger.wait_s - waited)
            if model.stop_requested:
                raise StoppedOnRequest(f"stopped on request in step {number + 1} of {total}")
            if now - shown_at >= SHOW_EVERY_S or number == total - 1:
                shown_at = now
                _show_step(model, samples, total, now - began)
        samples.elapsed_s = time.perf_counter() - measured_from
        samples.own_busy_s = _own_busy_s() - own
        samples.machine_busy_s = _machine_busy_s() - machine
        samples.turn_s = (samples.turn_s + turn_s()) / 2
    return first_batch


def _show_step(model: ParallelModel, samples: RankSamples, total: int, elapsed: float) -> None:
    if model.world.rank == 0:
        done, seconds = len(samples.seconds), samples.seconds[-1]
        model.world.emit(
            {
                "event": "step",
                "step": done,
                "steps": total,
                "loss": samples.losses[-1] if samples.losses[-1] is not None else math.nan,
                "skipped": False,
                "num_samples": samples.num_samples[-1],
                "num_tokens": samples.num_tokens[-1],
                "seconds": seconds,
                "samples_per_s": samples.num_samples[-1] / seconds,
                "tokens_per_s": samples.num_tokens[-1] / seconds,
                "peak_memory_bytes": peak_memory_bytes(model.world.device),
                "eta_s": elapsed / done * (total - done),
            }
        )


def _own_busy_s() -> float:
    """Return the processor time that this process and the children it has now have used [s]."""
    process = psutil.Process()
    total = 0.0
    for member in (process, *process.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = member.cpu_times()
            total += times.user + times.system
    return total


def _machine_busy_s() -> float:
    """Return the processor time that everything on this machine has used, or lost to other machines on the host [s]."""
    times = psutil.cpu_times()._asdict()
    return sum(times.get(kind, 0.0) for kind in ("user", "nice", "system", "irq", "softirq", "steal"))


def _finish(devices: Sequence[torch.device]) -> None:
    for device in set(devices):
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def _name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _peaks(devices: Sequence[torch.device]) -> list[int]:
    if devices[0].type == "cuda":
        return [peak_memory_bytes(device) for device in dict.fromkeys(devices)]
    return [peak_memory_bytes(devices[0])]
