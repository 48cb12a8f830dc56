"""Recurrences with dropout: layers of a GPU one by one, against the CPU's operator for all of them; and packed samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.apply.randomness.forward_draws import ForwardDraws
from meshwright.apply.randomness.names import Names
from meshwright.apply.randomness.operators import install_operators
from meshwright.apply.randomness.recurrences import recurrence
from meshwright.apply.randomness.sample_dims import SiteDims
from meshwright.apply.randomness.sites import StepDraws, in_forward, in_step

_MODES = {nn.LSTM: 2, nn.GRU: 3, nn.RNN: 1}


def _one_layer(tensor: Tensor, weights: Any, _per_way: int, _: None, hidden: Tensor, cell: Any, *options: Any) -> Any:
    """Compute what `aten::_cudnn_rnn` gives for one layer without dropout, on the CPU."""
    mode, _, _, num_layers, batch_first, dropout, train, both_ways, batch_sizes, _ = options
    assert (num_layers, batch_first, dropout) == (1, False, 0.0)
    run = {2: torch.lstm, 3: torch.gru, 1: torch.rnn_tanh}[mode]
    states = (hidden, cell) if cell is not None else hidden
    if batch_sizes:
        output, end, *cells = run(tensor, torch.tensor(batch_sizes), states, weights, True, 1, 0.0, train, both_ways)
    else:
        output, end, *cells = run(tensor, states, weights, True, 1, 0.0, train, both_ways, False)
    return output, end, (cells or [tensor.new_empty(0)])[0], tensor.new_empty(0), tensor.new_empty(0)


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("both_ways", [False, True])
@pytest.mark.parametrize("kind", _MODES)
def test_equals_all_layers_at_once(kind: type[nn.RNNBase], both_ways: bool, batch_first: bool) -> None:
    torch.manual_seed(0)
    layers = kind(5, 4, 3, dropout=0.5, batch_first=batch_first, bidirectional=both_ways).double()
    x = torch.randn(2, 2, 5, dtype=torch.float64)
    states = torch.randn(3 * (1 + both_ways), 2, 4, dtype=torch.float64)
    cell = states.sin() if kind is nn.LSTM else None
    torch.manual_seed(1)
    output, end = layers(x, (states, cell) if cell is not None else states)
    options = (_MODES[kind], 4, 0, 3, batch_first, 0.5, True, both_ways, [], None)
    torch.manual_seed(1)
    found = recurrence(_one_layer, x, layers._flat_weights, 4, None, states, cell, *options)
    assert torch.equal(found[0], output)
    wanted = end if cell is not None else (end, None)
    assert torch.equal(found[1], wanted[0])
    assert found[2].numel() == 0 if cell is None else torch.equal(found[2], wanted[1])
    assert len(found) == 5


def test_packed_samples() -> None:
    torch.manual_seed(0)
    layers = nn.LSTM(5, 4, 2, dropout=0.5).double()
    packed = nn.utils.rnn.pack_sequence([torch.randn(n, 5, dtype=torch.float64) for n in (3, 2)])
    state = torch.zeros(2, 2, 4, dtype=torch.float64)
    torch.manual_seed(1)
    output, (end, cell) = layers(packed)
    options = (2, 4, 0, 2, False, 0.5, True, False, packed.batch_sizes.tolist(), None)
    torch.manual_seed(1)
    found = recurrence(_one_layer, packed.data, layers._flat_weights, 4, None, state, state, *options)
    assert torch.equal(found[0], output.data)
    assert torch.equal(found[1], end)
    assert torch.equal(found[2], cell)


def test_packed_samples_draw_one_by_one_what_they_draw_together() -> None:
    torch.manual_seed(0)
    layers = nn.GRU(5, 4, 3, dropout=0.5, bidirectional=True).double()
    samples = [torch.randn(n, 5, dtype=torch.float64) for n in (2, 4, 1)]

    def run(first: int, stop: int) -> list[torch.Tensor]:
        dims = {("", call): SiteDims(0, num_dims=2) for call in range(2)}
        install_operators()
        with in_step(StepDraws("test", Names(layers), dims)), in_forward(ForwardDraws(first, stop - first)):
            output, _ = layers(nn.utils.rnn.pack_sequence(samples[first:stop], enforce_sorted=False))
        return nn.utils.rnn.unpack_sequence(output)

    together = run(0, 3)
    for number, alone in enumerate([*run(0, 2), *run(2, 3)]):
        torch.testing.assert_close(alone, together[number], rtol=1e-12, atol=0)
    assert not torch.equal(layers.eval()(samples[1])[0], together[1]), "nothing was dropped"


@pytest.mark.parametrize(("num_layers", "dropout", "train"), [(1, 0.5, True), (2, 0.0, True), (2, 0.5, False)])
def test_what_draws_nothing_is_left_to_torch(num_layers: int, dropout: float, train: bool) -> None:
    options = (2, 4, 0, num_layers, False, dropout, train, False, [], None)
    x = torch.zeros(1)
    assert recurrence(_one_layer, x, [], 4, None, x, x, *options) is NotImplemented
