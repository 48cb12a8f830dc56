"""Training that goes on from the newest checkpoint and is killed in its next save; ranks import it."""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
from typing import Any
from unittest import mock

import torch
from tests.faults.checkpoint_saves import watched
from tests.parity.jobs.checkpoint_jobs import apply, batch

import meshwright as mw
from meshwright.checkpoint import store
from meshwright.run.checkpoints import live_share
from meshwright.run.checkpoints.live_share import memory_for

DROPOUT = 0.1
SLOW_S = 0.3
"""What a file takes on a slow disk: longer than a launch lets ranks live after an error [s]."""


def digest_of(model: mw.ParallelModel) -> str:
    """Return a digest of all that this rank holds: parameters, buffers, the optimizer's state, torch's generator."""
    found = hashlib.sha256()
    tensors = [*model.module.parameters(), *model.module.buffers()]
    for state in model.optimizer.state.values() if model.optimizer is not None else ():
        tensors += [value for _, value in sorted(state.items()) if isinstance(value, torch.Tensor)]
    with torch._C.DisableTorchFunctionSubclass():  # the rank's own piece, not the tensor that it stands for
        for tensor in (*tensors, torch.get_rng_state()):
            found.update(repr(tensor.detach().as_subclass(torch.Tensor).reshape(-1).tolist()).encode())
    return found.hexdigest()


def train(plan: str, steps: tuple[int, int], model: mw.ParallelModel | None = None) -> list[tuple[str, float]]:
    """Return (digest of what this rank holds, loss) after each step."""
    model = model or apply(plan, "words", "adamw", dropout=DROPOUT)
    found = []
    for number in range(*steps):
        loss = model.step(mw.split_batch(batch("words", number), model)).loss
        found.append((digest_of(model), float(loss)))
    return found


def load_newest(model: mw.ParallelModel, directory: str, **options: Any) -> int:
    """Load the newest checkpoint where there is one; return its step, or 0."""
    if os.path.isdir(directory) and any(name.startswith("step-") for name in os.listdir(directory)):
        return mw.load_checkpoint(model, directory, **options)
    return 0


def go_on(plan: str, directory: str, kill: tuple[int, int, str] | None, in_background: bool) -> int:
    """Load the newest checkpoint if there is one, take a step, and save; one rank is killed in this save.

    Args:
        plan: The plan.
        directory: Of checkpoints.
        kill: Rank, number of its operation on files, and "before", "middle" or "after"; None kills nobody.
        in_background: How is saved.

    Returns:
        The step that was saved.
    """
    model = apply(plan, "words", "adamw", dropout=DROPOUT)
    rank = model.world.rank
    step = load_newest(model, directory)
    model.world.emit({"loaded": step})
    ((digest, loss),) = train(plan, (step, step + 1), model)
    model.world.emit({"step": step + 1, "digest": digest, "loss": loss})

    def at(number: int, operation: str, when: str) -> None:
        if kill == (rank, number, when):
            model.world.emit({"killed at": operation})
            os.kill(os.getpid(), signal.SIGKILL)

    memory_for(model.module).mode = "read"  # as after a first save of a process that goes on
    with watched(at), mock.patch.object(live_share, "LEAST_BYTES", 1):
        mw.save_checkpoint(model, directory, step=step + 1, keep=2, in_background=in_background)
        mw.wait_for_checkpoint(model)
    model.world.emit({"saved": step + 1})
    return step + 1


def leave_beside_a_save(directory: str, leaving: tuple[int, ...], how: str) -> None:
    """Begin a save in the background on a slow disk, and leave; ranks that stay go on with the next step.

    Args:
        directory: Of checkpoints.
        leaving: The ranks that leave.
        how: "sys.exit", or "raise" for an exception.
    """
    model = apply("dp=2", "words", "adamw")
    model.step(mw.split_batch(batch("words", 0), model))
    write = store.write_new_file

    def slow(*args: Any) -> int:
        time.sleep(SLOW_S)
        return write(*args)

    mock.patch.object(store, "write_new_file", slow).start()  # to this process's end: a thread writes
    mw.save_checkpoint(model, directory, step=1, in_background=True)
    if model.world.rank in leaving and how == "sys.exit":
        sys.exit(0)
    if model.world.rank in leaving:
        raise ValueError("broken")
    model.step(mw.split_batch(batch("words", 1), model))
