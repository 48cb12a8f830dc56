"""Comparison of a backward of an own loop between the ranks, before any of them runs it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Generic, Protocol, SupportsFloat, TypeVar

import torch
from torch import nn

from meshwright.apply.engine import Engine
from meshwright.errors import ApplyError
from meshwright.run.agreement import raise_first, told_of
from meshwright.run.loss_graph import LossGraph, foreign_error, foreign_parameters
from meshwright.run.losses.loss import Loss
from meshwright.run.sentinels.circles import Circle
from meshwright.run.sentinels.digest import digest_text
from meshwright.run.step import Stepper
from meshwright.spec import Plan

__all__: list[str] = []

OWN_MEAN = (
    "loss: the script's own is taken for a mean over samples, each by itself. Nobody sees what mixes a share's samples before it "
    "(rewards normalised by their mean, batch statistics, hooks and functions in backward): gather those first (mw.gather_batch)"
)
"""Reason of a plan whose batches an own loop has."""
_BITS = 20
"""Of a description that ranks compare: sums of its squares are exact in float64."""
_APART = 1e-3
"""Relative difference of a loss between ranks that share layers, above what the roundings of any dtype give."""


class TakesPart(Protocol):
    """A model of an own loop, as the comparison sees it; see `own_loop.OwnLoop`."""

    number: int
    plan: Plan
    engine: Engine
    num_updates: int
    has_looked_at_graph: bool
    stepper: Stepper

    @property
    def is_over_several_batches(self) -> bool: ...

    def holds(self, parameter: torch.Tensor) -> bool: ...

    def find_switched(self) -> str | None: ...


LoopT = TypeVar("LoopT", bound=TakesPart)


def real_number_of(loss: Any, weight: Any) -> torch.Tensor:
    """Return the tensor of a loss.

    Args:
        loss: What a script has given to `backward`.
        weight: What it has given beside it.

    Raises:
        ApplyError: One of them is no real number, or a `Loss` has two weights.
    """
    value = loss.sum if isinstance(loss, Loss) else loss
    fix = "pass one number that was computed from outputs of model(...), without .detach() or torch.no_grad()"
    if isinstance(value, Mapping):
        fix = f"pass the entry that is the loss, one of {', '.join(map(repr, list(value)[:4]))}"
    elif isinstance(value, tuple | list):
        fix = "pass one of them, or their sum"
    if not isinstance(value, torch.Tensor):
        raise ApplyError(f"model.backward() was given a {type(value).__name__} (rule: a tensor of one number)", fix=fix)
    if value.is_complex():
        raise ApplyError(
            f"model.backward() was given a loss of {value.dtype} (rule: a real number)",
            fix="pass loss.real or loss.abs()",
        )
    if isinstance(loss, Loss) and weight is not None:
        raise ApplyError(
            f"model.backward() was given meshwright.Loss(sum, weight={loss.weight}) and weight={weight} (rule: one of them)",
            fix="leave weight= out: the Loss has its own",
        )
    counted: Any = loss.weight if isinstance(loss, Loss) else weight
    is_one = isinstance(counted, torch.Tensor) and counted.numel() == 1 and not counted.is_complex()
    try:
        is_number = (counted is None and not isinstance(loss, Loss)) or is_one or isinstance(counted, SupportsFloat)
        if is_number and counted is not None:
            float(counted)
    except (OverflowError, ValueError, TypeError, RuntimeError):
        is_number = False
    if not is_number or isinstance(counted, str):
        raise ApplyError(
            f"the weight of a loss is {str(counted)[:60]}, a {type(counted).__name__}",
            fix="pass how much it counts, a finite number of at least 0: len(inputs), or the number of valid labels",
        )
    return value


class OwnBackward(Generic[LoopT]):
    """One call of `model.backward` on this rank, and what all ranks bring to it.

    Args:
        loop: The model that it was called on.
        loss: A mean, or a sum with its weight.
        weight: What the mean counts.
        graph: What the loss comes from.
        live: All models under plans of several ranks, in the order of their numbers.
    """

    def __init__(
        self,
        loop: LoopT,
        loss: torch.Tensor | Loss,
        weight: float | torch.Tensor | None,
        graph: LossGraph,
        live: Sequence[LoopT],
    ) -> None:
        self._loop = loop
        self._is_mean = not isinstance(loss, Loss)
        self._value = loss.sum if isinstance(loss, Loss) else loss
        self._weight = float(loss.weight) if isinstance(loss, Loss) else (1.0 if weight is None else float(weight))
        self._total = math.nan
        loop.stepper.own_draws.look_at_views([mark for mark in graph.marks if mark.loop() is loop], self._weight)
        marked = {id(mark.loop()) for mark in graph.marks}
        owned = [other for other in live if id(other) in marked or any(map(other.holds, graph.leaves))]
        self.loops = owned
        """The models whose parameters may get gradients, in one order on all ranks."""
        self._broken = self._find_broken(graph, has_weight=isinstance(loss, Loss) or weight is not None)
        numbers = [
            (
                other.number,
                sum(mark.loop() is other for mark in graph.marks),
                other.find_switched(),
                other.engine.module.training,
            )
            for other in owned
        ]
        self._description = json.dumps([loop.number, self._is_mean, str(self._value.dtype), numbers])

    def _find_broken(self, graph: LossGraph, *, has_weight: bool) -> ApplyError | None:
        loop, value = self._loop, self._value
        if value.numel() != 1 or not value.requires_grad:
            what = f"a tensor of shape {tuple(value.shape)}" if value.numel() != 1 else "a loss without a graph"
            return ApplyError(
                f"model.backward() was given {what}",
                fix="pass one number that was computed from outputs of model(...), without .detach() or torch.no_grad()",
            )
        if loop not in self.loops:
            return ApplyError(
                "the loss that model.backward() was given does not come from this model",
                fix="compute it from outputs of model(...) on every rank, or call backward on the model that it comes from",
            )
        if not has_weight and loop.is_over_several_batches:
            return ApplyError(
                f"model.backward() was given a mean without its weight under the plan '{loop.plan}': ranks may have different "
                "numbers of samples, and one device's mean weighs each sample alike",
                fix="pass weight=, what the mean is taken over on this rank (len(inputs), or the number of valid labels), or "
                "meshwright.Loss(sum, weight); model.loss(batch) returns such a loss",
            )
        if not self._weight >= 0 or math.isinf(self._weight):
            return ApplyError(
                f"the weight of a loss is {self._weight}",
                fix="pass how much it counts, a finite number of at least 0",
            )
        if graph.recut is not None:
            return ApplyError(
                f"the loss reads a parameter that had another shape when it did: the first model(...) under the plan "
                f"'{loop.plan}' has cut it to {tuple(graph.recut.shape)} since",
                fix="compute the loss from parameters after model(...), or pass example_batch= to apply_plan",
            )
        return self._find_foreign(graph) or self._find_unlike(graph)

    def _find_foreign(self, graph: LossGraph) -> ApplyError | None:
        if not self._loop.is_over_several_batches:
            return None  # its gradient is the same on all ranks
        foreign = [leaf for leaf in graph.leaves if isinstance(leaf, nn.Parameter)]
        foreign = [leaf for leaf in foreign if not any(other.holds(leaf) for other in self.loops)]
        if not foreign and not self._loop.has_looked_at_graph:  # inside of the models' forwards, too
            known = [parameter for other in self.loops for parameter in other.engine.parameters]
            foreign = foreign_parameters(self._value, known)
            self._loop.has_looked_at_graph = not foreign
        return foreign_error(foreign[0], str(self._loop.plan)) if foreign else None

    def _find_unlike(self, graph: LossGraph) -> ApplyError | None:
        own = self._loop.plan
        for other in self.loops:
            if (other.plan.dp, other.plan.tp, other.plan.batch) != (own.dp, own.tp, own.batch):
                return ApplyError(
                    f"a loss comes from models under the plans '{own}' and '{other.plan}', whose ranks share out batches "
                    "differently",
                    fix="use plans with the same dp, tp and batch for models that meet in one loss",
                )
            stale = [mark for mark in graph.marks if mark.loop() is other and mark.version != other.num_updates]
            if stale:
                return ApplyError(
                    "the parameters were updated by the optimizer between a forward and the backward through it",
                    fix="run model(...) again after the optimizer's step, or model.backward(loss) before it",
                )
            streams = [mark.streams for mark in graph.marks if mark.loop() is other]
            if other.plan.recompute != "none" and any(stream != streams[0] for stream in streams):
                return ApplyError(
                    f"recompute={other.plan.recompute} under tp={own.tp} repeats forwards of other sizes in one backward",
                    fix="call model.backward(loss) after each model(...), or use recompute=none",
                )
        return None

    def agree(self) -> float:
        """Compare what the ranks run, and return the loss of the global batch.

        Raises:
            ApplyError: On every rank: one of them cannot run this backward, or they run different ones, or nothing counts.
        """
        engine = self._loop.engine
        everyone, device = engine.everyone, engine.device
        code = digest_text(self._description) & 2**_BITS - 1
        mean = self._value.detach().double().sum() if self._value.numel() == 1 else torch.zeros(())
        total = mean * self._weight if self._is_mean else mean
        if not self._weight:
            total = torch.zeros((), dtype=torch.float64)  # the mean over no sample is not a number
        weight = self._weight if self._broken is None else 0.0
        circle = Circle.over(self._loop.plan.mesh, everyone.rank, "tp")
        mine = [weight, total.item(), float(self._broken is not None), float(code), float(code * code)]
        terms = [part * circle.factor for part in (weight, total.item())]
        mine += [*terms, *map(abs, terms)]
        told = torch.tensor(mine, dtype=torch.float64, device=device)
        everyone.all_reduce(told)
        self._total, loss_sum, num_broken, codes, squares, *apart = told.tolist()
        if num_broken:
            reasons = everyone.all_gather_json(told_of(self._broken), device=device)
            raise_first(reasons, self._broken, everyone.ranks)
        if round(squares) * everyone.size != round(codes) ** 2:
            self._raise_different()
        if not circle.is_alone and self._are_apart(*apart):
            self._raise_apart(circle.ranks, mine[:2])
        if not self._total:
            raise ApplyError(
                "the weights of a loss add up to 0 over all ranks, so that it is 0 / 0",
                fix="leave out batches in which nothing counts",
            )
        return loss_sum / self._total

    def _raise_different(self) -> None:
        engine = self._loop.engine
        told = engine.everyone.all_gather_json(self._description, device=engine.device)
        other = next(place for place, text in enumerate(told) if text != told[0])
        raise ApplyError(
            "ranks have called model.backward() on losses of different kinds: [model, is a mean, dtype, [model, forwards, "
            f"switched parameter, training mode]] is {told[0]} on rank {engine.everyone.ranks[0]} and {told[other]} on rank "
            f"{engine.everyone.ranks[other]}",
            fix="run the same forwards and backwards on every rank, with a batch of 0 samples and weight=0 where there are none",
        )

    def _are_apart(self, weight: float, total: float, weight_size: float, total_size: float) -> bool:
        """Tell whether weights or sums of losses differ by more than roundings, of which a loss near 0 may have many."""
        dtype = self._value.dtype
        floor = float(torch.finfo(dtype).eps) ** 0.5
        return abs(weight) > _APART * weight_size or abs(total) > _APART * total_size + floor * weight_size

    def _raise_apart(self, ranks: Sequence[int], mine: Sequence[float]) -> None:
        """Raise where ranks that share layers have other losses of one batch, or other weights; every rank calls it."""
        engine = self._loop.engine
        told = engine.everyone.all_gather_json([list(ranks), *map(repr, mine)], device=engine.device)
        for place, (theirs, weight, total) in enumerate(told):
            first = told[engine.everyone.ranks.index(theirs[0])]
            sizes = [(float(weight), float(first[1])), (float(total), float(first[2]))]
            # Each pair as the sum over all ranks has it, which has found that one of them differs.
            if any(abs(odd - usual) > _APART / 2 * abs(usual) for odd, usual in sizes):
                raise ApplyError(
                    f"ranks {theirs} share the layers and the batch under the plan '{self._loop.plan}', and have other losses of "
                    f"it: sum {first[2]} and weight {first[1]} on rank {theirs[0]}, {total} and {weight} on rank "
                    f"{engine.everyone.ranks[place]}",
                    fix="compute the same loss with the same weight on these ranks: its code must not depend on the rank",
                )

    def root(self) -> torch.Tensor:
        """Return the gradient from which this rank's backward starts."""
        total = self._total / self._loop.engine.readers
        share = self._weight / total if self._is_mean else 1.0 / total
        return torch.full_like(self._value, share)
