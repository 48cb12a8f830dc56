"""Random numbers of a forward that several stages walk: drawn between layers, they must be the same on all of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

__all__: list[str] = []

_State = tuple[torch.Tensor, torch.Tensor | None]
_NOTHING = contextlib.nullcontext()


class Draws:
    """Two streams of random numbers: one for the code between layers, equal on all stages, and each rank's own for its layers.

    Args:
        seed: Equal on all ranks of a pipeline, another for another share of the batch.
        device: Whose generator layers may draw from, beside the CPU's.
        apart: Whether code between layers draws at all; else nothing is done here.
    """

    def __init__(self, seed: int, device: torch.device, *, apart: bool) -> None:
        self._generator = torch.Generator().manual_seed(seed % 2**63)
        self._device = device
        self.apart = apart
        self._step_seed = 0
        self._own: _State | None = None

    def begin_step(self) -> None:
        """Take another seed for what is drawn between layers."""
        self._step_seed = int(torch.randint(2**62, (), generator=self._generator))

    def begin_forward(self) -> None:
        """Take the seed that the next step will take, for a forward that must not change what training draws."""
        state = self._generator.get_state()
        self.begin_step()
        self._generator.set_state(state)

    def between_layers(self, micro_batch: int) -> contextlib.AbstractContextManager[None]:
        """Draw from the common stream of a micro-batch inside."""
        return self._between_layers(micro_batch) if self.apart else _NOTHING

    def inside_layer(self) -> contextlib.AbstractContextManager[None]:
        """Draw from this rank's own stream inside, which a forward that is under way has put aside."""
        return _NOTHING if self._own is None else self._inside_layer(self._own)

    @contextlib.contextmanager
    def _between_layers(self, micro_batch: int) -> Iterator[None]:
        self._own = self._read()
        torch.manual_seed((self._step_seed + 0x9E3779B97F4A7C15 * (micro_batch + 1)) % 2**63)
        try:
            yield
        finally:
            self._set(self._own)
            self._own = None

    @contextlib.contextmanager
    def _inside_layer(self, own: _State) -> Iterator[None]:
        common = self._read()
        self._set(own)
        try:
            yield
        finally:
            self._own = self._read()
            self._set(common)

    def _read(self) -> _State:
        return torch.get_rng_state(), torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else None

    def _set(self, state: _State) -> None:
        torch.set_rng_state(state[0])
        if state[1] is not None:
            torch.cuda.set_rng_state(state[1], self._device)
