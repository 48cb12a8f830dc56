"""Random numbers of a forward that several stages run: draws between layers must be the same on all of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from meshwright.apply.randomness.sites import draws_by_place
from meshwright.apply.state.undisturbed import note_draw_apart
from meshwright.python_state import PythonState

__all__: list[str] = []

_NOTHING = contextlib.nullcontext()


class Draws:
    """Streams of random numbers of a forward.

    Torch's generators have one stream for the code between layers, equal on all stages, and a rank's own stream for its layers.
    Python's and NumPy's global generators keep the single stream of one device, since each stage draws what the others draw. Code
    between layers runs on all stages, and other stages' layers that draw are run on fake tensors at each call.

    Args:
        seed: Equal on all ranks of a pipeline, different for each share of the batch.
        device: The device whose generator layers may draw from, beside the CPU's.
        apart: Whether the code between layers is known to draw from torch's generators; else draws are noticed one by one.
        python: Whether the model may draw from Python's or NumPy's.
    """

    def __init__(self, seed: int, device: torch.device, *, apart: bool, python: bool = False) -> None:
        self.generator = torch.Generator().manual_seed(seed % 2**63)
        """Gives each step's seed for the draws between layers."""
        self.device = device
        self.apart = apart
        self.python = python
        self._python_at: dict[int | None, PythonState] = {}
        self._step_seed = 0
        self._micro_batch = 0
        self._own: Any = None
        self._common: Any = None

    def begin_step(self) -> None:
        """Take a new seed for the draws between layers, and start all stages at the same state of Python's generators."""
        self._python_at = {None: PythonState()} if self.python else {}
        self._step_seed = int(torch.randint(2**62, (), generator=self.generator))

    def begin_forward(self) -> None:
        """Take the seed of the next step, for a forward that must not change what training draws."""
        state = self.generator.get_state()
        self.begin_step()
        self.generator.set_state(state)

    def between_layers(self, micro_batch: int, stage: int) -> contextlib.AbstractContextManager[None]:
        """Draw from the common stream of a micro-batch inside the context, in a forward of one stage."""
        self._micro_batch, self._common = micro_batch, None
        return self._between_layers(stage) if self._has_streams or self.python else _NOTHING

    def inside_layer(self) -> contextlib.AbstractContextManager[None]:
        """Draw from this rank's own stream inside the context, and return to the common one after it."""
        return _NOTHING if self._own is None or not self._has_streams else self._inside_layer(self._own)

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a function between layers that draws unexpectedly, from the common stream."""
        if self.apart or not self._may_stream or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        own = self._read_torch()
        if self._common is None:
            torch.manual_seed(self._seed)
        else:
            self._set_torch(self._common)
        start = self._read_torch()
        try:
            return func(*args, **kwargs)
        finally:
            self._common = self._read_torch()
            self._note_drawn(start, self._common)
            self._set_torch(own)

    @property
    def _may_stream(self) -> bool:
        """Whether torch's generators decide numbers; where draws go by place, all stages draw alike anyway."""
        return not draws_by_place()

    @property
    def _has_streams(self) -> bool:
        return self.apart and self._may_stream

    @property
    def _seed(self) -> int:
        return (self._step_seed + 0x9E3779B97F4A7C15 * (self._micro_batch + 1)) % 2**63

    @contextlib.contextmanager
    def _between_layers(self, stage: int) -> Iterator[None]:
        if self._has_streams:
            self._own = self._read_torch()
            torch.manual_seed(self._seed)
        start = self._read_torch() if self._own is not None else None
        if self.python:
            self._python_at.get(stage, self._python_at[None]).restore()
        try:
            yield
        finally:
            if self.python:
                self._python_at[stage] = PythonState()
            if self._own is not None:
                self._note_drawn(start, self._read_torch())
                self._set_torch(self._own)
                self._own = None

    @contextlib.contextmanager
    def _inside_layer(self, own: Any) -> Iterator[None]:
        common = self._read_torch()
        self._set_torch(own)
        try:
            yield
        finally:
            self._own = self._read_torch()
            self._set_torch(common)

    def _note_drawn(self, before: Any, after: Any) -> None:
        """Let trials know of numbers that the generators, which are put back, do not show."""
        if any(one is not None and not torch.equal(one, other) for one, other in zip(before, after, strict=True)):
            note_draw_apart()

    def _read_torch(self) -> Any:
        return torch.get_rng_state(), torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None

    def _set_torch(self, state: Any) -> None:
        torch.set_rng_state(state[0])
        if state[1] is not None:
            torch.cuda.set_rng_state(state[1], self.device)
