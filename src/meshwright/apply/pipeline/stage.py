"""One stage: its forward of each micro-batch and its backward."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from meshwright._torch_dispatch import scripts_in_python
from meshwright.apply.finding import Finding
from meshwright.apply.pipeline.notes import END, Note
from meshwright.apply.pipeline.ownership.settled import Buffers
from meshwright.apply.pipeline.p2p import Mail, Post, Route, other_way
from meshwright.apply.pipeline.split_backward import Rest, SplitBackward, run_rest
from meshwright.apply.pipeline.tracing.stage_map import StageMap
from meshwright.apply.pipeline.walking.counters import Counters
from meshwright.apply.pipeline.walking.draws import Draws
from meshwright.apply.pipeline.walking.later_writes import LaterWrites
from meshwright.apply.pipeline.walking.own_state import OwnState
from meshwright.apply.pipeline.walking.path_hash import Way
from meshwright.apply.pipeline.walking.shapes import Shapes
from meshwright.apply.pipeline.walking.stage_forward import StageForward
from meshwright.apply.pipeline.walking.stand_ins import Meta, value_of
from meshwright.apply.pipeline.walking.unit_hooks import UnderWay
from meshwright.apply.pipeline.walking.without_numbers import ReadsValueError
from meshwright.apply.randomness.sites import begin_again
from meshwright.comm.ledger import Ledger
from meshwright.trees import map_tensors

__all__: list[str] = []

T = TypeVar("T")


@dataclasses.dataclass(slots=True)
class _Passed:
    """State that the forward of a micro-batch keeps for its backward."""

    sent: list[tuple[GradientEdge, Meta, int]]
    received: list[tuple[Tensor, int]]
    split: SplitBackward | None
    way: Way


class Stage:
    """One stage of a pipeline.

    Args:
        index: The stage.
        module: The user's module.
        stage_map: The stage of each call.
        shapes: Output shapes of other stages' calls.
        later_writes: State of layers that other code uses.
        post: Transfers to and from the other stages.
        draws: Random numbers.
        under_way: Record of the forward that this rank is running.
        own_state: State of the code between layers, where several stages of this rank run it; else None.
        shards: Parts into which layers may be cut on the stage that holds them [count].
    """

    def __init__(
        self,
        index: int,
        module: nn.Module,
        stage_map: StageMap,
        *,
        shapes: Shapes,
        later_writes: LaterWrites,
        post: Post,
        draws: Draws,
        under_way: UnderWay,
        own_state: OwnState | None = None,
        shards: int = 1,
    ) -> None:
        self.index = index
        self._shards = shards
        self._module = module
        self._map = stage_map
        self._shapes = shapes
        self._later_writes = later_writes
        self._post = post
        self._draws = draws
        self._passed: dict[int, _Passed] = {}
        self._rest: dict[int, list[Rest]] = {}
        self._under_way = under_way
        self._own_state = own_state
        self.counters = Counters(())
        """What the code between layers counts; set once the model is cut."""
        self._buffers = Buffers(module)
        self._has_notes = post.has_notes(draws.device)
        self.is_inspected = False
        """Whether inputs are checked for what was sent, on all stages."""
        self.findings: list[Finding] = []
        """What was found in the inputs of this one."""

    @property
    def ledger(self) -> Ledger:
        """What this rank exchanges and does."""
        return self._post.group.ledger

    def forward(self, micro_batch: int, run: Callable[[nn.Module], T], *, in_halves: bool = False) -> T | None:
        """Run this stage's part of a forward; tensors of other stages are stand-ins in what is returned.

        None where the loss reads values that other stages hold and needs nothing of this one. `in_halves` says whether its
        backward will run in halves.
        """
        mail = Mail(self._post, self.index, micro_batch, self.findings if self.is_inspected else None)
        split = SplitBackward() if in_halves and torch.is_grad_enabled() else None
        if self._own_state is not None:
            self._own_state.enter(self.index)
        changes = self.counters.changes()
        way = Way(micro_batch, is_training=self._module.training, counters=changes, shards=self._shards)
        begin_again()  # each stage of this rank counts what the others draw
        known = (self._shapes, self._later_writes)
        walk = StageForward(self.index, self._map, known, mail, self._draws, module=self._module, way=way)
        self._under_way.walk = walk
        try:
            between, halves = self._draws.between_layers(micro_batch, self.index), split or contextlib.nullcontext()
            with scripts_in_python(), between, halves, walk:
                result = run(self._module)
        except ReadsValueError:
            if not walk.owes_nothing_to_the_loss:
                raise
            result = None
        finally:
            self._under_way.walk = None
            sent, received = walk.sent, walk.received
            walk.close()
        self._buffers.settle()
        self._end_forward(micro_batch, way)
        if torch.is_grad_enabled():
            self._passed[micro_batch] = _Passed(sent, received, split, way)
        else:
            self._check_way(micro_batch, way)
        return result

    def _end_forward(self, micro_batch: int, way: Way) -> None:
        """Tell the later stages which path the forward took; one that waits for another tensor learns that none will come."""
        if not self._has_notes:
            return
        note = Note(END, way.digest, way.num_calls, way.last)
        for target in filter(self._post.is_elsewhere, range(self.index + 1, self._map.num_stages)):
            self._post.send_note(note, Route(self.index, target, micro_batch))

    def _check_way(self, micro_batch: int, way: Way) -> None:
        """Refuse a forward that took another path on another stage.

        Raises:
            ApplyError: The paths differ.
        """
        if not self._has_notes:
            return
        for source in filter(self._post.is_elsewhere, range(self.index)):
            note = self._post.receive_note(Route(source, self.index, micro_batch))
            if note is None or note.digest != way.digest:
                names = list(self._map.calls)
                mine = _way_text(way.num_calls, way.last, names)
                theirs = "more layers" if note is None else _way_text(note.num_calls, note.last, names)
                if mine == theirs:
                    theirs += ", with other numbers in the model's attributes, or in what layers return or write"
                raise other_way(self.index, source, micro_batch, mine, theirs)

    def home_of(self, tensor: Tensor) -> int:
        """Return the stage that computes a tensor returned by `forward`; the last stage for one that every stage computes."""
        value = value_of(tensor)
        return self._map.num_stages - 1 if value is None or value.home is None else value.home

    def own_results(self, results: Any) -> Any:
        """Return a forward's results, with the tensors of this stage where its code holds stand-ins that it has written into."""

        def own(tensor: Tensor) -> Tensor:
            value = value_of(tensor)
            held = None if value is None or value.home != self.index else value.real
            return tensor if held is None else held

        return map_tensors(results, own)

    def backward(self, micro_batch: int, root: tuple[Tensor, Tensor | None] | None) -> None:
        """Run this stage's backward; in halves, only the half that other stages wait for.

        Args:
            micro_batch: The micro-batch.
            root: The loss and its gradient, on the stage that computes it.
        """
        passed = self._passed.pop(micro_batch)
        self._check_way(micro_batch, passed.way)
        roots, gradients = self._gather_gradients(passed, micro_batch)
        if root is not None:
            roots.append(root[0])
            gradients.append(torch.ones_like(root[0]) if root[1] is None else root[1])
        if roots and passed.split is None:
            torch.autograd.backward(roots, gradients)
        elif roots and passed.split is not None:
            self._rest[micro_batch] = passed.split.backward(roots, gradients)
        for leaf, stage in passed.received:
            route = Route(self.index, stage, micro_batch, is_gradient=True)
            if leaf.grad is None:
                self._post.send_no_gradient(leaf, route)
            else:
                self._post.send(leaf.grad, route)

    def run_rest(self, micro_batch: int) -> None:
        """Run the second half of a backward, for which no stage waits."""
        run_rest(self._rest.pop(micro_batch, []))

    def _gather_gradients(self, passed: _Passed, micro_batch: int) -> tuple[list[Any], list[Tensor]]:
        """Return each tensor that went to other stages, once, with the sum of its gradients from them.

        A tensor that did not contribute to the loss is left out: on one device no backward would run through it either.
        """
        sums: dict[tuple[int, int], tuple[GradientEdge, Tensor]] = {}
        for edge, meta, stage in passed.sent:
            gradient = self._post.receive_if_used(meta, Route(stage, self.index, micro_batch, is_gradient=True))
            if gradient is None:
                continue
            key = (id(edge.node), edge.output_nr)
            known = sums.get(key)
            sums[key] = (edge, gradient if known is None else known[1] + gradient)
        return [edge for edge, _ in sums.values()], [gradient for _, gradient in sums.values()]

    def forget(self) -> None:
        """Drop the state of a step that ended in an error."""
        self._passed.clear()
        self._rest.clear()


def _way_text(num_calls: int, last: int, names: list[str]) -> str:
    if not num_calls:
        return "no layer"
    name = f", the last one '{names[last]}'" if 0 <= last < len(names) else ""
    return f"{num_calls} layers{name}"
