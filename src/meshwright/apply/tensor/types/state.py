"""State of the type check: types of all tensors so far."""

from __future__ import annotations

from torch import Tensor, nn

from meshwright.apply.tensor.cutting import Cutting, find_tensor
from meshwright.apply.tensor.slices import Slices
from meshwright.apply.tensor.types.gradients import Tape
from meshwright.apply.tensor.types.lattice import PARTIAL, REPLICATED, VARYING, Typed, Where, shard
from meshwright.apply.tensor.types.report import TypeReport
from meshwright.apply.tensor.types.typed_run import Follower, Record
from meshwright.trees import arguments_in

__all__: list[str] = []


UNKNOWN = "a tensor that no torch function made"


class TypingState:
    """The types of all tensors, and the report, of a run on a copy of the module that is cut."""

    def __init__(self, cutting: Cutting, record: Record) -> None:
        self.cutting = cutting
        self.module: nn.Module = cutting.module
        self.report = TypeReport()
        self.whole = Follower(record)
        self.tape = Tape()
        self.closed: list[str] = []
        """Modules that are running and not followed: their code is ours (`edges.py`)."""
        self.hooked: list[tuple[Typed, Where]] = []
        """Tensors whose gradients code wants to see."""
        self._values: dict[int, Typed] = {}
        self._constants = {**record.constants}
        for child in self.module.modules():
            for tree in vars(child).values():
                self._constants.update((id(tensor), tensor) for tensor in arguments_in(tree))
        self._start()

    def _start(self) -> None:
        layout = self.cutting.layout
        once = {path for region in layout.regions for path in region.once}
        cuts = {id(find_tensor(self.module, path)): cut.dim for path, (_, cut) in layout.cuts.items()}
        by_id = self.cutting.layouts_by_id()
        for path, tensor in (*self.module.named_parameters(remove_duplicate=False), *self.module.named_buffers()):
            if id(tensor) in cuts:
                kind, full = shard(cuts[id(tensor)]), by_id[id(tensor)][0].shape
            else:
                kind, full = PARTIAL if path in once else REPLICATED, tuple(tensor.shape)
            self._values.setdefault(id(tensor), Typed(tensor, kind, full, path))

    @property
    def is_over(self) -> bool:
        """Whether the check has ended: something was refused."""
        return bool(self.report.refusals)

    def put(self, value: Typed) -> None:
        """Record a tensor, or its new version."""
        self._values[id(value.tensor)] = value

    def known(self, tensor: Tensor) -> Typed | None:
        """Return the record of a tensor."""
        return self._values.get(id(tensor))

    def typed(self, tensor: Tensor) -> Typed:
        """Return the record of a tensor; one from before the run is a constant, the same on every rank."""
        found = self._values.get(id(tensor))
        if found is None:
            is_known = isinstance(tensor, Slices) or id(tensor) in self._constants
            kind, name = (REPLICATED, "a constant") if is_known else (VARYING, UNKNOWN)
            found = Typed(tensor, kind, tuple(tensor.shape), name)
            self.put(found)
        return found
