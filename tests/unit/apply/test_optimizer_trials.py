"""Which optimizers may work on pieces of parameters, and which on some of the parameters alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.apply.data.optimizer import acts_per_element, refuse_coupled


def _parameters(count: int = 3) -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(4, 3)) for _ in range(count)]


class _Own(torch.optim.Optimizer):
    """An optimizer by a rule: (optimizer, its parameters) -> nothing."""

    def __init__(self, rule: Callable[[Any, list[Tensor]], None], groups: Any = None, **options: Any) -> None:
        super().__init__(groups or _parameters(), {"lr": 0.1, "whole": False, **options})
        self.rule = rule
        self.num_steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        del closure
        self.num_steps += 1
        self.rule(self, [p for group in self.param_groups for p in group["params"]])


def _norm(parameters: list[Tensor]) -> Tensor:
    return torch.stack([p.grad.square().sum() for p in parameters]).sum().sqrt()


def _by_global_norm(_: Any, parameters: list[Tensor]) -> None:
    norm = _norm(parameters)
    for p in parameters:
        p.sub_(0.1 * p.grad / norm)


def _clipped_high(_: Any, parameters: list[Tensor]) -> None:
    factor = min(1.0, 1e4 / float(_norm(parameters)))
    for p in parameters:
        p.sub_(0.1 * factor * p.grad)


def _by_distance(optimizer: Any, parameters: list[Tensor]) -> None:
    """The step size follows how far all parameters have come, as in D-Adaptation and Prodigy."""
    group = optimizer.param_groups[0]
    for p in parameters:
        optimizer.state[p].setdefault("first", p.clone())
    travelled = sum(float((p.grad * (optimizer.state[p]["first"] - p)).sum()) for p in parameters)
    group["d"] = max(group["d"], 0.1 * travelled / sum(float(p.grad.abs().sum()) for p in parameters))
    for p in parameters:
        p.sub_(group["d"] * p.grad.sign())


def _across_groups(optimizer: Any, parameters: list[Tensor]) -> None:
    mean = torch.stack([group["params"][0].grad.mean() for group in optimizer.param_groups]).mean()
    for p in parameters:
        p.sub_(0.1 * (p.grad - mean))


def _plain(_: Any, parameters: list[Tensor]) -> None:
    for p in parameters:
        p.sub_(0.1 * p.grad)


def _by_matrix(optimizer: Any, _: list[Tensor]) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.sub_(group["lr"] * p.grad / (p.grad.norm() if group["whole"] else 1.0))


def _of_large_matrices(_: Any, parameters: list[Tensor]) -> None:
    for p in parameters:
        is_large = p.dim() == 2 and min(p.shape) >= 30
        p.sub_(0.1 * (p.grad - p.grad.mean(1, keepdim=True) if is_large else p.grad))


def _of_kernels(_: Any, parameters: list[Tensor]) -> None:
    for p in parameters:
        p.sub_(0.1 * (p.grad - p.grad.mean((1, 2, 3), keepdim=True) if p.dim() == 4 else p.grad))


def _two_groups(**options: Any) -> list[dict[str, Any]]:
    return [{"params": _parameters(2)}, {"params": _parameters(2), **options}]


class _OwnSgd(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.mark.parametrize(
    "make",
    [
        lambda: _Own(_by_global_norm),
        lambda: _Own(_clipped_high),
        lambda: _Own(_by_distance, d=1e-3),
        lambda: _Own(_across_groups, _two_groups()),
    ],
)
def test_coupled_optimizers_are_refused(make: Callable[[], Any]) -> None:
    optimizer = make()
    with pytest.raises(mw.ApplyError, match="_Own updates two parameters in one optimizer otherwise than in two"):
        refuse_coupled(optimizer, "pp=2")
    assert not acts_per_element(optimizer)
    assert not optimizer.state
    assert optimizer.num_steps == 0


@pytest.mark.parametrize(
    ("make", "per_element"),
    [
        (lambda: _Own(_plain), True),
        (lambda: _OwnSgd(_parameters(), lr=0.1, momentum=0.9), True),
        (lambda: _Own(_by_matrix, _two_groups()), True),
        (lambda: _Own(_by_matrix, _two_groups(whole=True)), False),  # the second group alone
        (lambda: torch.optim.Adafactor(_parameters()), False),
        (lambda: torch.optim.AdamW(_parameters()), True),
    ],
)
def test_optimizers_that_update_each_parameter_for_itself(make: Callable[[], Any], per_element: bool) -> None:
    optimizer = make()
    refuse_coupled(optimizer, "pp=2")
    assert acts_per_element(optimizer) == per_element


@pytest.mark.parametrize(
    ("rule", "shapes", "per_element"),
    [
        (_of_large_matrices, [(4, 4), (32, 40), (600, 700)], False),
        (_of_large_matrices, [(4, 400), (8,)], True),
        (_of_kernels, [(16, 8), (8, 4, 3, 3)], False),
    ],
)
def test_the_shapes_that_an_optimizer_has_decide(rule: Any, shapes: list[tuple[int, ...]], per_element: bool) -> None:
    optimizer = _Own(rule, [nn.Parameter(torch.ones(shape)) for shape in shapes])
    assert acts_per_element(optimizer) == per_element


def test_a_scheduler_that_starts_at_zero_hides_nothing() -> None:
    optimizer = _Own(_by_matrix, _two_groups(whole=True))
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 0.0)
    before = [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]
    refuse_coupled(optimizer, "pp=2")
    assert not acts_per_element(optimizer)
    after = [p for group in optimizer.param_groups for p in group["params"]]
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))


class _Outside(torch.optim.Optimizer):
    """Works on parameters of its own memory, not on those of its groups."""

    def __init__(self) -> None:
        parameters = _parameters()
        super().__init__(parameters, {"lr": 0.1})
        self.inner = torch.optim.SGD(parameters, lr=0.1)

    def step(self, closure: Any = None) -> None:
        del closure
        self.inner.step()


@pytest.mark.parametrize("make", [_Outside, lambda: torch.optim.LBFGS(_parameters())])
def test_optimizers_that_cannot_be_tried_are_refused(make: Callable[[], Any]) -> None:
    with pytest.raises(mw.ApplyError, match="could not be tried"):
        refuse_coupled(make(), "dp=2,zero=1")
