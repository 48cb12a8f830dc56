"""Base of data parallelism over processes: equal copies at the start, buffers that follow rank 0, sparse gradients."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from meshwright._torch_private import unsafe_sparse
from meshwright.apply.data.buffers_apart import BuffersApart
from meshwright.apply.data.sparse import names_with_sparse_gradients
from meshwright.apply.engine import Engine
from meshwright.apply.norm import values_of
from meshwright.apply.state.buffers import persistent_buffers
from meshwright.comm.communicator import Communicator
from meshwright.comm.compression.reducer import Reducer
from meshwright.errors import ApplyError
from meshwright.spec import Plan
from meshwright.trees import write_entries

__all__: list[str] = []

_DIGEST_BYTES = 7  # a bit is left of a signed number

BROADCAST_BYTES = 32 * 2**20
"""Tensors travel together up to this size when copies are made equal [bytes]; bounds the extra memory."""


class DataParallelEngine(Engine):
    """Ranks that share a global batch, one process per device.

    Args:
        module: The user's module, on `device`.
        group: The data-parallel ranks.
        device: This rank's device.
        reducer: Sums gradients over the group, or over the replicas where shards have replicas.
    """

    def __init__(self, module: nn.Module, group: Communicator, device: torch.device, reducer: Reducer) -> None:
        super().__init__(module, group, device)
        self.reducer = reducer
        self.sparse_names = names_with_sparse_gradients(module)
        make_copies_equal(self.parameters, group)
        make_copies_equal(module.buffers(), group)
        self._apart = BuffersApart(group, device)
        self._buffer_owners = list(module.modules())
        self._buffer_versions = self._read_buffer_versions()
        self._sparse = self._sparse_parameters()

    def dense_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return (FQN, parameter) of the parameters with dense gradients, each once."""
        return [(name, p) for name, p in self.module.named_parameters() if name not in self.sparse_names]

    def _sparse_parameters(self) -> list[nn.Parameter]:
        named = self.module.named_parameters()
        return [parameter for name, parameter in named if parameter.requires_grad and name in self.sparse_names]

    def refresh_trainable(self) -> None:
        self._sparse = self._sparse_parameters()

    def detail(self, plan: Plan) -> Plan:
        change = self.reducer.explain()
        told = (f"compress={plan.compress}: {change}",) if change else ()
        told += self._apart.reasons
        return plan.replace(reasons=(*plan.reasons, *told)) if told else plan

    def leave_out_step(self) -> None:
        self.reducer.reset()

    def compression_state(self) -> dict[str, torch.Tensor]:
        return self.reducer.state()

    def held_tensors(self) -> dict[str, list[torch.Tensor]]:
        held = super().held_tensors()
        held["gradients"] += self.reducer.state().values()
        return held

    def load_compression_state(self, state: Mapping[str, torch.Tensor]) -> None:
        self.reducer.load_state(state)

    def sum_sparse_gradients(self, scale: float) -> None:
        """Sum sparse gradients over the ranks by gathering rows: [nnz] indices and [nnz, ...] values of each rank."""
        for parameter in self._sparse:
            self._sum_sparse(parameter, scale)

    def _sum_sparse(self, parameter: nn.Parameter, scale: float) -> None:
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
            parameter.grad = unsafe_sparse(all_indices.t(), all_values * scale, parameter.shape).coalesce()

    def sparse_values(self) -> list[torch.Tensor]:
        """Return the values of the sparse gradients, which every rank has whole; all of one that was made dense further out."""
        return [values_of(p.grad) for p in self._sparse if p.grad is not None]

    def _read_buffer_versions(self) -> list[tuple[int, int]]:
        # Twice in each step: to walk through the module, as `buffers` does, takes ten times as long.
        return [
            (id(buffer), buffer._version)
            for owner in self._buffer_owners
            for buffer in owner._buffers.values()
            if buffer is not None
        ]

    def buffers_changed(self) -> bool:
        return self._read_buffer_versions() != self._buffer_versions

    def looks_at_buffers(self, *, begins: bool) -> bool:
        if not self._buffer_versions:
            return False
        if begins:
            self._apart.begin(self.module)
        return self._apart.is_due

    def note_buffers(self) -> None:
        self._buffer_versions = self._read_buffer_versions()

    def sync_buffers(self) -> None:
        """Copy rank 0's buffers to all ranks, as DDP does: running statistics follow rank 0.

        A non-persistent buffer may have another shape on each rank, such as a cache of the rank's own batch: it is left alone.

        Raises:
            ApplyError: A persistent buffer differs in shape or dtype between ranks, or exists only on some.
        """
        common = self._common_buffers()
        if self._apart.look(self.module, common, self._written_buffers):
            make_copies_equal(common, self.group)
        self.note_buffers()

    def _written_buffers(self) -> set[int]:
        """Return the ids of buffers of which torch has counted a write since they were equal."""
        before = dict(self._buffer_versions)
        return {key for key, version in self._read_buffer_versions() if before.get(key) != version}

    def _common_buffers(self) -> list[torch.Tensor]:
        """Return the buffers with the same shape and dtype on all ranks."""
        kinds = describe_buffers(self.module)
        if self.group.size > 1:
            digest = int.from_bytes(hashlib.blake2b(json.dumps(kinds).encode(), digest_size=_DIGEST_BYTES).digest())
            is_fresh = self._apart.has_fresh(self.module, self._written_buffers)
            highest, lowest = self._extremes(digest | is_fresh << 8 * _DIGEST_BYTES, digest)
            if highest >> 8 * _DIGEST_BYTES:  # on some rank, which all know now
                self._apart.look_again()
                highest, lowest = self._extremes(digest, digest)
            if highest != lowest:
                return self._agree_on_buffers(kinds)
        return list(self.module.buffers())

    def _extremes(self, high: int, low: int) -> tuple[int, int]:
        """Return the highest `high` and the lowest `low` of all ranks."""
        extremes = torch.tensor([high, -low], dtype=torch.int64, device=self.device)
        self.group.all_reduce(extremes, "max")
        highest, lowest = extremes.tolist()
        return highest, -lowest

    def _agree_on_buffers(self, kinds: dict[str, list[Any]]) -> list[torch.Tensor]:
        everyone = self.group.all_gather_json(kinds, device=self.device)
        names = list(dict.fromkeys(name for theirs in everyone for name in theirs))
        unequal = [name for name in names if any(theirs.get(name) != everyone[0].get(name) for theirs in everyone)]
        for name in unequal:
            if any(theirs[name][2] for theirs in everyone if name in theirs):
                sizes = "; ".join(
                    f"rank {rank}: {theirs[name][:2] if name in theirs else 'none'}"
                    for rank, theirs in zip(self.group.ranks, everyone, strict=True)
                )
                raise ApplyError(
                    f"buffer '{name}' is part of the state dict and differs between the ranks of a batch ({sizes}); buffers "
                    "follow rank 0",
                    fix="give it one shape on all ranks, or register it with persistent=False where each may have its own",
                )
        return [buffer for name, buffer in self.module.named_buffers() if name not in unequal]


def describe_buffers(module: nn.Module) -> dict[str, list[Any]]:
    """Return FQN -> [shape, dtype, whether it is persistent] of each buffer."""
    kept = {name for name, _ in persistent_buffers(module)}
    return {name: [list(b.shape), str(b.dtype), name in kept] for name, b in module.named_buffers()}


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
    # Not every backend supports every dtype (bool, complex, float8); all support bytes.
    group.broadcast(flat.view(torch.uint8))
    if group.group_rank == 0:
        return
    start = 0
    for tensor in tensors:
        write_entries(tensor, flat[start : start + tensor.numel()].view(tensor.shape))
        start += tensor.numel()
