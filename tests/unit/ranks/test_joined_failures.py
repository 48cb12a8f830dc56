"""What ranks of a job tell each other of a failure, and how long rank 0 stays for the others to read it."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore

from meshwright.ranks import joined_failures
from meshwright.ranks.joined_failures import _news, _publish
from meshwright.ranks.joined_watch import HEARD_KEY

PATIENCE_S = 20.0
FAILURE = {"rank": 2, "type": "ValueError", "text": "x", "traceback": ""}


@pytest.fixture(autouse=True)
def no_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joined_failures, "_break_connections", lambda _world: None)
    monkeypatch.setattr(joined_failures, "_NEWS_PATIENCE_S", PATIENCE_S)


def of_rank(rank: int) -> Any:
    return SimpleNamespace(rank=rank)


def test_rank_0_does_not_wait_for_itself_where_another_was_first() -> None:
    store: Any = HashStore()
    assert _publish(of_rank(1), store, FAILURE, num_readers=1)
    began = time.monotonic()
    assert not _publish(of_rank(0), store, FAILURE | {"text": "y"}, num_readers=1)
    assert time.monotonic() - began < PATIENCE_S / 2


def test_rank_0_stays_until_the_others_have_read() -> None:
    store: Any = HashStore()
    stays = threading.Thread(target=_publish, args=(of_rank(0), store, FAILURE), kwargs={"num_readers": 2})
    stays.start()
    for _ in range(2):
        stays.join(0.05)
        assert stays.is_alive()
        assert _news(store, PATIENCE_S) is not None
    stays.join(PATIENCE_S / 2)
    assert not stays.is_alive()


def test_rank_0_stays_until_a_rank_that_was_given_up_knows_it() -> None:
    # The store ends with rank 0: a rank that sleeps in the user's code read there that it is to end, or lived for ever.
    store: Any = HashStore()
    news = FAILURE | {"given_up": (2,)}
    stays = threading.Thread(target=_publish, args=(of_rank(0), store, news), kwargs={"num_readers": 0})
    stays.start()
    stays.join(0.05)
    assert stays.is_alive()
    store.set(f"{HEARD_KEY}/2", "")
    stays.join(PATIENCE_S / 2)
    assert not stays.is_alive()
