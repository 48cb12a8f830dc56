"""Writes between steps: to a parameter on one rank, and not on others that hold it, or the rest of it, as well.

torch counts the writes to a tensor, so that those cost a look at a number. What it does not count (a write to `.data`, a fault of
the memory) shows in copies, which sentinels compare; of what has no copy a part is looked at in each step, in turn.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from meshwright.apply.engine import Engine
from meshwright.apply.finding import Finding
from meshwright.comm.communicator import Communicator
from meshwright.mesh import MeshSpec
from meshwright.run.circles import circles_of

__all__: list[str] = []

_PIECES = "what this rank's optimizer updates"
_WINDOW_BYTES = 2**14
"""What is looked at in one step, of that which has no copy [bytes]."""


class StateWatch:
    """A rank's parameters as they were when the last step ended.

    Args:
        engine: The strategy.
        optimizer: What updates the parameters, or None.
    """

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

    def _find(self) -> None:
        named = dict(self._engine.module.named_parameters())
        known = {id(parameter) for parameter in named.values()}
        groups = [] if self._optimizer is None else self._optimizer.param_groups
        pieces = [tensor for group in groups for tensor in group["params"] if id(tensor) not in known]
        self._names = [*named, *[_PIECES] * len(pieces)]
        fqns = {id(tensor): name for _, held in self._engine.copies_of_state() for name, tensor in held}
        self._labels = [*named, *(fqns.get(id(piece), _PIECES) for piece in pieces)]
        self._tensors = [*named.values(), *pieces]
        self._windows = list(_windows(self._alone()))

    def _alone(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, values) of what this rank holds and no other, as far as it lies in the host's memory in one piece."""
        copied = {
            _place(tensor) for group, named in self._engine.copies_of_state() if group.size > 1 for _, tensor in named
        }
        for name, tensor in zip(self._labels, self._tensors, strict=True):
            value = tensor.detach()
            is_plain = value.device.type == "cpu" and value.layout == torch.strided and value.is_contiguous()
            if is_plain and value.numel() and _place(value) not in copied and 0 not in value.stride():
                yield name, value.view(-1)

    def note(self) -> None:
        """Take note of everything at the end of a step."""
        if not self._tensors:
            self._find()
        self._versions = [tensor._version for tensor in self._tensors]
        if self._windows:
            self._turn = (self._turn + 1) % len(self._windows)
            self._seen = self._look()

    def _look(self) -> torch.Tensor:
        return torch.cat([part for _, part in self._windows[self._turn]])

    def written(self) -> list[str]:
        """Return the FQNs of the parameters that were written to since the last step ended; one word for all pieces of them."""
        return self._written(self._names)

    def _written(self, names: list[str]) -> list[str]:
        versions = self._versions
        if versions is None or versions == [tensor._version for tensor in self._tensors]:
            return []
        changed = zip(names, self._tensors, versions, strict=True)
        return list(dict.fromkeys(name for name, tensor, version in changed if tensor._version != version))

    def changed(self) -> list[str]:
        """Return the FQNs of what has other bits than when the last step ended, of what was looked at."""
        seen = self._seen
        if seen is None:
            return []
        now = self._look()
        if torch.equal(now.view(torch.uint8), seen.view(torch.uint8)):
            return []
        window = self._windows[self._turn]
        sizes = [part.numel() for _, part in window]
        pairs = zip(window, now.split(sizes), seen.split(sizes), strict=True)
        names = [name for (name, _), new, old in pairs if not torch.equal(new.view(torch.uint8), old.view(torch.uint8))]
        return list(dict.fromkeys(names))

    def compare(self, group: Communicator, mesh: MeshSpec) -> list[Finding]:
        """Return what was written to on this rank and not on all that hold it as well; every rank calls it.

        Args:
            group: All ranks.
            mesh: Their places.
        """
        written, labels = self.written(), self._written(self._labels)
        mine = [written, labels[0] if written == [_PIECES] else None, [n for n in self.changed() if n not in labels]]
        everyone = group.all_gather_json(mine, device=self._engine.device)
        findings = []
        for circle in circles_of(mesh, "dp", "cp", "tp"):
            # Ranks cut elsewhere have pieces of other parameters: there it counts alone whether they were written to.
            for name in dict.fromkeys(name for rank in circle.ranks for name in everyone[rank][0]):
                wrote = [rank for rank in circle.ranks if name in everyone[rank][0]]
                if len(wrote) < len(circle.ranks) and group.rank == wrote[0]:
                    others = [rank for rank in circle.ranks if rank not in wrote]
                    text = f"it was written to on rank(s) {wrote} and not on rank(s) {others}"
                    findings.append(_finding(mine[1] or name, text))
        hidden = [(rank, name) for rank, (_, _, names) in enumerate(everyone) for name in names]
        # Who clamps `.data` on every rank changes many tensors on many ranks: a fault is one tensor on one rank.
        if not findings and len(hidden) == 1 and hidden[0][0] == group.rank:
            name = hidden[0][1]
            findings.append(
                _finding(name, "its values changed on this rank alone, by a write to .data or a fault of the memory")
            )
        return findings


def _finding(name: str, text: str) -> Finding:
    return Finding(part=name, difference=float("nan"), tolerance=0.0, text=f"{text}, between two steps")


def _place(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.nbytes


def _windows(named: Iterator[tuple[str, torch.Tensor]]) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Yield lists of (name, part), each of one dtype and together not above a window's size."""
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
