"""One step as a picture: a lane for each rank, as it ran, and the simulated schedule of a pipeline to the same scale."""

from __future__ import annotations

import bisect
import dataclasses
import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from meshwright.errors import MeshwrightError
from meshwright.report.run_files import RunFiles, number_of
from meshwright.report.step_times import RankStep, TracedStep, action_times, middle_step, steps_of
from meshwright.report.trace_read import ReadTrace, TraceSpan, read_trace
from meshwright.schedule import Action, ActionKind, PipelineSchedule
from meshwright.spec.plan import Plan
from meshwright.units import format_bytes, format_seconds

__all__: list[str] = []

MOST_LANES: Final = 64
"""Lanes that are drawn [count]."""
MOST_BOXES: Final = 12_000
"""Boxes that are drawn one by one; of more, neighbours of a kind are merged [count]."""
WIDTH: Final = 1000.0
LEFT: Final = 120
LANE: Final = 34
_TEXT_PX: Final = 8.0
_NAMED: Final = frozenset({"load", "forward", "backward", "input_grad", "weight_grad", "recompute", "optimizer"})
_KIND_OF: Final = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward",
    ActionKind.INPUT_GRAD: "input_grad",
    ActionKind.WEIGHT_GRAD: "weight_grad",
}


@dataclasses.dataclass(frozen=True, slots=True)
class SpanBox:
    """A box in a lane.

    Args:
        x: Its left edge [px].
        width: Its width [px].
        kind: The kind of its span.
        title: What it says when it is pointed at.
        label: The text in it.
        label_x: Where the text begins [px].
    """

    x: float
    width: float
    kind: str
    title: str
    label: str = ""
    label_x: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """A rank's lane, or one of its threads'."""

    y: int
    label: str
    boxes: tuple[SpanBox, ...]
    flights: tuple[SpanBox, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepPicture:
    """What the page shows of a traced step.

    Args:
        step: The step that is drawn.
        lanes: As it ran.
        simulated: The schedule as simulated; () without a pipeline.
        ticks: Marks of the time axis: position [px] and text.
        times: Rows of each rank: its number, seconds by kind, idle share.
        exchanges: Rows: exchange, axis, calls, bytes and waiting, a rank.
        steps: Rows of all traced steps: number, seconds, idle share.
        verdict: The sentence above the picture.
        remarks: How to read it, and what was left out.
    """

    step: int
    lanes: tuple[Lane, ...]
    simulated: tuple[Lane, ...]
    ticks: tuple[tuple[float, str], ...]
    times: tuple[tuple[str, ...], ...]
    exchanges: tuple[tuple[str, ...], ...]
    steps: tuple[tuple[str, ...], ...]
    verdict: str
    remarks: tuple[str, ...]
    idle_fraction: float
    simulated_idle_fraction: float | None

    @property
    def height(self) -> int:
        """Height of the lanes as they ran [px]."""
        return len(self.lanes) * LANE

    @property
    def simulated_height(self) -> int:
        """Height of the simulated lanes [px]."""
        return len(self.simulated) * LANE


TIME_COLUMNS: Final = (
    *(("load", ("load",)), ("forward", ("forward",)), ("backward", ("backward", "input_grad", "weight_grad"))),
    *(("recompute", ("recompute",)), ("optimizer", ("optimizer",)), ("waiting", ("wait",)), ("other", ("step",))),
)


def picture_step(run: RunFiles) -> StepPicture | None:
    """Return the picture of a run's traced step; None where nothing was traced. Damage goes to the run's problems."""
    told = run.last("traced")
    if told is None:
        return None
    try:
        trace = read_trace(run.path, told.get("id"))
    except MeshwrightError as error:
        run.problems.append(f"the traced step is not drawn: {error.message}")
        return None
    steps = steps_of(trace)
    if trace.num_damaged:
        run.problems.append(f"trace.json: {trace.num_damaged} events were left out (damaged)")
    if not steps:
        run.problems.append("trace.json holds no step that all ranks ended")
        return None
    return draw_step(trace, steps, run.plan)


def draw_step(trace: ReadTrace, steps: Sequence[TracedStep], plan: Plan | None) -> StepPicture:
    """Return the picture of the step of median length."""
    step = middle_step(steps)
    sees_idle = plan is None or plan.mode == "ranks"
    schedule = _schedule_of(plan, step)
    simulation = None
    if schedule is not None:
        medians = {key: statistics.median(times) for key, times in action_times(step).items()}
        simulation = schedule.simulate(lambda action: medians.get((action.stage, _KIND_OF[action.kind]), 0.0))
    longest = max(step.seconds, simulation.makespan_s if simulation is not None else 0.0)
    scale = WIDTH / longest if longest > 0 else 0.0
    remarks = _remarks(trace, step)
    lanes, num_left_out, is_merged = _lanes(trace, step, scale)
    if num_left_out:
        remarks.append(f"{num_left_out} more lanes are not drawn; the table has all ranks.")
    if is_merged:
        remarks.append("Boxes narrower than a third of a pixel are merged with neighbours of their kind.")
    simulated: tuple[Lane, ...] = ()
    bubble = None
    if schedule is not None and simulation is not None:
        bubble = simulation.bubble_fraction
        simulated = _simulated(schedule, simulation.starts, simulation.ends, scale)
    return StepPicture(
        step=step.number,
        lanes=lanes,
        simulated=simulated,
        ticks=_ticks(longest, scale),
        times=tuple(_time_row(one, step, sees_idle=sees_idle) for one in step.ranks),
        exchanges=_exchange_rows(step),
        steps=tuple(
            (str(one.number), format_seconds(one.seconds), f"{one.idle_fraction:.1%}" if sees_idle else "-")
            for one in steps
        ),
        verdict=_verdict(step, bubble, sees_idle=sees_idle),
        remarks=tuple(remarks),
        idle_fraction=step.idle_fraction,
        simulated_idle_fraction=bubble,
    )


def _verdict(step: TracedStep, bubble: float | None, *, sees_idle: bool) -> str:
    if not sees_idle:
        return (
            f"Step {step.number} took {format_seconds(step.seconds)} in one process, which does not see for how long its "
            "devices were idle."
        )
    text = f"Step {step.number} took {format_seconds(step.seconds)}; ranks were idle for {step.idle_fraction:.1%} of it"
    if bubble is None:
        return f"{text}."
    return f"{text}. The schedule alone, with each stage's median times, is idle for {bubble:.1%}."


def _remarks(trace: ReadTrace, step: TracedStep) -> list[str]:
    clocks = trace.about.get("clocks")
    errors = [
        number_of(cast("dict[str, Any]", one).get("error_s"))
        for one in (cast("dict[str, Any]", clocks).values() if isinstance(clocks, dict) else ())
        if isinstance(one, dict)
    ]
    worst = max((error for error in errors if not math.isnan(error)), default=0.0)
    remarks = [
        "All ranks read one clock."
        if not worst
        else f"Clocks of different hosts are aligned to within {format_seconds(worst)}."
    ]
    if trace.about.get("device") == "cuda":
        remarks.append(
            "Ranks on GPUs: these are the host's times, when work was given to the GPU and when the host waited for it."
        )
    num_operators = trace.about.get("num_operators")
    if isinstance(num_operators, int):
        remarks.append(
            "torch.profiler ran in these steps, which makes them longer and takes memory: "
            f"{num_operators} operators are in trace.json."
        )
    if any(flight.details.get("end") == "not seen" for one in step.ranks for flight in one.flights):
        remarks.append("Some exchanges ended without being waited for; their boxes end with the trace.")
    left_out = trace.about.get("num_left_out")
    if isinstance(left_out, int) and left_out:
        remarks.append(f"{left_out} spans were not recorded: there was no room for them.")
    return remarks


def _lanes(trace: ReadTrace, step: TracedStep, scale: float) -> tuple[tuple[Lane, ...], int, bool]:
    tracks = [(one, track) for one in step.ranks for track in sorted({span.track for span in one.spans})]
    merges = sum(len(one.spans) + len(one.flights) for one in step.ranks) > MOST_BOXES
    lanes: list[Lane] = []
    for one, track in tracks[:MOST_LANES]:
        spans = [span for span in one.spans if span.track == track]
        label = f"rank {one.rank}" if track == 0 else trace.threads.get((one.rank, track), "")[-16:]
        lanes.append(
            Lane(
                y=len(lanes) * LANE,
                label=label,
                boxes=_boxes(spans, step.begin, scale, merges=merges),
                flights=_boxes(one.flights, step.begin, scale, merges=merges) if track == 0 else (),
            )
        )
    return tuple(lanes), len(tracks) - len(lanes), merges


def _boxes(spans: Sequence[TraceSpan], begin: float, scale: float, *, merges: bool) -> tuple[SpanBox, ...]:
    found: list[SpanBox] = []
    named: list[tuple[int, str]] = []
    last_of: dict[str, int] = {}
    # What interrupts others is drawn over them.
    for span in sorted(spans, key=lambda one: one.kind == "wait"):
        x, width = (span.begin - begin) * scale, span.seconds * scale
        place = last_of.get(span.kind)
        if merges and place is not None and width < 1 / 3:
            known = found[place]
            if x - known.x - known.width < 1 / 3:
                found[place] = dataclasses.replace(known, width=max(known.width, x + width - known.x), title="several")
                continue
        last_of[span.kind] = len(found)
        found.append(SpanBox(x, width, span.kind, _title(span)))
        if span.kind in _NAMED and width >= _TEXT_PX * len(span.name):
            named.append((len(found) - 1, span.name))
    waits = [box for box in found if box.kind == "wait"]
    for place, name in named:
        label_x, room = _free_part(found[place], waits)
        if room >= _TEXT_PX * len(name):
            found[place] = dataclasses.replace(found[place], label=name, label_x=label_x)
    return tuple(found)


def _free_part(box: SpanBox, waits: Sequence[SpanBox]) -> tuple[float, float]:
    """Return the widest part of a box that no wait covers: its left edge and its width [px]."""
    at, best = box.x, (box.x, 0.0)
    first = bisect.bisect_left(waits, box.x, key=lambda wait: wait.x)
    for wait in waits[first:]:
        if wait.x >= box.x + box.width:
            break
        best = max(best, (at, wait.x - at), key=lambda part: part[1])
        at = wait.x + wait.width
    return max(best, (at, box.x + box.width - at), key=lambda part: part[1])


def _title(span: TraceSpan) -> str:
    words = [f"{span.name}: {span.kind}" if span.kind != span.name else span.name, format_seconds(span.seconds)]
    details = span.details
    if isinstance(details.get("bytes"), int):
        words.append(format_bytes(details["bytes"]))
    for key, word in (("axis", "axis"), ("peer", "with rank"), ("stage", "stage"), ("micro_batch", "micro-batch")):
        if isinstance(details.get(key), int | str):
            words.append(f"{word} {details[key]}")
    ranks = details.get("ranks")
    if isinstance(ranks, list):
        shown = ", ".join(str(rank) for rank in cast("list[Any]", ranks)[:8])
        words.append(f"ranks {shown}{', ...' if len(cast('list[Any]', ranks)) > 8 else ''}")
    return ", ".join(words)


def _schedule_of(plan: Plan | None, step: TracedStep) -> PipelineSchedule | None:
    """Return the schedule that the step ran; None where it ran none that can be told."""
    if plan is None or plan.pp == 1 or plan.mode != "ranks":
        return None
    numbers = [span.details.get("micro_batch") for one in step.ranks for span in one.spans if "stage" in span.details]
    counts = [number + 1 for number in numbers if isinstance(number, int)]
    if not counts or max(counts) > 4096:
        return None
    try:
        return PipelineSchedule.build(
            plan.schedule, num_ranks=plan.pp, num_micro_batches=max(counts), virtual=plan.virtual
        )
    except MeshwrightError:
        return None


def _simulated(
    schedule: PipelineSchedule,
    starts: Sequence[Sequence[float]],
    ends: Sequence[Sequence[float]],
    scale: float,
) -> tuple[Lane, ...]:
    lanes: list[Lane] = []
    for rank, actions in enumerate(schedule.actions[:MOST_LANES]):
        boxes = [
            _simulated_box(action, start, end, scale)
            for action, start, end in zip(actions, starts[rank], ends[rank], strict=True)
        ]
        lanes.append(Lane(y=rank * LANE, label=f"pp {rank}", boxes=tuple(boxes)))
    return tuple(lanes)


def _simulated_box(action: Action, start: float, end: float, scale: float) -> SpanBox:
    width, name, kind = (end - start) * scale, str(action), _KIND_OF[action.kind]
    label = name if width >= _TEXT_PX * len(name) else ""
    title = f"{name}: {kind}, {format_seconds(end - start)}, simulated"
    return SpanBox(start * scale, width, kind, title, label, start * scale)


def _ticks(longest: float, scale: float) -> tuple[tuple[float, str], ...]:
    if longest <= 0:
        return ()
    count = 5
    return tuple(
        (longest * at / count * scale, format_seconds(longest * at / count) if at else "0") for at in range(count + 1)
    )


def _time_row(one: RankStep, step: TracedStep, *, sees_idle: bool) -> tuple[str, ...]:
    own = [sum(one.own_s.get(kind, 0.0) for kind in kinds) for _, kinds in TIME_COLUMNS]
    idle = 1.0 - one.busy_s / step.seconds if step.seconds > 0 else 0.0
    shown = [format_seconds(seconds) if seconds > 0 else "-" for seconds in own]
    return (f"rank {one.rank}", *shown, f"{idle:.1%}" if sees_idle else "-")


def _purpose(details: Mapping[str, Any]) -> str:
    return "check" if details.get("check") else "note" if details.get("note") else "step"


def _exchange_rows(step: TracedStep) -> tuple[tuple[str, ...], ...]:
    """Return rows of exchanges: means over ranks."""
    found: defaultdict[tuple[str, str, str], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for one in step.ranks:
        for span in (*one.spans, *one.flights):
            if span.kind not in ("wait", "exchange"):
                continue
            details: Mapping[str, Any] = span.details
            size = details.get("bytes")
            entry = found[span.name, str(details.get("axis", "")), _purpose(details)]
            if span.kind == "exchange" or not details.get("async"):
                entry[0] += 1
                entry[1] += size if isinstance(size, int) else 0
            if span.kind == "wait":
                entry[2] += span.seconds
    num_ranks = len(step.ranks)
    rows = sorted(found.items(), key=lambda item: -item[1][2])
    return tuple(
        (
            name,
            axis,
            check,
            f"{calls / num_ranks:.1f}",
            format_bytes(size / num_ranks),
            format_seconds(wait / num_ranks),
        )
        for (name, axis, check), (calls, size, wait) in rows
    )
