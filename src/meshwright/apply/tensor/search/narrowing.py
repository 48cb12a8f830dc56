"""Torch's own embeddings and linear layers with fewer rows, on which a cut of their rows is proven instead.

A vocabulary of 100,000 tokens has some gigabytes in the copies of a proof. The code of `nn.Embedding` and `nn.Linear` is torch's,
and so is that of their roles; neither does anything else for another number of rows. Ranks that do not divide the rows have
shares as uneven as before. Subclasses, hooks and further attributes are the user's code: such a layer is proven as it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from meshwright._torch_private import GLOBAL_MODULE_HOOKS
from meshwright.apply.modules.copies import copy_module, map_call
from meshwright.apply.tensor.guards.asked import sizes_of
from meshwright.apply.tensor.guards.described import PLAIN
from meshwright.apply.tensor.guards.signatures import HOOKS
from meshwright.apply.tensor.search.trace import Call
from meshwright.apply.tensor.tensor_layout import Region

__all__: list[str] = []

_ROWS = 61
"""Rows for each rank, about [count]."""

_ATTRIBUTES: dict[type, frozenset[str]] = {kind: frozenset(vars(kind(1, 1))) for kind in (nn.Embedding, nn.Linear)}


@dataclasses.dataclass(frozen=True)
class Narrowed:
    """A layer with fewer rows."""

    module: nn.Module
    calls: list[Call]
    num_rows: int
    """Of the layer as it is [count]."""
    num_left: int
    """Of the smaller one [count]."""

    def region(self, region: Region) -> Region | None:
        """Return a region of the layer for the smaller one; None where it does not cut the rows alone."""
        cuts = region.cuts.values()
        is_rows = all(cut.dim == 0 and tuple(cut.groups) == (self.num_rows,) for cut in cuts)
        if not is_rows or not region.is_apart or region.num_units != self.num_rows or set(region.roles) != {""}:
            return None
        if region.integers or region.shared or region.resizes or region.inputs or region.results:
            return None
        smaller = {name: cut.replace(groups=(self.num_left,)) for name, cut in region.cuts.items()}
        return region.replace(num_units=self.num_left, cuts=smaller)


def narrow(module: nn.Module, calls: Sequence[Call], num_tp_ranks: int) -> Narrowed | None:
    """Return a layer of torch's own with fewer rows, and its calls for that; None where it is the user's, or small."""
    kind = type(module)
    if kind not in _ATTRIBUTES or not _is_torchs_own(module):
        return None
    if any(vars(module)[name] for name in HOOKS) or any(GLOBAL_MODULE_HOOKS):
        return None
    weight = module._parameters.get("weight")
    if type(weight) is not nn.Parameter or weight.dim() != 2 or not weight.is_floating_point():
        return None
    num_rows = weight.shape[0]
    num_left = _ROWS * num_tp_ranks + num_rows % num_tp_ranks
    while any(num_left in sizes_of((call.args, call.kwargs)) for call in calls):
        num_left += num_tp_ranks  # a size of its own: whatever follows from it is told apart
    if num_rows < 2 * num_left:
        return None
    smaller = copy_module(module, lambda tensor: tensor.detach()[:num_left])
    if isinstance(smaller, nn.Embedding):
        smaller.num_embeddings = num_left
        if smaller.padding_idx is not None:
            smaller.padding_idx %= num_left
        calls = [_with_ids_below(call, num_left) for call in calls]
    elif isinstance(smaller, nn.Linear):
        smaller.out_features = num_left
    return Narrowed(smaller, list(calls), num_rows, num_left)


def _is_torchs_own(module: nn.Module) -> bool:
    """Tell whether only torch's code runs: further attributes are plain values, and none stands for a method of the class."""
    own = _ATTRIBUTES[type(module)]
    further = {name: value for name, value in vars(module).items() if name not in own}
    return own <= vars(module).keys() and all(
        isinstance(value, PLAIN) and not hasattr(type(module), name) for name, value in further.items()
    )


def _with_ids_below(call: Call, num_rows: int) -> Call:
    def below(tensor: Tensor) -> Tensor:
        is_ids = not tensor.is_floating_point() and tensor.dtype != torch.bool
        return tensor % num_rows if is_ids else tensor

    args, kwargs = map_call((call.args, call.kwargs), below)
    return dataclasses.replace(call, args=args, kwargs=kwargs)
