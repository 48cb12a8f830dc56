"""One start of all sides of a kind: every side has processes of its own, all alive at once, which take their blocks in turn."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import math
from typing import Any

from gangs import Gang
from rounds import run_rounds, wait_for_quiet
from side import Side
from summary import Start

NUM_SHARES = 2


def run_start(case: str, sides: list[Side], arguments: argparse.Namespace) -> Start:
    """Start all sides and take this start's share of the rounds. A side that does not start is named with its reason."""
    patience_s = arguments.patience_s / arguments.starts
    patience_s -= wait_for_quiet(patience_s)
    unavailable: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        gangs: dict[str, Gang] = {}
        facts: dict[str, Any] = {}
        for side in sides:
            try:
                gang = stack.enter_context(start_gang(side, case, arguments))
                facts[side.name] = gang.prepare()
                gangs[side.name] = gang
            except Exception as error:
                unavailable[side.name] = reason_of(error)
        for name, gang in list(gangs.items()):  # the first step is where most of what does not work shows
            try:
                gang.run(arguments.warmup)
            except Exception as error:
                unavailable[name] = reason_of(error)
                del gangs[name], facts[name]
        if not gangs:
            raise RuntimeError(f"no side runs: {unavailable}")
        for gang in gangs.values():  # how the others started is not what is asked about
            gang.idle = {"wall_s": 0.0, "cpu_s": 0.0}
        rounds = run_rounds(
            gangs,
            rounds=math.ceil(arguments.rounds / arguments.starts),
            steps=arguments.steps,
            patience_s=patience_s,
        )
        return {
            "sides": facts,
            "unavailable": unavailable,
            "rounds": rounds,
            "losses": {name: gang.losses for name, gang in gangs.items()},
            "idle_cores": {name: gang.idle["cpu_s"] / max(gang.idle["wall_s"], 1e-9) for name, gang in gangs.items()},
        }


def start_gang(side: Side, case: str, arguments: argparse.Namespace) -> Gang:
    for package in side.packages:
        try:
            importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            raise ModuleNotFoundError(f"{package} is not installed") from None
    limits = {"timeout_s": arguments.timeout_s, "freeze": not arguments.no_freeze}
    return Gang(side, case, arguments.optimizer, NUM_SHARES, **limits)


def reason_of(error: Exception) -> str:
    """Return an error in a line: the first one of ours, the last one where a rank's traceback ends with it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return lines[-1] if "Traceback (most recent call last):" in lines else lines[0]
