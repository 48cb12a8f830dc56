"""Conclusion from the numbers of a comparison, in words. Every word depends on a number; no plan is known by name."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.compare.formulas import Spread
from meshwright.compare.rows import ComparisonRow
from meshwright.units import format_seconds

__all__: list[str] = []

EXPOSED_MUCH = 0.1
"""From this share of the step on, communication is named as what limits a plan [fraction]."""

LOSS_TOLERANCE = 1e-3
"""Losses that differ by more are not taken for the same training [fraction]. In fp32 the sums of a plan come in another
order than those of one device, about 1e-7 each, and a few dozen optimizer steps let that grow to 1e-6 .. 1e-4."""


DISTURBED = 0.1
"""From this share of the machine's cores on, other work is taken to have disturbed a run [fraction]."""


def draw_conclusion(rows: Sequence[ComparisonRow], baseline: str, cores: int, machine_cores: int | None = None) -> str:
    """Return which plan is fastest, by how much, whether that is noise, what limits it, and whether the losses agree.

    Args:
        rows: All rows.
        baseline: The canonical line of the plan that is compared with.
        cores: The cores that every plan shares [count].
        machine_cores: The cores that other work is judged by; None: `cores` [count].
    """
    asked = [row for row in rows if not row.trial.is_baseline]
    done = [row for row in asked if row.step_s is not None]
    if not done:
        return "No plan ran."
    fastest = min(done, key=lambda row: row.step_s or 0.0)
    others = [row for row in rows if row is not fastest and row.step_s is not None]
    sentences = [_verdict(fastest, others, rows, baseline, cores)]
    sentences.append(_fewer_threads(fastest, others, cores))
    if fastest.trial.num_devices > 1:
        sentences.append(_limit(fastest))
    sentences += [_one_at_a_time(row) for row in done if row.trial.mode == "model_parallel"]
    sentences += [*_losses(done, baseline), *_failures(asked), _disturbance(rows, machine_cores or cores)]
    return " ".join(sentence for sentence in sentences if sentence)


def _verdict(
    fastest: ComparisonRow, others: Sequence[ComparisonRow], rows: Sequence[ComparisonRow], baseline: str, cores: int
) -> str:
    name = f"'{fastest.trial.name}'"
    step = f"{format_seconds(fastest.step_s or 0.0)} a step"
    where = f"the same {cores} cores" if fastest.trial.is_on_cpu and cores > 1 else "one device"
    if fastest.trial.plan == baseline:
        rivals = [row for row in others if not row.trial.is_baseline]
        if not rivals:
            return f"{name} takes {step}; there is no other plan to compare it with."
        second = min(rivals, key=lambda row: row.step_s or 0.0)
        ratio = (second.step_s or 0.0) / (fastest.step_s or 1.0)
        return (
            f"{name} is the fastest with {step}; the next, '{second.trial.name}', takes {ratio:.2f}x as long"
            f"{_noise(fastest, second)}."
        )
    whole = next(
        (row for row in rows if row.trial.plan == baseline and row.step_s and row.trial.threads == cores), None
    ) or next((row for row in rows if row.trial.plan == baseline and row.step_s), None)
    if fastest.speedup_same_cores is None or whole is None:
        return f"{name} is the fastest with {step}; single did not run on the same devices, so there is no speed-up."
    if fastest.speedup_same_cores < 1:
        return (
            f"{name} is the fastest of the plans with {step}, and slower than single on {where}: "
            f"{fastest.speedup_same_cores:.2f}x{_noise(fastest, whole)}."
        )
    return f"{name} is the fastest with {step}, {fastest.speedup_same_cores:.2f}x single on {where}{_noise(fastest, whole)}."


def _fewer_threads(fastest: ComparisonRow, others: Sequence[ComparisonRow], cores: int) -> str:
    """Return that the baseline with fewer threads than cores is faster than every plan: small operators wait for threads."""
    rivals = [row for row in others if row.trial.is_baseline and row.trial.is_on_cpu and row.trial.threads < cores]
    rival = min(rivals, key=lambda row: row.step_s or 0.0, default=None)
    if rival is None or (rival.step_s or 0.0) >= (fastest.step_s or 0.0):
        return ""
    ratio = (fastest.step_s or 0.0) / (rival.step_s or 1.0)
    step = format_seconds(rival.step_s or 0.0)
    return f"But '{rival.trial.name}' takes {step}: every plan takes {ratio:.2f}x as long or longer{_noise(fastest, rival)}."


def _noise(first: ComparisonRow, second: ComparisonRow) -> str:
    if _spread_of(first).overlaps(_spread_of(second)):
        return ", which is within the noise: the middle halves of their step times overlap"
    return ", beyond the noise: the middle halves of their step times do not overlap"


def _disturbance(rows: Sequence[ComparisonRow], machine_cores: int) -> str:
    disturbed = [row for row in rows if (row.trial.other_cores or 0.0) > DISTURBED * machine_cores]
    if not disturbed:
        return ""
    named = ", ".join(
        f"{row.trial.other_cores:.1f} of {machine_cores} cores during '{row.trial.name}'" for row in disturbed
    )
    return (
        f"But the machine was busy with other work ({named}), and not equally for all plans: measure again when it is idle "
        "before you rely on a ratio."
    )


def _spread_of(row: ComparisonRow) -> Spread:
    return Spread(row.low_s or 0.0, row.step_s or 0.0, row.high_s or 0.0)


def _limit(row: ComparisonRow) -> str:
    share, count = row.exposed_fraction, row.trial.num_devices
    if share is None:
        return "How much of its step communication exposes was not measured."
    if row.trial.mode == "ranks" and any(word.startswith("pp=") for word in row.trial.plan.split(",")):
        return f"Its ranks stand still for {share:.0%} of the step: for messages, and in the pipeline's bubble."
    if share >= EXPOSED_MUCH:
        return f"Communication limits it: ranks stand still for {share:.0%} of the step."
    if row.efficiency is None or row.efficiency >= 1:
        return f"Communication exposes {share:.1%} of its step."
    return (
        f"Communication exposes only {share:.1%} of its step, so most of what {count} devices lose against {count} times "
        f"one ({row.efficiency:.0%} efficiency) is lost in computing."
    )


def _one_at_a_time(row: ComparisonRow) -> str:
    measured = ""
    if row.speedup is not None:
        measured = f" (S = {row.speedup:.2f}" + (
            ", which is a difference between the runs)" if row.speedup > 1 else ")"
        )
    return (
        f"'{row.trial.name}' computes on one device at a time: it spreads memory over {row.trial.num_devices} devices, "
        f"and can be no faster than one of them{measured}."
    )


def _losses(done: Sequence[ComparisonRow], baseline: str) -> list[str]:
    mine = [row for row in done if row.trial.plan != baseline]
    apart = ", ".join(f"'{row.trial.name}' in {_steps(row.num_incomparable)}" for row in mine if row.num_incomparable)
    if apart:
        apart = f"Losses are finite in one of two runs alone, or single's is 0: {apart}. Ask `meshwright verify`."
    return [apart, *_loss_sentences([row for row in mine if row.loss_difference is not None], all_of_them=not apart)]


def _steps(count: int) -> str:
    return f"{count} step{'' if count == 1 else 's'}"


def _loss_sentences(compared: Sequence[ComparisonRow], *, all_of_them: bool) -> list[str]:
    if not compared:
        return []
    far = [row for row in compared if (row.loss_difference or 0.0) > LOSS_TOLERANCE]
    largest = max(row.loss_difference or 0.0 for row in compared)
    if not far:
        which = "All losses" if all_of_them else "The other losses"
        return [f"{which} agree with single's within {largest:.1e}." if largest else f"{which} equal single's."]
    named = ", ".join(f"'{row.trial.name}' by {row.loss_difference:.1e}" for row in far)
    return [
        f"The losses differ from single's: {named} (rule: {LOSS_TOLERANCE:g}). Dropout, batch normalisation, compression and "
        "bf16 do that; where there is none of them, ask `meshwright verify`."
    ]


def _failures(asked: Sequence[ComparisonRow]) -> list[str]:
    return [f"'{row.trial.name}' did not run: {row.trial.error}." for row in asked if row.trial.error is not None]
