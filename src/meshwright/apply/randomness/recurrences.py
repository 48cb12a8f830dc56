"""Recurrent layers with dropout between them: on a GPU, where cuDNN's operator draws by itself, and of packed samples."""

from __future__ import annotations

import dataclasses
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence

from meshwright._torch_dispatch import cudnn_rnn, draws_untouched
from meshwright._torch_private import MODULE_CALL, RECURRENCES
from meshwright.apply.randomness import distributions
from meshwright.apply.randomness.chosen_rows import rows_of_pack
from meshwright.apply.randomness.philox import NO_SAMPLE, ElementPlace, Level, RowPlaces, index_strides, merge_levels
from meshwright.apply.randomness.sites import place_of_draw

__all__: list[str] = []


def recurrence(  # noqa: PLR0917 - the operator's own
    run: Callable[..., Any],
    tensor: Tensor,
    weights: Sequence[Tensor],
    per_way: int,
    _buffer: Tensor | None,
    hidden: Tensor,
    cell: Tensor | None,
    *options: Any,
) -> Any:
    """Run one layer after the other, with torch's dropout between them, as on a CPU; NotImplemented where nothing is drawn.

    The weights of a layer do not lie in one piece of memory then: cuDNN copies them in each call.

    Args:
        run: `aten::_cudnn_rnn`, for layers without dropout.
        tensor: (steps, batch, features), the batch first where the options say so, or packed as (steps of all samples, features).
        weights: Those of each layer and each of its ways.
        per_way: Weights of one way [count].
        hidden: (layers x ways, batch, size).
        cell: The like, of an LSTM.
        options: The operator's further arguments, from `mode` on.

    Returns:
        What the operator returns: output, hidden and cell states, and two buffers for backward.
    """
    mode, hidden_size, proj_size, num_layers, batch_first, dropout, train, both_ways, batch_sizes, _ = options
    if not train or not dropout or num_layers < 2:
        return NotImplemented
    ways = 2 if both_ways else 1
    output = tensor.transpose(0, 1) if batch_first else tensor
    ends: list[Tensor] = []
    cells: list[Tensor] = []
    buffers: list[Tensor] = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous chunk")
        for layer in range(num_layers):
            states = slice(layer * ways, (layer + 1) * ways)
            own = weights[states.start * per_way : states.stop * per_way]
            output, end, last_cell, *buffers = run(
                F.dropout(output, dropout) if layer else output,
                own,
                per_way,
                None,
                hidden[states].contiguous(),
                None if cell is None else cell[states].contiguous(),
                *(mode, hidden_size, proj_size, 1, False, 0.0, train, both_ways, batch_sizes, None),
            )
            ends.append(end)
            cells.append(last_cell)
    output = output.transpose(0, 1) if batch_first else output
    return output, torch.cat(ends), cells[0] if cell is None else torch.cat(cells), *buffers


def layers_of_gpu(*given: Any) -> Any:
    """Run cuDNN's operator, which draws by itself."""
    with draws_untouched():
        return cudnn_rnn(*given)


# -- packed samples -------------------------------------------------------------------------------------------------------


def running_pack(out: Tensor) -> PackedSequence | None:
    """Return the packed samples that a recurrent layer runs on now, whose rows are those of `out`; None: there are none."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not MODULE_CALL and frame.f_code not in RECURRENCES:
        frame = frame.f_back
    # What backward repeats may call the forward itself.
    packed = None if frame is None or frame.f_code is MODULE_CALL else frame.f_locals.get("orig_input")
    fits = isinstance(packed, PackedSequence) and out.dim() == 2 and len(out) == len(packed.data)
    return packed if fits else None


def bernoulli_of_pack(out: Tensor, p: float, packed: PackedSequence) -> Any:
    """Fill (steps of all samples, features) with 1 by this chance, else 0: each step of a sample as padded samples draw it.

    In which order the samples lie, and how long the others are, changes no number. NotImplemented where the draw is torch's own.

    Args:
        out: What is filled.
        p: The chance of a 1 [fraction].
        packed: Whose rows these are.
    """
    sizes, num_features = packed.batch_sizes, out.shape[1]
    num_samples, num_steps = int(sizes[0]), len(sizes)
    place = place_of_draw((num_samples, num_features), "bernoulli_")  # of a step: their number is not the call's
    if place is None:
        return NotImplemented
    made = torch.empty((num_samples, num_steps, num_features), dtype=torch.float32, device=out.device)
    distributions.fill_bernoulli(made, _with_steps(place, num_steps, num_features), p)
    steps, samples = rows_of_pack(sizes)
    if packed.sorted_indices is not None:
        samples = packed.sorted_indices.cpu()[samples]
    drawn = made[samples.to(out.device), steps.to(out.device)]
    return out.copy_(drawn.to(out.dtype) if out.is_complex() else drawn)


def _with_steps(place: ElementPlace, num_steps: int, num_features: int) -> ElementPlace:
    """Return the place of (samples, steps, features), of that of (samples, features)."""
    if place.rows is None:
        num_samples = place.count // num_features
        is_common = place.first_sample == NO_SAMPLE
        full = [num_samples, num_steps, num_features] if is_common else [num_steps, num_features]
        inner = [Level(size, 0, step) for size, step in zip(full, index_strides(full), strict=True)]
        return dataclasses.replace(
            place, levels=merge_levels(inner if is_common else [Level(num_samples, 1, 0), *inner])
        )
    # Samples that the script has sorted: a row is a step of one of them now.
    samples, moved = place.rows.samples, place.rows.indices // index_strides([1, num_features])[0]
    by_row, by_step, _ = index_strides([1, num_steps, num_features])
    steps = torch.arange(num_steps, device=samples.device) * by_step
    rows = RowPlaces(samples.repeat_interleave(num_steps), (moved[:, None] * by_row + steps).flatten().contiguous())
    return dataclasses.replace(place, levels=(Level(num_features, 0, 1),), rows=rows)
