"""Which optimizers may work on pieces of parameters, and giving them the pieces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from meshwright.errors import ApplyError

__all__: list[str] = []

_PER_ELEMENT = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.ASGD,
)


def acts_per_element(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether an optimizer treats each element by itself, so that it computes the same on pieces.

    torch's own are known; any other is tried on a small matrix, whole and in two flat pieces.
    """
    if type(optimizer) in _PER_ELEMENT:
        return True
    try:
        whole, pieces = _updates(optimizer, cut=False), _updates(optimizer, cut=True)
    except Exception:  # noqa: BLE001 - somebody's class, which may want anything: then it gets whole matrices
        return False
    return torch.equal(whole, pieces)


def _updates(optimizer: torch.optim.Optimizer, *, cut: bool) -> torch.Tensor:
    """Return a [6, 4] matrix after three steps of such an optimizer."""
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(6, 4, dtype=torch.float64, generator=generator)
    gradients = [torch.randn(6, 4, dtype=torch.float64, generator=generator) for _ in range(3)]
    flat = matrix.reshape(-1)
    parts = [flat[:7], flat[7:]] if cut else [matrix]
    parameters = [nn.Parameter(part) for part in parts]
    options = {key: value for key, value in optimizer.param_groups[0].items() if key not in ("params", "param_names")}
    twin = type(optimizer)(parameters, **{key: options[key] for key in optimizer.defaults if key in options})
    for gradient in gradients:
        flat_gradient = gradient.reshape(-1)
        for parameter, part in zip(
            parameters, [flat_gradient[:7], flat_gradient[7:]] if cut else [gradient], strict=True
        ):
            parameter.grad = part.clone()
        twin.step()
    return matrix


def require_fresh(optimizer: torch.optim.Optimizer) -> None:
    """Raise ApplyError where an optimizer holds state already: that state is of whole parameters."""
    if len(optimizer.state):
        raise ApplyError(
            f"the optimizer holds state of {len(optimizer.state)} whole parameters already, which this plan shards",
            fix="pass a factory such as functools.partial(torch.optim.AdamW, lr=3e-4), or an optimizer that has not stepped",
        )


def hand_over_pieces(optimizer: torch.optim.Optimizer, pieces: Mapping[int, Sequence[nn.Parameter]]) -> None:
    """Have an optimizer work on pieces instead of parameters; its groups and their options stay.

    Args:
        optimizer: The optimizer; it has no state.
        pieces: id of a parameter -> what this rank holds of it: one piece, or none. Others stay as they are.
    """
    for group in optimizer.param_groups:
        kept = [
            (piece, name)
            for parameter, name in zip(group["params"], _names(group), strict=True)
            for piece in pieces.get(id(parameter), (parameter,))
        ]
        group["params"][:] = [piece for piece, _ in kept]
        if "param_names" in group:
            group["param_names"][:] = [name for _, name in kept]


def _names(group: Mapping[str, list[str]]) -> Sequence[str]:
    return group.get("param_names") or [""] * len(group["params"])
