"""Unbucketed gradients, which stay in autograd's memory and are summed together once backward has ended.

This replaces `buckets.py` for ranks that share memory and compute on the CPU. There an exchange takes time from the core that
computes, so overlap with backward gains nothing. The transport reads any number of tensors as one piece of memory, so a flat copy
gains nothing either. This saves that copy, its memory, and a Python hook for each parameter. The census of `buckets.py` is sent
with the gradients here too.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from meshwright._torch_private import foreach_mul_
from meshwright.apply.norm import squares_of
from meshwright.comm.communicator import Communicator
from meshwright.errors import ApplyError

__all__: list[str] = []


class LooseGradients:
    """The gradients of all trainable parameters of one module, summed in place.

    Args:
        named_parameters: (FQN, parameter) pairs that get dense gradients, in registration order, each once.
        group: The ranks that hold copies of these parameters.
    """

    def __init__(self, named_parameters: Sequence[tuple[str, nn.Parameter]], group: Communicator) -> None:
        self.group = group
        self.names = [name for name, _ in named_parameters]
        self.parameters = [parameter for _, parameter in named_parameters]
        self._watched: dict[int, Any] = {}
        self._taken: set[int] = set()

    def begin_step(self) -> None:
        """Drop the gradients, and watch those with a user's hook, which may remove a gradient before it is summed."""
        for index, parameter in enumerate(self.parameters):
            parameter.grad = None
            if getattr(parameter, "_post_accumulate_grad_hooks", None) and index not in self._watched:
                watch = functools.partial(self._notice, index)
                self._watched[index] = parameter.register_post_accumulate_grad_hook(watch)
        self._taken.clear()

    def _notice(self, index: int, parameter: torch.Tensor) -> None:
        if parameter.grad is None:
            self._taken.add(index)

    def arm(self) -> None:
        """Do nothing: everything happens after backward."""

    def wait_for_end(self) -> None:
        """Do nothing, for the same reason."""

    def finish(self, scale: float) -> None:
        """Sum over the ranks and set every parameter's `.grad`, multiplied by `scale`; None where no rank had one."""
        if not self.parameters:
            return
        grads = [parameter.grad for parameter in self.parameters]
        present = [grad is not None for grad in grads]
        full = [
            torch.zeros_like(parameter, requires_grad=False) if grad is None else grad
            for parameter, grad in zip(self.parameters, grads, strict=True)
        ]
        # A sum of zeros and ones, exact in every floating dtype as long as there are fewer than 256 ranks.
        census = torch.tensor([*present, bool(self._taken)], dtype=full[0].dtype)
        tensors = [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in full]
        self.group.all_reduce_together([*tensors, census])
        *counts, num_takers = census.tolist()
        if num_takers:
            self.refuse_taken()
        used = [count != 0 for count in counts]
        for parameter, grad, was_here, is_used in zip(self.parameters, full, present, used, strict=True):
            if was_here != is_used:
                parameter.grad = grad if is_used else None
        there = [grad for grad, is_used in zip(full, used, strict=True) if is_used]
        if scale != 1.0 and there:
            with torch.no_grad():
                foreach_mul_(there, scale)

    def refuse_taken(self) -> None:
        """Raise ApplyError, on every rank, if a hook removed a gradient on any; every rank calls this."""
        raise_taken(self.names, self._taken, self.group, torch.device("cpu"))

    def tensors(self) -> list[torch.Tensor]:
        """Return the existing gradients."""
        return [parameter.grad for parameter in self.parameters if parameter.grad is not None]

    def squares(self, device: torch.device) -> torch.Tensor:
        """Return the sum of the whole gradient's squares, as of buckets: each rank measures a part, and all learn all parts."""
        mine = _share(self.tensors(), self.group.group_rank, self.group.size)
        squares = squares_of(mine, device, exact=False)
        self.group.all_reduce(squares)
        return squares

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        for hook in self._watched.values():
            hook.remove()


def raise_taken(names: Sequence[str], taken: set[int], group: Communicator, device: torch.device | None) -> None:
    """Raise ApplyError, on every rank, if any rank has noticed that a gradient was removed; every rank calls this.

    Args:
        names: FQNs.
        taken: Indices of removed gradients, on this rank.
        group: The ranks that sum gradients.
        device: The device of the exchange.
    """
    found = group.all_gather_json(sorted(taken), device=device or torch.device("cpu"))
    rank, index = next(((rank, places[0]) for rank, places in enumerate(found) if places), (None, 0))
    if rank is not None:
        raise ApplyError(
            f"a hook took the gradient of '{names[index]}' away on rank {group.ranks[rank]} before the ranks had "
            "summed it (an optimizer that runs inside backward does that, and would train each rank on its own share only)",
            fix="remove the hook and pass the optimizer to apply_plan",
        )


def _share(tensors: Sequence[torch.Tensor], index: int, count: int) -> list[torch.Tensor]:
    """Return the tensors whose middle element lies in this rank's share of all elements."""
    total = sum(tensor.numel() for tensor in tensors)
    shared: list[torch.Tensor] = []
    before = 0
    for tensor in tensors:
        middle = before + tensor.numel() // 2
        if middle * count // max(1, total) == index:
            shared.append(tensor)
        before += tensor.numel()
    return shared
