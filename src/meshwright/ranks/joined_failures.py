"""Failures of joined ranks, which no launching process sees together: the failing rank leaves its error in the store."""

from __future__ import annotations

import contextlib
import datetime
import json
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from meshwright.comm.communicator import is_lost_peer
from meshwright.errors import LostPeerError, RankNote, StoppedOnRequest
from meshwright.ranks.error_transfer import describe_error
from meshwright.ranks.joined_watch import Missing
from meshwright.ranks.world import leave_group

if TYPE_CHECKING:
    from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

    from meshwright.ranks.world import World

__all__: list[str] = []

_KEY = "failure"
_READERS_KEY = "failure readers"
_NEWS_PATIENCE_S = 2.0
_MAX_TEXT = 20_000


@contextlib.contextmanager
def sharing(world: World) -> Iterator[None]:
    """Tell the other ranks this rank's error, and raise theirs here; see `World.sharing_failures`."""
    try:
        yield
    except StoppedOnRequest:
        raise
    except Exception as error:
        if world.store is None or world.is_launched or world.world_size == 1:
            raise
        description = describe_error(error)
        if not description["secondary"]:
            _publish(world, world.store, description)
            raise
        news, missing = _cause(world, world.store)
        if news is not None:
            raise _explained(world, error, news) from error
        if missing is not None:
            raise _named(world, error, missing) from error
        raise


def _cause(world: World, store: Store) -> tuple[dict[str, Any] | None, Missing | None]:
    """Return the error that a rank has published, or which ranks are missing; both None where neither is known."""
    missing = None if world.watch is None else world.watch.store_is_lost()
    if missing is not None:
        return None, missing
    if (news := _news(store, 0.0)) is None and world.watch is not None:
        missing = world.watch.find_missing()
    if news is None:  # a rank that tells nothing will publish nothing
        news = _news(store, 0.0 if missing is not None and missing.ranks else _NEWS_PATIENCE_S)
    return news, missing


def _named(world: World, error: Exception, missing: Missing) -> LostPeerError:
    """Return an exchange's error with what the watch has found."""
    what = str(error).splitlines()[0] if is_lost_peer(error) else type(error).__name__
    names = ", ".join(map(str, missing.ranks))
    who = (
        f"rank{'s' if len(missing.ranks) > 1 else ''} {names} of {world.world_size} left an exchange waiting"
        if names
        else what
    )
    named = LostPeerError(
        f"{who} (rank {world.rank} noticed by: {what})\n{missing.text}" if names else f"{what}\n{missing.text}",
        rank=world.rank,
        peer=missing.peer,
    )
    if world.watch is not None:
        world.watch.stop(f"has left, since rank {names or 'another'} is missing", missing.ranks)
    return named


def _publish(world: World, store: Store, description: dict[str, Any]) -> None:
    """Put the error into the store, then break the connections, so that waiting ranks stop and read it."""
    text = json.dumps(
        {
            "rank": world.rank,
            "type": description["type"],
            "text": description["text"][:_MAX_TEXT],
            "traceback": description["traceback"][-_MAX_TEXT:],
        }
    )
    with contextlib.suppress(RuntimeError):
        store.compare_set(_KEY, "", text)  # the first one counts
    # This may wait for exchanges of other threads; since the process is about to end, it need not finish.
    breaker = threading.Thread(target=_break_connections, args=(world,), daemon=True)
    breaker.start()
    breaker.join(_NEWS_PATIENCE_S)
    if world.rank == 0:
        _linger(store, world.world_size - 1)


def _break_connections(world: World) -> None:
    leave_group(world)


def _linger(store: Store, num_readers: int) -> None:
    """Stay until the others have read: rank 0 may host the store, which ends with its process."""
    done = [f"{_READERS_KEY} {count}" for count in range(1, num_readers + 1)]
    with contextlib.suppress(RuntimeError):
        store.wait(done, datetime.timedelta(seconds=_NEWS_PATIENCE_S))


def _news(store: Store, patience_s: float) -> dict[str, Any] | None:
    """Return the failing rank's error; None if none is published in time."""
    try:
        if patience_s:
            store.wait([_KEY], datetime.timedelta(seconds=patience_s))
        elif not store.check([_KEY]):
            return None
        news = json.loads(store.get(_KEY))
        store.set(f"{_READERS_KEY} {store.add(_READERS_KEY, 1)}", "read")
    except (RuntimeError, ValueError):
        return None
    return news if isinstance(news, dict) and {"rank", "type", "text", "traceback"} <= set(news) else None


def _explained(world: World, error: Exception, news: dict[str, Any]) -> LostPeerError:
    what = str(error).splitlines()[0] if is_lost_peer(error) else type(error).__name__
    told = LostPeerError(
        f"rank {news['rank']} of {world.world_size} raised {news['type']}: {news['text']}\n"
        f"(rank {world.rank} noticed by: {what})",
        rank=world.rank,
        peer=news["rank"],
    )
    told.is_told = True
    told.add_note(RankNote(f"rank {news['rank']}; its traceback:\n{news['traceback']}", news["rank"]))
    return told
