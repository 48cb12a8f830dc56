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
from meshwright.apply.tensor import cutting, region_state, roles
from meshwright.apply.tensor import engine as tensor_engine
from meshwright.apply.tensor.proof import threads
from meshwright.comm import functional
from meshwright.nn import cross_entropy

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


def patch(stack: Stack, owner: Any, name: str, value: Any) -> None:
    stack.enter_context(mock.patch.object(owner, name, value))


def own_rank() -> int:
    world = mw.current_world()
    return 0 if world is None else world.rank


def nothing(*_: Any, **__: Any) -> None:
    return None


# -- tensor parallelism ------------------------------------------------------------------------------------------------


def embedding_without_mask(stack: Stack) -> None:
    def vocabulary_forward(original: Any, region: Any) -> Any:
        first, last = region.region.units(region.group.size, region.group.group_rank)

        def forward(self: Any, ids: Tensor) -> Tensor:
            vectors = original(self, (ids - first).clamp(0, last - first - 1))
            return functional.reduce_from_group(vectors, region.group)

        return forward

    patch(stack, roles, "_vocabulary_forward", vocabulary_forward)


def embedding_without_mask_later(stack: Stack) -> None:
    right = roles._vocabulary_forward

    def vocabulary_forward(original: Any, region: Any) -> Any:
        first, last = region.region.units(region.group.size, region.group.group_rank)

        def forward(self: Any, ids: Tensor) -> Tensor:
            vectors = original(self, (ids - first).clamp(0, last - first - 1))
            return functional.reduce_from_group(vectors, region.group)

        return right(original, region) if isinstance(region.group, threads.ThreadGroup) else forward

    patch(stack, roles, "_vocabulary_forward", vocabulary_forward)


def partial_gradients_not_summed(stack: Stack) -> None:
    patch(stack, tensor_engine, "sum_gradients", nothing)


def column_input_gradient_not_summed(stack: Stack) -> None:
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        del ctx
        return gradients[0], None

    patch(stack, functional._Copy, "backward", staticmethod(backward))


def column_input_gradient_not_summed_later(stack: Stack) -> None:
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        is_proof = isinstance(ctx.group, threads.ThreadGroup)
        return (functional._Reduce.apply(gradients[0], ctx.group) if is_proof else gradients[0]), None

    patch(stack, functional._Copy, "backward", staticmethod(backward))


def row_output_not_summed_later(stack: Stack) -> None:
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        ctx.group = group
        total = tensor.clone()
        if isinstance(group, threads.ThreadGroup):
            group.all_reduce(total)
        return total

    patch(stack, functional._Reduce, "forward", staticmethod(forward))


def sequence_gradient_not_scattered_later(stack: Stack) -> None:
    original = functional._reduce_scatter

    def wrong(tensor: Tensor, group: Any, dim: int, sizes: tuple[int, ...]) -> Tensor:
        if isinstance(group, threads.ThreadGroup):
            return original(tensor, group, dim, sizes)
        return tensor.narrow(dim, sum(sizes[: group.group_rank]), sizes[group.group_rank]).clone()

    _, conjugate = functional._EXCHANGES["reduce_scatter"]
    stack.enter_context(mock.patch.dict(functional._EXCHANGES, reduce_scatter=(wrong, conjugate)))


def smoothing_over_own_classes(stack: Stack) -> None:
    factors = property(lambda self: (1.0 - self.label_smoothing, self.label_smoothing / (self.vocab_size // 2)))
    patch(stack, cross_entropy._LossOptions, "factors", factors)


def loss_off_by_the_group_size(stack: Stack) -> None:
    original = cross_entropy._RowLosses.forward

    def forward(ctx: Any, logits: Tensor, rows: Tensor, counted: Tensor, options: Any) -> Tensor:
        return original(ctx, logits, rows, counted, options) + torch.tensor(2.0).log()

    patch(stack, cross_entropy._RowLosses, "forward", staticmethod(forward))


def another_ranks_slice(stack: Stack) -> None:
    original = cutting.take_shard

    def wrong(full: Tensor, layout: Any) -> Tensor:
        own = original(full, layout)
        return own.flip(0) if own_rank() == 1 else own

    patch(stack, cutting, "take_shard", wrong)


def one_shard_twice(stack: Stack) -> None:
    original = cutting.take_shard

    def wrong(full: Tensor, layout: Any) -> Tensor:
        own = original(full, layout)
        return full[: own.shape[0]].clone() if own_rank() == 1 and tuple(full.shape) == (16, 8) else own

    patch(stack, cutting, "take_shard", wrong)


def shards_draw_one_mask(stack: Stack) -> None:
    patch(stack, region_state.Drawing, "apart", nothing)


def shards_draw_one_mask_later(stack: Stack) -> None:
    original = region_state.Drawing.apart

    def apart(self: Any, device: torch.device) -> None:
        if isinstance(self._group, threads.ThreadGroup):
            original(self, device)

    patch(stack, region_state.Drawing, "apart", apart)


def copies_draw_apart_later(stack: Stack) -> None:
    """Nobody goes back to the common numbers, until the next step begins."""
    original = region_state.Drawing.together

    def together(self: Any, device: torch.device) -> None:
        if isinstance(self._group, threads.ThreadGroup):
            original(self, device)

    patch(stack, region_state.Drawing, "together", together)


def norm_of_own_shards(stack: Stack) -> None:
    def squares(self: Any, skipped: frozenset[int], *, exact: bool) -> Tensor:
        gradients = [gradient for gradient, p in self.inner.gradient_pieces() if id(p) not in skipped]
        return tensor_engine.squares_of(gradients, self.device, exact=exact)

    patch(stack, tensor_engine.TensorEngine, "gradient_squares", squares)


def norm_counts_copies_twice(stack: Stack) -> None:
    def squares(self: Any, skipped: frozenset[int], *, exact: bool) -> Tensor:
        gradients = [gradient for gradient, p in self.inner.gradient_pieces() if id(p) not in skipped]
        total = tensor_engine.squares_of(gradients, self.device, exact=exact)
        self.tp_group.all_reduce(total)
        return total

    patch(stack, tensor_engine.TensorEngine, "gradient_squares", squares)
