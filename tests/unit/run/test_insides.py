"""What a script changes inside of containers, objects and variables between steps, as one rank's watch sees it."""

from __future__ import annotations

import gc
import types
import weakref
from typing import Any

import torch
from torch import nn

from meshwright.run.sentinels.insides import InsidesWatch, told_text

LIMIT = {"of": 1.0}


class Note:
    """An object of a user's class."""

    def __init__(self) -> None:
        self.size, self.rates = 1, [0.5, 0.5]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.note, self.table = Note(), {"a": 1.0, "deep": {"b": 2.0}}
        self.log: list[Any] = []
        self.layer = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * LIMIT["of"]


class Watched:
    """A watch over one model, whose attributes are given as the sentinels do."""

    def __init__(self, loss_fn: Any = None) -> None:
        self.net = Net()
        self.watch = InsidesWatch(self.net, loss_fn)
        self.slots = ["note", "table", "log"]

    def changes(self, *acts: Any, meanwhile: Any = None) -> list[str]:
        """Return the names of what the acts have changed, each after a note; `meanwhile` is the modules' own doing."""
        self.watch.note(self.slots, [getattr(self.net, name) for name in self.slots], lambda name: f"'{name}'")
        for act in acts:
            act()
        self.watch.look()
        if meanwhile is not None:
            meanwhile()
        return sorted(self.watch.take())


def test_changed_entries_have_names() -> None:
    watched = Watched()
    net = watched.net
    assert watched.changes() == []
    assert watched.changes(lambda: setattr(net.note, "size", 2)) == ["attribute 'size' of 'note'"]
    assert watched.changes(lambda: net.note.rates.append(1.0)) == ["attribute 'rates' of 'note'"]
    assert watched.changes(lambda: net.table["deep"].pop("b")) == ["entry 'b' of entry 'deep' of 'table'"]  # type: ignore[attr-defined, union-attr]
    assert watched.changes(lambda: LIMIT.update(of=float("1.5"))) == ["entry 'of' of variable LIMIT"]
    assert watched.changes(lambda: LIMIT.update(of=float("1.5"))) == []
    LIMIT["of"] = 1.0


def test_what_modules_do_themselves_is_no_change() -> None:
    watched = Watched()
    assert watched.changes(meanwhile=lambda: watched.net.log.append(1.0)) == []
    assert watched.changes() == []


def test_a_container_that_is_replaced_is_watched_no_more_and_not_kept() -> None:
    class Kept(dict[str, float]):
        pass

    watched = Watched()
    watched.net.table = Kept(a=1.0)  # type: ignore[assignment]
    assert watched.changes() == []
    gone = weakref.ref(watched.net.table)
    watched.net.table = {"deep": Kept(a=1.0)}  # type: ignore[assignment, dict-item]
    inner = weakref.ref(watched.net.table["deep"])  # type: ignore[arg-type]
    assert watched.changes(lambda: watched.net.table.update(a=2.0)) == []
    watched.net.note.rates = Kept(a=1.0)  # type: ignore[assignment]
    assert watched.changes() == []
    last = weakref.ref(watched.net.note.rates)  # type: ignore[type-var]
    watched.net.note.rates = [1.0]
    watched.net.table = {}
    assert watched.changes() == []
    gc.collect()
    assert (gone(), inner(), last()) == (None, None, None)


def test_a_log_that_grows_is_watched_no_more() -> None:
    watched = Watched()
    for number in range(300):
        found = watched.changes(lambda number=number: watched.net.log.append(number))
        assert found == (["'log'"] if number < 256 else [])


def test_differences_that_were_told_end_the_watch() -> None:
    watched = Watched()
    for _ in range(20):
        watched.watch.tell()
    assert watched.changes(lambda: setattr(watched.net.note, "size", 3)) == []


def test_what_the_loss_holds_has_its_name() -> None:
    weights = {"a": 1.0}

    def loss(outputs: Any, batch: Any) -> Any:
        del batch
        return outputs.sum() * weights["a"]

    watched = Watched(loss)
    assert watched.changes(lambda: weights.update(a=3.0)) == ["entry 'a' of variable weights"]
    assert watched.watch.text("entry 'a' of variable weights") == "3.0"
    assert watched.watch.text("entry 'c' of variable weights") == "not there"


def test_objects_have_a_text() -> None:
    assert told_text(Note()) == "Note {'size': 1, 'rates': [0.5, 0.5]}"
    assert told_text(types.SimpleNamespace(a=1)) == "SimpleNamespace {'a': 1}"
    assert told_text(nn.Linear(1, 1)) == "torch.nn.modules.linear.Linear"
