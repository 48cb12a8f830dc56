"""Writes between steps to a parameter on one rank, and not on the others that hold it or the rest of it.

torch counts the writes to a tensor, so a check costs one comparison of numbers. A change without a count (a write to `.data`,
a memory fault) shows in copies, which sentinels compare. Tensors without a copy are checked in turn, a part in each step. Before
a sentinel all of them are checked, with the optimizer's state (`imprint.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch

from meshwright.apply.engine import Engine
from meshwright.apply.finding import Finding
from meshwright.comm.communicator import Communicator
from meshwright.mesh import MeshSpec
from meshwright.run.sentinels.apart import holds_values
from meshwright.run.sentinels.circles import circles_of
from meshwright.run.sentinels.imprint import Change, Imprint, change_of
from meshwright.run.sentinels.optimizer_writes import OptimizerWrites, find_apart

__all__: list[str] = []

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_PIECES = "what this rank's optimizer updates"
_WINDOW_BYTES = 2**14
"""What is looked at in one step, of that which has no copy [bytes]."""


class StateWatch:
    """A rank's parameters at the end of the last step."""

    def __init__(self, engine: Engine, optimizer: torch.optim.Optimizer | None) -> None:
        self._engine = engine
        self._optimizer = optimizer
        self._names: list[str] = []
        self._labels: list[str] = []
        self._tensors: list[torch.Tensor] = []
        self._versions: list[int] | None = None
        self._windows: list[list[tuple[str, torch.Tensor]]] = []
        self._turn = 0
        self._seen: torch.Tensor | None = None
        self._imprint: Imprint | None = None
        self._of_optimizer = OptimizerWrites(optimizer)

    def _find(self) -> None:
        named = dict(self._engine.module.named_parameters())
        known = {id(parameter) for parameter in named.values()}
        groups = [] if self._optimizer is None else self._optimizer.param_groups
        pieces = [tensor for group in groups for tensor in group["params"] if id(tensor) not in known]
        self._names = [*named, *[_PIECES] * len(pieces)]
        fqns = {id(tensor): name for _, held in self._engine.copies_of_state() for name, tensor in held}
        self._labels = [*named, *(fqns.get(id(piece), _PIECES) for piece in pieces)]
        self._tensors = [*named.values(), *pieces]
        on_host = [(name, value.detach().view(-1)) for name, value in self._alone() if value.device.type == "cpu"]
        self._windows = list(windows_of(on_host))

    def _alone(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, values) of contiguous tensors that no other rank holds for longer than a step.

        Under ZeRO copies get the owner's values after each step, so only this check sees a change in between.
        """
        has_pieces = _PIECES in self._names
        held = [] if has_pieces else [named for group, named in self._engine.copies_of_state() if group.size > 1]
        copied = {_place(tensor) for named in held for _, tensor in named}
        seen: list[tuple[int, int]] = []
        for name, tensor in zip(self._labels, self._tensors, strict=True):
            start, size = _place(tensor)
            is_known = any(first <= start and start + size <= last for first, last in seen)
            if is_plain(tensor) and (start, size) not in copied and not is_known:
                seen += [(start, start + size)] if has_pieces else []
                yield name, tensor

    def _kept_alone(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, values) of `_alone`, of the optimizer's state for the parameters it updates, and of buffers."""
        yield from self._alone()
        copied = {
            _place(tensor) for group, named in self._engine.copies_of_state() if group.size > 1 for _, tensor in named
        }
        state = getattr(self._optimizer, "state", None) or {}
        for name, tensor in zip(self._labels, self._tensors, strict=True):
            is_alone = tensor in state and (_place(tensor) not in copied or _PIECES in self._names)
            for key, value in state[tensor].items() if is_alone else ():
                if isinstance(value, torch.Tensor) and is_plain(value):
                    yield f"{name} (the optimizer's {key})", value
        for name, buffer in self._engine.module.named_buffers():
            if is_plain(buffer) and _place(buffer) not in copied:
                yield name, buffer

    def forget(self) -> None:
        """Forget what was recorded."""
        self._versions = self._seen = self._imprint = None
        self._tensors = []
        self._of_optimizer.forget()

    def note(self, *, keeps_imprint: bool = False) -> None:
        """Record everything at the end of a step.

        Args:
            keeps_imprint: Whether all tensors without a copy are checked before the next step.
        """
        if not self._tensors:
            self._find()
        self._versions = [tensor._version for tensor in self._tensors]
        self._of_optimizer.note()
        self._imprint = Imprint(list(self._kept_alone())) if keeps_imprint else None
        if self._windows:
            self._turn = (self._turn + 1) % len(self._windows)
            self._seen = self._look()

    def take_whole_writes(self) -> None:
        """Take what was written while parameters were whole: the engine gave it to the pieces of all ranks.

        A rank without a piece of what was written has nothing that torch could count a write to. The parameters themselves are
        compared as ever.
        """
        if self._versions is None or _PIECES not in self._names:
            return
        rows = zip(self._names, self._tensors, self._versions, strict=True)
        self._versions = [tensor._version if name == _PIECES else version for name, tensor, version in rows]
        if self._seen is not None:
            self._seen = self._look()
        if self._imprint is not None:
            self._imprint = Imprint(list(self._kept_alone()))

    def _look(self) -> torch.Tensor:
        return torch.cat([part for _, part in self._windows[self._turn]])

    def written(self) -> list[str]:
        """Return the FQNs of the parameters written since the last step ended; one entry stands for all their pieces.

        What was written of the optimizer's state comes after them.
        """
        return [*self._written(self._names), *self._of_optimizer.names()]

    def _names_of_held(self) -> dict[int, str]:
        """Return id of a parameter or piece -> FQN; pieces that no rank has a name for are left out."""
        rows = zip(self._labels, self._tensors, strict=True)
        return {id(tensor): label for label, tensor in rows if label != _PIECES}

    def _written(self, names: list[str]) -> list[str]:
        versions = self._versions
        if versions is None or versions == [tensor._version for tensor in self._tensors]:
            return []
        changed = zip(names, self._tensors, versions, strict=True)
        return list(dict.fromkeys(name for name, tensor, version in changed if tensor._version != version))

    def written_parameters(self) -> list[tuple[str, torch.Tensor]]:
        """Return (FQN, parameter) of those written since the last step ended, where they have values on this rank.

        Where each rank's optimizer has whole parameters, its state that was written is among them.
        """
        if self._versions is None:
            return []
        rows = zip(self._names, self._tensors, self._versions, strict=True)
        changed = [(name, tensor) for name, tensor, version in rows if tensor._version != version and name != _PIECES]
        state = [] if _PIECES in self._names else self._of_optimizer.written_tensors(self._names_of_held())
        held = [(name, tensor) for name, tensor in changed if holds_values(tensor)]
        return [*held, *((name, tensor) for name, tensor in state if is_plain(tensor))]

    def changed(self) -> list[str]:
        """Return the FQNs of checked tensors whose bits have changed since the last step ended."""
        return [change.name for change in self._changes()]

    def _changes(self) -> list[Change]:
        seen = self._seen
        if seen is None:
            return []
        now = self._look()
        if torch.equal(now.view(torch.uint8), seen.view(torch.uint8)):
            return []
        window = self._windows[self._turn]
        sizes = [part.numel() for _, part in window]
        pairs = zip(window, now.split(sizes), seen.split(sizes), strict=True)
        found = [change for (name, _), new, old in pairs if (change := change_of(name, new, old)) is not None]
        # Two parts of one tensor: several entries.
        names = [change.name for change in found]
        return list({c.name: c if names.count(c.name) == 1 else Change(c.name) for c in found}.values())

    def compare(self, group: Communicator, mesh: MeshSpec) -> list[Finding]:
        """Return the writes on this rank that other holders do not have; every rank calls it."""
        labels = self._written(self._labels)
        looked_at = self._changes()
        changes = [change for change in looked_at if change.name not in labels]
        # Pieces share one memory, whose writes torch counts together; the bits show which piece was written.
        seen = [change.name for change in looked_at if change.name in labels]
        mine = [self._written(self._names), None, len(changes), self._of_optimizer.rows(self._names_of_held())]
        mine[1] = (seen or labels)[0] if mine[0] == [_PIECES] else None
        everyone = group.all_gather_json(mine, device=self._engine.device)
        findings = []
        for circle in circles_of(mesh, "dp", "cp", "tp"):
            # Ranks with other bounds have pieces of other parameters; only whether they were written is compared.
            for name in dict.fromkeys(name for rank in circle.ranks for name in everyone[rank][0]):
                wrote = [rank for rank in circle.ranks if name in everyone[rank][0]]
                if len(wrote) < len(circle.ranks) and group.rank == wrote[0]:
                    others = [rank for rank in circle.ranks if rank not in wrote]
                    text = f"it was written to on rank(s) {wrote} and not on rank(s) {others}"
                    findings.append(_finding(mine[1] or name, text))
            apart = find_apart({rank: everyone[rank][3] for rank in circle.ranks})
            if apart is not None and not findings and group.rank == apart[1][0]:
                name, wrote, others = apart
                findings.append(_finding(name, f"it was written to on rank(s) {wrote} and not on rank(s) {others}"))
        return findings or self._hidden(changes, sum(one[2] for one in everyone), mesh)

    def compare_imprint(self, group: Communicator, mesh: MeshSpec) -> list[Finding]:
        """Return changes since the last step ended for which torch has counted no write; every rank calls it."""
        changes = [] if self._imprint is None else self._imprint.changes()
        self._imprint = None
        count = torch.tensor([len(changes)], dtype=torch.float64, device=self._engine.device)
        group.all_reduce(count)
        return self._hidden(changes, int(count.item()), mesh)

    def _hidden(self, changes: list[Change], num_of_all: int, mesh: MeshSpec) -> list[Finding]:
        """Return a finding where one tensor of one rank has changed without a counted write.

        Args:
            changes: The changes on this rank.
            num_of_all: Changes on all ranks together [count].
            mesh: The ranks' places.
        """
        # A script that clamps `.data` changes many tensors on many ranks; a fault is one tensor on one rank. Where no
        # other rank has a part of it, a script changes one tensor on one rank as well; a fault changes one entry.
        if not changes or num_of_all > 1:
            return []
        change, has_parts_elsewhere = changes[0], len(mesh.groups("dp", "cp", "tp")[0]) > 1
        if change.place is None and not has_parts_elsewhere:
            return []
        text = f"{change.text} on this rank alone, by a write to .data or a fault of the memory"
        return [_finding(change.name, text, change.relative)]


def _finding(name: str, text: str, difference: float = math.nan) -> Finding:
    return Finding(part=name, difference=difference, tolerance=0.0, text=f"{text}, between two steps")


def is_plain(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor's memory is its values alone, each once."""
    is_there = tensor.layout == torch.strided and not tensor.is_meta and type(tensor) in _PLAIN
    return is_there and tensor.is_contiguous() and bool(tensor.numel()) and 0 not in tensor.stride()


def _place(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.nbytes


def windows_of(named: Iterable[tuple[str, torch.Tensor]]) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Yield lists of (name, part of flat values), each of one dtype and in total no larger than a window."""
    kinds: dict[torch.dtype, list[tuple[str, torch.Tensor]]] = {}
    for name, values in named:
        kinds.setdefault(values.dtype, []).append((name, values))
    for members in kinds.values():
        window: list[tuple[str, torch.Tensor]] = []
        room = _WINDOW_BYTES
        for name, values in members:
            parts = values.split(_WINDOW_BYTES // values.element_size())
            for part in parts:
                if part.nbytes > room:
                    yield window
                    window, room = [], _WINDOW_BYTES
                window.append((name, part))
                room -= part.nbytes
        yield window
