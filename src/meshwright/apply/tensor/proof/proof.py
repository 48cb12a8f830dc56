"""Proof of one region: its shards, run side by side, must equal the whole in results and gradients.

All ranks of the group are threads of this process for the time of a proof. They run the code that the real ranks will run, on
copies of the region's scope: in float64 on the CPU, on a small input, with random weights, since zero weights would let anything
pass. Their exchanges meet at a barrier. A thread that fails breaks the barrier, so none waits forever.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from meshwright._torch_private import run_backward
from meshwright.apply.modules.copies import map_call
from meshwright.apply.tensor.cutting import Cutting, find_tensor
from meshwright.apply.tensor.guards.ambient import surrounded_by
from meshwright.apply.tensor.guards.asked import Asked, Event, Followed, ask, calls_the_same, run_and_note
from meshwright.apply.tensor.proof.effects import Before, Left, foreign_parameter
from meshwright.apply.tensor.proof.exact import Exact
from meshwright.apply.tensor.proof.scope_values import ScopeValues, as_double
from meshwright.apply.tensor.proof.shards_against_whole import (
    TOLERANCE,
    Disproof,
    DisprovedError,
    add_up,
    are_same,
    check_equal,
    check_gradient,
    check_left,
    check_shards,
    in_words,
    is_equal,
    largest,
)
from meshwright.apply.tensor.proof.threads import run_as_ranks
from meshwright.apply.tensor.search.trace import Call
from meshwright.apply.tensor.slices import Slices
from meshwright.apply.tensor.tensor_layout import Region, TensorLayout
from meshwright.apply.tensor.types.checker import Checker
from meshwright.apply.tensor.types.report import TypeReport
from meshwright.apply.tensor.types.typed_run import Record, run_and_watch
from meshwright.comm.communicator import Communicator
from meshwright.garbage import paused_collection
from meshwright.trees import tensors_in

__all__: list[str] = []


class MisshapenError(DisprovedError):
    """A result on shards has another shape than on the whole."""

    def __init__(self, place: int, own: tuple[int, ...], whole: tuple[int, ...]) -> None:
        super().__init__(f"result {place} has shape {list(own)} on a shard, {list(whole)} of the whole")
        self.place = place
        self.own = own
        self.whole = whole


# -- one run ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(kw_only=True)
class Outcome:
    """Results of one run of a scope."""

    outputs: list[Tensor]
    input_gradients: list[Tensor | None]
    gradients: dict[str, Tensor | None]
    left: Left
    """What it left behind beside them."""
    slices: dict[int, int] = dataclasses.field(default_factory=dict)
    """Outputs that are slices -> along which dim."""
    types: TypeReport | None = None
    """What the types say; of the rank that they are followed on."""


class Experiment:
    """A scope with a small input, prepared to run whole and in shards.

    Args:
        scope: The module, as the user built it.
        call: Its recorded call.
        num_tp_ranks: Ranks [count].
        mode: Training (True) or eval mode for all modules inside; None leaves each module's own.
        values: Values of the scope that other experiments use, too.
        only_asks: Whether `asks` alone will be called.
    """

    def __init__(
        self,
        scope: nn.Module,
        call: Call,
        num_tp_ranks: int,
        *,
        mode: bool | None = None,
        values: ScopeValues | None = None,
        only_asks: bool = False,
    ) -> None:
        self.num_tp_ranks, self._mode, self._scope = num_tp_ranks, mode, scope
        self._values = values or ScopeValues(scope)
        self._generator = self._values.generator()
        self._only_asks = only_asks
        self._called: list[Event] = []  # by the whole, where it is only asked
        self._ambient = call.ambient
        self._inputs = map_call((call.args, call.kwargs), self._input)
        self._cotangents: list[Tensor] = []
        self._of_attributes: dict[str, Tensor] = {}  # cotangents of tensors left in attributes: a loss may add those
        self._start = self._generator.get_state()
        # With the record, which holds the run's parameters, and these their gradients.
        self._whole: tuple[Outcome, Record] | None = self._run_whole()
        while self._values.were_written():
            self._whole = self._run_whole()
        self._largest = {name: 0.0 if g is None else largest(g) for name, g in self.whole.gradients.items()}
        of_inputs = [largest(g) for g in self.whole.input_gradients if g is not None]
        # A gradient that is zero up to rounding (a bias of keys, before softmax) is not compared relative to its own size.
        # Of finite ones: beside an infinite scale nothing would differ.
        self._scale = 1e-3 * max([0.0, *filter(math.isfinite, [*self._largest.values(), *of_inputs])])
        self.idle = {name for name, size in self._largest.items() if size <= TOLERANCE * self._scale}
        """Parameters whose gradient is nothing but rounding here."""
        self.names = set(self._largest)
        """All parameters."""

    def _input(self, tensor: Tensor) -> Tensor:
        plain = tensor.detach().cpu()
        if not tensor.requires_grad:
            return as_double(plain.clone() if plain.is_inference() else plain)
        # Activations: only their shape is asked for.
        noise = torch.randn(plain.shape, generator=self._generator, dtype=torch.float64)
        return noise.requires_grad_()

    def _fresh(self) -> tuple[nn.Module, Any]:
        module = self._values.fresh()
        if self._mode is not None:
            module.train(self._mode)
        inputs = map_call(self._inputs, lambda tensor: tensor.detach().clone().requires_grad_(tensor.requires_grad))
        return module, inputs

    @property
    def whole(self) -> Outcome:
        """The results of the whole scope."""
        return self._remember()[0]

    def _remember(self) -> tuple[Outcome, Record]:
        if self._whole is None:
            self._whole = self._run_whole()
        return self._whole

    def forget(self) -> None:
        """Let go of the whole's results where the scope is large; they are computed again, the same, when they are asked for."""
        if self._values.is_large:
            self._whole = None

    def _run_whole(self) -> tuple[Outcome, Record]:
        self._generator.set_state(self._start)
        self._cotangents.clear()
        record = Record()
        module, inputs = self._fresh()
        before = Before(module, inputs)
        with surrounded_by(self._ambient, gradients=True), Exact():
            if self._only_asks and self._ambient[0]:
                results, self._called = run_and_note(module, inputs)
            else:
                results = run_and_watch(module, inputs, record)
            outputs = list(tensors_in(results))
            left = before.left()
            for tensor in outputs:
                self._cotangents.append(torch.randn(tensor.shape, generator=self._generator, dtype=torch.float64))
            for path, value in left.attributes.items():
                if isinstance(value, Tensor) and value.requires_grad:
                    noise = torch.randn(value.shape, generator=self._generator, dtype=torch.float64)
                    self._of_attributes[path] = noise
            if self._only_asks:
                outputs = [tensor.detach() for tensor in outputs]
                return Outcome(outputs=outputs, input_gradients=[], gradients={}, left=left), record
            return self._backward(module, inputs, outputs, self._cotangents, left), record

    def asks(self, few: Experiment | None = None, earlier: Followed | None = None, *, resizes: bool = False) -> Asked:
        """Return the sizes and values that this call's code reads, and whether it does the same without gradients.

        Args:
            few: The same call with fewer rows. It is asked in this one's place where its code calls the same functions.
            earlier: What was found of its sizes in another mode.
            resizes: Whether a region in it translates sizes to shards'.
        """

        def run(module: nn.Module, inputs: Any, mode: Any, gradients: bool | None = None) -> list[Tensor]:
            with surrounded_by(self._ambient, gradients=gradients), Exact(), mode:
                return list(tensors_in(module(*inputs[0], **inputs[1])))

        are_alike = few is not None and calls_the_same(run, *((one._fresh, one._called) for one in (few, self)))
        of = few if few is not None and are_alike else self
        asked = ask(run, of._fresh, earlier, resizes=resizes, expected=None if resizes else of._called)
        if of is not self:
            pairs = zip(tensors_in(of._inputs), tensors_in(self._inputs), strict=True)
            rows = {size: own for tensors in pairs for size, own in zip(*(t.shape for t in tensors), strict=True)}
            asked.sizes = {rows[size] for size in asked.sizes}
        # As it is called; if that is with gradients, also without.
        without = run(*self._fresh(), contextlib.nullcontext(), False if self._ambient[0] else None)
        pairs = zip(without, self.whole.outputs, strict=False)
        asked.is_same = len(without) == len(self.whole.outputs) and all(
            is_equal(mine, wanted) for mine, wanted in pairs
        )
        return asked

    def _backward(
        self, module: nn.Module, inputs: Any, outputs: list[Tensor], cotangents: Sequence[Tensor], left: Left
    ) -> Outcome:
        beside = [_attribute(left, path, cotangent) for path, cotangent in self._of_attributes.items()]
        roots = zip([*outputs, *beside], [*cotangents, *self._of_attributes.values()], strict=True)
        pairs = [pair for pair in roots if pair[0].requires_grad]
        foreign = foreign_parameter([root for root, _ in pairs], module)
        if foreign is not None:
            raise DisprovedError(f"it uses a parameter of shape {list(foreign.shape)} that is outside of it")
        run_backward([pair[0] for pair in pairs], [pair[1] for pair in pairs])
        outcome = Outcome(
            outputs=[tensor.detach() for tensor in outputs],
            input_gradients=[_dense(tensor.grad) for tensor in tensors_in(inputs)],
            gradients={name: _dense(p.grad) for name, p in module.named_parameters(remove_duplicate=False)},
            left=left,
        )
        for parameter in module.parameters():
            parameter.grad = None  # the module, which refers to itself, would keep it until it is collected
        return outcome

    def _run_shards(self, layout: TensorLayout) -> list[tuple[Outcome, Cutting]]:
        _, record = self._remember()  # which shards follow
        made: list[Cutting] = []

        def work(group: Any) -> tuple[Outcome, Cutting]:
            with surrounded_by(self._ambient, gradients=True), Exact():
                outcome = self._run_shard(layout, group, record, made)
                group.leave()
                return outcome

        with paused_collection():
            found, errors = run_as_ranks(self.num_tp_ranks, work)
        shards_were_written = any(cutting.were_written() for cutting in made)
        if errors:
            for cutting in made:  # the error keeps them until it is collected
                cutting.drop_values()
        if shards_were_written and self._values.are_shared:
            self._values.count_write()
            self._values.were_written()
            return self._run_shards(layout)  # each with values of its own now, drawn as before
        if self._values.were_written():
            raise DisprovedError("on shards it writes into parameters, and the whole does not", Disproof.RAISED)
        if errors:
            first = next((error for error in errors if not isinstance(error, threading.BrokenBarrierError)), errors[0])
            if isinstance(first, MisshapenError) or _is_of_results(first):
                raise first
            raise DisprovedError(
                f"tried on shards for {self.num_tp_ranks} ranks, {in_words(first)}: it works on whole tensors only",
                Disproof.UNFIT_SIZES if type(first) is RuntimeError else Disproof.RAISED,
            )
        return [shard for shard in found if shard is not None]  # where nothing was raised, all of them

    def _run_shard(
        self, layout: TensorLayout, group: Communicator, record: Record, made: list[Cutting]
    ) -> tuple[Outcome, Cutting]:
        module, inputs = self._fresh()
        cutting = Cutting(module, layout, group, shares_memory=self._values.are_shared)
        made.append(cutting)
        is_last = group.group_rank == self.num_tp_ranks - 1
        checker = Checker(self._scope, cutting, record) if is_last else None
        before = Before(module, inputs)
        outputs = module(*inputs[0], **inputs[1]) if checker is None else checker.run_and_watch(inputs)
        left = before.left()
        tensors = list(tensors_in(outputs))
        local = [tensor.local if isinstance(tensor, Slices) else tensor for tensor in tensors]
        if len(local) != len(self._cotangents):
            raise DisprovedError(f"{len(local)} tensors leave, from the whole {len(self._cotangents)}")
        cotangents = []
        for place, (tensor, cotangent, own) in enumerate(zip(tensors, self._cotangents, local, strict=True)):
            if isinstance(tensor, Slices):
                if (
                    tensor.shape != cotangent.shape
                ):  # nobody gathers it here, and each rank makes sizes of its own slice
                    shapes = f"{list(tensor.shape)}, of the whole {list(cotangent.shape)}"
                    raise DisprovedError(f"result {place} in slices has shape {shapes}")
                start = sum(tensor.sizes[: group.group_rank])
                cotangent = cotangent.narrow(tensor.cut_dim, start, tensor.sizes[group.group_rank])
            if cotangent.shape != own.shape:
                raise MisshapenError(place, tuple(own.shape), tuple(cotangent.shape))
            if not isinstance(tensor, Slices):  # a backward from other results would be for nothing
                check_equal(own.detach(), self.whole.outputs[place], f"result {place}")
            cotangents.append(cotangent)
        outcome = self._backward(module, inputs, local, cotangents, left)
        outcome.types = None if checker is None else checker.report
        outcome.slices = {i: tensor.cut_dim for i, tensor in enumerate(tensors) if isinstance(tensor, Slices)}
        return outcome, cutting

    # -- comparison ---------------------------------------------------------------------------------------------

    def prove(self, region: Region) -> Region:
        """Return the region, completed with its partial parameters, or raise DisprovedError."""
        for _ in range(1 + len(self.whole.outputs)):
            try:
                return region.replace(partial=self.check(TensorLayout(regions=(region,))))
            except MisshapenError as error:
                region = self._with_slices(region, error)
        raise DisprovedError("too many results in slices")

    def check(self, layout: TensorLayout) -> tuple[str, ...]:
        """Return the names of whole parameters whose gradients have to be summed, or raise DisprovedError."""
        runs: list[tuple[Outcome, Cutting]] = []
        try:
            runs = self._run_shards(layout)
            return self._compare(runs)
        finally:
            for outcome, cutting in runs:
                outcome.gradients.clear()
                cutting.drop_values()
            self._values.collect(self._inputs)

    def _compare(self, runs: Sequence[tuple[Outcome, Cutting]]) -> tuple[str, ...]:
        outcomes = [outcome for outcome, _ in runs]
        self._check_outputs(outcomes)
        check_left([outcome.left for outcome in outcomes], self.whole.left, runs[0][1])
        for index, whole in enumerate(self.whole.input_gradients):
            for outcome in outcomes:
                check_gradient(outcome.input_gradients[index], whole, f"input {index}", self._scale)
        return self._check_types(outcomes[-1].types, self._check_gradients(outcomes, runs[0][1]))

    def check_types(self, layout: TensorLayout) -> TypeReport:
        """Return the type check's report on a layout, without comparing numbers."""
        return self._run_shards(layout)[-1][0].types or TypeReport()

    def _check_types(self, types: TypeReport | None, partial: list[str]) -> tuple[str, ...]:
        """Return the names of the parameters whose gradients are terms, where types and numbers agree."""
        zero = {name for name, size in self._largest.items() if size == 0.0}
        disagreement = "" if types is None else types.disagreement(partial, zero)
        if disagreement:
            raise DisprovedError(disagreement)
        terms = {*partial, *(() if types is None else types.partial)}
        return tuple(name for name in self.whole.gradients if name in terms)

    def _with_slices(self, region: Region, error: MisshapenError) -> Region:
        """Mark a result that is smaller in one dim as a slice, and run the proof again."""
        differing = [dim for dim, sizes in enumerate(zip(error.own, error.whole, strict=False)) if sizes[0] != sizes[1]]
        known = error.place in dict(region.results)
        if known or len(error.own) != len(error.whole) or len(differing) != 1:
            raise error
        if region.shares(error.whole[differing[0]], self.num_tp_ranks) is None:
            raise error
        return region.replace(results=(*region.results, (error.place, differing[0])))

    def _check_outputs(self, outcomes: list[Outcome]) -> None:
        slices = outcomes[0].slices
        for index, whole in enumerate(self.whole.outputs):
            if index in slices:
                joined = torch.cat([outcome.outputs[index] for outcome in outcomes], slices[index])
                check_equal(joined, whole, f"result {index}, put together")
                continue
            for outcome in outcomes:
                check_equal(outcome.outputs[index], whole, f"result {index}")

    def _check_gradients(self, outcomes: list[Outcome], cutting: Cutting) -> list[str]:
        cuts, by_id = cutting.layout.cuts, cutting.layouts_by_id()
        partial = []
        for name, whole in self.whole.gradients.items():
            own = [outcome.gradients[name] for outcome in outcomes]
            layouts = by_id[id(find_tensor(cutting.module, name))] if name in cuts else None
            if layouts is not None:
                least = max(self._scale, self._largest[name])
                check_shards(own, layouts, whole, name, least, check=check_gradient)
            elif len({gradient is None for gradient in own}) > 1:
                # Another batch may skip it on another rank, and all ranks must sum the same gradients.
                raise DisprovedError(f"{name} is used by some of the ranks")
            elif not all(is_equal(gradient, whole, self._scale) for gradient in own):
                check_gradient(add_up(own), whole, f"{name}, added up", self._scale)
                partial.append(name)
            elif not are_same(own) and is_equal(add_up(own), whole, self._scale):
                partial.append(name)  # zero up to rounding, which differs between ranks: copies would drift apart
        return partial


def _is_of_results(error: BaseException) -> bool:
    return isinstance(error, DisprovedError) and error.difference.kind in (Disproof.RESULT_VALUES, Disproof.ROUNDING)


def _dense(gradient: Tensor | None) -> Tensor | None:
    return gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient


def _attribute(left: Left, path: str, cotangent: Tensor) -> Tensor:
    """Return a tensor left in an attribute, which a loss may add."""
    value = left.attributes.get(path)
    if not isinstance(value, Tensor) or isinstance(value, Slices) or value.shape != cotangent.shape:
        kind = f"of shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise DisprovedError(f"'{path}' is left {kind} on shards, of shape {list(cotangent.shape)} of the whole")
    return value
