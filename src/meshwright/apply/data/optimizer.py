"""Check of optimizers that shall update pieces of parameters, or only some of the parameters, and handover of the pieces.

torch's own optimizers are known. Any other is tried on small parameters, for each group with that group's options. One trial
compares a matrix, and tensors like the group's own, with the same in two pieces, the other two parameters in one optimizer with
each in its own.
"""

from __future__ import annotations

import collections
import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from meshwright.errors import ApplyError

__all__: list[str] = []


class HoldsPieces(Protocol):
    """Flat memory of several parameters, as this file sees it; see `flat_unit.FlatUnit`."""

    parameters: list[nn.Parameter]
    pieces: list[Any]

    def cut(self, value: Tensor, piece: Any) -> Tensor: ...


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
_PER_PARAMETER = (*_PER_ELEMENT, torch.optim.Adafactor, torch.optim.Muon, torch.optim.SparseAdam)

# Factors of a trial's gradients: a limit on the norm shows at one size or the other, slow statistics after some steps.
_SCALES = (1.0, 1e-3, 1e3, 1.0, 1e5, 1.0, 0.1, 10.0) * 2
_SHAPE = (6, 4)
_MAX_ENTRIES = 2**16
"""Of a parameter that an optimizer is tried on [count]."""
_TOLERANCE = 1e-9  # relative; a coupling of parameters exceeds it by far, a reordered sum stays far below


def acts_per_element(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether an optimizer treats each element by itself, in every group, so that it computes the same on pieces."""
    if type(optimizer) in _PER_ELEMENT:
        return True
    try:
        return all(_is_cut_alike(optimizer, group) for group in optimizer.param_groups) and not _couples(optimizer)
    except Exception:  # noqa: BLE001 - somebody's class, which may want anything: then it gets whole matrices
        return False


def refuse_coupled(optimizer: torch.optim.Optimizer, plan: str) -> None:
    """Raise ApplyError where a parameter's update depends on other parameters, of which each rank has only some.

    Args:
        optimizer: The optimizer, before its parameters are dealt out.
        plan: The plan, for the error.
    """
    name = type(optimizer).__name__
    fix = "use a plan in which each rank holds all parameters (dp, tp with zero=0), or an optimizer without such a statistic"
    if type(optimizer) in _PER_PARAMETER:
        return
    try:
        is_coupled = _couples(optimizer)
    except Exception as error:
        raise ApplyError(
            f"{name} could not be tried on small parameters ({type(error).__name__}: {error}), and the plan '{plan}' gives "
            "each rank only some of the parameters: whether that changes its updates is not known",
            fix=fix,
        ) from error
    if is_coupled:
        raise ApplyError(
            f"{name} updates two parameters in one optimizer otherwise than in two (a norm or another statistic over all of "
            f"them), and the plan '{plan}' gives each rank only some of the parameters",
            fix=fix,
        )


def _couples(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether a parameter's update depends on other parameters of the optimizer, in its group or in another."""
    groups = [group for group in optimizer.param_groups if group["params"]]
    for group in groups:
        together, apart = _update(optimizer, [(group, 2)]), []
        for index in range(2):
            apart += _update(optimizer, [(group, 2)], only=index)
        if not _are_close(together, apart):
            return True
    if len(groups) < 2:
        return False
    together = _update(optimizer, [(group, 1) for group in groups])
    apart = [t for index in range(len(groups)) for t in _update(optimizer, [(g, 1) for g in groups], only=index)]
    return not _are_close(together, apart)


def _is_cut_alike(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> bool:
    for shape in dict.fromkeys([_SHAPE, *_shapes_of(group["params"])]):
        whole = torch.cat([t.reshape(-1) for t in _update(optimizer, [(group, 1)], shape=shape)])
        pieces = torch.cat([t.reshape(-1) for t in _update(optimizer, [(group, 1)], cut=7, shape=shape)])
        if not torch.equal(whole, pieces):
            return False
    return True


def _shapes_of(parameters: Sequence[Tensor]) -> list[tuple[int, ...]]:
    """Return the largest shape of each number of dims, made smaller where it is large: updates may depend on either."""
    largest: dict[int, tuple[int, ...]] = {}
    for shape in (tuple(parameter.shape) for parameter in parameters if parameter.numel() >= _SHAPE[0] * _SHAPE[1]):
        if math.prod(shape) > math.prod(largest.get(len(shape), (0,))):
            largest[len(shape)] = shape
    return [_fitted(shape) for shape in largest.values()]


def _fitted(shape: tuple[int, ...]) -> tuple[int, ...]:
    sizes = list(shape)
    while math.prod(sizes) > _MAX_ENTRIES:
        place = sizes.index(max(sizes))
        sizes[place] = (sizes[place] + 1) // 2
    return tuple(sizes)


def _are_close(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    return all(
        torch.allclose(a, b, rtol=_TOLERANCE, atol=0.0, equal_nan=True) for a, b in zip(left, right, strict=True)
    )


def _update(
    optimizer: torch.optim.Optimizer,
    wanted: Sequence[tuple[Mapping[str, Any], int]],
    *,
    only: int | None = None,
    cut: int | None = None,
    shape: tuple[int, ...] = _SHAPE,
) -> list[Tensor]:
    """Return small parameters after some steps of an optimizer like this one.

    Args:
        optimizer: Gives class, options and attributes; it is not changed.
        wanted: Groups, and the number of parameters in each.
        only: Index, over all groups, of the only parameter to create; None for all of them.
        cut: Offset at which flat parameters are cut into two pieces; None for whole ones.
        shape: The parameters' shape.
    """
    generator = torch.Generator().manual_seed(0)
    groups, gradients, tensors, number = [], [], [], 0
    for options, count in wanted:
        members = []
        for _ in range(count):
            values, trend, *noise = torch.randn(2 + len(_SCALES), *shape, dtype=torch.float64, generator=generator)
            number += 1
            if only is not None and only != number - 1:
                continue
            pieces = [values] if cut is None else [values.reshape(-1)[:cut], values.reshape(-1)[cut:]]
            tensors += pieces
            members += [nn.Parameter(piece) for piece in pieces]
            # They share a direction, as real gradients do: some optimizers depend on that.
            steps = [scale * number * (trend + 0.3 * part) for scale, part in zip(_SCALES, noise, strict=True)]
            if cut is None:
                gradients.append(steps)
            else:
                gradients += [[g.reshape(-1)[:cut] for g in steps], [g.reshape(-1)[cut:] for g in steps]]
        if members:
            groups.append({**_options(options), "params": members})
    before = [tensor.clone() for tensor in tensors]
    twin = _twin(optimizer, groups)
    parameters = [parameter for group in groups for parameter in group["params"]]
    for step in range(len(_SCALES)):
        for parameter, steps in zip(parameters, gradients, strict=True):
            parameter.grad = steps[step].clone()
        twin.step()
    if any(torch.equal(old, new) for old, new in zip(before, parameters, strict=True)):
        raise RuntimeError("step() left parameters as they were; it may work on others than those of its groups")
    return [parameter.detach() for parameter in parameters]


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    found = {key: _copy(value, {}) for key, value in group.items() if key not in ("params", "param_names")}
    if "lr" in found and not found["lr"]:
        found["lr"] = 1e-3  # the first learning rate of a warm-up, at which nothing would show
    return found


def _twin(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Return an optimizer of the same class, options and attributes over other parameters, without state or hooks."""
    twin = object.__new__(type(optimizer))
    hooks = {name: value for name, value in vars(optimizer).items() if name.endswith("_hooks")}
    for name, value in vars(optimizer).items():
        if name in hooks:
            twin.__dict__[name] = type(value)()
        elif name not in ("state", "param_groups", "step"):  # learning rate schedulers put a `step` of their own there
            twin.__dict__[name] = _copy(value, {id(optimizer): twin})
    twin.state = collections.defaultdict(dict)
    twin.param_groups = groups
    return twin


def _copy(value: Any, known: dict[int, Any]) -> Any:
    try:
        return copy.deepcopy(value, known)
    except Exception:  # noqa: BLE001 - whatever an attribute's own copying raises; it is then shared
        return value


def require_hooks(optimizer: Any) -> None:
    """Raise ApplyError where an optimizer is no `torch.optim.Optimizer`, so that nothing can be done before its steps."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ApplyError(
            f"{type(optimizer).__name__} was not seen to treat each element by itself, so that tp would give it whole matrices "
            "before each step, which takes the hooks of torch.optim.Optimizer",
            fix="derive its class from torch.optim.Optimizer, and work on param_groups alone; or use a plan of dp alone",
        )


def require_fresh(optimizer: torch.optim.Optimizer) -> None:
    """Raise ApplyError where an optimizer already holds state that was not there when it was made.

    Such state belongs to whole parameters. What torch.optim.Adagrad makes at once, before any step, is cut with them.
    """
    held = [state for state in optimizer.state.values() if state]
    if held and not (type(optimizer) is torch.optim.Adagrad and all(not float(state["step"]) for state in held)):
        raise ApplyError(
            f"the optimizer holds state of {len(held)} whole parameters already, which this plan shards",
            fix="pass a factory such as functools.partial(torch.optim.AdamW, lr=3e-4), or an optimizer that has not stepped",
        )


def hand_over_pieces(
    optimizer: torch.optim.Optimizer,
    pieces: Mapping[int, Sequence[nn.Parameter]],
    units: Sequence[HoldsPieces] = (),
) -> None:
    """Replace an optimizer's parameters by pieces of them; its groups and their options stay.

    Args:
        optimizer: The optimizer; it has no state but what `require_fresh` lets pass.
        pieces: id of a parameter -> this rank's pieces of it, one or none. Parameters that are missing here stay.
        units: What the parameters lie in, where their state is cut with them.
    """
    for unit in units:
        _cut_state(optimizer, unit)
    for group in optimizer.param_groups:
        kept = [
            (piece, name)
            for parameter, name in zip(group["params"], _names(group), strict=True)
            for piece in pieces.get(id(parameter), (parameter,))
        ]
        group["params"][:] = [piece for piece, _ in kept]
        if "param_names" in group:
            group["param_names"][:] = [name for _, name in kept]


def _cut_state(optimizer: torch.optim.Optimizer, unit: HoldsPieces) -> None:
    whole = [optimizer.state.pop(parameter, None) for parameter in unit.parameters]
    for piece in unit.pieces:
        state = whole[piece.span.index]
        if state:
            optimizer.state[piece.tensor] = {
                key: unit.cut(value, piece) if isinstance(value, Tensor) else value for key, value in state.items()
            }


def refuse_other_state(optimizer: torch.optim.Optimizer) -> None:
    """Raise ApplyError where an optimizer's loaded state belongs to other pieces than this rank's.

    Only torch's own optimizers can be checked: each of their states is a number, or has the parameter's shape.
    """
    if type(optimizer) not in _PER_ELEMENT:
        return
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.dim() and value.shape != parameter.shape:
                raise ApplyError(
                    f"the state that was loaded has '{name}' of shape {tuple(value.shape)}, and this rank's piece of that "
                    f"parameter has {tuple(parameter.shape)}: it was saved under another plan or by another rank",
                    fix="load a state that this rank's model.optimizer.state_dict() gave under the same plan",
                )


def _names(group: Mapping[str, list[str]]) -> Sequence[str]:
    return group.get("param_names") or [""] * len(group["params"])
