"""PipelineSchedule: the actions of each rank in their order, checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Literal, Self, cast, get_args

from meshwright.errors import ConfigError, did_you_mean
from meshwright.schedule import orders
from meshwright.schedule.action import Action, ActionKind
from meshwright.schedule.halves import unit_cost
from meshwright.schedule.simulate import Simulation, first_stuck, peak_activations, walk
from meshwright.schedule.svg import schedule_svg
from meshwright.texts import html_block
from meshwright.values import Problems, Value

__all__: list[str] = []

Kind = Literal["gpipe", "1f1b", "interleaved", "zb-h1", "zbv"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSchedule(Value):
    """A pipeline's order of work: for every rank, its actions in the order in which it does them.

    Building one checks it, so a schedule that exists is sound: every stage runs each micro-batch forward and backward
    exactly once, on the rank that holds it, and no rank waits for ever.

    Args:
        kind: gpipe, 1f1b, interleaved, zb-h1 or zbv.
        num_ranks: Pipeline ranks, the plan's ``pp`` [count].
        num_micro_batches: Micro-batches of one step [count].
        virtual: Stages a rank [count].
        actions: [rank][slot] -> action; text such as "2F0" is parsed.

    Raises:
        ConfigError: The order is not sound; the message has the whole table and marks the place.

    >>> schedule = PipelineSchedule.build("1f1b", num_ranks=2, num_micro_batches=3)
    >>> print(" ".join(str(action) for action in schedule.actions[0]))
    0F0 0F1 0B0 0F2 0B1 0B2
    >>> print(schedule.draw())
    rank 0: F0 F1 .  .  B0 B0 F2 B1 B1 .  B2 B2
    rank 1: .  F0 B0 B0 F1 B1 B1 F2 B2 B2 .  .
    >>> schedule.simulate().bubble_fraction == (2 - 1) / (3 + 2 - 1)
    True
    """

    FORMAT: ClassVar[str] = "schedule"

    kind: Kind
    num_ranks: int
    num_micro_batches: int
    virtual: int = 1
    actions: tuple[tuple[Action, ...], ...]

    def __post_init__(self) -> None:
        given = cast("Iterable[Iterable[Action | str]]", self.actions)
        self._set(actions=())
        self._check_types()
        _check_shape(self.kind, self.num_ranks, self.num_micro_batches, self.virtual)
        actions = tuple(tuple(Action.parse(a) if isinstance(a, str) else a for a in row) for row in given)
        self._set(actions=actions)
        self.validate()

    @classmethod
    def build(cls, kind: Kind, *, num_ranks: int, num_micro_batches: int, virtual: int | None = None) -> Self:
        """Return the schedule of a kind.

        Args:
            kind: "gpipe" does all forwards first; "1f1b" holds fewer activations; "interleaved" has several stages a
                rank and a smaller bubble; "zb-h1" and "zbv" split backward in two and fill the bubble with the half
                that nobody waits for, zbv with two stages a rank.
            num_ranks: Pipeline ranks [count].
            num_micro_batches: Micro-batches of one step; any number [count].
            virtual: Stages a rank; None is 2 for interleaved and zbv, and 1 otherwise [count].

        Raises:
            ConfigError: The numbers do not fit the kind.
        """
        if virtual is None:
            virtual = 2 if kind in ("interleaved", "zbv") else 1
        _check_shape(kind, num_ranks, num_micro_batches, virtual)
        if kind == "interleaved":
            order = orders.interleaved_order(num_ranks, num_micro_batches, virtual)
        else:
            makers = {
                "gpipe": orders.gpipe_order,
                "1f1b": orders.one_f_one_b_order,
                "zb-h1": orders.zb_h1_order,
                "zbv": orders.zbv_order,
            }
            order = makers[kind](num_ranks, num_micro_batches)
        return cls(
            kind=kind,
            num_ranks=num_ranks,
            num_micro_batches=num_micro_batches,
            virtual=virtual,
            actions=tuple(tuple(row) for row in order),
        )

    @property
    def num_stages(self) -> int:
        """Stages over all ranks [count]."""
        return self.num_ranks * self.virtual

    def rank_of_stage(self, stage: int) -> int:
        """Return the rank that holds a stage; see [Note: stages of a rank].

        Raises:
            ConfigError: There is no such stage.
        """
        if not 0 <= stage < self.num_stages:
            raise ConfigError(f"schedule: there is no stage {stage} (rule: 0 <= stage < {self.num_stages})")
        if self.kind == "zbv" and stage >= self.num_ranks:
            return self.num_stages - 1 - stage
        return stage % self.num_ranks

    def stages_of_rank(self, rank: int) -> tuple[int, ...]:
        """Return the stages that a rank holds, ascending.

        Raises:
            ConfigError: There is no such rank.
        """
        if not 0 <= rank < self.num_ranks:
            raise ConfigError(f"schedule: there is no rank {rank} (rule: 0 <= rank < {self.num_ranks})")
        return tuple(stage for stage in range(self.num_stages) if self.rank_of_stage(stage) == rank)

    def validate(self) -> None:
        """Check that the order is complete, each action on its rank, nothing before its inputs, and that it ends.

        Raises:
            ConfigError: It is not; the message has the whole table and marks the place with "<-- ERROR HERE".
        """
        if len(self.actions) != self.num_ranks:
            raise ConfigError(f"schedule: {len(self.actions)} rows for {self.num_ranks} ranks (rule: one row a rank)")
        seen: set[tuple[int, str, int]] = set()
        for rank, row in enumerate(self.actions):
            for slot, action in enumerate(row):
                wrong = self._wrong_action(action, rank, seen)
                if wrong:
                    raise ConfigError(f"schedule: {wrong}\n{self._table((rank, slot))}")
                seen.add((action.stage, action.kind, action.micro_batch))
        missing = self._first_missing(seen)
        if missing is not None:
            rank = self.rank_of_stage(missing.stage)
            raise ConfigError(
                f"schedule: '{missing}' is missing (rule: each stage runs each micro-batch forward and backward once)\n"
                f"{self._table((rank, len(self.actions[rank])))}"
            )
        stuck = first_stuck(walk(self.actions, self.num_stages, lambda _: 1.0), self.actions)
        if stuck is not None:
            action = self.actions[stuck[0]][stuck[1]]
            raise ConfigError(
                f"schedule: '{action}' waits for ever: its input comes later, on this rank or on one that waits in turn "
                f"(rule: nothing runs before its inputs)\n{self._table(stuck)}"
            )

    def simulate(self, cost: Callable[[Action], float] | None = None, *, send_s: float = 0.0) -> Simulation:
        """Return when every action runs if each rank does its own in order, as soon as their inputs are there.

        Args:
            cost: Action -> how long it takes [s]; None means F = I = W = 1 and B = 2.
            send_s: Time from one stage's result to a neighbour on another rank, not hidden by anything [s].

        Returns:
            Starts, ends, makespan, bubble and the peak of activations.

        Raises:
            ConfigError: A cost is negative.

        >>> schedule = PipelineSchedule.build("zbv", num_ranks=4, num_micro_batches=8)
        >>> round(schedule.simulate().bubble_fraction, 3), schedule.simulate().peak_activations
        (0.059, (8, 8, 8, 8))
        """
        chosen = cost or unit_cost
        costs = {action: chosen(action) for row in self.actions for action in row}
        problems = Problems("schedule")
        problems.require(min(costs.values()) >= 0, "a cost is negative (rule: an action takes no less than no time)")
        problems.require(send_s >= 0, f"send_s={send_s} (rule: it is not negative)")
        problems.check()
        times = walk(self.actions, self.num_stages, costs.__getitem__, send_s)
        begin = min(row[0][0] for row in times)
        makespan = max(row[-1][1] for row in times) - begin
        busy = sum(costs.values())
        return Simulation(
            starts=tuple(tuple(start for start, _ in row) for row in times),
            ends=tuple(tuple(end for _, end in row) for row in times),
            peak_activations=tuple(peak_activations(row) for row in self.actions),
            makespan_s=makespan,
            bubble_fraction=1.0 - busy / (makespan * self.num_ranks) if makespan > 0 else 0.0,
        )

    def draw(self) -> str:
        """Return the schedule as text: a row a rank, a column a unit of time, "." where the rank is idle.

        B fills two columns, the rest one. With several stages a rank, cells have the stage in front.
        """
        simulation = self.simulate()
        columns = round(simulation.makespan_s)
        grid = [["."] * columns for _ in self.actions]
        for rank, row in enumerate(self.actions):
            for action, start, end in zip(row, simulation.starts[rank], simulation.ends[rank], strict=True):
                cell = str(action) if self.virtual > 1 else f"{action.kind}{action.micro_batch}"
                for column in range(round(start), round(end)):
                    grid[rank][column] = cell
        width = max(len(cell) for row in grid for cell in row)
        label = len(str(self.num_ranks - 1))
        return "\n".join(
            f"rank {rank:>{label}}: {' '.join(cell.ljust(width) for cell in row).rstrip()}"
            for rank, row in enumerate(grid)
        )

    def _repr_html_(self) -> str:
        """Return the schedule as a notebook shows it: drawn, with its bubble."""
        simulation = self.simulate()
        title = f"{self.kind}: {self.num_ranks} ranks, {self.num_micro_batches} micro-batches, "
        title += f"idle for {simulation.bubble_fraction:.1%} with B twice as long as F"
        return html_block(title, schedule_svg(self.actions, simulation))

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain JSON values; an action is its text."""
        return {
            "kind": self.kind,
            "num_ranks": self.num_ranks,
            "num_micro_batches": self.num_micro_batches,
            "virtual": self.virtual,
            "actions": [[str(action) for action in row] for row in self.actions],
        }

    def _wrong_action(self, action: Action, rank: int, seen: set[tuple[int, str, int]]) -> str:
        stage, kind, micro_batch = action
        if not (0 <= stage < self.num_stages and 0 <= micro_batch < self.num_micro_batches):
            return (
                f"'{action}' on rank {rank} does not exist (rule: {self.num_stages} stages and "
                f"{self.num_micro_batches} micro-batches, counted from 0)"
            )
        if self.rank_of_stage(stage) != rank:
            return f"'{action}' is on rank {rank} (rule: stage {stage} is on rank {self.rank_of_stage(stage)})"
        if (stage, kind, micro_batch) in seen:
            return f"'{action}' is there twice (rule: once)"
        halves = ("I", "W") if kind == "B" else ("B",) if kind in ("I", "W") else ()
        if any((stage, half, micro_batch) in seen for half in halves):
            return f"'{action}' does again what a backward of this micro-batch did (rule: B, or I and W)"
        return ""

    def _first_missing(self, seen: set[tuple[int, str, int]]) -> Action | None:
        for stage in range(self.num_stages):
            for micro_batch in range(self.num_micro_batches):
                whole = (stage, "B", micro_batch) in seen
                for kind in (ActionKind.FORWARD, ActionKind.INPUT_GRAD, ActionKind.WEIGHT_GRAD):
                    covered = whole and kind is not ActionKind.FORWARD
                    if not covered and (stage, kind, micro_batch) not in seen:
                        split = (stage, "W", micro_batch) in seen or (stage, "I", micro_batch) in seen
                        return Action(stage, kind if split or kind == "F" else ActionKind.BACKWARD, micro_batch)
        return None

    def _table(self, mark: tuple[int, int]) -> str:
        lines: list[str] = []
        for rank, row in enumerate(self.actions):
            cells = [str(action) for action in row]
            if rank == mark[0]:
                cells = [*cells[: mark[1]], *cells[mark[1] : mark[1] + 1], "<-- ERROR HERE", *cells[mark[1] + 1 :]]
            lines.append(f"rank {rank}: {' '.join(cells)}")
        return "\n".join(lines)


def _check_shape(kind: str, num_ranks: int, num_micro_batches: int, virtual: int) -> None:
    problems = Problems("schedule")
    for name, number in (("num_ranks", num_ranks), ("num_micro_batches", num_micro_batches), ("virtual", virtual)):
        whole = isinstance(cast("object", number), int) and not isinstance(number, bool)
        problems.require(
            whole and number >= 1, f"{name}={number!r} (rule: {name} is a whole number, at least 1)", fix=f"{name}=1"
        )
    problems.check()
    if kind == "interleaved":
        problems.require(
            virtual > 1, f"interleaved with virtual={virtual} (rule: a rank has several stages)", fix="virtual=2"
        )
    elif kind == "zbv":
        problems.require(virtual == 2, f"zbv with virtual={virtual} (rule: a V has two stages a rank)", fix="virtual=2")
    elif kind in ("gpipe", "1f1b", "zb-h1"):
        problems.require(virtual == 1, f"{kind} with virtual={virtual} (rule: one stage a rank)", fix="virtual=1")
    else:
        known = get_args(Kind)
        problems.add(f"unknown kind '{kind}'{did_you_mean(str(kind), known)}; known: {', '.join(known)}")
    problems.check()
