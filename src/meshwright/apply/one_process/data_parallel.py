"""data_parallel: one process with a thread and a replica of the module for each device.

This is nn.DataParallel with three differences. Each thread also runs the loss and the backward of its chunk, which autograd on
CPU would otherwise run in one thread. The chunks are weighted exactly, and CPU devices work too. Replicas on one device share the
memory of the parameters; only gradients are their own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import nn

from meshwright.apply.engine import Engine
from meshwright.apply.forecast import Forecast
from meshwright.apply.one_process.expected_bytes import ReplicasForecast
from meshwright.apply.state.mirror import LeftByForward, Mirror
from meshwright.comm.communicator import Communicator
from meshwright.describe.batches import BatchSplitter, join_samples
from meshwright.errors import ApplyError
from meshwright.garbage import paused_collection
from meshwright.host import usable_cores
from meshwright.trees import move_to, write_entries

__all__: list[str] = []

T = TypeVar("T")


class Replica:
    """A copy of the module on one device, with gradients of its own.

    Args:
        module: The user's module.
        device: The copy's device.
        owns_buffers: Whether its writes into buffers are the module's (only the first replica's are, as in nn.DataParallel).
        left: The attributes that forwards leave, common to all replicas.
    """

    def __init__(self, module: nn.Module, device: torch.device, *, owns_buffers: bool, left: LeftByForward) -> None:
        self.device = device
        self.originals = list(module.parameters())
        self.leaves = [_make_leaf(parameter, device) for parameter in self.originals]
        self.owns_buffers = owns_buffers
        memo = {id(old): new for old, new in zip(self.originals, self.leaves, strict=True)}
        memo |= {id(buffer): buffer.detach().clone().to(device) for buffer in module.buffers()}
        is_near = all(tensor.device == device for tensor in (*self.originals, *module.buffers()))
        try:
            self.mirror = Mirror(module, memo, left, is_near=is_near)
        except Exception as error:
            raise ApplyError(
                f"data_parallel needs a copy of the model per device, and copy.deepcopy failed: {error!r}",
                fix="use the plan 'distributed', which builds the model once per process",
            ) from error
        self.module: nn.Module = self.mirror.module
        self._pairs = self.mirror.pairs

    def refresh(self) -> None:
        """Copy the module's values, train/eval modes and `requires_grad`; drop gradients."""
        for original, leaf in zip(self.originals, self.leaves, strict=True):
            leaf.grad = None
            if leaf.requires_grad != original.requires_grad:
                leaf.requires_grad_(original.requires_grad)
            if original.device != self.device:
                leaf.data.copy_(original.data, non_blocking=True)
            elif leaf.data_ptr() != original.data_ptr():
                leaf.data = original.data
        self.refresh_buffers()
        for original, mine in self._pairs:
            mine.training = original.training

    def refresh_buffers(self) -> None:
        """Copy the module's buffers."""
        for owner, twin, name in self._buffer_slots():
            original, mine = owner._buffers[name], twin._buffers.get(name)
            if self.owns_buffers or original is None:
                twin._buffers[name] = original
            elif mine is not None and mine.shape == original.shape and mine.dtype == original.dtype:
                write_entries(mine.detach(), original.detach(), non_blocking=True)
            else:
                twin._buffers[name] = original.detach().clone().to(self.device)

    def _buffer_slots(self) -> list[tuple[nn.Module, nn.Module, str]]:
        return [(owner, twin, name) for owner, twin in self._pairs for name in owner._buffers]

    def give_buffers_back(self) -> None:
        """Give the module the tensors that its forward has assigned to buffers on this replica."""
        for owner, twin in self._pairs:
            if twin._buffers:
                owner._buffers.update(twin._buffers)
                owner._non_persistent_buffers_set.update(twin._non_persistent_buffers_set)


def _make_leaf(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    data = parameter.detach()
    return nn.Parameter(data if device == data.device else data.to(device), requires_grad=parameter.requires_grad)


class ReplicasEngine(Engine):
    """Data parallelism over threads.

    Args:
        module: The user's module, on the first device.
        group: A group of this one process.
        devices: A device for each replica; one may occur several times.
        splitter: Cuts a batch into the chunks.
    """

    def __init__(
        self, module: nn.Module, group: Communicator, devices: Sequence[torch.device], *, splitter: BatchSplitter
    ) -> None:
        super().__init__(module, group, devices[0])
        self._left = LeftByForward()
        self.replicas = [
            Replica(module, device, owns_buffers=index == 0, left=self._left) for index, device in enumerate(devices)
        ]
        self.num_replicas = len(devices)
        self._is_fresh = False  # whether no forward has run since the replicas took over the module's buffers
        self._splitter = splitter
        threads = max(1, usable_cores() // len(devices))
        # The number of intra-op threads is a property of each calling thread.
        self._pool = ThreadPoolExecutor(
            len(devices), "meshwright-replica", initializer=torch.set_num_threads, initargs=(threads,)
        )

    takes_own_loops = False

    def forecast(self) -> Forecast:
        return ReplicasForecast(self.module, [replica.device for replica in self.replicas])

    def begin_step(self) -> None:
        super().begin_step()
        self.begin_forward()

    def begin_forward(self) -> None:
        self._left.refresh()
        for replica in self.replicas:
            replica.refresh()
        self._is_fresh = True

    def forward_backward(self, batch: Any, compute: Callable[[nn.Module, Any], T]) -> list[T]:
        if not self._is_fresh:  # each micro-batch begins with the buffers that the one before left on the module
            for replica in self.replicas:
                replica.refresh_buffers()
        self._is_fresh = False
        return self._in_threads(self._splitter.cut(batch, len(self.replicas)), compute)

    def _in_threads(self, chunks: Sequence[Any], compute: Callable[[nn.Module, Any], T]) -> list[T]:
        grad_enabled = torch.is_grad_enabled()  # belongs to the thread, as does autocast, which `compute` sets itself

        def work(replica: Replica, chunk: Any) -> T:
            reading = self._left.reading(replica.mirror)
            with torch.set_grad_enabled(grad_enabled), _on_device(replica.device), reading:
                return compute(replica.module, move_to(chunk, replica.device))

        with self._left.running(), paused_collection():
            jobs = [self._pool.submit(work, r, c) for r, c in zip(self.replicas, chunks, strict=False)]
            # Wait for all threads before raising the first error: none may still write when the caller continues.
            errors = [job.exception() for job in jobs]
        for error in errors:
            if error is not None:
                raise error
        self.replicas[0].give_buffers_back()
        return [job.result() for job in jobs]

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.begin_forward()

        def call(module: nn.Module, inputs: Any) -> Any:
            chunk_args, chunk_kwargs = inputs
            return module(*chunk_args, **chunk_kwargs)

        chunks = BatchSplitter().cut((args, kwargs), len(self.replicas))
        return join_samples(self._in_threads(chunks, call), self.device)

    def finish_gradients(self, scale: float) -> None:
        for index, parameter in enumerate(self.parameters):
            leaves = [replica.leaves[index] for replica in self.replicas]
            parts = [leaf.grad for leaf in leaves if leaf.grad is not None]
            if parameter.grad is not None:  # a loss that reads the module's own parameters, a penalty, leaves it here
                _refuse_called_hooks(parameter)
                parts.append(parameter.grad)
            if not parts:
                continue
            total = parts[0].to(parameter.device)
            for part in parts[1:]:
                total = total.add_(part.to(parameter.device)) if not total.is_sparse else total + part
            parameter.grad = total
        super().finish_gradients(scale)
        for parameter in self.parameters:
            _run_hooks(parameter)

    def close(self) -> None:
        self._pool.shutdown()
        self._left.close()


def _run_hooks(parameter: nn.Parameter) -> None:
    """Run the user's hooks on the whole gradient: replicas have terms of it, and not every hook is linear."""
    if parameter.grad is None:
        return
    for hook in list((parameter._backward_hooks or {}).values()):
        result = hook(parameter.grad)
        if result is not None:
            parameter.grad = result
    for hook in list((getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values()):
        hook(parameter)


def _refuse_called_hooks(parameter: nn.Parameter) -> None:
    if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
        raise ApplyError(
            f"a hook that waits for the gradient of a parameter of shape {tuple(parameter.shape)} was called with a part of it: "
            "the loss reads the module's own parameters, whose gradient data_parallel adds to that of the replicas later",
            fix="take the hook off, or use the plan 'distributed'",
        )


def _on_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
