"""A student that learns from a teacher's outputs, and a moving average of the student, each under the same plan.

python examples/loops/distillation.py [PLAN]
"""

from __future__ import annotations

import functools
import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshwright as mw


def classifier(num_hidden: int) -> nn.Module:
    return nn.Sequential(nn.Linear(16, num_hidden), nn.GELU(), nn.Linear(num_hidden, 10)).double()


def batch_of(num_samples: int, step: int) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(step)
    x = torch.randn(num_samples, 16, generator=draws, dtype=torch.float64)
    return x, x[:, :10].argmax(dim=1)


def train(plan: str = "single", steps: int = 50, samples: int = 33) -> list[float]:
    """Train on every rank; return the losses, and at the end how far the average's outputs are from the teacher's."""
    teacher = mw.apply_plan(functools.partial(classifier, 64), plan, seed=1)
    student = mw.apply_plan(
        functools.partial(classifier, 32), plan, optimizer=functools.partial(torch.optim.SGD, lr=0.1)
    )
    average = mw.apply_plan(functools.partial(classifier, 32), plan)
    losses: list[float] = []
    for step in range(steps):
        x, labels = mw.split_batch(batch_of(samples, step), student)
        with torch.no_grad():
            soft = teacher(x).softmax(dim=1)
        logits = student(x)
        loss = F.cross_entropy(logits, labels) + F.cross_entropy(logits, soft)
        student.zero_grad()
        losses.append(student.backward(loss, weight=len(x)))
        student.optimizer.step()
        with student.whole_parameters(), average.whole_parameters(), torch.no_grad():
            for mean, now in zip(average.parameters(), student.parameters(), strict=True):
                mean.lerp_(now, 0.1)
    average.eval()
    state = average.full_state_dict()
    losses.append(sum(value.square().sum().item() for value in state.values()))
    for model in (teacher, student, average):
        model.close()
    return losses


if __name__ == "__main__":
    plan = sys.argv[1] if len(sys.argv) > 1 else "single"
    print(mw.launch(train, mw.Plan.parse(plan).num_ranks, plan)[0][-3:])
