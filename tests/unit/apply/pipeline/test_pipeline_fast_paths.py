"""Short cuts of a pipeline's forward: they give what the long ways gave."""

import torch
from torch import nn

from meshwright.apply.pipeline.ownership.settled import Buffers
from meshwright.apply.pipeline.tracing.scene import plain_tensors
from meshwright.apply.pipeline.walking.bookkeeping import with_leaf
from meshwright.apply.pipeline.walking.shapes import describe_call
from meshwright.apply.pipeline.walking.stand_ins import Meta, StandIn


def test_plain_tensors_are_told_from_containers() -> None:
    x, y = torch.ones(2), torch.ones(3)
    found = plain_tensors((x, None, 1.5), {"mask": y, "again": x})
    assert found is not None
    assert [id(tensor) for tensor in found] == [id(x), id(y)]
    for item in ([x], (x,), {"x": x}, object()):
        assert plain_tensors((x, item), {}) is None
        assert plain_tensors((x,), {"item": item}) is None


def test_keys_of_calls_tell_arguments_by_place_from_those_by_name() -> None:
    x = torch.ones(2)
    assert describe_call(([x],), {}) != describe_call((), {"list": x})
    assert describe_call((x,), {}) != describe_call((), {"x": x})


def test_buffers_settle_in_a_module_that_was_put_in_afterwards() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    buffers = Buffers(model)
    buffers.settle()
    model[0] = nn.BatchNorm1d(2)
    for child in model:
        child.running_mean = StandIn(Meta.of(torch.ones(2)))
    buffers.settle()
    assert all(type(child.running_mean) is torch.Tensor for child in model)


def test_what_is_received_may_be_written_over() -> None:
    leaf, tensor = with_leaf(torch.tensor([-1.0, 2.0]))
    (3 * tensor.relu_()).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [0.0, 3.0]
