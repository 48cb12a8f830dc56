"""Forward of torch's nn.MultiheadAttention with some of its heads; torch's own forward requires all of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.apply.tensor.region_state import RunningRegion
from meshwright.apply.tensor.tensor_layout import Cut, Region
from meshwright.comm.functional import gather_from_group, reduce_from_group

__all__: list[str] = []


def attention_region(module: nn.MultiheadAttention) -> Region:
    """Return the region that cuts the module by its heads; names are relative to it."""
    width = module.embed_dim
    cuts = {"out_proj.weight": Cut(dim=1, groups=(width,), kind="row")}
    if module.in_proj_weight is not None:
        cuts["in_proj_weight"] = Cut(dim=0, groups=(width,) * 3)
    else:
        cuts |= {f"{name}_proj_weight": Cut(dim=0, groups=(width,)) for name in "qkv"}
    if module.in_proj_bias is not None:
        cuts["in_proj_bias"] = Cut(dim=0, groups=(width,) * 3)
    if module.bias_k is not None:
        cuts |= {"bias_k": Cut(dim=2, groups=(width,)), "bias_v": Cut(dim=2, groups=(width,))}
    return Region(scope="", num_units=module.num_heads, cuts=cuts, roles={"": "attention"}, drops=True)


def attention_forward(running: RunningRegion) -> Callable[..., Any]:
    """Return a forward of nn.MultiheadAttention with this rank's heads; arguments and results are torch's."""
    first, last = running.region.units(running.group.size, running.group.group_rank)

    def forward(  # noqa: PLR0917 - torch's own
        self: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        if is_causal and attn_mask is None:
            raise RuntimeError("Need attn_mask if specifying the is_causal hint.")  # as torch's own does
        entered = [running.enter(tensor) for tensor in (query, key, value)]
        is_batched = entered[0].dim() == 3
        q, k, v = (_batch_first(self, tensor, is_batched=is_batched) for tensor in entered)
        q, k, v = _project(self, q, k, v)
        mask = _mask(attn_mask, key_padding_mask, q, num_heads=last - first, all_heads=self.num_heads, first=first)
        k, v, mask = _extend(self, k, v, mask)
        q, k, v = (tensor.unflatten(-1, (last - first, self.head_dim)).transpose(1, 2) for tensor in (q, k, v))
        dropout = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            scores = q @ k.transpose(-2, -1) / math.sqrt(self.head_dim)
            weights = torch.softmax(scores if mask is None else scores + mask, -1)
            # Torch drops out with samples and heads in one dim: numbers are drawn by their place there.
            weights = F.dropout(weights.flatten(0, 1), dropout).unflatten(0, weights.shape[:2])
            context = weights @ v
        else:
            context = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
        term = F.linear(context.transpose(1, 2).flatten(-2), self.out_proj.weight)
        result = running.leave(_as_given(self, term, is_batched=is_batched))
        if self.out_proj.bias is not None:
            result = result + self.out_proj.bias
        return result, None if weights is None else _whole_weights(
            weights, running, average=average_attn_weights, all_heads=self.num_heads, is_batched=is_batched
        )

    return forward


def _batch_first(module: Any, tensor: Tensor, *, is_batched: bool) -> Tensor:
    if not is_batched:
        return tensor.unsqueeze(0)
    return tensor if module.batch_first else tensor.transpose(0, 1)


def _as_given(module: Any, tensor: Tensor, *, is_batched: bool) -> Tensor:
    if not is_batched:
        return tensor.squeeze(0)
    return tensor if module.batch_first else tensor.transpose(0, 1)


def _project(module: Any, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    biases = (None, None, None) if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
    if module.in_proj_weight is None:
        weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    elif query is key and key is value:
        q, k, v = F.linear(query, module.in_proj_weight, module.in_proj_bias).chunk(3, -1)
        return q, k, v
    else:
        weights = module.in_proj_weight.chunk(3)
    q, k, v = (F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True))
    return q, k, v


def _mask(
    mask: Tensor | None, padding: Tensor | None, query: Tensor, *, num_heads: int, all_heads: int, first: int
) -> Tensor | None:
    """Return the mask added to the scores, [batch or 1, heads or 1, length or 1, source length]; None where there is none."""
    total: Tensor | None = None
    if mask is not None:
        added = _additive(mask, query)
        if added.dim() == 3:  # one for each sample and head
            added = added.unflatten(0, (-1, all_heads))[:, first : first + num_heads]
        total = added if added.dim() == 4 else added.view(1, 1, *added.shape)
    if padding is not None:
        added = _additive(padding if padding.dim() == 2 else padding.unsqueeze(0), query)[:, None, None, :]
        total = added if total is None else total + added
    return total


def _additive(mask: Tensor, like: Tensor) -> Tensor:
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=like.dtype).masked_fill_(mask, float("-inf"))
    return mask.to(like.dtype)


def _extend(module: Any, key: Tensor, value: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Append the entries of add_bias_kv and add_zero_attn to keys and values, [batch, source length, own width]."""
    if module.bias_k is not None:
        key = torch.cat([key, module.bias_k.expand(key.shape[0], -1, -1)], 1)
        value = torch.cat([value, module.bias_v.expand(key.shape[0], -1, -1)], 1)
        mask = None if mask is None else F.pad(mask, (0, 1))
    if module.add_zero_attn:
        key, value = F.pad(key, (0, 0, 0, 1)), F.pad(value, (0, 0, 0, 1))
        mask = None if mask is None else F.pad(mask, (0, 1))
    return key, value, mask


def _whole_weights(
    weights: Tensor, running: RunningRegion, *, average: bool, all_heads: int, is_batched: bool
) -> Tensor:
    if average:
        whole = reduce_from_group(weights.sum(1) / all_heads, running.group)
    else:
        whole = gather_from_group(weights, running.group, dim=1, sizes=running.sizes(all_heads))
    return whole if is_batched else whole.squeeze(0)
