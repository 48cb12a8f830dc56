"""Mutations of what data parallelism, ZeRO, pipelines and recompute do, as `mutations.py` has those of tensor parallelism."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from mutations import Stack, nothing, own_rank, patch
from torch import Tensor

from meshwright.apply.data import base, flat_unit, unbucketed
from meshwright.apply.engine import Engine
from meshwright.apply.pipeline import p2p, stage
from meshwright.apply.pipeline.ownership import tied
from meshwright.apply.recompute import checkpointing
from meshwright.comm import communicator
from meshwright.run import exchange, step
from meshwright.run.losses import terms

# -- data parallelism and ZeRO ----------------------------------------------------------------------------------------


def gradients_not_summed(stack: Stack) -> None:
    patch(stack, communicator.Communicator, "all_reduce_together", nothing)


def gradients_of_one_tensor_not_summed(stack: Stack) -> None:
    original = communicator.Communicator.all_reduce_together

    def without_first(self: Any, tensors: Any) -> None:
        original(self, tensors[1:])

    patch(stack, communicator.Communicator, "all_reduce_together", without_first)


def gradients_divided_again(stack: Stack) -> None:
    original = unbucketed.LooseGradients.finish

    def halved(self: Any, scale: float) -> None:
        original(self, scale / self.group.size)

    patch(stack, unbucketed.LooseGradients, "finish", halved)


def gradients_summed_in_bfloat16(stack: Stack) -> None:
    original = communicator.Communicator.all_reduce_together

    def rounded(self: Any, tensors: Any) -> None:
        for tensor in tensors:
            tensor.copy_(tensor.bfloat16())
        original(self, tensors)

    patch(stack, communicator.Communicator, "all_reduce_together", rounded)


def sum_corrupted_on_one_rank(stack: Stack) -> None:
    original = communicator.Communicator.all_reduce_together

    def corrupted(self: Any, tensors: Any) -> None:
        original(self, tensors)
        if own_rank() == 1:
            tensors[0].view(-1)[0] += 1e-3

    patch(stack, communicator.Communicator, "all_reduce_together", corrupted)


def sum_corrupted_on_all_ranks(stack: Stack) -> None:
    original = communicator.Communicator.all_reduce_together

    def corrupted(self: Any, tensors: Any) -> None:
        original(self, tensors)
        tensors[0].view(-1)[0] += 1e-3

    patch(stack, communicator.Communicator, "all_reduce_together", corrupted)


def mean_of_means(stack: Stack) -> None:
    """Each rank divides by the samples of its own share, and the sum by the ranks."""
    original = terms.LossTerms.root

    def root(term: Any, agreement: Any, *, alone: bool) -> Any:
        found = original(term, agreement, alone=alone)
        return None if found is None else (found[0], torch.full_like(found[0], 0.5))

    patch(stack, terms.LossTerms, "root", staticmethod(root))


def accumulation_not_divided(stack: Stack) -> None:
    def root(term: Any, agreement: Any, *, alone: bool) -> Any:
        del agreement, alone
        return term.value, None

    patch(stack, terms.LossTerms, "root", staticmethod(root))


def gradients_not_cleared(stack: Stack) -> None:
    patch(stack, unbucketed.LooseGradients, "begin_step", nothing)
    patch(stack, Engine, "begin_step", nothing)


def copies_not_made_equal(stack: Stack) -> None:
    patch(stack, base, "make_copies_equal", nothing)
    original = torch.manual_seed

    def other(seed: int) -> Any:
        return original(seed + own_rank())

    patch(stack, torch, "manual_seed", other)


def buffers_not_synced(stack: Stack) -> None:
    patch(stack, base.DataParallelEngine, "sync_buffers", nothing)


def values_not_spread(stack: Stack) -> None:
    patch(stack, flat_unit.FlatUnit, "spread", nothing)


def update_lost(stack: Stack) -> None:
    """The optimizer writes into memory that nobody reads, on every rank: the values stay those of the first step."""
    original = flat_unit.FlatUnit.spread
    kept: dict[int, Tensor] = {}

    def spread(self: Any) -> None:
        self.segment.data.copy_(kept.setdefault(id(self), self.segment.clone()))
        original(self)

    patch(stack, flat_unit.FlatUnit, "spread", spread)


def stale_gather(stack: Stack) -> None:
    """ZeRO-3 gathers what was gathered in the first step."""
    original = flat_unit.FlatUnit.start_gather
    first: dict[int, Tensor] = {}

    def start(self: Any, *, async_op: bool = True) -> None:
        kept = first.get(id(self))
        if kept is not None and self.flat is None and self._coming is None:
            flat = torch.empty_like(kept)
            pending = self.group.all_gather_into(flat, self.segment.detach(), async_op=False)
            flat.copy_(kept)
            self._coming = flat, pending
            return
        original(self, async_op=async_op)
        if self._coming is not None:
            self._coming[1].wait()
            first[id(self)] = self._coming[0].clone()

    patch(stack, flat_unit.FlatUnit, "start_gather", start)


def segment_of_another_rank(stack: Stack) -> None:
    """Gradients of the other rank's segment are taken for one's own."""
    original = flat_unit.FlatUnit.settle

    def settle(self: Any, used: Any, scale: float) -> None:
        self._sums = [part.roll(1) for part in self._sums]
        original(self, used, scale)

    patch(stack, flat_unit.FlatUnit, "settle", settle)


def optimizer_skips_a_rank(stack: Stack) -> None:
    original = torch.optim.SGD.step

    def skip(self: Any, closure: Any = None) -> Any:
        return None if own_rank() == 1 else original(self, closure)

    patch(stack, torch.optim.SGD, "step", skip)


def clip_by_own_norm(stack: Stack) -> None:
    original = step.clip_

    def clip(tensors: Any, norm: Tensor, max_norm: float) -> None:
        own = torch.linalg.vector_norm(torch.cat([tensor.reshape(-1) for tensor in tensors]))
        original(tensors, own, max_norm)

    patch(stack, step, "clip_", clip)


def loss_told_wrong(stack: Stack) -> None:
    """The loss that is told leaves out the other ranks; gradients are right."""
    own = property(lambda self: self.loss_sum / self.weight + 0.01 * own_rank())
    patch(stack, exchange.Sums, "loss", own)


# -- pipelines and recompute ------------------------------------------------------------------------------------------


def tied_gradients_not_summed(stack: Stack) -> None:
    patch(stack, tied.TiedGradients, "sum", nothing)


def stale_activation(stack: Stack) -> None:
    """A stage computes on what it received for the micro-batch before."""
    original = p2p.Post.receive
    kept: dict[Any, Tensor] = {}

    def receive(self: Any, meta: Any, route: p2p.Route) -> Tensor:
        tensor = original(self, meta, route)
        key = (route.source, route.target, tuple(tensor.shape))
        before, kept[key] = kept.get(key, tensor), tensor.clone()
        return before.clone()

    patch(stack, p2p.Post, "receive", receive)


def boundary_gradient_lost(stack: Stack) -> None:
    original = stage.Stage._gather_gradients

    def lost(self: Any, passed: Any, micro_batch: int) -> Any:
        edges, gradients = original(self, passed, micro_batch)
        return edges, [torch.zeros_like(g) if micro_batch == 0 else g for g in gradients]

    patch(stack, stage.Stage, "_gather_gradients", lost)


def micro_batch_twice(stack: Stack) -> None:
    original = step.Stepper._micro_batches

    def twice(self: Any, batch: Any) -> list[Any]:
        parts = original(self, batch)
        return [parts[0], *parts[:-1]] if len(parts) > 1 else parts

    patch(stack, step.Stepper, "_micro_batches", twice)


def repeated_with_another_mask(stack: Stack) -> None:
    original = checkpointing._Twice.__call__

    def again(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self._before is not None:
            torch.rand(1)
        return original(self, *args, **kwargs)

    patch(stack, checkpointing._Twice, "__call__", again)


def repeated_on_another_input(stack: Stack) -> None:
    original = checkpointing._Twice.__call__

    def again(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self._before is not None and args and isinstance(args[0], Tensor):
            args = (args[0] * 1.01, *args[1:])
        return original(self, *args, **kwargs)

    patch(stack, checkpointing._Twice, "__call__", again)


def autocast_left_out_on_a_rank(stack: Stack) -> None:
    original = terms.LossTerms.autocast

    def autocast(self: Any) -> Any:
        return contextlib.nullcontext() if own_rank() == 1 else original(self)

    patch(stack, terms.LossTerms, "autocast", autocast)
