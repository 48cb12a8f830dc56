"""Layers whose weight no product takes as it is: convolutions in groups, weights that are normalised or parametrised first.

All tensors of such a layer with an entry for each output are cut together. What its code does with them, the proof decides.
"""

from __future__ import annotations

from torch import Tensor

from meshwright.apply.tensor.search.trace import Trace
from meshwright.apply.tensor.tensor_layout import Cut, Region, layer_of

__all__: list[str] = []


def layer_by_its_outputs(trace: Trace, key: int, num_tp_ranks: int) -> Region | None:
    """Return the region that cuts a layer by its outputs, or by its groups of them; None where its weight is not its own.

    Args:
        trace: The trace.
        key: The weight, whose dim 0 has an entry for each output.
        num_tp_ranks: Ranks [count].
    """
    names, num_outputs = trace.names[key], trace.parameters[key].shape[0]
    scope = layer_of(names[0])
    call = trace.calls.get(scope)
    if len(names) > 1 or not scope or call is None or len(call.results) != 1:
        return None
    if not call.args or not isinstance(call.args[0], Tensor):
        return None  # no layer: a module that makes a weight, say
    module = trace.module.get_submodule(scope)
    own = {name: tensor for name, tensor in module.named_parameters(scope) if layer_of(name) == scope}
    if sum(1 for _ in module.parameters()) > len(own):
        return None  # layers inside have parameters, too
    groups = getattr(module, "groups", 1)
    num_units = groups if isinstance(groups, int) and groups > 1 else num_outputs
    if num_units < num_tp_ranks or num_outputs % num_units:
        return None
    cut = Cut(dim=0, groups=(num_outputs,))
    cuts = {name: cut for name, tensor in own.items() if tensor.dim() and tensor.shape[0] == num_outputs}
    integers = tuple(
        (scope, name)
        for name, value in vars(module).items()
        if type(value) is int and value > 1 and not name.startswith("in_") and value in (num_units, num_outputs)
    )
    return Region(scope=scope, num_units=num_units, cuts=cuts, roles={scope: "gathered"}, integers=integers)
