"""Plain data parallelism (the preset `distributed`): one process per device, equal parameters everywhere, gradients summed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from meshwright.apply.data.base import DataParallelEngine
from meshwright.apply.data.buckets import GradientBuckets
from meshwright.apply.data.expected_bytes import CopiesForecast
from meshwright.apply.data.unbucketed import LooseGradients
from meshwright.apply.forecast import Forecast
from meshwright.apply.norm import squares_of
from meshwright.apply.own_passes import Kept
from meshwright.apply.state.buffers import persistent_buffers
from meshwright.comm.communicator import Communicator
from meshwright.comm.compression.choose import make_reducer

__all__: list[str] = []

COMPRESSED_BUCKET_BYTES = 4 * 2**20
"""Size of a bucket whose gradients are compressed [bytes]. Whoever compresses waits for a link: small ones keep it busy while the
next is being coded."""


class DistributedEngine(DataParallelEngine):
    """Data parallelism over processes.

    Args:
        module: The user's module, on `device`.
        group: The data-parallel ranks.
        device: This rank's device.
        bucket_bytes: Size of a gradient bucket [bytes], or None for the measured default.
        overlap: Whether reduction may run while backward does.
        compress: Compression of the sent gradients: a plan's `compress`.
    """

    def __init__(
        self,
        module: nn.Module,
        group: Communicator,
        device: torch.device,
        *,
        bucket_bytes: int | None = None,
        overlap: bool = True,
        compress: str = "none",
    ) -> None:
        super().__init__(module, group, device, make_reducer(compress, group))
        if bucket_bytes is None and compress != "none":
            bucket_bytes = COMPRESSED_BUCKET_BYTES
        self._bucket_bytes = bucket_bytes
        self._overlap = overlap
        self._buckets = self._make_buckets()

    def _make_buckets(self) -> GradientBuckets | LooseGradients:
        dense = [(name, parameter) for name, parameter in self.dense_parameters() if parameter.requires_grad]
        if self._bucket_bytes is None and self.group.shares_memory_of(self.device):
            return LooseGradients(dense, self.group)
        return GradientBuckets(
            dense, self.group, bucket_bytes=self._bucket_bytes, overlap=self._overlap, reducer=self.reducer
        )

    def copies_of_state(self) -> list[tuple[Communicator, list[tuple[str, torch.Tensor]]]]:
        return [(self.group, [*self.module.named_parameters(), *persistent_buffers(self.module)])]

    def forecast(self) -> Forecast:
        return CopiesForecast(self.module, self.group.size, self.reducer)

    @property
    def exchanges_in_backward(self) -> bool:
        return isinstance(self._buckets, GradientBuckets)

    def refresh_trainable(self) -> None:
        """Rebuild the buckets after `requires_grad` was switched, on all ranks."""
        self._buckets.close()
        super().begin_step()
        super().refresh_trainable()
        self.reducer.keep_only([name for name, parameter in self.dense_parameters() if parameter.requires_grad])
        self._buckets = self._make_buckets()

    def begin_step(self) -> None:
        super().begin_step()
        self._buckets.begin_step()

    def take_gradients(self) -> Kept:
        kept = super().take_gradients()
        if isinstance(self._buckets, LooseGradients):
            return kept
        return [(holder, gradient.clone()) for holder, gradient in kept]  # the next exchange writes over the buckets

    def begin_own_backward(self, *, is_alone: bool) -> None:
        super().begin_own_backward(is_alone=is_alone)
        self._buckets.wait_for_end()

    def arm(self) -> None:
        self._buckets.arm()

    def finish_gradients(self, scale: float) -> None:
        self._buckets.finish(scale)
        self.sum_sparse_gradients(scale)

    def gradient_tensors(self) -> Sequence[torch.Tensor]:
        return self._buckets.tensors() + self.sparse_values()

    def gradient_norm(self) -> torch.Tensor:
        # Measured while gradients were on their way; an engine around this one may change them after that, and asks for squares.
        squares = self._buckets.squares(self.device) + squares_of(self.sparse_values(), self.device, exact=False)
        return squares.sqrt() if math.isfinite(squares.item()) else self.norm_of_squares()

    def refuse_taken(self) -> None:
        self._buckets.refuse_taken()

    def close(self) -> None:
        self._buckets.close()
