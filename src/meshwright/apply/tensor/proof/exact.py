"""Mode of a proof's runs, whose results are equal to rounding: float64, no dropout, and the same random numbers in all.

Dropout drops nothing (`search/operations.py`). What else a forward draws, drop path or noise, would differ between threads, so
that a layer would run whole or cut by chance: here the number of a call and the drawn shape decide its numbers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from meshwright.apply.randomness.alike import alike_draws
from meshwright.apply.randomness.sites import drawing_again
from meshwright.apply.tensor.proof.unchecked import check_shapes
from meshwright.apply.tensor.search.operations import WithoutDropout

__all__: list[str] = []


class Exact(WithoutDropout):
    """Float64 where code asks for float32, no dropout, and numbers that depend on the call alone."""

    def __init__(self) -> None:
        super().__init__()
        self._draws = contextlib.ExitStack()

    def __enter__(self) -> Any:
        self._draws.enter_context(drawing_again(alike_draws()))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._draws.close()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.float:
            return args[0].double()
        args = tuple(torch.float64 if value is torch.float32 else value for value in args)
        kwargs = {name: torch.float64 if value is torch.float32 else value for name, value in (kwargs or {}).items()}
        check_shapes(func, args, kwargs)
        return super().__torch_function__(func, types, args, kwargs)
