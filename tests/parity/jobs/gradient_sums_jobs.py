"""Functions that ranks import: gradients of which several ranks have terms."""

from __future__ import annotations

from typing import Any

import torch
from tests.parity import harness
from torch import Tensor, nn

import meshwright as mw
from meshwright.apply.gradient_sums import sum_gradients, sum_term
from meshwright.ranks.join import join_world


def _sparse(rows: list[int], value: float) -> Tensor:
    values = torch.full((len(rows), 2), value, dtype=torch.float64)
    return torch.sparse_coo_tensor(torch.tensor([rows]), values, (4, 2), check_invariants=True)


def terms(rank: int) -> dict[str, tuple[nn.Parameter, Tensor | None]]:
    """Return by name a parameter and this rank's term of its gradient, or None."""
    plain, complex_kind = {"dtype": torch.float64}, {"dtype": torch.complex128}
    scale = 1.0 + rank
    frozen = nn.Parameter(torch.zeros(2, **plain), requires_grad=False)
    return {
        "on all": (nn.Parameter(torch.zeros(3, **plain)), torch.full((3,), scale, **plain)),
        "on one": (nn.Parameter(torch.zeros(2, 2, **plain)), torch.ones(2, 2, **plain) if rank == 1 else None),
        "on none": (nn.Parameter(torch.zeros(2, **plain)), None),
        "frozen": (frozen, None),
        "complex": (nn.Parameter(torch.zeros(2, **complex_kind)), torch.full((2,), 1j * scale, **complex_kind)),
        "complex on one": (
            nn.Parameter(torch.zeros(2, **complex_kind)),
            torch.full((2,), 2 + 1j, **complex_kind) if rank == 0 else None,
        ),
        "sparse": (nn.Parameter(torch.zeros(4, 2, **plain)), _sparse([0, 0, 2] if rank == 0 else [2], scale)),
        "float32": (nn.Parameter(torch.zeros(2)), torch.full((2,), scale)),
    }


def summed() -> dict[str, Tensor | None]:
    """Return the gradients that this rank has after the ranks' terms were summed at the end."""
    world = join_world()
    given = terms(world.rank)
    for parameter, gradient in given.values():
        parameter.grad = gradient
    sum_gradients([parameter for parameter, _ in given.values()], world.default_group)
    return {name: parameter.grad for name, (parameter, _) in given.items()}


def summed_in_backward() -> dict[str, Tensor]:
    """Return what a hook makes of the terms that every rank has."""
    world = join_world()
    given = terms(world.rank)
    return {
        name: sum_term(world.default_group, gradient)
        for name in ("on all", "complex", "sparse")
        if (gradient := given[name][1]) is not None
    }


def take_away(parameter: Tensor) -> None:
    parameter.grad = None


def refusal_of_taken(plan: str) -> tuple[str, str | None]:
    """Return with what a step is refused in which a hook takes a gradient away on one rank before it was summed."""
    torch.manual_seed(0)
    build: Any = lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4), nn.LayerNorm(4)).double()  # noqa: E731
    model = mw.apply_plan(build, plan, loss_fn=lambda outputs, _: outputs.square().mean())
    inputs = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    share = mw.split_batch((inputs, torch.zeros(4)), model)
    model.stepper.prepare(share)
    for name, parameter in model.named_parameters():
        if name == "0.weight":
            parameter.register_post_accumulate_grad_hook(take_away)
    return harness.refused(model.step, share)
