"""Backwards that leave the gradients of parameters for later, on layers of any size."""

import pytest
import torch
from torch import nn

from meshwright.apply.pipeline.split_backward import SplitBackward, run_rest


@pytest.mark.parametrize(
    ("features", "outputs", "leading"), [(3, 5, (2, 4)), (3, 5, ()), (0, 5, (2, 4)), (3, 0, (2, 4)), (3, 5, (0,))]
)
def test_a_linear_layer_has_its_gradients_in_two_halves(features: int, outputs: int, leading: tuple[int, ...]) -> None:
    # A rank's shard of a layer may hold no feature: sizes of 0 are no exception.
    torch.manual_seed(0)
    x = torch.randn(*leading, features, dtype=torch.float64, requires_grad=True)
    weight = nn.Parameter(torch.randn(outputs, features, dtype=torch.float64))
    bias = nn.Parameter(torch.randn(outputs, dtype=torch.float64))
    leaves = (x, weight, bias)
    expected = torch.autograd.grad(nn.functional.linear(*leaves).square().sum(), leaves)
    split = SplitBackward()
    with split:
        loss = nn.functional.linear(*leaves).square().sum()
    rest = split.backward([loss], [torch.ones_like(loss)])
    assert x.grad is not None
    torch.testing.assert_close(x.grad, expected[0])
    assert weight.grad is None
    run_rest(rest)
    for leaf, gradient in zip(leaves[1:], expected[1:], strict=True):
        assert leaf.grad is not None
        torch.testing.assert_close(leaf.grad, gradient)
