"""Training in a process that belongs to a job of torchrun, srun or Kubernetes. Imports torch only where it joins."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from meshwright.errors import RankNote, StoppedOnRequest, rank_of
from meshwright.ranks.signals import StopSignals
from meshwright.train.config.types import TrainConfig
from meshwright.train.failures import report_failure
from meshwright.train.states_file import StatesFile

__all__: list[str] = []


def train_beside(config: TrainConfig, end: contextlib.ExitStack) -> int:
    """Train on a rank that is not the job's first: that one writes the folder and draws. `end`: see `join_job`."""
    failures: dict[int, dict[str, Any]] = {}

    def on_event(rank: int, event: dict[str, Any]) -> None:
        if event["event"] == "failed":
            failures[rank] = event

    try:
        summary = join_job(config, on_event, end, resume=False)  # rank 0's word counts
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - every failure becomes an exit code
        return report_failure(config, error, failures)
    return StoppedOnRequest.exit_code if summary["stopped"] else 0


def join_job(
    config: TrainConfig,
    on_event: Callable[[int, dict[str, Any]], None],
    end: contextlib.ExitStack,
    *,
    resume: bool,
    states: StatesFile | None = None,
) -> dict[str, Any]:
    """Train in this process, which belongs to a job; return what this rank did. `states`: where it tells what all ranks do.

    torchrun's agent sends SIGTERM to all as soon as one rank has ended. Whoever has more to tell then tells it: from the end of
    training to that of the context `end` stop signals are noted, and do nothing.
    """
    from meshwright.ranks.join import join_world
    from meshwright.train.session import train

    world = join_world(timeout_s=config.train.timeout_s)
    world.on_event = on_event
    if states is not None and world.watch is not None:
        world.watch.on_states = states.write
    try:
        with world.sharing_failures():
            try:
                return train(config, world, resume=resume)
            finally:
                end.enter_context(StopSignals())
    except (Exception, KeyboardInterrupt) as error:
        if rank_of(error) is None:
            error.add_note(RankNote(f"rank {world.rank} of {world.world_size}", world.rank))
        raise
