"""State of a rank while a cut model runs: random states, tensors that have entered a region, sizes of slices."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from meshwright._torch_dispatch import draws_untouched
from meshwright._torch_private import is_in_backward, without_function_modes
from meshwright.apply.randomness.sites import on_slices
from meshwright.apply.state.undisturbed import is_trying
from meshwright.apply.tensor.slices import Slices, make_whole
from meshwright.apply.tensor.tensor_layout import Chain, Region
from meshwright.comm.communicator import Communicator
from meshwright.comm.functional import (
    all_gather_along,
    copy_to_group,
    gather_from_group,
    reduce_from_group,
    reduce_scatter_along,
    scatter_to_group,
)
from meshwright.errors import InternalError
from meshwright.layout import even_sizes

__all__: list[str] = []


class Drawing:
    """Random numbers of ranks that share layers: the same for copies of a tensor, different for shards of one."""

    def __init__(self, group: Communicator) -> None:
        self._group = group
        self._state: tuple[Tensor, Tensor | None] | None = None
        self._own = 0
        """Seed of this rank's own numbers."""
        self._unmoved: tuple[list[Tensor], list[Tensor]] | None = None
        """On trial: the states before the common seed was drawn, and those that this rank's own numbers begin with."""

    def apart(self, device: torch.device) -> None:
        """Start drawing per rank, from a state derived from the common one, so that recompute can repeat it."""
        if self.is_apart:
            return
        before = _states(device) if is_trying() else None
        with draws_untouched():
            seed = int(torch.randint(2**62, ()))  # the same on every rank, and the common generator moves on
        cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        self._state = (torch.get_rng_state(), cuda)
        self._own = own = (seed + 0x9E3779B97F4A7C15 * (self._group.group_rank + 1)) % 2**63
        torch.default_generator.manual_seed(own)  # torch.manual_seed takes 100 us: it seeds every kind of device
        if cuda is not None:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(own)
        self._unmoved = None if before is None else (before, _states(device))

    def together(self, device: torch.device) -> None:
        """Start drawing the same numbers on all ranks again."""
        was_apart = self.is_apart
        if self._state is None:
            return
        state, cuda = self._state
        unmoved, self._state, self._unmoved = self._unmoved, None, None
        if not was_apart:
            return
        if unmoved is not None and all(map(torch.equal, _states(device), unmoved[1])):
            # A trial asks whether the model draws, and the seed is no draw of its code.
            state, cuda = unmoved[0][0], None if cuda is None else unmoved[0][1]
        torch.set_rng_state(state)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, device)

    @property
    def is_apart(self) -> bool:
        """Whether each rank is drawing for itself.

        A checkpoint ends a repetition inside of a region, once it has the last tensor that backward needs, and puts the common
        generator back by itself.
        """
        return self._state is not None and torch.default_generator.initial_seed() == self._own


def _states(device: torch.device) -> list[Tensor]:
    """Return the states of torch's generators: the CPU's, and a GPU's where the device is one."""
    cuda = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    return [torch.get_rng_state(), *cuda]


class RunningChain:
    """A chain of layers on one rank, while it runs."""

    def __init__(self, chain: Chain, group: Communicator, drawing: Drawing) -> None:
        self.chain = chain
        self.group = group
        self.drawing = drawing
        self.dim = chain.dims[0]
        """Where the stream lies in slices, of the forward that ran last."""
        self.sizes: tuple[int, ...] = ()
        """Every rank's part of it."""
        self._is_running = False

    @property
    def is_on_slices(self) -> bool:
        """Whether the running code is inside a layer on slices; backward repeats nothing else of a chain."""
        return self._is_running or is_in_backward()

    @contextlib.contextmanager
    def running(self, dim: int, sizes: tuple[int, ...]) -> Iterator[None]:
        """Run a layer inside the context, with its stream in slices of these sizes along this dim."""
        before = self._is_running
        self._is_running, self.dim, self.sizes = True, dim, sizes
        try:
            with on_slices((dim, sizes, self.group.group_rank)):
                yield
        finally:
            self._is_running = before

    @contextlib.contextmanager
    def drawing_apart(self, layer: nn.Module, device: torch.device) -> Iterator[None]:
        """Draw per rank inside the context, if dropout in a layer on slices draws."""
        if not (self.chain.drops and layer.training):
            yield
            return
        self.drawing.apart(device)
        try:
            yield
        finally:
            self.drawing.together(device)

    def take(self, stream: Tensor) -> Tensor:
        """Return this rank's slice of a layer's input: the previous layer's own, if nothing has used the whole since."""
        if isinstance(stream, Slices) and stream.is_in_slices and stream.cut_dim in self.chain.dims:
            self.dim, self.sizes = stream.cut_dim, stream.sizes
            return stream.local_to_use()
        stream = make_whole(stream)
        # Equal parts of dim 0 are contiguous in memory: no copy is needed before or after an exchange.
        even = (dim for dim in self.chain.dims if stream.shape[dim] % self.group.size == 0)
        self.dim = next(even, self.chain.dims[-1])
        self.sizes = even_sizes(stream.shape[self.dim], self.group.size)
        return self.scatter_again(stream)

    def scatter_again(self, stream: Tensor) -> Tensor:
        """Return this rank's slice of a tensor that was computed from the whole sequence inside the layer."""
        return scatter_to_group(stream, self.group, dim=self.dim, sizes=self.sizes)

    def hand_on(self, stream: Tensor, dim: int, sizes: tuple[int, ...]) -> Slices:
        """Return a layer's result as `Slices`: the next layer takes the slice, any other code gathers it."""
        return Slices.of(stream, self.group, dim, sizes)

    def gather(self, stream: Tensor, dim: int, sizes: tuple[int, ...]) -> Tensor:
        """Return the last layer's result, gathered."""
        return gather_from_group(stream, self.group, dim=dim, sizes=sizes)


class RunningRegion:
    """A region on one rank, while it runs; `chain` are the layers on slices that it lies in."""

    def __init__(
        self, region: Region, group: Communicator, drawing: Drawing, chain: RunningChain | None = None
    ) -> None:
        self.region = region
        self.group = group
        self.drawing = drawing
        self.chain = chain
        self.is_open = True
        """Whether its modules may be called: inside of the part that was proven, where there is one."""
        self.is_whole = False
        """Whether the modules of the region compute as on one device now, with whole parameters (`part.py`)."""
        self._entered: tuple[Tensor, int | None, bool, Tensor] | None = None

    def enter(self, tensor: Any, *, is_whole: bool = False) -> Any:
        """Take a column's input into the region, gathered where it comes in slices; projections of one tensor share one exchange.

        With `is_whole` it is whole even where layers run on slices.
        """
        tensor = make_whole(tensor)
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            return tensor
        # In inference mode a tensor has no version that would show a write, so it enters again.
        key = (None if tensor.is_inference() else tensor._version, torch.is_grad_enabled())
        if self._entered is not None:
            if self._entered[3] is tensor:  # it has entered at the enclosing module
                return tensor
            if self._entered[0] is tensor and self._entered[1:3] == key and key[0] is not None:
                return self._entered[3]
        slicing = self.slicing
        if slicing is not None and not is_whole:
            entered = all_gather_along(tensor, self.group, dim=slicing.dim, sizes=slicing.sizes)
        else:
            entered = copy_to_group(tensor, self.group) if tensor.requires_grad else tensor
        self._entered = (tensor, *key, entered)
        self.draw_apart(tensor)
        return entered

    def draw_apart(self, tensor: Tensor) -> None:
        """Start drawing numbers of this rank's own where the region drops entries, on the device of what it is given."""
        if self.region.drops and self.slicing is None:
            self.drawing.apart(tensor.device)

    @property
    def slicing(self) -> RunningChain | None:
        """The chain whose stream comes in slices now, if any; a module of the region may also be called outside its layer."""
        return self.chain if self.chain is not None and self.chain.is_on_slices else None

    def is_slice_of_stream(self, tensor: Tensor) -> bool:
        """Tell whether a tensor has the sizes of this rank's slice of the stream."""
        slicing = self.slicing
        if slicing is None or tensor.dim() != 3 or not tensor.is_floating_point():
            return False
        return tensor.shape[slicing.dim] == slicing.sizes[self.group.group_rank]

    def leave(self, term: Tensor) -> Tensor:
        """Sum the ranks' terms; where layers run on slices, only for this rank's slice."""
        self._entered = None
        if (slicing := self.slicing) is not None:
            return reduce_scatter_along(term, self.group, dim=slicing.dim, sizes=slicing.sizes)
        if self.region.drops:
            self.drawing.together(term.device)
        return reduce_from_group(term, self.group)

    def forget(self) -> None:
        """Drop the state of a forward that did not end."""
        self._entered = None

    def sizes(self, full: int) -> tuple[int, ...]:
        """Return every rank's share of a size that is divided like the region's units."""
        shares = self.region.shares(full, self.group.size)
        if shares is None:
            raise InternalError(f"{full} entries are not shared out as {self.region.num_units} units are")
        return shares

    def gather(self, local: Tensor, dim: int) -> Tensor:
        """Gather slices."""
        return gather_from_group(local, self.group, dim=dim, sizes=self.sizes_of(local, dim))

    def slices(self, local: Tensor, dim: int) -> Slices:
        """Return the slices as one tensor that acts as a whole one."""
        return Slices.of(local, self.group, dim, self.sizes_of(local, dim))

    def sizes_of(self, local: Tensor, dim: int) -> tuple[int, ...]:
        """Return every rank's size along the dim in which the tensor is sliced."""
        counts = even_sizes(self.region.num_units, self.group.size)
        own = counts[self.group.group_rank]
        full = local.shape[dim] * self.region.num_units // own if own else 0
        if counts[-1] == 0:
            full = self._told_size(full, local.device)
        return self.sizes(full)

    def _told_size(self, full: int, device: torch.device) -> int:
        """Return a full size where some ranks have no unit: such a rank's slice is empty, however large a unit is."""
        if self.region.is_apart:
            return self.region.num_units  # rows of one layer, each a unit
        with without_function_modes():  # whoever follows what is called would see what one device does not do
            told = torch.tensor([full], device=device)
            self.group.all_reduce(told, "max")
            return int(told.item())
