"""Random programs of exchanges: the same on every rank for one seed, and free of deadlocks by construction.

Why they end: all steps stand in one order, the same for all ranks, and every rank goes through those of its groups in
that order. A rank blocks only for an exchange whose last side is already behind it in that order. So the earliest exchange
that is not done is one that all its sides come to, whatever they wait for is done before.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable

import torch
from tests.transport.collectives import KINDS, Call
from tests.transport.layouts import LAYOUTS
from tests.transport.values import DTYPES, ops_of

LARGEST_BYTES = 3 * 2**20
_TAGS = (0, 1, 2, 7, 4096)
_OWN_TAGS = 10_000  # from here on a tag is used by one step only


@dataclasses.dataclass(frozen=True, kw_only=True)
class Message:
    """One message between two ranks of a group. Where `source` does not matter to the receiver, `from_any` is set."""

    number: int
    group: int
    source: int
    target: int
    tag: int
    call: Call
    """Its shape, dtype, layouts and seed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """What some ranks do at one place of the program."""

    kind: str
    """collective, coalesced, send, receive, any_source, batch, barrier, objects, sparse, refused, monitored or split"""
    group: int
    calls: tuple[Call, ...] = ()
    is_async: bool = False
    message: Message | None = None
    ready_at: int = 0
    """The step from which on it may be waited for: both sides of a message are behind it."""
    tag: int = 0
    root: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """Groups, by their ranks, and steps."""

    seed: int
    num_ranks: int
    groups: tuple[tuple[int, ...], ...]
    steps: tuple[Step, ...]


class _Maker:
    def __init__(self, seed: int, num_ranks: int, num_steps: int, takes: Callable[[Call], bool]) -> None:
        self.random = random.Random(f"program {seed} of {num_ranks} ranks")
        self.seed = seed
        self.num_ranks = num_ranks
        self.num_steps = num_steps
        self.takes = takes
        self.numbers = itertools.count()
        self.groups = self._groups()
        # Where steps go: (place, number) sorts them.
        self.placed: list[tuple[int, int, Step]] = []
        self.last: dict[tuple[str, int, int, int, int], int] = {}

    def _groups(self) -> tuple[tuple[int, ...], ...]:
        world = tuple(range(self.num_ranks))
        half = max(1, self.num_ranks // 2)
        found = [world]
        for _ in range(self.random.randint(2, 5)):
            size = min(self.num_ranks, self.random.choice([2, 2, 3, 3, half, self.num_ranks - 1, self.num_ranks]))
            found.append(tuple(sorted(self.random.sample(world, max(1, size)))))
        if self.num_ranks >= 4:
            found[1:3] = [world[:half], world[half:]] if self.random.random() < 0.5 else [world[::2], world[1::2]]
        return tuple(found)

    def shape(self, dtype: torch.dtype, num_parts: int) -> tuple[int, ...]:
        most = max(1, LARGEST_BYTES // dtype.itemsize // num_parts)
        kind = self.random.random()
        if kind < 0.08:
            count = 0
        elif kind < 0.5:
            count = self.random.randint(1, 100)
        elif kind < 0.85:
            count = self.random.randint(100, min(most, 20_000))
        else:
            count = self.random.randint(min(most, 20_000), most)
        if self.random.random() < 0.5:
            return (count,)
        columns = self.random.randint(1, 9)
        return (-(-count // columns), columns)

    def call(self, kind: str, group: int, dtype: torch.dtype | None = None, op: str | None = None) -> Call:
        size = len(self.groups[group])
        while True:
            chosen = dtype or self.random.choice(DTYPES)
            layouts = [self.random.choice(LAYOUTS) if self.random.random() < 0.4 else "plain" for _ in range(2)]
            call = Call(
                kind=kind,
                shape=self.shape(
                    chosen, 1 if kind in ("all_reduce", "broadcast", "reduce", "message", "any_source") else size
                ),
                dtype=chosen,
                op=op or self.random.choice(ops_of(chosen)),
                root=self.random.randrange(size),
                seed=self.seed * 100_000 + next(self.numbers),
                input_layout=layouts[0],
                output_layout=layouts[1],
            )
            if self.takes(call):
                return call

    def add(self, place: int, step: Step) -> None:
        self.placed.append((place, next(self.numbers), step))

    def some_group(self, least: int = 1) -> int:
        return self.random.choice([index for index, ranks in enumerate(self.groups) if len(ranks) >= least])

    def collective(self, place: int) -> None:
        group = self.some_group()
        call = self.call(self.random.choice([kind for kind in KINDS if self.takes_kind(kind)]), group)
        self.add(place, Step(kind="collective", group=group, calls=(call,), is_async=self.random.random() < 0.6))

    def takes_kind(self, kind: str) -> bool:
        return self.takes(Call(kind=kind, shape=(1,), dtype=torch.int32))

    def coalesced(self, place: int) -> None:
        group = self.some_group()
        kind = self.random.choice(["all_reduce", "all_gather_tensor", "reduce_scatter_tensor"])
        dtype = self.random.choice([dtype for dtype in DTYPES if dtype not in (torch.int16, torch.bool)])
        calls = tuple(self.call(kind, group, dtype, "sum") for _ in range(self.random.randint(2, 4)))
        self.add(place, Step(kind="coalesced", group=group, calls=calls, is_async=self.random.random() < 0.6))

    def messages(self, place: int) -> None:
        """A burst in one direction of one pair: sent and received in any order, far apart or close."""
        group = self.some_group(least=2)
        source, target = self.random.sample(range(len(self.groups[group])), 2)
        for _ in range(self.random.randint(1, 6)):
            tag = self.random.choice(_TAGS)
            call = self.call("message", group)
            message = Message(number=next(self.numbers), group=group, source=source, target=target, tag=tag, call=call)
            # Messages of one tag are received in the order they were sent in: never before an earlier one.
            places = {}
            for side in ("send", "receive"):
                key = (side, group, source, target, tag)
                places[side] = max(place + self.random.randint(0, 12), self.last.get(key, 0))
                self.last[key] = places[side]
            for side in self.random.sample(("send", "receive"), 2):
                # Blocking where the other side has come before; whoever sorts the steps says so.
                is_async = self.random.random() < 0.6
                self.add(places[side], Step(kind=side, group=group, message=message, is_async=is_async))

    def any_source(self, place: int) -> None:
        group = self.some_group(least=2)
        call = self.call("any_source", group)
        root, tag = self.random.randrange(len(self.groups[group])), _OWN_TAGS + next(self.numbers)
        self.add(place, Step(kind="any_source", group=group, calls=(call,), root=root, tag=tag))

    def batch(self, place: int) -> None:
        group = self.some_group(least=2)
        calls = tuple(self.call("message", group) for _ in range(self.random.randint(1, 3)))
        shift, tag = self.random.randrange(1, len(self.groups[group])), _OWN_TAGS + next(self.numbers)
        self.add(place, Step(kind="batch", group=group, calls=calls, root=shift, tag=tag, is_async=True))

    def simple(self, place: int) -> None:
        kind = self.random.choice(["barrier", "barrier", "objects"])
        group = self.some_group()
        root = self.random.randrange(len(self.groups[group]))
        is_async = kind == "barrier" and self.random.random() < 0.5
        self.add(place, Step(kind=kind, group=group, root=root, is_async=is_async, tag=next(self.numbers)))

    def special(self, place: int) -> None:
        """What is called seldom: sums of sparse tensors, calls that every rank refuses, groups that are split."""
        kind = self.random.choice(["sparse", "sparse", "refused", "refused", "monitored", "split"])
        is_async = kind == "sparse" and self.random.random() < 0.6
        self.add(place, Step(kind=kind, group=self.some_group(), is_async=is_async, tag=next(self.numbers)))

    def make(self) -> Program:
        makers = (
            [self.collective] * 10 + [self.messages] * 2 + [self.coalesced, self.any_source, self.batch, self.simple]
        )
        if self.takes_kind("special"):
            makers.append(self.special)
        place = 0
        while len(self.placed) < self.num_steps:
            self.random.choice(makers)(place)
            place += 1
        self.placed.sort(key=lambda entry: entry[:2])
        steps = [step for _, _, step in self.placed]
        sides: dict[int, list[int]] = {}
        for index, step in enumerate(steps):
            if step.message is not None:
                sides.setdefault(step.message.number, []).append(index)
        for first, second in sides.values():
            # The side that comes first cannot wait there for the other one.
            steps[first] = dataclasses.replace(steps[first], is_async=True, ready_at=second)
            steps[second] = dataclasses.replace(steps[second], ready_at=second)
        return Program(seed=self.seed, num_ranks=self.num_ranks, groups=self.groups, steps=tuple(steps))


def make_program(
    seed: int, num_ranks: int, num_steps: int | None = None, takes: Callable[[Call], bool] = lambda _: True
) -> Program:
    """Return the program of a seed; `takes` tells which calls the backend under test can do at all."""
    if num_steps is None:
        num_steps = random.Random(f"length {seed}").randint(50, 200)
    return _Maker(seed, num_ranks, num_steps, takes).make()
