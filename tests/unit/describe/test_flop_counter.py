"""FLOPs of attention in which a key head serves several heads, in the kernels of GPUs too; torch 2.11 raised for them."""

from __future__ import annotations

import pytest
import torch

from meshwright.describe.flop_counter import make_flop_counter

BATCH, HEADS, LENGTH, WIDTH = 2, 4, 6, 8


@pytest.mark.parametrize("key_heads", [4, 2, 1])
def test_fewer_key_heads_cost_as_many_flops(key_heads: int) -> None:
    query = torch.empty(BATCH, HEADS, LENGTH, WIDTH, device="meta")
    key = torch.empty(BATCH, key_heads, LENGTH, WIDTH, device="meta")
    with make_flop_counter() as counter:
        torch.ops.aten._scaled_dot_product_flash_attention(query, key, key)
    assert counter.get_total_flops() == 2 * (2 * BATCH * HEADS * LENGTH * LENGTH * WIDTH)
