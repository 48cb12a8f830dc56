"""distributed: one process per device, equal parameters everywhere, gradients summed while backward runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from meshwright.apply.buckets import GradientBuckets
from meshwright.apply.engine import Engine
from meshwright.apply.loose import LooseGradients
from meshwright.apply.norm import norm_of_norms
from meshwright.comm.communicator import Communicator

__all__: list[str] = []

BROADCAST_BYTES = 32 * 2**20
"""Tensors travel together up to this size when copies are made equal [bytes]; bounds the extra memory."""


class DistributedEngine(Engine):
    """Data parallelism over processes.

    Args:
        module: The user's module, on `device`.
        group: The data-parallel ranks.
        device: This rank's device.
        bucket_bytes: Size of a gradient bucket [bytes], or None for the measured default.
        overlap: Whether reduction may run while backward does.
    """

    def __init__(
        self,
        module: nn.Module,
        group: Communicator,
        device: torch.device,
        *,
        bucket_bytes: int | None = None,
        overlap: bool = True,
    ) -> None:
        super().__init__(module, group, device)
        self._bucket_bytes = bucket_bytes
        self._overlap = overlap
        self._sparse_names = _names_with_sparse_gradients(module)
        make_copies_equal(self.parameters, group)
        make_copies_equal(module.buffers(), group)
        self._buffer_versions = self._read_buffer_versions()
        self._buckets = self._make_buckets()
        self._sparse = self._sparse_parameters()

    def _make_buckets(self, *, may_be_loose: bool = True) -> GradientBuckets | LooseGradients:
        dense = [
            (name, parameter)
            for name, parameter in self.module.named_parameters()
            if parameter.requires_grad and name not in self._sparse_names
        ]
        if may_be_loose and self._bucket_bytes is None and self.device.type == "cpu" and self.group.shares_memory:
            return LooseGradients([parameter for _, parameter in dense], self.group)
        return GradientBuckets(dense, self.group, bucket_bytes=self._bucket_bytes, overlap=self._overlap)

    @property
    def exchanges_in_backward(self) -> bool:
        return isinstance(self._buckets, GradientBuckets)

    def _sparse_parameters(self) -> list[nn.Parameter]:
        named = self.module.named_parameters()
        return [parameter for name, parameter in named if parameter.requires_grad and name in self._sparse_names]

    def refresh_trainable(self) -> None:
        """Build the buckets anew after `requires_grad` was switched, on all ranks."""
        self._buckets.close()
        super().begin_step()
        self._buckets = self._make_buckets()
        self._sparse = self._sparse_parameters()

    def begin_step(self) -> None:
        super().begin_step()
        if isinstance(self._buckets, LooseGradients) and self._buckets.has_hooks:
            self._buckets = self._make_buckets(may_be_loose=False)  # whose own hooks notice what others do
        self._buckets.begin_step()

    def arm(self) -> None:
        self._buckets.arm()

    def finish_gradients(self, scale: float) -> None:
        self._buckets.finish(scale)
        for parameter in self._sparse:
            self._sum_sparse(parameter, scale)

    def _sum_sparse(self, parameter: nn.Parameter, scale: float) -> None:
        """Sum a sparse gradient over the ranks by gathering rows: [nnz] indices and [nnz, ...] values of each rank."""
        grad = parameter.grad
        if grad is None:
            indices = torch.empty((0, 1), dtype=torch.int64, device=parameter.device)
            values = parameter.detach().new_empty((0, *parameter.shape[1:]))
        else:
            grad = grad.coalesce()
            indices, values = grad.indices().t(), grad.values()
        present = torch.tensor([grad is not None], dtype=torch.int32, device=parameter.device)
        self.group.all_reduce(present, "max")
        all_indices = torch.cat(self.group.all_gather_uneven(indices.contiguous()))
        all_values = torch.cat(self.group.all_gather_uneven(values))
        if int(present):
            summed = torch.sparse_coo_tensor(all_indices.t(), all_values * scale, parameter.shape)
            parameter.grad = summed.coalesce()

    def _sparse_values(self) -> list[torch.Tensor]:
        return [p.grad.coalesce().values() for p in self._sparse if p.grad is not None]

    def gradient_tensors(self) -> Sequence[torch.Tensor]:
        return self._buckets.tensors() + self._sparse_values()

    def gradient_norm(self) -> torch.Tensor:
        norms = self._buckets.norms() + [torch.linalg.vector_norm(values) for values in self._sparse_values()]
        return norm_of_norms(norms, self.gradient_tensors, self.device)

    def _read_buffer_versions(self) -> list[tuple[int, int]]:
        return [(id(buffer), buffer._version) for buffer in self.module.buffers()]

    def buffers_changed(self) -> bool:
        return self._read_buffer_versions() != self._buffer_versions

    def sync_buffers(self) -> None:
        """Copy rank 0's buffers to all ranks, as DDP does: running statistics follow rank 0."""
        make_copies_equal(self.module.buffers(), self.group)
        self._buffer_versions = self._read_buffer_versions()

    def close(self) -> None:
        self._buckets.close()


def _names_with_sparse_gradients(module: nn.Module) -> set[str]:
    """Return the FQNs of embeddings that produce sparse gradients; these cannot lie in flat memory."""
    sparse_ids = {
        id(child.weight)
        for child in module.modules()
        if isinstance(child, (nn.Embedding, nn.EmbeddingBag)) and child.sparse
    }
    return {name for name, parameter in module.named_parameters() if id(parameter) in sparse_ids}


def make_copies_equal(tensors: Iterable[torch.Tensor], group: Communicator) -> None:
    """Give every rank the values of the group's rank 0, in place; small tensors travel together."""
    if group.size == 1:
        return
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor.detach())
    for members in kinds.values():
        batch: list[torch.Tensor] = []
        for tensor in members:
            batch.append(tensor)
            if sum(part.nbytes for part in batch) >= BROADCAST_BYTES:
                _broadcast_together(batch, group)
                batch = []
        if batch:
            _broadcast_together(batch, group)


def _broadcast_together(tensors: Sequence[torch.Tensor], group: Communicator) -> None:
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    if flat.numel() == 0:
        return
    # Not every backend knows every dtype (bool, complex, float8); bytes it always knows.
    group.broadcast(flat.view(torch.uint8))
    if group.group_rank == 0:
        return
    start = 0
    for tensor in tensors:
        tensor.copy_(flat[start : start + tensor.numel()].view(tensor.shape))
        start += tensor.numel()
