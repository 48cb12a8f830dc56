"""What travels between the stages of one pipeline."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable

import torch
from torch import Tensor

from meshwright.apply.pipeline.values import Meta
from meshwright.comm.communicator import Communicator, Pending

__all__: list[str] = []


class Post:
    """Sends and receives for the stages of this rank.

    A message has its own tag, which says between which stages it travels, for which micro-batch and in which direction; so the
    ranks need not agree on an order. A stage on the same rank gets the tensor itself.

    Args:
        group: The ranks of one pipeline.
        rank_of_stage: Stage -> the group's rank that holds it.
        num_stages: Stages [count].
    """

    def __init__(self, group: Communicator, rank_of_stage: Callable[[int], int], num_stages: int) -> None:
        self.group = group
        self._rank_of = [rank_of_stage(stage) for stage in range(num_stages)]
        self._under_way: deque[tuple[Pending, Tensor]] = deque()
        self._boxes: defaultdict[int, deque[Tensor]] = defaultdict(deque)

    def _tag(self, source: int, target: int, micro_batch: int, *, is_gradient: bool) -> int:
        num = len(self._rank_of)
        return (((micro_batch * num) + source) * num + target) * 2 + is_gradient

    def send(self, tensor: Tensor, *, source: int, target: int, micro_batch: int, is_gradient: bool) -> None:
        """Start to send a tensor from a stage of this rank to another."""
        tag = self._tag(source, target, micro_batch, is_gradient=is_gradient)
        rank = self._rank_of[target]
        if rank == self.group.group_rank:
            self._boxes[tag].append(tensor)
            return
        tensor = tensor.contiguous()
        if tensor.numel():
            self._under_way.append((self.group.send(tensor, rank, tag), tensor))
        while self._under_way and self._under_way[0][0].is_done:
            self._under_way.popleft()

    def receive(self, meta: Meta, *, source: int, target: int, micro_batch: int, is_gradient: bool) -> Tensor:
        """Return the next tensor that another stage sends to one of this rank: contiguous, or the sender's own."""
        tag = self._tag(source, target, micro_batch, is_gradient=is_gradient)
        rank = self._rank_of[source]
        if rank == self.group.group_rank:
            return self._boxes[tag].popleft()
        tensor = torch.empty(meta.shape, dtype=meta.dtype, device=meta.device)
        if tensor.numel():
            self.group.receive(tensor, rank, tag)
        return tensor

    def finish(self) -> None:
        """Return when everything that was sent has left."""
        while self._under_way:
            self._under_way.popleft()[0].wait()

    def forget(self) -> None:
        """Forget what a step that ended in an error has left behind."""
        self._under_way.clear()
        self._boxes.clear()
