"""Pool of ranks that stay alive between tests, since starting them takes longer than most tests.

The processes from which ranks are forked stay as well. There are two of them, with different hashes of strings. So ranks that
iterate over a set in different orders are detected, as if each had been started on its own.
"""

from __future__ import annotations

import atexit
import dataclasses
import os
import pickle
import sys
import traceback
from collections.abc import Callable
from typing import Any

import psutil

from meshwright.ranks import spawning
from meshwright.ranks.environment import TRANSPORT_VARIABLE
from meshwright.ranks.launch import RankGroup
from meshwright.ranks.processes import rank_environment
from meshwright.ranks.world import current_world

__all__: list[str] = []

_NUM_TEMPLATES = 2
_TIMEOUT_S = 60.0  # for one collective: far beyond any test's work, well below what a test may take


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankOutcome:
    """The end of a call on one rank: a result, or an exception."""

    result: Any = None
    """What the function returned."""
    error: BaseException | None = None
    """What it raised, or None."""
    traceback_text: str = ""
    """The traceback of that."""


class RankPool:
    """One group of rank processes for each world size, started when first needed, all over one transport.

    Args:
        env: Environment variables for the ranks, beside this process's.
    """

    def __init__(self, env: dict[str, str] | None = None) -> None:
        self._own = env or {}
        self._groups: dict[int, RankGroup] = {}
        self._pids: dict[int, set[int]] = {}
        self._transport = ""
        self.modules: tuple[str, ...] = ()
        """What ranks find imported when they start."""

    @property
    def _env(self) -> dict[str, str]:
        return {"PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "random"), **self._own}

    def run(self, fn: Callable[..., Any], num_ranks: int, *args: Any) -> list[Any]:
        """Call `fn(*args)` on every rank and return the results in rank order."""
        transport = {**os.environ, **self._env}.get(TRANSPORT_VARIABLE, "")
        if transport != self._transport:
            self.close()  # those of the other transport
            self._transport = transport
        group = self._groups.get(num_ranks)
        if group is None:
            keep_templates(rank_environment("", 1, self._env), self.modules)
            before = _child_pids()
            group = RankGroup(num_ranks, threads_per_rank=1, timeout_s=_TIMEOUT_S, env=self._env)
            self._groups[num_ranks], self._pids[num_ranks] = group, _child_pids() - before
        try:
            return group.submit(_call, list(sys.path), pickle.dumps((fn, args)))
        except BaseException:
            # A group that has failed is in no known state: the next call gets a fresh one.
            self.drop(num_ranks)
            raise

    def drop(self, num_ranks: int) -> None:
        """Stop the ranks of one group; the next call gets new ones."""
        self._pids.pop(num_ranks)
        self._groups.pop(num_ranks).close()

    def pids(self) -> set[int]:
        """Return the processes that belong to the pool now."""
        return set().union(*self._pids.values(), (template.pid for template in spawning.kept))

    def close(self) -> None:
        """Stop all ranks."""
        while self._groups:
            num_ranks, group = self._groups.popitem()
            self._pids.pop(num_ranks)
            group.close()


_POOL = RankPool()


def keep_templates(environment: dict[str, str], modules: tuple[str, ...] = ()) -> None:
    """Fork the ranks that this process starts from now on from templates that stay, if their environments match.

    Args:
        environment: The ranks' environment variables; only those that are read at a process's start must match.
        modules: Modules that the templates import beside those that every rank needs.
    """
    if spawning.can_fork() and not any(template.serves(environment) for template in spawning.kept):
        templates = [spawning.TemplateProcess(environment, modules) for _ in range(_NUM_TEMPLATES)]
        for template in templates:
            template.hear(_TIMEOUT_S)
        spawning.kept.extend(templates)


def preload(*modules: str) -> None:
    """Import these modules in templates of later ranks too, unless a template is already kept."""
    _POOL.modules = tuple(dict.fromkeys((*_POOL.modules, *modules)))


def run_ranks(fn: Callable[..., Any], num_ranks: int, *args: Any) -> list[Any]:
    """Call an importable function on every rank of a pool that outlives the call.

    The ranks are those of `meshwright.launch`, but they are kept for the next call with the same number of ranks, so a
    test costs milliseconds instead of seconds. After a failure they are thrown away and started afresh. The import path
    of the caller is passed on, so that functions and classes of test modules are found.

    Args:
        fn: An importable function.
        num_ranks: How many ranks.
        args: Its arguments; they are pickled.

    Returns:
        The results, in rank order.

    Raises:
        MeshwrightError: The error of the first rank at fault, as `launch` reports it.
    """
    return _POOL.run(fn, num_ranks, *args)


def run_outcomes(fn: Callable[..., Any], num_ranks: int, *args: Any) -> list[RankOutcome]:
    """Call a function on every rank where some or all of them are expected to raise.

    The exceptions are caught on their ranks and the ranks stay alive, so every rank has to come out by itself.

    Args:
        fn: An importable function.
        num_ranks: How many ranks.
        args: Its arguments; they are pickled.

    Returns:
        For each rank its result or its exception.
    """
    outcomes = run_ranks(_outcome, num_ranks, fn, *args)
    if any(has_left for _, has_left in outcomes):
        _POOL.drop(num_ranks)
    return [outcome for outcome, _ in outcomes]


def pool_pids() -> set[int]:
    """Return the processes that `run_ranks` keeps, for checks that a test leaves nothing behind."""
    return _POOL.pids()


def close_pools() -> None:
    """Stop all ranks that `run_ranks` has kept; also done when the interpreter leaves."""
    _POOL.close()
    while spawning.kept:  # ranks of every pool are forked from them
        spawning.kept.pop().dismiss()


atexit.register(close_pools)


def _child_pids() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def _call(paths: list[str], payload: bytes) -> Any:
    sys.path.extend(path for path in paths if path not in sys.path)
    # The pool's own parent has just pickled these bytes; they are unpickled here, after the path has been set.
    fn, args = pickle.loads(payload)  # noqa: S301
    return fn(*args)


def _outcome(fn: Callable[..., Any], *args: Any) -> tuple[RankOutcome, bool]:
    """Return the end of a call, and whether this rank has abandoned an exchange in it: its groups are then unusable."""
    try:
        outcome = RankOutcome(result=fn(*args))
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what the caller wants to look at
        outcome = RankOutcome(error=error, traceback_text=traceback.format_exc())
    world = current_world()
    return outcome, world is not None and world.calls.has_given_up
