"""Buffers that a trial wrote are put back as if nothing had happened: values, and the count of writes that autograd compares."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from meshwright.apply.state.attributes import insides_put_back
from meshwright.apply.state.buffers import BufferSnapshot


@pytest.mark.parametrize("writes", ["counted", "uncounted"])
def test_a_graph_that_saved_a_buffer_runs_backward_after_a_trial(writes: str) -> None:
    module = nn.BatchNorm1d(3).double()
    inputs = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    outputs = module(inputs)  # the graph holds the statistics
    assert module.running_mean is not None
    before, version = module.running_mean.clone(), module.running_mean._version
    snapshot = BufferSnapshot(module)
    if writes == "counted":
        module.running_mean.add_(1.0)
    else:
        module(inputs + 1.0)
    assert not torch.equal(module.running_mean, before)
    snapshot.restore()
    assert torch.equal(module.running_mean, before)
    assert module.running_mean._version == version
    outputs.square().sum().backward()
    assert inputs.grad is not None


def test_a_graph_that_saved_an_attribute_runs_backward_after_a_trial() -> None:
    held = {"scale": torch.full((3,), 2.0)}
    weight = torch.ones(3, requires_grad=True)
    outputs = weight * held["scale"]
    with insides_put_back(held):
        held["scale"].mul_(5.0)
    outputs.sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [2.0] * 3
