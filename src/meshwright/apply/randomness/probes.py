"""Probes of a trial: zeros added to what a call has drawn, whose gradients show which samples it has influence on; and NaNs.

A NaN passes weights and masks of zero, which gradients do not: it shows which elements may have influence on outputs later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from meshwright.apply.randomness.sample_dims import Call

__all__: list[str] = []

_FACTORIES = (torch.rand, torch.randn, torch.normal)
_MASKS = (torch.where, Tensor.where, torch.masked_fill, Tensor.masked_fill, Tensor.masked_fill_)


class Probes:
    """Probes of one forward.

    Args:
        drawn: `DrawNote`s of its calls, the last one last.
        marked: Which blocks of what a call draws become NaNs, a mask of its leading dims. None: zeros are added to all calls'.
    """

    def __init__(self, drawn: dict[Call, Any], marked: Mapping[Call, Tensor] | None = None) -> None:
        self.of_calls: dict[Call, Tensor] = {}
        """Zeros of what each call has drawn, with gradients."""
        self._drawn = drawn
        self._marked = marked
        self._changed: list[Tensor] = []

    def add(self, result: Any) -> None:
        """Add a probe to what has been drawn last, in its own memory, since code may hold that.

        Args:
            result: What the operator returns that has drawn; beside a mask where it is several.
        """
        drawn = result[0] if isinstance(result, tuple) and result else result
        call = next(reversed(self._drawn), None)
        if call is None or call in self.of_calls or not isinstance(drawn, Tensor):
            return
        shape = self._drawn[call].shape
        if not drawn.is_floating_point() or tuple(drawn.shape) != shape:
            return
        if self._marked is not None:
            self._mark(drawn, self._marked.get(call))
            return
        if not torch.is_grad_enabled():
            return
        if drawn._is_view() or (drawn.is_leaf and drawn.requires_grad):
            return  # a view could not be freed of its graph afterwards
        probe = torch.zeros_like(drawn, requires_grad=True)
        drawn.add_(probe)
        if drawn.requires_grad:  # not inside of a function that makes a tensor, which autograd does not see
            self.of_calls[call] = probe
            self._changed.append(drawn)

    def pass_on(self, result: Any, given: Iterable[Any]) -> None:
        """Have NaNs pass a mask that the numbers of a batch may decide.

        Args:
            result: Of the call that masks.
            given: Its arguments.
        """
        if self._marked is None or not isinstance(result, Tensor) or not result.is_floating_point():
            return
        for tensor in given:
            if isinstance(tensor, Tensor) and tensor.is_floating_point() and bool((lost := tensor.isnan()).any()):
                with torch.no_grad():
                    result.masked_fill_(lost, torch.nan)

    def _mark(self, drawn: Tensor, blocks: Tensor | None) -> None:
        if blocks is not None and drawn.shape[: blocks.dim()] == blocks.shape:
            wide = blocks.to(drawn.device).view(*blocks.shape, *[1] * (drawn.dim() - blocks.dim()))
            with torch.no_grad():
                drawn.masked_fill_(wide, torch.nan)

    def leave(self) -> None:
        """Free what was drawn of its graph: code may keep it, as a buffer that each forward fills."""
        for drawn in self._changed:
            if not drawn._is_view():
                drawn.detach_()
        self._changed.clear()


class ProbesOfFactories(TorchFunctionMode):
    """Adds probes to the results of functions that make a tensor of random numbers, and has NaNs pass masks.

    Args:
        probes: Of the forward that runs inside the context.
    """

    def __init__(self, probes: Probes) -> None:
        super().__init__()
        self._probes = probes

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function, and look at its result where it is such a one."""
        masked = tuple(map(torch.clone, args[:1])) if func is Tensor.masked_fill_ else args
        result = func(*args, **(kwargs or {}))
        if func in _FACTORIES:
            self._probes.add(result)
        elif func in _MASKS:
            self._probes.pass_on(result, (*masked, *(kwargs or {}).values()))
        return result
