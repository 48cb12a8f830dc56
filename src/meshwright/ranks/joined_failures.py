"""Failures of joined ranks, which no launching process sees together: the failing rank leaves its error in the store."""

from __future__ import annotations

import contextlib
import datetime
import json
import threading
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from meshwright.comm.communicator import is_lost_peer
from meshwright.errors import LostPeerError, RankNote, StoppedOnRequest
from meshwright.ranks.error_transfer import describe_error
from meshwright.ranks.joined_watch import FAILURE_KEY, HEARD_KEY
from meshwright.ranks.told import Missing
from meshwright.ranks.world import leave_group

if TYPE_CHECKING:
    from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

    from meshwright.ranks.world import World

__all__: list[str] = []

_READERS_KEY = "failure readers"
_NEWS_PATIENCE_S = 2.0
_END_PATIENCE_S = 3.0
_MAX_TEXT = 20_000
_MISSING = "missing"
"""In place of an exception's type: the rank has told nothing, and another one has found that."""


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
            described = {name: description[name] for name in ("type", "text", "traceback")}
            _publish(world, world.store, {"rank": world.rank, **described}, num_readers=world.world_size - 1)
            raise
        missing = None if world.watch is None else world.watch.store_is_lost()
        if missing is None:
            news, missing = _cause(world, world.store)
            if news is not None:
                if world.rank == 0:
                    _linger(world.store, news)
                if world.watch is not None and news["type"] != _MISSING:
                    world.watch.await_end(news["rank"], _END_PATIENCE_S)
                elif world.watch is not None:
                    world.watch.end_stuck(news["rank"])
                raise _explained(world, error, news) from error
        elif world.watch is not None:
            world.watch.end_store_rank()
        if missing is not None:
            raise _named(world, error, missing) from error
        raise


def _cause(world: World, store: Store) -> tuple[dict[str, Any] | None, Missing | None]:
    """Return the error that a rank has published, or which ranks are missing, and publish that; None where nothing is known."""
    news = _news(store, 0.0)
    if news is not None or world.watch is None:
        return news or _news(store, _NEWS_PATIENCE_S), None
    missing = world.watch.find_missing()
    if world.watch.store_is_lost() is not None:
        world.watch.end_store_rank()
        return None, missing
    if not missing.ranks:
        return _news(store, _NEWS_PATIENCE_S), missing
    verdict = {"rank": missing.ranks[0], "type": _MISSING, "text": missing.text, "traceback": "", "by": world.rank}
    verdict |= {"given_up": missing.working}
    for rank in missing.silent:
        world.watch.end_stuck(rank)
    world.watch.stop(f"has left, since rank {', '.join(map(str, missing.ranks))} is missing", missing.ranks)
    is_first = _publish(world, store, verdict, num_readers=world.world_size - 1 - len(missing.ranks))
    return None if is_first else _news(store, 0.0), missing


def _named(world: World, error: Exception, missing: Missing) -> LostPeerError:
    """Return an exchange's error with what the watch has found."""
    what = str(error).splitlines()[0] if is_lost_peer(error) else type(error).__name__
    names = ", ".join(map(str, missing.ranks))
    who = f"rank{'s' if len(missing.ranks) > 1 else ''} {names} of {world.world_size} left an exchange waiting"
    noticed = f"{who} (rank {world.rank} noticed by: {what})" if names else what
    # The exchange itself may know: a process of this host has ended.
    peer = missing.peer if missing.ranks or not isinstance(error, LostPeerError) else error.peer
    return LostPeerError(f"{noticed}\n{missing.text}".rstrip(), rank=world.rank, peer=peer)


def _publish(world: World, store: Store, news: dict[str, Any], *, num_readers: int) -> bool:
    """Put the cause into the store, then break the connections, so that waiting ranks stop and read it.

    Returns:
        Whether this one counts: the first does.
    """
    shortened = {"text": news["text"][:_MAX_TEXT], "traceback": news["traceback"][-_MAX_TEXT:]}
    text = json.dumps({**news, **shortened, "readers": num_readers})
    is_first = True
    with contextlib.suppress(RuntimeError):
        is_first = store.compare_set(FAILURE_KEY, "", text) == text.encode()
    if news["type"] == _MISSING:
        world.calls.tell_missing(news["rank"], news["text"])
    # This may wait for exchanges of other threads; since the process is about to end, it need not finish.
    breaker = threading.Thread(target=_break_connections, args=(world,), daemon=True)
    breaker.start()
    breaker.join(_NEWS_PATIENCE_S)
    if world.rank == 0:
        # Another one's cause is read by this rank too, which would wait for itself.
        _linger(store, {**news, "readers": num_readers} if is_first else _news(store, 0.0) or {})
    return is_first


def _break_connections(world: World) -> None:
    leave_group(world)


def _linger(store: Store, news: Mapping[str, Any]) -> None:
    """Stay until the others have read, and ranks that were given up know it: rank 0 may host the store, which ends with it."""
    done = [f"{_READERS_KEY} {count}" for count in range(1, news.get("readers", 0) + 1)]
    done += [f"{HEARD_KEY}/{rank}" for rank in news.get("given_up", ())]
    with contextlib.suppress(RuntimeError):
        store.wait(done, datetime.timedelta(seconds=_NEWS_PATIENCE_S))


def _news(store: Store, patience_s: float) -> dict[str, Any] | None:
    """Return the failing rank's error; None if none is published in time."""
    try:
        if patience_s:
            store.wait([FAILURE_KEY], datetime.timedelta(seconds=patience_s))
        elif not store.check([FAILURE_KEY]):
            return None
        news = json.loads(store.get(FAILURE_KEY))
        store.set(f"{_READERS_KEY} {store.add(_READERS_KEY, 1)}", "read")
    except (RuntimeError, ValueError):
        return None
    return news if isinstance(news, dict) and {"rank", "type", "text", "traceback"} <= set(news) else None


def _explained(world: World, error: Exception, news: dict[str, Any]) -> LostPeerError:
    what = str(error).splitlines()[0] if is_lost_peer(error) else type(error).__name__
    happened = f"rank {news['rank']} of {world.world_size} "
    if news["type"] == _MISSING:
        happened += f"left an exchange waiting, as rank {news.get('by')} has found:\n{news['text']}"
    else:
        happened += f"raised {news['type']}: {news['text']}"
    told = LostPeerError(f"{happened}\n(rank {world.rank} noticed by: {what})", rank=world.rank, peer=news["rank"])
    told.is_told = True
    if news["traceback"]:
        told.add_note(RankNote(f"rank {news['rank']}; its traceback:\n{news['traceback']}", news["rank"]))
    return told
