"""Listing of plans: what `meshwright plan` prints."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

from meshwright.errors import ConfigError, StorageError
from meshwright.hardware import ClusterSpec
from meshwright.plan.catalogue.catalogue import find_model
from meshwright.plan.catalogue.hugging_face import read_hugging_face
from meshwright.plan.search.ranking import make_plans
from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import Plan
from meshwright.spec.train import TrainSpec
from meshwright.texts import is_directory, is_file, read_text
from meshwright.units import format_bytes, format_seconds

__all__: list[str] = []


def read_model(text: str, *, sequence: int | None = None) -> ModelSpec:
    """Return a model by a name of the catalogue, a Hugging Face `config.json`, or a ModelSpec's JSON file.

    Raises:
        ConfigError: It is none of them.
    """
    path = Path(text)
    if text.endswith(".json") or is_directory(path):
        if is_file(path) and '"meshwright.model"' in (written := _read(path))[:200]:
            if sequence is not None:
                raise ConfigError(
                    f"model: '{text}' is described for its own sequence length", fix="leave --sequence out"
                )
            return ModelSpec.from_json(written)
        return read_hugging_face(path, sequence=sequence)
    return find_model(text, sequence=sequence)


def _read(path: Path) -> str:
    try:
        return read_text(path)
    except OSError as error:
        raise ConfigError(f"model: '{path}' cannot be read: {error.strerror}", fix="name another file") from None


def list_plans(
    spec: ModelSpec,
    cluster: ClusterSpec,
    train: TrainSpec,
    *,
    top: int,
    json_path: Path | None = None,
    ran: Sequence[tuple[Plan, float]] = (),
) -> str:
    """Return the best plans as text, and write them as JSON where a path is given.

    Args:
        spec: The model.
        cluster: The devices.
        train: Global batch, optimizer and precision.
        top: Plans to show at most [count].
        json_path: Write the plans there.
        ran: Plans that were run, the fastest first, each with its step [s]: they come first, whatever is predicted.
    """
    plans = _with_those_that_ran(make_plans(spec, cluster, train, top=top), [plan for plan, _ in ran], top=top)
    measured = {str(plan): step_s for plan, step_s in ran}
    if json_path is not None:
        import json

        try:
            json_path.write_text(json.dumps([plan.to_dict() for plan in plans], indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise StorageError(
                f"the plans could not be written to {json_path}: {error.strerror}", fix="--json plans.json"
            ) from error
    heads = [f"{spec}", f"{cluster}, {train.global_batch_size} samples a step", ""]
    return "\n".join(
        [*heads, *_table(plans, train, measured), *_order(plans[len(ran) :], len(ran)), "", *_why(plans[0])]
    )


def _with_those_that_ran(plans: Sequence[Plan], ran: Sequence[Plan], *, top: int) -> list[Plan]:
    """Return plans that ran, with all that is known of them, then the others."""
    known = {str(plan): plan for plan in plans}
    first = [
        known[line].replace(reasons=plan.reasons + known[line].reasons) if (line := str(plan)) in known else plan
        for plan in ran
    ]
    of_first = {str(plan) for plan in first}
    return [*first, *(plan for plan in plans if str(plan) not in of_first)][:top]


def _table(plans: Sequence[Plan], train: TrainSpec, measured: Mapping[str, float]) -> list[str]:
    rows: list[tuple[str, ...]] = [
        ("", "plan", *(("measured",) if measured else ()), "step", "samples/s", "memory", "bubble", "MFU")
    ]
    for rank, plan in enumerate(plans, start=1):
        cells, cost = ("-",) * 5, plan.prediction
        if cost is not None:
            cells = (
                format_seconds(cost.step_s),
                f"{train.global_batch_size / cost.step_s:.4g}",
                format_bytes(cost.peak_bytes),
                f"{cost.bubble_fraction:.0%}",
                "-" if cost.mfu is None else f"{cost.mfu:.0%}",
            )
        step_s = measured.get(str(plan))
        took = ("-" if step_s is None else format_seconds(step_s),) if measured else ()
        rows.append((f"{rank}.", str(plan), *took, *cells))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _order(plans: Sequence[Plan], num_above: int) -> list[str]:
    """Say why a plan stands below one that takes longer."""
    times = [0.0 if plan.prediction is None else plan.prediction.step_s for plan in plans]
    return [
        f"{rank}. is {above / below - 1:.1%} faster than {rank - 1}., which is simpler: a further strategy counts as 1 %"
        for rank, (above, below) in enumerate(itertools.pairwise(times), start=num_above + 2)
        if format_seconds(below) != format_seconds(above) and below < above
    ]


def _why(plan: Plan) -> list[str]:
    return [f"Why '{plan}':", *(f"- {reason}" for reason in plan.reasons)]
