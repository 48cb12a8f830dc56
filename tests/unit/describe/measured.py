"""What a real run on the CPU keeps for backward and computes, for comparison with a description."""

from __future__ import annotations

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from meshwright.describe.batches import call_model


def kept_bytes(module, batch, loss_fn=None) -> int:
    """Return the bytes that autograd keeps, each memory once, without parameters and buffers."""
    own = {tensor.untyped_storage()._cdata for tensor in (*module.parameters(), *module.buffers())}
    found = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            found[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = call_model(module, batch)
        if loss_fn is not None:
            loss_fn(outputs, batch)
    return sum(storage.nbytes() for storage in found.values())


def growth(module, make_batch, loss_fn=None) -> float:
    """Return the bytes that each further sample adds to what is kept."""
    return (kept_bytes(module, make_batch(4), loss_fn) - kept_bytes(module, make_batch(2), loss_fn)) / 2


def counted_flops(module, batch) -> int:
    """Return torch's own count of a forward; its table has attention on GPUs and lacks the CPU's, by the same formula."""
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

    def of_attention(query, key, value, *_, **__) -> int:
        heads = query[:2]  # torch 2.11 counts as many key heads as there are heads alone
        return sdpa_flop_count(query, (*heads, *key[2:]), (*heads, *value[2:]))

    with FlopCounterMode(display=False, custom_mapping={attention: of_attention}) as counter:
        call_model(module, batch)
    return counter.get_total_flops()


def kept_by_layers(spec) -> int:
    return sum(layer.activation_bytes for layer in spec.layers)
