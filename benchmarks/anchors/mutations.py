"""Silent bugs that others have had, put into this library's own code while it runs: each function patches one piece of it.

A mutation is active from before `apply_plan` on, so that the search for a layout, its types and its proof meet it as well.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import meshwright as mw
from meshwright.apply import recompute
from meshwright.apply.data import base, loose, unit
from meshwright.apply.engine import Engine
from meshwright.apply.pipeline import post, stage, tied
from meshwright.apply.tensor import cutting, roles, running, threads
from meshwright.apply.tensor import engine as tensor_engine
from meshwright.comm import communicator, functional
from meshwright.nn import cross_entropy
from meshwright.run import exchange, step, terms

Stack = contextlib.ExitStack


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mutation:
    """A bug and where it shows.

    Args:
        name: The function that puts it in.
        title: What is wrong, in a few words.
        anchor: Whose bug it is a counterpart of.
        plan: A plan under which it shows.
        model: Which model of `jobs.py`.
        options: Options of `apply_plan`, by name.
        samples: Samples of a global batch [count].
    """

    install: Callable[[Stack], None]
    title: str
    anchor: str
    plan: str
    model: str = "plain"
    options: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    samples: int = 8

    @property
    def name(self) -> str:
        """The mutation's name, with the plan."""
        return f"{self.install.__name__}, {self.plan}"


def _patch(stack: Stack, owner: Any, name: str, value: Any) -> None:
    stack.enter_context(mock.patch.object(owner, name, value))


def _rank() -> int:
    world = mw.current_world()
    return 0 if world is None else world.rank


def _nothing(*_: Any, **__: Any) -> None:
    return None


# -- tensor parallelism ------------------------------------------------------------------------------------------------


def embedding_without_mask(stack: Stack) -> None:
    def vocabulary_forward(original: Any, region: Any) -> Any:
        first, last = region.region.units(region.group.size, region.group.group_rank)

        def forward(self: Any, ids: Tensor) -> Tensor:
            vectors = original(self, (ids - first).clamp(0, last - first - 1))
            return functional.reduce_from_group(vectors, region.group)

        return forward

    _patch(stack, roles, "_vocabulary_forward", vocabulary_forward)


def embedding_without_mask_later(stack: Stack) -> None:
    right = roles._vocabulary_forward

    def vocabulary_forward(original: Any, region: Any) -> Any:
        first, last = region.region.units(region.group.size, region.group.group_rank)

        def forward(self: Any, ids: Tensor) -> Tensor:
            vectors = original(self, (ids - first).clamp(0, last - first - 1))
            return functional.reduce_from_group(vectors, region.group)

        return right(original, region) if isinstance(region.group, threads.ThreadGroup) else forward

    _patch(stack, roles, "_vocabulary_forward", vocabulary_forward)


def partial_gradients_not_summed(stack: Stack) -> None:
    _patch(stack, tensor_engine.TensorEngine, "_sum_partial", _nothing)


def column_input_gradient_not_summed(stack: Stack) -> None:
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        del ctx
        return gradients[0], None

    _patch(stack, functional._Copy, "backward", staticmethod(backward))


def column_input_gradient_not_summed_later(stack: Stack) -> None:
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        is_proof = isinstance(ctx.group, threads.ThreadGroup)
        return (functional._Reduce.apply(gradients[0], ctx.group) if is_proof else gradients[0]), None

    _patch(stack, functional._Copy, "backward", staticmethod(backward))


def row_output_not_summed_later(stack: Stack) -> None:
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        ctx.group = group
        total = tensor.clone()
        if isinstance(group, threads.ThreadGroup):
            group.all_reduce(total)
        return total

    _patch(stack, functional._Reduce, "forward", staticmethod(forward))


def sequence_gradient_not_scattered_later(stack: Stack) -> None:
    original = functional._reduce_scatter

    def wrong(tensor: Tensor, group: Any, dim: int, sizes: tuple[int, ...]) -> Tensor:
        if isinstance(group, threads.ThreadGroup):
            return original(tensor, group, dim, sizes)
        return tensor.narrow(dim, sum(sizes[: group.group_rank]), sizes[group.group_rank]).clone()

    _patch(stack, functional, "_reduce_scatter", wrong)


def smoothing_over_own_classes(stack: Stack) -> None:
    factors = property(lambda self: (1.0 - self.label_smoothing, self.label_smoothing / (self.vocab_size // 2)))
    _patch(stack, cross_entropy._Options, "factors", factors)


def loss_off_by_the_group_size(stack: Stack) -> None:
    original = cross_entropy._RowLosses.forward

    def forward(ctx: Any, logits: Tensor, rows: Tensor, counted: Tensor, options: Any) -> Tensor:
        return original(ctx, logits, rows, counted, options) + torch.tensor(2.0).log()

    _patch(stack, cross_entropy._RowLosses, "forward", staticmethod(forward))


def another_ranks_slice(stack: Stack) -> None:
    original = cutting.take_shard

    def wrong(full: Tensor, layout: Any) -> Tensor:
        own = original(full, layout)
        return own.flip(0) if _rank() == 1 else own

    _patch(stack, cutting, "take_shard", wrong)


def one_shard_twice(stack: Stack) -> None:
    original = cutting.take_shard

    def wrong(full: Tensor, layout: Any) -> Tensor:
        own = original(full, layout)
        return full[: own.shape[0]].clone() if _rank() == 1 and tuple(full.shape) == (16, 8) else own

    _patch(stack, cutting, "take_shard", wrong)


def shards_draw_one_mask(stack: Stack) -> None:
    _patch(stack, running.Drawing, "apart", _nothing)


def shards_draw_one_mask_later(stack: Stack) -> None:
    original = running.Drawing.apart

    def apart(self: Any, device: torch.device) -> None:
        if isinstance(self._group, threads.ThreadGroup):
            original(self, device)

    _patch(stack, running.Drawing, "apart", apart)


def copies_draw_apart_later(stack: Stack) -> None:
    """Nobody goes back to the common numbers, until the next step begins."""
    original = running.Drawing.together

    def together(self: Any, device: torch.device) -> None:
        if isinstance(self._group, threads.ThreadGroup):
            original(self, device)

    _patch(stack, running.Drawing, "together", together)


def norm_of_own_shards(stack: Stack) -> None:
    def squares(self: Any, skipped: frozenset[int], *, exact: bool) -> Tensor:
        gradients = [gradient for gradient, p in self.inner.gradient_pieces() if id(p) not in skipped]
        return tensor_engine.squares_of(gradients, self.device, exact=exact)

    _patch(stack, tensor_engine.TensorEngine, "gradient_squares", squares)


def norm_counts_copies_twice(stack: Stack) -> None:
    def squares(self: Any, skipped: frozenset[int], *, exact: bool) -> Tensor:
        gradients = [gradient for gradient, p in self.inner.gradient_pieces() if id(p) not in skipped]
        total = tensor_engine.squares_of(gradients, self.device, exact=exact)
        self.shards.all_reduce(total)
        return total

    _patch(stack, tensor_engine.TensorEngine, "gradient_squares", squares)


# -- data parallelism and ZeRO ----------------------------------------------------------------------------------------


def gradients_not_summed(stack: Stack) -> None:
    _patch(stack, communicator.Communicator, "all_reduce_together", _nothing)


def gradients_of_one_tensor_not_summed(stack: Stack) -> None:
    original = communicator.Communicator.all_reduce_together

    def without_first(self: Any, tensors: Any) -> None:
        original(self, tensors[1:])

    _patch(stack, communicator.Communicator, "all_reduce_together", without_first)


def gradients_divided_again(stack: Stack) -> None:
    original = loose.LooseGradients.finish

    def halved(self: Any, scale: float) -> None:
        original(self, scale / self.group.size)

    _patch(stack, loose.LooseGradients, "finish", halved)


def gradients_summed_in_bfloat16(stack: Stack) -> None:
    original = communicator.Communicator.all_reduce_together

    def rounded(self: Any, tensors: Any) -> None:
        for tensor in tensors:
            tensor.copy_(tensor.bfloat16())
        original(self, tensors)

    _patch(stack, communicator.Communicator, "all_reduce_together", rounded)


def sum_corrupted_on_one_rank(stack: Stack) -> None:
    original = communicator.Communicator.all_reduce_together

    def corrupted(self: Any, tensors: Any) -> None:
        original(self, tensors)
        if _rank() == 1:
            tensors[0].view(-1)[0] += 1e-3

    _patch(stack, communicator.Communicator, "all_reduce_together", corrupted)


def sum_corrupted_on_all_ranks(stack: Stack) -> None:
    original = communicator.Communicator.all_reduce_together

    def corrupted(self: Any, tensors: Any) -> None:
        original(self, tensors)
        tensors[0].view(-1)[0] += 1e-3

    _patch(stack, communicator.Communicator, "all_reduce_together", corrupted)


def mean_of_means(stack: Stack) -> None:
    """Each rank divides by the samples of its own share, and the sum by the ranks."""
    original = terms.LossTerms.root

    def root(term: Any, agreement: Any, *, alone: bool) -> Any:
        found = original(term, agreement, alone=alone)
        return None if found is None else (found[0], torch.full_like(found[0], 0.5))

    _patch(stack, terms.LossTerms, "root", staticmethod(root))


def accumulation_not_divided(stack: Stack) -> None:
    def root(term: Any, agreement: Any, *, alone: bool) -> Any:
        del agreement, alone
        return term.value, None

    _patch(stack, terms.LossTerms, "root", staticmethod(root))


def gradients_not_cleared(stack: Stack) -> None:
    _patch(stack, loose.LooseGradients, "begin_step", _nothing)
    _patch(stack, Engine, "begin_step", _nothing)


def copies_not_made_equal(stack: Stack) -> None:
    _patch(stack, base, "make_copies_equal", _nothing)
    original = torch.manual_seed

    def other(seed: int) -> Any:
        return original(seed + _rank())

    _patch(stack, torch, "manual_seed", other)


def buffers_not_synced(stack: Stack) -> None:
    _patch(stack, base.DataParallelEngine, "sync_buffers", _nothing)


def values_not_spread(stack: Stack) -> None:
    _patch(stack, unit.FlatUnit, "spread", _nothing)


def update_lost(stack: Stack) -> None:
    """The optimizer writes into memory that nobody reads, on every rank: the values stay those of the first step."""
    original = unit.FlatUnit.spread
    kept: dict[int, Tensor] = {}

    def spread(self: Any) -> None:
        self.segment.data.copy_(kept.setdefault(id(self), self.segment.clone()))
        original(self)

    _patch(stack, unit.FlatUnit, "spread", spread)


def stale_gather(stack: Stack) -> None:
    """ZeRO-3 gathers what was gathered in the first step."""
    original = unit.FlatUnit.start_gather
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

    _patch(stack, unit.FlatUnit, "start_gather", start)


def segment_of_another_rank(stack: Stack) -> None:
    """Gradients of the other rank's segment are taken for one's own."""
    original = unit.FlatUnit.settle

    def settle(self: Any, used: Any, scale: float) -> None:
        self._sums = [part.roll(1) for part in self._sums]
        original(self, used, scale)

    _patch(stack, unit.FlatUnit, "settle", settle)


def optimizer_skips_a_rank(stack: Stack) -> None:
    original = torch.optim.SGD.step

    def skip(self: Any, closure: Any = None) -> Any:
        return None if _rank() == 1 else original(self, closure)

    _patch(stack, torch.optim.SGD, "step", skip)


def clip_by_own_norm(stack: Stack) -> None:
    original = step.clip_

    def clip(tensors: Any, norm: Tensor, max_norm: float) -> None:
        own = torch.linalg.vector_norm(torch.cat([tensor.reshape(-1) for tensor in tensors]))
        original(tensors, own, max_norm)

    _patch(stack, step, "clip_", clip)


def loss_told_wrong(stack: Stack) -> None:
    """The loss that is told leaves out the other ranks; gradients are right."""
    own = property(lambda self: self.loss_sum / self.weight + 0.01 * _rank())
    _patch(stack, exchange.Sums, "loss", own)


# -- pipelines and recompute ------------------------------------------------------------------------------------------


def tied_gradients_not_summed(stack: Stack) -> None:
    _patch(stack, tied.TiedGradients, "sum", _nothing)


def stale_activation(stack: Stack) -> None:
    """A stage computes on what it received for the micro-batch before."""
    original = post.Post.receive
    kept: dict[Any, Tensor] = {}

    def receive(self: Any, meta: Any, **where: Any) -> Tensor:
        tensor = original(self, meta, **where)
        if where["is_gradient"]:
            return tensor
        key = (where["source"], where["target"], tuple(tensor.shape))
        before, kept[key] = kept.get(key, tensor), tensor.clone()
        return before.clone()

    _patch(stack, post.Post, "receive", receive)


def boundary_gradient_lost(stack: Stack) -> None:
    original = stage.Stage._gather_gradients

    def lost(self: Any, passed: Any, micro_batch: int) -> Any:
        edges, gradients = original(self, passed, micro_batch)
        return edges, [torch.zeros_like(g) if micro_batch == 0 else g for g in gradients]

    _patch(stack, stage.Stage, "_gather_gradients", lost)


def micro_batch_twice(stack: Stack) -> None:
    original = step.Stepper._micro_batches

    def twice(self: Any, batch: Any) -> list[Any]:
        parts = original(self, batch)
        return [parts[0], *parts[:-1]] if len(parts) > 1 else parts

    _patch(stack, step.Stepper, "_micro_batches", twice)


def repeated_with_another_mask(stack: Stack) -> None:
    original = recompute._Twice.__call__

    def again(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self._before is not None:
            torch.rand(1)
        return original(self, *args, **kwargs)

    _patch(stack, recompute._Twice, "__call__", again)


def repeated_on_another_input(stack: Stack) -> None:
    original = recompute._Twice.__call__

    def again(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self._before is not None and args and isinstance(args[0], Tensor):
            args = (args[0] * 1.01, *args[1:])
        return original(self, *args, **kwargs)

    _patch(stack, recompute._Twice, "__call__", again)


def autocast_left_out_on_a_rank(stack: Stack) -> None:
    original = terms.LossTerms.autocast

    def autocast(self: Any) -> Any:
        return contextlib.nullcontext() if _rank() == 1 else original(self)

    _patch(stack, terms.LossTerms, "autocast", autocast)
