"""The world: what one rank knows about its place among the others.

`_current` below is the one fact of this package that belongs to the whole process: which world the process is in. It is
set once, by the launch that started the process or by the first `join_world`, because torch.distributed's default group
and the environment, which it stands for, belong to the whole process too. Nothing else reads it: code that exchanges
tensors is handed a `Communicator`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

import torch

from meshwright.ranks.calls import Calls
from meshwright.ranks.signals import StopSignals

if TYPE_CHECKING:
    from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

    from meshwright.comm.communicator import Communicator
    from meshwright.comm.ledger import Ledger

import torch.distributed as dist

from meshwright._torch_private import keep_forever

__all__: list[str] = []


class Link(Protocol):
    """What connects a rank to whoever watches over it."""

    stop: bool

    def emit(self, event: dict[str, Any]) -> None:
        """Hand an event to the launching process."""
        ...

    def progress(self, step: int, phase: str) -> None:
        """Note what the rank is doing."""
        ...

    def ask_to_stop(self) -> None:
        """Have all ranks told to stop."""
        ...


class _NoLink:
    """Nobody watches: a joined rank, or a process alone."""

    def __init__(self) -> None:
        self.stop = False

    def emit(self, event: dict[str, Any]) -> None:
        """There is nobody to hand it to."""

    def progress(self, step: int, phase: str) -> None:
        """There is nobody to tell."""

    def ask_to_stop(self) -> None:
        """The step's own agreement spreads it."""


class World:
    """This process's place among the ranks.

    Args:
        default_group: The collectives over all ranks.
        rank: This process, 0 .. world_size - 1.
        world_size: Number of ranks [count].
        local_rank: This process's number on its host.
        device: Where this rank computes.
        ledger: Counts what this rank exchanges.
        timeout_s: How long one exchange may wait [s].
        group_timeout_s: What torch.distributed's groups are given, where that is longer because somebody watches [s].
        link: The connection to the launching process; None where there is none.
        store: Where joined ranks tell each other of failures; None where there is none.
        share: How they do; None where nobody has to be told.
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
        self.calls = Calls(rank, store)
        """What the ranks are in the middle of; exchanges that wait look there for a rank that has raised."""
        default_group.calls = self.calls
        self.is_launched = link is not None
        self.on_event: Callable[[int, dict[str, Any]], None] | None = None
        """Where `emit` goes in a world that was joined, not launched; None drops the events."""
        self.subgroups: dict[tuple[tuple[int, ...], ...], Communicator] = {}
        """Communicators of some of the ranks that were made before, by the groups that were made together; see groups.py."""
        self._link: Link = link if link is not None else _NoLink()
        self._signals: StopSignals | None = None

    def __repr__(self) -> str:
        return f"World(rank={self.rank}, world_size={self.world_size}, device={self.device})"

    def stop_requested(self) -> bool:
        """Whether this rank has been asked to stop. Ranks learn of it at different instants: agree before acting on it."""
        return self._link.stop or (self._signals is not None and self._signals.first is not None)

    def request_stop(self) -> None:
        """Ask all ranks to stop, as if the launching process had been asked to. Nobody is killed for not reacting."""
        self._link.stop = True
        self._link.ask_to_stop()

    def report_progress(self, step: int, phase: str) -> None:
        """Note what this rank is doing, for the error that may have to say it. About a microsecond.

        Args:
            step: The step under way, from 0.
            phase: One word, for example "forward".
        """
        self._link.progress(step, phase)

    def emit(self, event: dict[str, Any]) -> None:
        """Hand an event to the launching process's `on_event`; events of one rank keep their order.

        Args:
            event: Plain data that can be pickled.
        """
        if self.is_launched:
            self._link.emit(event)
        elif self.on_event is not None:
            self.on_event(self.rank, event)

    def sharing_failures(self) -> contextlib.AbstractContextManager[None]:
        """Have joined ranks learn whose error it was. Put the rank's whole work inside.

        A rank that raises tells the others through the store; a rank that only sees a lost peer waits up to two seconds
        for such news, and then raises a `LostPeerError` that has the guilty rank's error in it. Launched ranks need
        none of this, their launching process knows.
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
    """Make a world this process's. For the launch, the join and their tests."""
    global _current
    _current = world


def leave_group(world: World) -> None:
    """Let go of the default group and end it. A process that ends with a group alive may abort in its teardown."""
    if world.calls.has_given_up and world.default_group.looks_out:
        # To end it would wait for an exchange that nobody comes to. It is never let go of; the process ends with its threads.
        keep_forever(world.default_group.process_group, *(each.process_group for each in world.subgroups.values()))
        return
    world.default_group.release()
    for communicator in world.subgroups.values():
        communicator.release()
    if dist.is_initialized():
        with contextlib.suppress(RuntimeError, ValueError):  # peers may have left before
            dist.destroy_process_group()
