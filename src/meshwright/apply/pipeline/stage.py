"""One stage at work: forward of a micro-batch, and its backward."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

from meshwright.apply.pipeline.draws import Draws
from meshwright.apply.pipeline.interception import UnderWay
from meshwright.apply.pipeline.post import Post
from meshwright.apply.pipeline.shapes import ReadsValueError, Shapes
from meshwright.apply.pipeline.split import Rest, SplitBackward, run_rest
from meshwright.apply.pipeline.stages import StageMap
from meshwright.apply.pipeline.values import Meta, value_of
from meshwright.apply.pipeline.walk import Walk

__all__: list[str] = []

T = TypeVar("T")


@dataclasses.dataclass(slots=True)
class _Passed:
    """What the forward of a micro-batch leaves for its backward."""

    sent: list[tuple[Tensor, int]]
    received: list[tuple[Tensor, int]]
    split: SplitBackward | None


class Stage:
    """One stage of a pipeline.

    Args:
        index: The stage.
        module: The user's module.
        stage_map: Which stage runs what.
        shapes: What other stages' calls give.
        post: The way to the other stages.
        draws: Random numbers.
        under_way: Where to say which forward is under way.
    """

    def __init__(
        self,
        index: int,
        module: nn.Module,
        stage_map: StageMap,
        *,
        shapes: Shapes,
        post: Post,
        draws: Draws,
        under_way: UnderWay,
    ) -> None:
        self.index = index
        self._module = module
        self._map = stage_map
        self._shapes = shapes
        self._post = post
        self._draws = draws
        self._passed: dict[int, _Passed] = {}
        self._rest: dict[int, list[Rest]] = {}
        self._under_way = under_way

    def forward(self, micro_batch: int, run: Callable[[nn.Module], T], *, in_halves: bool = False) -> T | None:
        """Run this stage's part of a forward; tensors of other stages are fake in what is returned.

        None where the loss reads numbers that other stages have, and needs nothing of this one. `in_halves` says how its
        backward will be run.
        """
        mail = _Mail(self._post, self.index, micro_batch)
        walk = Walk(self.index, self._map.stage_of, self._shapes, mail, self._draws)
        self._under_way.walk = walk
        split = SplitBackward() if in_halves and torch.is_grad_enabled() else None
        try:
            with self._draws.between_layers(micro_batch), split or contextlib.nullcontext(), walk:
                result = run(self._module)
        except ReadsValueError:
            if not walk.owes_nothing_to_the_loss:
                raise
            result = None
        finally:
            self._under_way.walk = None
        if torch.is_grad_enabled():
            self._passed[micro_batch] = _Passed(
                [(tensor, stage) for tensor, stage in walk.sent if tensor.requires_grad],
                [(leaf, stage) for leaf, stage in walk.received if leaf.requires_grad],
                split,
            )
        return result

    def home_of(self, tensor: Tensor) -> int:
        """Return the stage that computes a tensor which `forward` returned; for what every stage has the last one."""
        value = value_of(tensor)
        return self._map.num_stages - 1 if value is None or value.home is None else value.home

    def backward(self, micro_batch: int, root: tuple[Tensor, Tensor | None] | None) -> None:
        """Run this stage's part of a backward; where it runs in halves, the half that other stages wait for.

        Args:
            micro_batch: The micro-batch.
            root: The loss and its gradient, on the stage that computes it.
        """
        passed = self._passed.pop(micro_batch)
        roots, gradients = self._gather_gradients(passed, micro_batch)
        if root is not None:
            roots.append(root[0])
            gradients.append(torch.ones_like(root[0]) if root[1] is None else root[1])
        if roots and passed.split is None:
            torch.autograd.backward(roots, gradients)
        elif roots and passed.split is not None:
            self._rest[micro_batch] = passed.split.backward(roots, gradients)
        for leaf, stage in passed.received:
            gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            self._post.send(gradient, source=self.index, target=stage, micro_batch=micro_batch, is_gradient=True)

    def run_rest(self, micro_batch: int) -> None:
        """Run the half of a backward that nobody waits for."""
        run_rest(self._rest.pop(micro_batch, []))

    def _gather_gradients(self, passed: _Passed, micro_batch: int) -> tuple[list[Tensor], list[Tensor]]:
        """Return each tensor that went to other stages, once, and the sum of the gradients that came back for it."""
        sums: dict[int, tuple[Tensor, Tensor]] = {}
        for tensor, stage in passed.sent:
            meta = Meta.of(tensor)
            gradient = self._post.receive(
                meta, source=stage, target=self.index, micro_batch=micro_batch, is_gradient=True
            )
            known = sums.get(id(tensor))
            sums[id(tensor)] = (tensor, gradient if known is None else known[1] + gradient)
        return [tensor for tensor, _ in sums.values()], [gradient for _, gradient in sums.values()]

    def forget(self) -> None:
        """Forget what a step that ended in an error has left behind."""
        self._passed.clear()
        self._rest.clear()


class _Mail:
    """The post of one stage for one micro-batch's forward."""

    __slots__ = ("_micro_batch", "_post", "_stage")

    def __init__(self, post: Post, stage: int, micro_batch: int) -> None:
        self._post = post
        self._stage = stage
        self._micro_batch = micro_batch

    def send(self, tensor: Tensor, stage: int) -> None:
        self._post.send(tensor, source=self._stage, target=stage, micro_batch=self._micro_batch, is_gradient=False)

    def receive(self, meta: Meta, stage: int) -> Tensor:
        return self._post.receive(
            meta, source=stage, target=self._stage, micro_batch=self._micro_batch, is_gradient=False
        )
