"""FLOPs of attention in which a key head serves several heads, in the kernels of GPUs too; torch 2.11 raised for them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from meshwright.describe.flop_counter import make_flop_counter

BATCH, HEADS, LENGTH, WIDTH = 2, 4, 6, 8


class Slope(nn.Module):
    """A layer that takes a gradient inside."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        at = x.detach().requires_grad_()
        return torch.autograd.grad(self.body(at).sum(), at)[0]


def test_a_gradient_inside_a_layer_is_counted() -> None:
    # Hooks of torch's tracker of modules raised: "A leaf node was passed to _will_engine_execute_node".
    with make_flop_counter() as counter:
        Slope()(torch.ones(2, 3))
    assert counter.get_total_flops() == 2 * (2 * 2 * 3 * 3)


@pytest.mark.parametrize("key_heads", [4, 2, 1])
def test_fewer_key_heads_cost_as_many_flops(key_heads: int) -> None:
    query = torch.empty(BATCH, HEADS, LENGTH, WIDTH, device="meta")
    key = torch.empty(BATCH, key_heads, LENGTH, WIDTH, device="meta")
    with make_flop_counter() as counter:
        torch.ops.aten._scaled_dot_product_flash_attention(query, key, key)
    assert counter.get_total_flops() == 2 * (2 * BATCH * HEADS * LENGTH * LENGTH * WIDTH)
