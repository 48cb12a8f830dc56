"""Order of messages between stages: NCCL delivers them in the order in which they were sent, and knows no tags."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
from tests.parity import cases, harness

import meshwright as mw
from meshwright.comm.communicator import Communicator


def orders_of(name: str, plan: str, num_samples: int = 8) -> tuple[int, dict[tuple[str, int], list[int]]]:
    """Return this rank and, by ("send" or "receive", the other rank), the tags of two steps' messages in their order."""
    found: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
    send, receive = Communicator.send, Communicator.receive

    def noted_send(self: Communicator, tensor: Any, target: int, tag: int) -> Any:
        found["send", self.ranks[target]].append(tag)
        return send(self, tensor, target, tag)

    def noted_receive(self: Communicator, tensor: Any, source: int, tag: int, **options: Any) -> None:
        found["receive", self.ranks[source]].append(tag)
        receive(self, tensor, source, tag, **options)

    case = cases.find(name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Communicator, "send", noted_send)
        patch.setattr(Communicator, "receive", noted_receive)
        with mw.apply_plan(case.build, plan, loss_fn=case.loss_fn, optimizer=case.optimizer or harness_sgd) as model:
            for step in range(2):
                model.step(mw.split_batch(case.batch(num_samples, step), model))
            world = mw.current_world()
            return (0 if world is None else world.rank), dict(found)


def harness_sgd(parameters: Any) -> Any:
    import torch

    return torch.optim.SGD(parameters, lr=0.1)


__all__ = ["harness", "orders_of"]
