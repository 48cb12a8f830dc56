"""Noise: tiny differences, and whether roundings can make them.

The gradient of an attention key's bias is zero but for roundings, so that two correct plans give two such gradients. A gradient
that is small for another reason (a layer that the loss hardly depends on) has all its digits; with another factor it is wrong.
The two look alike. So one process is run once more, with each number moved by up to one rounding: noise becomes another noise,
and digits stay.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from meshwright._torch_private import TorchDispatchMode
from meshwright.measure.oracle import StepRecord, oracle_steps, to_dtype
from meshwright.measure.parity import compare_tensors
from meshwright.measure.resolution import is_new, pairs_of
from meshwright.trees import map_tensors

__all__: list[str] = []

_MARGIN = 1000.0
"""How many times what one rounding of everything moves counts as noise; a wrong factor is millions of times as much [ratio]."""


class MovedResults(TorchDispatchMode):
    """Makes each new floating-point result larger by a random part of one rounding; larger, so that no 3.0 is cut to 2.

    Args:
        seed: Of the random parts, which have a generator of their own.
    """

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor) and tensor.layout == torch.strided and is_new(tensor, args):
                self.move(tensor)
        return out

    def move(self, tensor: Tensor) -> None:
        """Move the entries of a tensor, in place."""
        values = torch.view_as_real(tensor) if tensor.is_complex() and not tensor.is_conj() else tensor
        if values.is_floating_point():
            parts = torch.rand(values.shape, generator=self._generator, dtype=torch.float64)
            values.copy_(values.double() * (1 + parts.to(values.device) * torch.finfo(values.dtype).eps))


def largest_moves(
    build_model: Callable[[], nn.Module],
    batches: Sequence[Any],
    loss_fn: Callable[[Any, Any], Any] | None,
    reference: Sequence[StepRecord],
    **options: Any,
) -> dict[tuple[int, str, str], float]:
    """Return by how much roundings move each tensor of one process' steps: the largest entry of the difference.

    Args:
        build_model: As for `oracle_steps`.
        batches: As for `oracle_steps`.
        loss_fn: As for `oracle_steps`.
        reference: The steps that are not moved.
        **options: As for `oracle_steps`, dtype among them.

    Returns:
        (step, "gradient", "value" or "buffer", FQN) -> absolute difference.
    """
    mode = MovedResults()

    def moved(tensor: Tensor) -> Tensor:
        tensor = tensor.clone()
        mode.move(tensor)
        return tensor

    batches = [map_tensors(to_dtype(batch, options["dtype"]), moved) for batch in batches]
    with _entered_at_first(mode) as before_step:
        records = oracle_steps(build_model, batches, loss_fn, before_step=before_step, **options)
    found: dict[tuple[int, str, str], float] = {}
    for step, (record, expected) in enumerate(zip(records, reference, strict=True)):
        for kind, got, wanted in pairs_of(record, expected):
            for row in compare_tensors(got, wanted):
                found[step, kind, row.name] = row.gap
    return found


def is_noise(gap: float, move: float) -> bool:
    """Tell whether a difference is one that roundings make.

    Args:
        gap: The largest absolute difference of a tensor.
        move: What `largest_moves` says of it.

    >>> is_noise(1e-17, 3e-18), is_noise(1e-17, 3e-33)
    (True, False)
    """
    return gap <= _MARGIN * move


@contextlib.contextmanager
def _entered_at_first(mode: MovedResults) -> Iterator[Callable[[int, nn.Module], None]]:
    """Move the parameters before the first step and enter the mode there; the model is built as it is."""
    with contextlib.ExitStack() as stack:

        def before_step(step: int, model: nn.Module) -> None:
            if step == 0:
                with torch.no_grad():
                    for parameter in model.parameters():
                        mode.move(parameter)
                stack.enter_context(mode)

        yield before_step
