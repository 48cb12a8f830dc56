"""Forward of a module whose parameters are kept in parts: put together for each call, with which it computes as on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from meshwright._torch_private import without_function_modes
from meshwright.apply.tensor.lost_writes import LostWrites
from meshwright.apply.tensor.region_state import RunningRegion
from meshwright.apply.tensor.whole import gather_parameter, replaced_tensors

__all__: list[str] = []


def stored_forward(original: Callable[..., Any], running: RunningRegion) -> Callable[..., Any]:
    """Return a forward that gathers the region's parameters, and keeps this rank's part of their gradients.

    Every rank computes the same, so that no gradient has to be added up.

    Args:
        original: The forward of the module's class.
        running: The region, whose scope the module is.
    """
    own = running.region.below(running.region.scope)
    ranks = range(running.group.size)
    seen: set[int] = set()

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        values: dict[str, Tensor] = {}
        with without_function_modes():
            for name, cut in own.cuts.items():
                part = self.get_parameter(name)
                shape = list(part.shape)
                shape[cut.dim] = sum(cut.groups)
                layouts = [cut.layout(tuple(shape), own.num_units, len(ranks), rank) for rank in ranks]
                values[name] = gather_parameter(part, layouts, running.group)
        writes = LostWrites(self, values, is_first=id(self) not in seen)
        with replaced_tensors(self, values, in_containers=True):
            outputs = original(self, *args, **kwargs)
            writes.refuse(running.region.scope)
        seen.add(id(self))
        return outputs

    return forward


def forget_graphs(module: nn.Module) -> None:
    """Detach what modules keep of computations before the plan, as hooks for the norm of weights do.

    Their graph knows the parameters by whole shapes, and autograd would expect gradients of these for the parts.
    """
    for child in module.modules():
        for key, value in vars(child).items():
            if isinstance(value, Tensor) and value.grad_fn is not None:
                vars(child)[key] = value.detach()
