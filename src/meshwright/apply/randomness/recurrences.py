"""Recurrent layers of a GPU with dropout between them, which cuDNN's operator for all layers draws by itself."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

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
