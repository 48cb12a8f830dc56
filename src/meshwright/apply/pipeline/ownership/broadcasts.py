"""Broadcasts over the ranks of one pipeline: outputs, values, gradients and buffers that only some of them hold."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.apply.pipeline.p2p import OtherStageError
from meshwright.apply.pipeline.walking.stand_ins import StandIn
from meshwright.comm.communicator import Communicator
from meshwright.comm.told_errors import ends_exchanges, error_of_rank, kind_of
from meshwright.trees import map_tensors, tensors_in

__all__: list[str] = []


class Collector:
    """Gives every rank of a pipeline what some of them hold. Every rank makes the same calls in the same order.

    Args:
        pp_group: The ranks of the pipeline.
        device: This rank's device.
        places: FQN -> the pipeline's ranks that hold the parameter.
    """

    def __init__(self, pp_group: Communicator, device: torch.device, places: Mapping[str, list[int]]) -> None:
        self._group = pp_group
        self._device = device
        self._places = places

    def tensor(self, tensor: Tensor, source: int) -> Tensor:
        """Broadcast a tensor from the pipeline's rank `source`; the other ranks pass one (fake, perhaps) of the same shape and
        dtype.
        """
        if source == self._group.group_rank:
            result = tensor.detach().resolve_conj().resolve_neg().contiguous()
        else:
            result = torch.empty(tuple(tensor.shape), dtype=tensor.dtype, device=self._device)
        if result.numel():
            self._group.broadcast(result.view(-1).view(torch.uint8), source)
        return result

    def told(self, value: Any) -> list[Any]:
        """Return a JSON value from each rank of the pipeline, in their order."""
        return self._group.all_gather_json(value, device=self._device)

    @contextlib.contextmanager
    def together(self, tell: Callable[[], None]) -> Iterator[None]:
        """Raise an exception of any rank on every rank.

        Args:
            tell: Wakes the ranks that wait for this one.

        Raises:
            MeshwrightError: Another rank has failed: of its error's class where that is ours, else UserCodeError.
            Exception: This rank's own failure.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as raised:
            if ends_exchanges(raised, self._group.calls):
                raise
            error = raised  # the user's code: it is raised below
            tell()
        is_told = isinstance(error, OtherStageError)
        mine = error and [
            is_told,
            kind_of(error),
            str(getattr(error, "message", error)),
            getattr(error, "fix", None),
        ]
        told = [(place, entry) for place, entry in enumerate(self.told(mine)) if entry is not None]
        if not told:
            return
        if error is not None and not is_told:
            raise error
        place, (_, name, text, fix) = min(told, key=lambda found: (found[1][0], found[0]))
        raise error_of_rank(self._group.ranks[place], name, text, fix) from error

    def outputs(
        self, found: Mapping[int, Any], home_of: Callable[[Tensor], int], rank_of_stage: Callable[[int], int]
    ) -> Any:
        """Return a forward's outputs on every rank, with the tensors that only some stage computed.

        Args:
            found: What it gave on the stages of this rank.
            home_of: Tensor -> the stage that computes it.
            rank_of_stage: Stage -> the pipeline's rank that holds it.
        """
        own = {index: list(tensors_in(tree)) for index, tree in found.items()}
        anyone, tree = next(iter(found.items()))
        place = iter(range(len(own[anyone])))
        # What comes of a parameter alone is on the stages that hold it, which need not be the last.
        there = [[not isinstance(tensor, StandIn) for tensor in row] for row in zip(*own.values(), strict=True)]
        holders = self.told([any(row) for row in there])

        def whole(_: Tensor) -> Tensor:
            index = next(place)
            home = home_of(own[anyone][index])
            source = rank_of_stage(home)
            if not holders[source][index]:
                source = next((rank for rank, row in enumerate(holders) if row[index]), source)
            mine = home if home in own else anyone
            if source == self._group.group_rank and not there[index][list(own).index(mine)]:
                mine = next(stage for stage, has in zip(own, there[index], strict=True) if has)
            return self.tensor(own[mine][index], source)

        return map_tensors(tree, whole)

    def values(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        """Return the whole model's values by FQN."""
        return {name: self.tensor(parameter, self._places[name][0]) for name, parameter in parameters.items()}

    def gradients(
        self, parameters: Mapping[str, nn.Parameter], own: Mapping[str, Tensor | None]
    ) -> dict[str, Tensor | None]:
        """Return the whole model's gradients by FQN; `own` are this rank's, and None stands for a missing one."""
        there = [name for name, gradient in own.items() if gradient is not None]
        everywhere = [set(names) for names in self._group.all_gather_json(there, device=self._device)]
        found: dict[str, Tensor | None] = {}
        for name, parameter in parameters.items():
            source = self._places[name][0]
            gradient = own.get(name)
            like = parameter if gradient is None else gradient.to_dense() if gradient.is_sparse else gradient
            found[name] = self.tensor(like, source) if name in everywhere[source] else None
        return found
