"""Description of a model as text: a table of its layers, totals, and what could not be seen."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from meshwright.spec.layer import LayerSpec
from meshwright.spec.model import ModelSpec
from meshwright.units import format_bytes

__all__: list[str] = []

_HEAD = ("layer", "parameters", "size", "GFLOPs", "kept", "hands on", "split")
_SPLITS = {"columns": "columns", "inner": "rows"}


def format_model(spec: ModelSpec) -> str:
    """Return the table; equal layers that follow each other share a line."""
    rows = [_HEAD, *(_row(label, layer) for label, layer in _runs(spec.layers))]
    kept = sum(layer.activation_bytes for layer in spec.layers)
    total = (f"{spec.num_params:,}", format_bytes(spec.params_bytes), f"{spec.forward_flops / 1e9:,.3g}")
    rows.append(("total", *total, format_bytes(kept), "", ""))
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    lines = [_line(row, widths) for row in rows]
    facts = ("sequence_length", "num_heads", "num_kv_heads", "hidden_size", "vocab_size")
    known = [f"{fact}={getattr(spec, fact)}" for fact in facts if getattr(spec, fact) is not None]
    return "\n".join(
        [
            f"{spec.name}, for one sample, forward" + (f" ({', '.join(known)})" if known else ""),
            "",
            *lines,
            *(["", *(_shared(spec))] if spec.shared else []),
            *(["", *(f"note: {note}" for note in spec.notes)] if spec.notes else []),
        ]
    )


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = (cell for cell in row)
    last = others.pop()
    middle = "  ".join(cell.rjust(width) for cell, width in zip(others, widths[1:-1], strict=True))
    return f"{first.ljust(widths[0])}  {middle}  {last}".rstrip()


def _runs(layers: Sequence[LayerSpec]) -> Iterator[tuple[str, LayerSpec]]:
    def alike(layer: LayerSpec) -> tuple[str, LayerSpec]:
        return layer.name.rpartition(".")[0], dataclasses.replace(layer, name="-")

    for _, group in itertools.groupby(layers, key=alike):
        run = list(group)
        label = (
            run[0].name if len(run) == 1 else f"{run[0].name} .. {run[-1].name.rpartition('.')[2]} ({len(run)} equal)"
        )
        yield label, run[0]


def _row(label: str, layer: LayerSpec) -> tuple[str, ...]:
    splits = dict.fromkeys(_SPLITS[operator.split] for operator in layer.operators if operator.split in _SPLITS)
    return (
        label,
        f"{layer.num_params:,}",
        format_bytes(layer.params_bytes),
        f"{layer.forward_flops / 1e9:,.3g}",
        format_bytes(layer.activation_bytes),
        format_bytes(layer.output_bytes),
        ", ".join(splits) or "-",
    )


def _shared(spec: ModelSpec) -> Iterator[str]:
    for parameter in spec.shared:
        yield f"shared: {' = '.join(parameter.names)} ({format_bytes(parameter.params_bytes)}), in {', '.join(parameter.layers)}"
