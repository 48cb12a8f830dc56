"""Origin of a NaN: rank, micro-batch and parameter.

Nothing is watched in a normal step. When the summed gradient is not finite, each rank repeats its micro-batches one by one and
checks each gradient. It uses the random numbers and parameters of this step, which the optimizer has not changed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from meshwright.apply.engine import Engine
from meshwright.apply.state.buffers import BufferSnapshot
from meshwright.comm.communicator import Communicator
from meshwright.errors import NonFiniteError
from meshwright.run.losses.terms import LossTerms

__all__: list[str] = []


@dataclasses.dataclass(frozen=True, slots=True)
class RandomState:
    """State of the random generators that a model draws from."""

    cpu: torch.Tensor
    cuda: torch.Tensor | None

    @classmethod
    def read(cls, device: torch.device) -> RandomState:
        """Return the state as it is now."""
        return cls(torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None)

    def restore(self, device: torch.device) -> None:
        """Restore this state."""
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, device)


@contextlib.contextmanager
def unchanged_draws(engine: Engine) -> Iterator[None]:
    """Restore torch's generators after the context, so that the code inside takes no random numbers from training."""
    devices = {tensor.device for tensor in (*engine.parameters, *engine.module.buffers())} | {engine.device}
    indices = [device.index or 0 for device in devices if device.type == "cuda"]
    if indices and engine.num_replicas > 1:
        indices = list(range(torch.cuda.device_count()))
    with torch.random.fork_rng(devices=sorted(set(indices))):
        yield


@dataclasses.dataclass(frozen=True, slots=True)
class FirstNonFinite:
    """The first value on this rank that is not finite."""

    micro_batch: int
    loss: float
    parameter: str | None
    place: str | None = None
    """A tensor of the micro-batch that is not finite, where there is one, and its first such sample."""


def _find(
    module: nn.Module,
    micro_batches: Sequence[Any],
    loss_of: Callable[[nn.Module, Any], torch.Tensor],
    random_state: RandomState,
    *,
    device: torch.device,
    around: Callable[[int], contextlib.AbstractContextManager[None]],
) -> FirstNonFinite | None:
    """Repeat this rank's micro-batches and return the first with a loss or a gradient that is not finite.

    Args:
        module: The model, with the parameters of this step. Its buffers and `.grad` are not changed.
        micro_batches: The micro-batches of this step, in order.
        loss_of: ``(module, micro_batch)`` -> scalar with its graph.
        random_state: The generators' state before the first of them.
        device: The device whose generator is restored.
        around: Gives the context of a micro-batch's forward and backward, by its number.
    """
    now = RandomState.read(device)
    buffers = BufferSnapshot(module)
    named = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    random_state.restore(device)
    try:
        for index, batch in enumerate(micro_batches):
            gradients: Sequence[torch.Tensor | None] = [None] * len(named)
            with around(index):
                with torch.enable_grad():
                    loss = loss_of(module, batch)
                if loss.requires_grad:
                    gradients = torch.autograd.grad(loss, [p for _, p in named], allow_unused=True)
            bad = next(
                (name for (name, _), g in zip(named, gradients, strict=True) if g is not None and not _finite(g)), None
            )
            if bad is not None or not math.isfinite(loss.item()):
                return FirstNonFinite(index, loss.item(), bad, _place_in(batch))
        return None
    finally:
        now.restore(device)
        buffers.restore()


def _place_in(tree: Any, name: str = "batch") -> str | None:
    """Return the first tensor of a batch that is not finite, and its first such row along dim 0; None: all are finite."""
    if isinstance(tree, torch.Tensor):
        if not (tree.is_floating_point() or tree.is_complex()) or tree.layout != torch.strided or _finite(tree):
            return None
        rows = torch.isfinite(tree).reshape(len(tree), -1).all(1) if tree.dim() else None
        return name if rows is None else f"{name}, sample {int((~rows).nonzero()[0])}"
    pairs = tree.items() if isinstance(tree, Mapping) else enumerate(tree) if isinstance(tree, list | tuple) else ()
    return next((found for key, entry in pairs if (found := _place_in(entry, f"{name}[{key!r}]")) is not None), None)


def _finite(tensor: torch.Tensor) -> bool:
    values = tensor.coalesce().values() if tensor.is_sparse else tensor
    return bool(torch.isfinite(values).all())


def _explain(
    group: Communicator,
    finding: FirstNonFinite | None,
    *,
    loss: float,
    norm: float,
    device: torch.device,
    guess: str = "gradients whose squares overflow, a hook, or a random number of its own outside torch's generators?",
) -> NonFiniteError:
    """Return the error that names the first rank, micro-batch and parameter; the same on every rank.

    `guess` names a possible cause for the case that nothing is found.
    """
    mine = None if finding is None else [finding.micro_batch, repr(finding.loss), finding.parameter, finding.place]
    found = [
        (rank, *entry) for rank, entry in enumerate(group.all_gather_json(mine, device=device)) if entry is not None
    ]
    leave_out = "pass non_finite='skip' (in a configuration train.non_finite=\"skip\") to leave such steps out"
    fix = f"look at that micro-batch and lower the learning rate, or {leave_out}"
    if not found:
        return NonFiniteError(
            f"the gradient norm is {norm} and the loss {loss}, and running the micro-batches again did not show where "
            f"it came from ({guess})",
            fix=fix,
        )
    rank, micro_batch, rank_loss, parameter, place = found[0]
    where = f"the gradient of parameter '{parameter}'" if parameter else "the loss"
    others = f", and {len(found) - 1} more ranks" if len(found) > 1 else ""
    data = f"; the data are not finite themselves: {place} of that micro-batch" if place else ""
    return NonFiniteError(
        f"{where} is not finite: rank {group.ranks[rank]}, micro-batch {micro_batch} (loss {rank_loss}){others}{data}; the "
        "parameters are those of before the step",
        rank=group.ranks[rank],
        micro_batch=micro_batch,
        parameter=parameter,
        fix=f"leave such samples out of the data, or {leave_out}" if place else fix,
    )


def diagnose(
    engine: Engine,
    terms: LossTerms,
    parts: list[Any],
    random_state: RandomState,
    *,
    loss: float,
    norm: float,
    around: Callable[[int], contextlib.AbstractContextManager[None]] = lambda _: contextlib.nullcontext(),
) -> NonFiniteError:
    """Return the error that names where the first value is not finite; every rank calls it.

    Args:
        engine: The strategy.
        terms: What computes losses.
        parts: This rank's micro-batches.
        random_state: That of before the step.
        loss: The loss of all ranks.
        norm: The norm of the whole gradient.
        around: Gives the context of a micro-batch's forward and backward, by its number.
    """

    def loss_of(module: nn.Module, part: Any) -> torch.Tensor:
        term = terms.of_any(module, part)
        if term is None:
            raise RuntimeError("the whole model has no loss")
        return term.value

    with engine.switch.suspended(), engine.whole_parameters():
        finding = _find(engine.module, parts, loss_of, random_state, device=engine.device, around=around)
    guess = {"guess": engine.reads_as_nan} if engine.reads_as_nan else {}
    return _explain(engine.group, finding, loss=loss, norm=norm, device=engine.device, **guess)
