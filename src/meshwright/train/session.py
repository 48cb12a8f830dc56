"""The training loop, as every rank runs it."""

from __future__ import annotations

import math
import statistics
import time
import traceback
from array import array
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from meshwright.errors import ConfigError, MeshwrightError, StoppedOnRequest
from meshwright.host import peak_resident_bytes
from meshwright.ranks import unfinished
from meshwright.ranks.error_transfer import early_end
from meshwright.ranks.join import join_world
from meshwright.ranks.world import World
from meshwright.run.checkpoints.loading import Loaded
from meshwright.run.parallel_model import ParallelModel
from meshwright.run.result import StepResult
from meshwright.train.checkpoints import RunCheckpoints, RunState, agree_on_start
from meshwright.train.config.imports import add_to_path
from meshwright.train.config.types import TrainConfig
from meshwright.train.events import WARM_UP_STEPS
from meshwright.train.held_tensors import join_ranks, list_parts
from meshwright.train.opening import apply_config, endless, open_loader, start_event
from meshwright.train.optim import LRSchedule
from meshwright.train.tracing_run import RunTrace

__all__: list[str] = []


def train(config: TrainConfig, world: World | None = None, *, resume: bool = False) -> dict[str, Any]:
    """Train as the configuration says; every rank of its plan calls this.

    Rank 0 hands out events (see `events.py`); a rank that fails hands out one that says where it was.

    Args:
        config: The configuration.
        world: This process's place; None joins the world that it was started in.
        resume: Whether to continue from the newest sound checkpoint of the run's folder; rank 0's word counts.

    Returns:
        What this rank did: its last step, whether it was asked to stop, its peak memory, what it sent.

    Raises:
        ConfigError: The data or the model cannot be loaded, a parameter rule fits no parameter, or the run that is to be
            continued has other settings.
        CheckpointError: There is no checkpoint to continue from, or it does not fit.
        StorageError: A checkpoint cannot be written, with checkpoint.on_error = "stop".
        NonFiniteError: The loss or a gradient is not finite, with non_finite = "stop".
        Exception: Whatever the user's code raises.
    """
    world = world or join_world()
    add_to_path(config.import_roots)
    session = _Session(config, world)
    with world.catching_stop_signals():
        try:
            return session.run(resume=resume)
        except StoppedOnRequest:
            raise
        except SystemExit as error:  # of the user's data or model: the run is not done, whatever the code says
            unfinished.await_all(unfinished.LEAVE_S)
            early = early_end(error, world.rank, world.world_size)
            world.emit(session.failure(early))
            raise early from None
        except Exception as error:
            world.emit(session.failure(error))
            raise


class _Session:
    def __init__(self, config: TrainConfig, world: World) -> None:
        self.config = config
        self.world = world
        self.step = 0
        """Steps that are done [count]."""
        self.phase = "build"
        self.first_step = 0
        """Steps that were done before this process began [count]."""
        self.state = RunState(config)
        self.stop_reason: str | None = None
        self.began_at = time.perf_counter()
        self._has_told_plan = False
        self._has_told_held = False
        self._waits, self._sent = array("d"), array("d")
        """Time in each new step for which this rank stood still for exchanges [s]."""

    def run(self, *, resume: bool) -> dict[str, Any]:
        self.world.first_step = 1
        self._enter("build")
        resume, self.config = agree_on_start(self.config, self.world, resume=resume)
        self.state = RunState(self.config)
        model = apply_config(self.config, starts=not resume)
        with model:
            if model.optimizer is None:
                raise ConfigError("the model has no optimizer")
            schedule = LRSchedule(model.optimizer, self.config)
            self._enter("data")
            train_loader, eval_loader = self._make_loaders(model)
            checkpoints = RunCheckpoints(self.config, model, {"loader": train_loader, "run": self.state})
            loaded = self._continue(checkpoints) if resume else None
            self._emit_start(model, train_loader, eval_loader, loaded)
            self._train(model, train_loader, eval_loader, schedule, checkpoints)
            return self._summary(model)

    def failure(self, error: Exception) -> dict[str, Any]:
        """Return the event of a rank that fails; an error of ours learns where that was."""
        if isinstance(error, MeshwrightError):
            error.step = self._step_under_way if error.step is None else error.step
            error.phase = error.phase or self.phase
        return {
            "event": "failed",
            "rank": self.world.rank,
            "step": self._step_under_way,
            "phase": self.phase,
            "type": type(error).__name__,
            "text": str(error),
            "traceback": traceback.format_exc(),
        }

    # -- before the first step --------------------------------------------------------------------------------------

    def _make_loaders(self, model: ParallelModel) -> tuple[Any, Any]:
        train_loader = open_loader(self.config, model)
        eval_batches = self.config.train.eval_batches
        if eval_batches == 0:
            return train_loader, None
        # Each held-out sample counts once: nothing is repeated to fill the last batch, and nothing is dropped. A part of
        # them is a random one, and the same one every time.
        shuffle = eval_batches is not None
        return train_loader, open_loader(self.config, model, "eval", shuffle=shuffle, drop_last=False)

    def _continue(self, checkpoints: RunCheckpoints) -> Loaded:
        self._enter("resume")
        loaded = checkpoints.resume()
        self.step = self.first_step = loaded.step
        if self.step > self.config.train.steps:
            raise ConfigError(
                f"{loaded.path} is of step {self.step}, train.steps = {self.config.train.steps} (rule: at least as many)",
                fix=f"--set train.steps={self.step}",
            )
        return loaded

    def _emit_start(self, model: ParallelModel, train_loader: Any, eval_loader: Any, loaded: Loaded | None) -> None:
        event = start_event(self.config, model, self.config.train.steps)
        if loaded is not None:
            event |= {
                "event": "resumed",
                "step": loaded.step,
                "checkpoint": str(loaded.path),
                "skipped": [{"path": str(path), "reason": reason} for path, reason in loaded.skipped],
                "notes": loaded.notes,
            }
        self._emit(
            **event,
            torch=torch.__version__,
            train_samples=_length(train_loader),
            eval_samples=_length(eval_loader),
            build_seconds=time.perf_counter() - self.began_at,
        )

    def _tell_plan(self, model: ParallelModel) -> None:
        """Say, once, what a plan decided when it saw the first batch."""
        if self._has_told_plan:
            return
        plan = model.plan
        self._has_told_plan = model.engine.is_prepared
        if plan.layouts or plan.reasons:
            # What a warning has said already, at length, is not said again.
            warned = list(model.engine.joined_reasons)
            self._emit("planned", plan=plan.to_dict(), warned=warned)

    def _tell_held(self, model: ParallelModel) -> None:
        """Say, once, which part of each tensor each rank holds; every rank calls it after a step."""
        if self._has_told_held or not model.engine.is_prepared:
            return
        self._has_told_held = True
        with model.engine.switch.plain():
            mine = list_parts(model.engine.held_state())
        with model.ledger.of_checks():
            tensors, num_left_out = join_ranks(self.world.default_group.all_gather_json(mine, device=self.world.device))
        self._emit("held", tensors=tensors, num_left_out=num_left_out)

    # -- the loop ---------------------------------------------------------------------------------------------------

    def _train(
        self,
        model: ParallelModel,
        train_loader: Any,
        eval_loader: Any,
        schedule: LRSchedule,
        checkpoints: RunCheckpoints,
    ) -> None:
        train = self.config.train
        if eval_loader is not None and self._owes_evaluation():
            self._evaluate(model, eval_loader)
        batches = endless(self.config, train_loader)
        trace = RunTrace(self.config, model, self.first_step)
        model.stepper.sentinels.first_step = self.first_step + 1
        loop_began = step_began = time.perf_counter()
        try:
            while self.step < train.steps and self.stop_reason is None:
                step_began += trace.begin_step(self.step + 1)
                self._enter("load")
                with model.ledger.span("load", "load"):
                    batch = next(batches)
                lr = schedule.set_step(self.step)
                self._enter("step")
                waited, sent = model.ledger.wait_s, model.ledger.sent_bytes
                result = model.step(batch)
                self._waits.append(model.ledger.wait_s - waited)
                self._sent.append(model.ledger.sent_bytes - sent)
                self._tell_plan(model)
                self._tell_held(model)
                self.step += 1
                now = time.perf_counter()
                self._note_step(result, lr, now - step_began, now - loop_began)
                self._emit_all(checkpoints.look())
                self.stop_reason, is_time = self._agree(model, checkpoints, now - loop_began)
                self._emit_all(trace.end_step(self.step, is_end=self.stop_reason is not None))
                is_last = self.step == train.steps or self.stop_reason == "max_seconds"
                is_best = False
                if eval_loader is not None and (is_last or self._evaluates_now()):
                    is_best = self._evaluate(model, eval_loader)
                is_end = is_last or self.stop_reason is not None
                if checkpoints.is_due(self.step, is_time=is_time, is_end=is_end, is_best=is_best):
                    self._enter("save")
                    self._emit_all(checkpoints.save(self.step, best_step=self.state.best_step, is_end=is_end))
                step_began = time.perf_counter()
            self._enter("save")
            self._emit_all(checkpoints.finish())
        finally:
            trace.close()
            batches.close()
        self._enter("end")
        kind = "stopped" if self.stop_reason == "request" else "finished"
        seconds = time.perf_counter() - loop_began
        self._emit(kind, step=self.step, steps=train.steps, seconds=seconds, reason=self.stop_reason)

    def _owes_evaluation(self) -> bool:
        """Whether one is due before the next step: where the training starts from, or where it was asked to stop."""
        every = self.config.train.eval_every
        return every > 0 and self.step % every == 0 and self.step != self.state.evaluated_at

    def _evaluates_now(self) -> bool:
        every = self.config.train.eval_every
        return self.stop_reason is None and every > 0 and self.step % every == 0

    def _agree(self, model: ParallelModel, checkpoints: RunCheckpoints, seconds: float) -> tuple[str | None, bool]:
        """Return why all ranks stop after this step, or None, and whether it is time for a checkpoint; equal on every rank."""
        limit = self.config.train.max_seconds
        is_over = is_time = False
        if limit is not None or checkpoints.asks_the_clock:
            # The ranks' clocks differ by a little, which is enough to disagree on the step.
            mine = [limit is not None and seconds >= limit, self.world.rank == 0 and checkpoints.is_time()]
            flags = torch.tensor(mine, dtype=torch.int32, device=self.world.device)
            self.world.default_group.all_reduce(flags, "max")
            is_over, is_time = (bool(flag) for flag in flags.tolist())
        return "request" if model.stop_requested else "max_seconds" if is_over else None, is_time

    def _evaluate(self, model: ParallelModel, loader: Any) -> bool:
        """Evaluate on held-out data; the loss is exact whatever the batches' sizes. Returns whether it is the lowest so far."""
        self._enter("evaluate")
        began = time.perf_counter()
        loss_sum = weight_sum = 0.0
        num_samples = num_tokens = 0
        loader.set_epoch(0)
        for batch in _first(loader, self.config.train.eval_batches):
            metrics = model.evaluate(batch)
            self._tell_plan(model)
            # A mean over samples weighs by samples; a loss that knows its own weight says so.
            weight = float(metrics.get("weight", metrics["num_samples"]))
            loss_sum += metrics["loss"] * weight
            weight_sum += weight
            num_samples += metrics["num_samples"]
            num_tokens += metrics["num_tokens"]
        loss = loss_sum / weight_sum if weight_sum else math.nan
        self._emit(
            "evaluated",
            step=self.step,
            loss=loss,
            num_samples=num_samples,
            num_tokens=num_tokens,
            seconds=time.perf_counter() - began,
        )
        return self.state.note_evaluation(self.step, loss)

    # -- events -----------------------------------------------------------------------------------------------------

    def _enter(self, phase: str) -> None:
        self.phase = phase
        self.world.report_progress(self._step_under_way - 1 if phase not in ("build", "data") else -1, phase)

    @property
    def _step_under_way(self) -> int:
        """The step that is done or was done last, counted from 1 as in the lines of progress; 0 before the first."""
        return self.step + (self.phase in ("load", "step"))

    def _emit(self, event: str, **fields: Any) -> None:
        if self.world.rank == 0:
            self.world.emit({"event": event, "time": time.time(), **fields})

    def _emit_all(self, events: Iterable[dict[str, Any]]) -> None:
        for event in events:
            self._emit(**event)

    def _note_step(self, result: StepResult, lr: float, seconds: float, elapsed: float) -> None:
        self._emit(
            "step",
            step=self.step,
            steps=self.config.train.steps,
            loss=result.loss,
            grad_norm=result.grad_norm,
            lr=lr,
            skipped=result.skipped,
            num_samples=result.num_samples,
            num_tokens=result.num_tokens,
            seconds=seconds,
            step_seconds=result.seconds,
            samples_per_s=result.num_samples / seconds,
            tokens_per_s=result.num_tokens / seconds,
            peak_memory_bytes=peak_memory_bytes(self.world.device),
            eta_s=elapsed / (self.step - self.first_step) * (self.config.train.steps - self.step),
        )

    def _summary(self, model: ParallelModel) -> dict[str, Any]:
        sent: dict[str, float] = {}
        for (_, axis), entry in model.ledger.entries.items():
            sent[axis] = sent.get(axis, 0.0) + entry.sent_bytes
        return {
            "rank": self.world.rank,
            "step": self.step,
            "stopped": self.stop_reason == "request",
            "eval_loss": self.state.eval_loss,
            "peak_memory_bytes": peak_memory_bytes(self.world.device),
            "sent_bytes": {axis: round(amount) for axis, amount in sent.items()},
            "step_sent_bytes": statistics.median(self._sent[WARM_UP_STEPS:] or self._sent or [0.0]),
            "wait_s": self._median_wait_s(),
            # Of a resumed run that has nothing left to do, no batch came: what tp or pp would hold is not known.
            "held_bytes": model.held_bytes() if model.engine.is_prepared else {},
        }

    def _median_wait_s(self) -> float | None:
        """Return this rank's waiting in a step, warm-up left out; None where the host does not see devices wait."""
        waits = self._waits[WARM_UP_STEPS:] or self._waits
        return statistics.median(waits) if waits and self.world.device.type == "cpu" else None


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most this process has held so far: on its GPU, or resident on the CPU [bytes]."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else peak_resident_bytes()


def _length(loader: Any) -> int | None:
    dataset = getattr(loader, "dataset", None)
    return len(dataset) if dataset is not None else None


def _first(loader: Any, num_batches: int | None) -> Iterator[Any]:
    """Yield the first batches of an epoch, all of them where no number is given."""
    for number, batch in enumerate(loader, start=1):
        yield batch
        if number == num_batches:
            return
