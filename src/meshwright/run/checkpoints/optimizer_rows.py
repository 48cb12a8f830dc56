"""State and options of an optimizer, by the FQNs of the parameters that they belong to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from meshwright.apply.held_state import HeldPart
from meshwright.errors import CheckpointError
from meshwright.run.checkpoints.encoded import decode, encode

__all__: list[str] = []

PREFIX = "optimizer"
_NOT_OPTIONS = ("params", "param_names")


class OptimizerRows:
    """What this rank's optimizer keeps, as JSON and as parts of tensors.

    Args:
        optimizer: The optimizer, outside of user code.
        parts: This rank's parts of the model.
        rename: FQN -> the name under which it is stored.

    Raises:
        CheckpointError: It keeps something that has no place in a file.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, parts: Sequence[HeldPart], rename: Callable[[str], str]
    ) -> None:
        self._by_owner = {id(part.owner): part for part in parts}
        self._rename = rename
        self.parts: list[HeldPart] = []
        """Its tensors, under the names of the JSON."""
        self.state: dict[str, Any] = {}
        """FQN -> key -> value, as JSON."""
        for owner, entry in optimizer.state.items():
            part = self._part_of(owner, optimizer)
            name = rename(part.name)
            self.state[name] = self._encoded(part, f"{PREFIX}/{name}", dict(entry))["dict"]
        self.groups = [self._group(number, group, optimizer) for number, group in enumerate(optimizer.param_groups)]
        """For each group the names of this rank's parameters, and the options."""
        more = _entries_beside(optimizer)
        if more:
            raise CheckpointError(
                f"the state_dict() of {type(optimizer).__name__} has {more}, beside state and param_groups, and where that "
                "belongs under another plan is not known",
                fix="save the model without its optimizer (with_optimizer=False), or use an optimizer with per-parameter state",
            )

    def _part_of(self, tensor: Any, optimizer: torch.optim.Optimizer) -> HeldPart:
        part = self._by_owner.get(id(tensor))
        if part is None:
            shape = list(tensor.shape) if isinstance(tensor, Tensor) else tensor
            raise CheckpointError(
                f"{type(optimizer).__name__} keeps state for {shape}, which is no parameter of the model",
                fix="train parameters of the model, or save that state yourself",
            )
        return part

    def _encoded(self, part: HeldPart, where: str, value: Any) -> Any:
        return encode(value, where, lambda name, tensor: self.parts.append(_part_of_state(part, name, tensor)))

    def _group(self, number: int, group: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> list[Any]:
        names = [self._rename(self._part_of(parameter, optimizer).name) for parameter in group["params"]]
        options = {
            key: encode(value, f"{PREFIX} options/{number}/{key}", self._keep_option)
            for key, value in group.items()
            if key not in _NOT_OPTIONS
        }
        return [list(dict.fromkeys(names)), options]

    def _keep_option(self, name: str, tensor: Tensor) -> None:
        self.parts.append(HeldPart.whole(name, tensor))


def _entries_beside(optimizer: torch.optim.Optimizer) -> list[str]:
    if type(optimizer).state_dict is torch.optim.Optimizer.state_dict:
        return []
    return sorted(set(optimizer.state_dict()) - {"state", "param_groups"})


def _part_of_state(part: HeldPart, name: str, tensor: Tensor) -> HeldPart:
    """Return a state tensor as a part: cut like its parameter where it has that part's shape, else whole."""
    shape = tuple(tensor.shape)
    if shape and not part.has_whole_state and shape == part.layout.local_shape:
        return HeldPart(name=name, layout=part.layout, tensor=tensor, owner=tensor, order=part.order)
    if not shape or part.has_whole_state or (part.layout.is_whole and part.layout.flat is None):
        return HeldPart.whole(name, tensor)
    raise CheckpointError(
        f"'{name}' has shape {list(shape)}, and this rank has {list(part.layout.local_shape)} of a parameter of "
        f"{list(part.full_shape)}: which part of a whole it is, is not known",
        fix="save under a plan that cuts no parameters (zero=0, tp=1), or without the optimizer (with_optimizer=False)",
    )


def merge_state(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the state of all ranks, by FQN.

    Raises:
        CheckpointError: Ranks that hold parts of one parameter keep different numbers for it.
    """
    merged: dict[str, Any] = {}
    for row in rows:
        for name, entry in row.items():
            if merged.setdefault(name, entry) != entry:
                pair = f"{str(merged[name])[:200]} and {str(entry)[:200]}"
                raise CheckpointError(f"ranks keep different numbers for '{name}' in the optimizer: {pair}")
    return merged


def merge_groups(rows: Sequence[Sequence[Sequence[Any]]]) -> list[list[Any]]:
    """Return all groups, each with the parameters that any rank has in it and the first rank's options."""
    merged = []
    for same in zip(*rows, strict=True):
        merged.append([sorted({name for names, _ in same for name in names}), same[0][1]])
    return merged


def find_groups(
    stored: Sequence[Any], present: Sequence[Sequence[Any]], has_entries: Callable[[str], bool] = lambda _: True
) -> list[Any]:
    """Return the stored options for each present group: groups are found by their parameters, in any order.

    Args:
        stored: What `merge_groups` gave when it was saved.
        present: What it gives now.
        has_entries: Whether a parameter has any; one without is in the groups of some plans and not of others, which cut.

    Raises:
        CheckpointError: The groups have other parameters.
    """
    rows = [row for row in stored if isinstance(row, list) and len(row) == 2 and isinstance(row[0], list)]
    by_names = {frozenset(filter(has_entries, map(str, names))): options for names, options in rows}
    found = []
    for number, (names, _) in enumerate(present):
        options = by_names.get(frozenset(filter(has_entries, names)))
        if not isinstance(options, dict):
            nearest = max(rows, key=lambda row: len(set(row[0]) & set(names)), default=[[], {}])[0]
            missing, more = sorted(set(nearest) - set(names)), sorted(set(names) - set(nearest))
            raise CheckpointError(
                f"group {number} of the optimizer has {len(names)} parameters, and no group of the checkpoint has the same: the "
                f"nearest lacks {more[:3]} and has {missing[:3]} besides",
                fix="build the optimizer with the groups that it was saved with, or load without it (with_optimizer=False)",
            )
        found.append(options)
    return found


class OptimizerReader:
    """Gives an optimizer its stored state.

    Args:
        optimizer: The optimizer, outside of user code.
        read: (stored name, part or None for the whole, owner) -> tensor.
        rename: FQN -> the name under which it is stored.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        read: Callable[[str, HeldPart | None], Tensor],
        rename: Callable[[str], str],
    ) -> None:
        self._optimizer = optimizer
        self._read = read
        self._rename = rename

    def load_options(self, options: Sequence[Mapping[str, Any]]) -> None:
        """Replace the options.

        Args:
            options: For each of the optimizer's groups.
        """
        for group, stored in zip(self._optimizer.param_groups, options, strict=True):
            for key, value in stored.items():
                if key not in _NOT_OPTIONS:
                    group[key] = self._option(value, key, group.get(key))

    def load_state(self, state: Mapping[str, Any], parts: Sequence[HeldPart]) -> None:
        """Replace the state.

        Args:
            state: FQN -> key -> JSON.
            parts: This rank's parts of the model.
        """
        by_owner = {id(part.owner): part for part in parts}
        owned = [p for group in self._optimizer.param_groups for p in group["params"]]
        found: dict[Any, Any] = {}
        for owner in owned:
            part = by_owner[id(owner)]
            entry = state.get(self._rename(part.name))
            if entry is not None:
                found[owner] = {key: self._value(key, value, part, owner) for key, value in entry.items()}
        self._optimizer.state.clear()
        self._optimizer.state.update(found)

    def _value(self, key: str, value: Any, part: HeldPart, owner: Tensor) -> Any:
        def read(name: str) -> Tensor:
            tensor = self._read(name, part)
            if not tensor.shape and not part.full_shape and tuple(owner.shape) == (1,) and key != "step":
                tensor = tensor.view(1)  # ZeRO's piece of a parameter of one number is a row
            if tuple(tensor.shape) == tuple(owner.shape) and tensor.shape:
                like = torch.empty_like(owner, dtype=tensor.dtype, memory_format=torch.preserve_format)
                return like.copy_(tensor)
            # As torch does: counters of steps stay on the host, unless the update runs as one kernel.
            stays = key == "step" and not self._runs_on_device(owner)
            return tensor if stays else tensor.to(owner.device)

        return decode(value, f"{PREFIX}/{part.name}/{key}", read)

    def _runs_on_device(self, owner: Tensor) -> bool:
        for group in self._optimizer.param_groups:
            if any(parameter is owner for parameter in group["params"]):
                return bool(group.get("capturable") or group.get("fused"))
        return False

    def _option(self, value: Any, key: str, present: Any) -> Any:
        found = decode(value, f"{PREFIX} options/{key}", lambda name: self._read(name, None))
        return found.to(present.device) if isinstance(found, Tensor) and isinstance(present, Tensor) else found
