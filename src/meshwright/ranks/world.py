"""World: one rank's knowledge of its place among the others.

`_current` below is the only state of this package that belongs to the whole process: the world that the process is in. It is
set once, by the launch that started the process or by the first `join_world`. It stands for torch.distributed's default group
and the environment, which belong to the whole process too. No other code reads it: code that exchanges tensors is given a
`Communicator`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

import torch

from meshwright.ranks.calls import Calls
from meshwright.ranks.joined_watch import JoinedWatch
from meshwright.ranks.signals import StopSignals

if TYPE_CHECKING:
    from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

    from meshwright.comm.communicator import Communicator
    from meshwright.comm.ledger import Ledger

import torch.distributed as dist

from meshwright._torch_private import keep_forever

__all__: list[str] = []


class Link(Protocol):
    """Connection of a rank to its supervisor."""

    stop: bool

    def emit(self, event: dict[str, Any]) -> None:
        """Send an event to the launching process."""
        ...

    def progress(self, step: int, phase: str) -> None:
        """Record what the rank is doing."""
        ...

    def ask_to_stop(self) -> None:
        """Ask for all ranks to be stopped."""
        ...


class _NoLink:
    """The link of a rank without supervisor: a joined rank, or a single process."""

    def __init__(self) -> None:
        self.stop = False

    def emit(self, event: dict[str, Any]) -> None:
        """Do nothing: there is no launching process."""

    def progress(self, step: int, phase: str) -> None:
        """Do nothing: there is no supervisor."""

    def ask_to_stop(self) -> None:
        """Do nothing: the step's own agreement spreads the request."""


class World:
    """This process's place among the ranks.

    Args:
        default_group: The collectives over all ranks.
        rank: This process, 0 .. world_size - 1.
        world_size: Number of ranks [count].
        local_rank: This process's number on its host.
        device: This rank's device.
        ledger: Counts this rank's exchanges.
        timeout_s: How long one exchange may wait [s].
        group_timeout_s: The limit of torch.distributed's groups, which is longer under a supervisor [s].
        link: The connection to the launching process, or None.
        store: The store in which joined ranks report failures, or None.
        share: Shares failures through that store, or None.
        watch: Tells other joined ranks what this one does, or None.
    """

    def __init__(
        self,
        default_group: Communicator,
        *,
        rank: int,
        world_size: int,
        local_rank: int,
        device: torch.device,
        ledger: Ledger,
        timeout_s: float,
        group_timeout_s: float | None = None,
        link: Link | None = None,
        store: Store | None = None,
        share: Callable[[World], contextlib.AbstractContextManager[None]] | None = None,
        watch: JoinedWatch | None = None,
    ) -> None:
        self.default_group = default_group
        self.rank = rank
        self.world_size = world_size
        self.local_rank = local_rank
        self.device = device
        self.ledger = ledger
        self.timeout_s = timeout_s
        self.group_timeout_s = timeout_s if group_timeout_s is None else group_timeout_s
        self.store = store
        self._share = share
        self.watch = watch
        if watch is not None:
            default_group.on_enter, default_group.on_exit = watch.pulse.enter, watch.pulse.leave
        self.calls = Calls(rank, store)
        """What the ranks are in the middle of; exchanges that wait look there for a rank that has raised."""
        default_group.calls = self.calls
        if watch is not None:
            watch.has_given_up = lambda: self.calls.has_given_up
            self.calls.hears_of_failure = lambda: watch.has_news
        self.first_step = 0
        """Number of a program's first step in messages: 1 in a training run, whose lines of progress count so."""
        self.is_launched = link is not None
        self.on_event: Callable[[int, dict[str, Any]], None] | None = None
        """Where `emit` goes in a world that was joined, not launched; None drops the events."""
        self.subgroups: dict[tuple[tuple[tuple[int, ...], ...], int], Communicator] = {}
        """Communicators of some of the ranks that were made before, by the groups that were made together; see groups.py."""
        self._link: Link = link if link is not None else _NoLink()
        self._signals: StopSignals | None = None

    def __repr__(self) -> str:
        return f"World(rank={self.rank}, world_size={self.world_size}, device={self.device})"

    def stop_requested(self) -> bool:
        """Whether this rank has been asked to stop. Ranks learn of it at different times: agree before acting on it."""
        return self._link.stop or (self._signals is not None and self._signals.first is not None)

    def request_stop(self) -> None:
        """Ask all ranks to stop, as if the launching process had been asked to. No rank is killed for not reacting."""
        self._link.stop = True
        self._link.ask_to_stop()

    def report_progress(self, step: int, phase: str) -> None:
        """Record what this rank is doing, for error messages; takes about a microsecond.

        Args:
            step: The step under way, from 0.
            phase: One word, for example "forward".
        """
        step += self.first_step if step >= 0 else 0
        self._link.progress(step, phase)
        if self.watch is not None:
            self.watch.pulse.progress(step, phase)

    def emit(self, event: dict[str, Any]) -> None:
        """Send an event to the launching process's `on_event`; events of one rank keep their order.

        Args:
            event: Plain data: numbers, text, lists, and dicts with text as keys.

        Raises:
            ConfigError: It is something else.
        """
        if self.is_launched:
            self._link.emit(event)
        elif self.on_event is not None:
            self.on_event(self.rank, event)

    def sharing_failures(self) -> contextlib.AbstractContextManager[None]:
        """Share failures between joined ranks. Put the rank's whole work inside this context.

        A rank that raises tells the others through the store. A rank that only sees a lost peer raises a `LostPeerError` that
        contains the failing rank's error, or names the rank that tells nothing more: killed, stopped or cut off. That takes up
        to three seconds. Launched ranks do not need this, since their launching process sees all of them.
        """
        return contextlib.nullcontext() if self._share is None else self._share(self)

    @contextlib.contextmanager
    def catching_stop_signals(self) -> Iterator[None]:
        """Let SIGINT, SIGTERM and SIGHUP ask this rank to stop; a second SIGINT raises KeyboardInterrupt.

        For ranks that were joined (torchrun, srun and Kubernetes send SIGTERM) and for a process alone. Launched ranks
        do so already. Without effect outside the main thread.
        """
        if self.is_launched or self._signals is not None:
            yield
            return
        with StopSignals(raise_second=True) as self._signals:
            try:
                yield
            finally:
                self._link.stop = self._link.stop or self._signals.first is not None
                self._signals = None


_current: World | None = None


def current_world() -> World | None:
    """Return the world that this process was started in or has joined; None before that."""
    return _current


def set_current_world(world: World | None) -> None:
    """Set this process's world. For the launch, the join and their tests."""
    global _current
    _current = world


def leave_group(world: World) -> None:
    """Release the default group and end it. A process that ends with a living group may abort in its teardown."""
    if world.watch is not None:
        world.watch.stop()
    if world.calls.has_given_up and world.default_group.looks_out:
        # Ending it would wait for an exchange that no peer enters. It is never released; the process ends with its threads.
        keep_forever(world.default_group.process_group, *(each.process_group for each in world.subgroups.values()))
        return
    world.default_group.release()
    for communicator in world.subgroups.values():
        communicator.release()
    if dist.is_initialized():
        with contextlib.suppress(RuntimeError, ValueError):  # peers may have left before
            dist.destroy_process_group()
