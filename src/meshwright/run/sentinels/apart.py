"""Parameters that ranks have apart, by writes of a script: values that each rank has computed from its own share of a batch.

A script that trains copies of the model, and writes them back, need not step the model at all. So some entries of each parameter
are compared in what all ranks call anyway: evaluations, saves, and `whole_parameters`. A step compares what was written since.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from meshwright.apply.engine import Engine
from meshwright.comm.communicator import Communicator
from meshwright.errors import ApplyError
from meshwright.mesh import MeshSpec
from meshwright.run.sentinels.circles import circles_of
from meshwright.run.sentinels.copies_check import is_equal
from meshwright.run.sentinels.digest import digest_of, digest_tensor

__all__: list[str] = []

_NUM_ENTRIES = 16
"""Entries of a parameter that are looked at: a copy that was trained differs in nearly all [count]."""

_NUM_IN_TURN = 16
"""Parameters that an evaluation looks at [count]."""

Named = Sequence[tuple[str, torch.Tensor]]


class ApartWatch:
    """Compares some entries of parameters between the ranks that hold the same.

    Args:
        engine: The strategy.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._turn = 0

    def refuse(
        self, before: Callable[[], None] | None = None, *, is_whole: bool = False, in_turn: bool = False
    ) -> None:
        """Refuse parameters of which ranks that hold the same ones have other values; every rank calls it, outside of steps.

        Args:
            before: Called on every rank before it raises, to name another cause (a replaced layer).
            is_whole: Whether every rank has every parameter whole now.
            in_turn: Whether a few parameters are looked at, the next ones at the next call.

        Raises:
            ApplyError: On every rank.
        """
        engine = self._engine
        if is_whole and type(engine).whole_parameters is Engine.whole_parameters:
            return  # nothing is gathered under such a plan, so that rank 0 may look at its whole copy alone
        if is_whole or not engine.is_prepared:
            groups: list[tuple[Communicator, Named]] = [(engine.everyone, list(engine.module.named_parameters()))]
        else:
            groups = [(group, named) for group, named in engine.copies_of_state() if group.size > 1]
        with engine.group.ledger.of_checks():
            odd: list[str] = []
            for group, named in groups:
                chosen = [pair for pair in named if isinstance(pair[1], nn.Parameter)]
                odd += _find_odd(group, self._next(chosen) if in_turn else chosen, engine.device)
            self._turn += in_turn
            _raise_if_any(engine, odd, before)

    def _next(self, named: Named) -> Named:
        start = self._turn * _NUM_IN_TURN % max(1, len(named))
        return [*named[start:], *named[:start]][:_NUM_IN_TURN]


def refuse_written_apart(engine: Engine, mesh: MeshSpec, written: Named) -> None:
    """Refuse parameters that ranks have written since the last step, with other values; every rank calls it then.

    Args:
        engine: The strategy.
        mesh: The ranks' places.
        written: What this rank has written.

    Raises:
        ApplyError: On every rank.
    """
    mine = {name: f"{digest_tensor(tensor):x}" for name, tensor in written}
    told = engine.everyone.all_gather_json(mine, device=engine.device)
    circles = [circle.ranks for circle in circles_of(mesh, "dp", "cp")]
    odd = [name for ranks in circles for name in told[ranks[0]] if len({told[rank].get(name) for rank in ranks}) > 1]
    if odd:
        raise apart_error(list(dict.fromkeys(odd)))


def holds_values(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor has entries of its own on this rank."""
    return tensor.layout == torch.strided and not tensor.is_meta and bool(tensor.numel()) and 0 not in tensor.stride()


def _find_odd(group: Communicator, named: Named, device: torch.device) -> list[str]:
    """Return the FQNs of which a group's ranks have other values; the same on all of them."""
    entries = [(name, _entries(tensor)) for name, tensor in named if holds_values(tensor)]
    if is_equal(group, digest_of([tensor for _, tensor in entries]), device):
        return []
    told = group.all_gather_json({name: f"{digest_tensor(tensor):x}" for name, tensor in entries}, device=device)
    return [name for name in told[0] if len({rank.get(name, told[0][name]) for rank in told}) > 1]


def _raise_if_any(engine: Engine, odd: Sequence[str], before: Callable[[], None] | None) -> None:
    count = torch.tensor([float(len(odd))], dtype=torch.float64, device=engine.device)
    engine.everyone.all_reduce(count, "max")
    if not count.item():
        return
    if before is not None:
        before()
    told = engine.everyone.all_gather_json(list(odd), device=engine.device)
    raise apart_error(list(dict.fromkeys(name for rank in told for name in rank)))


def apart_error(names: Sequence[str]) -> ApplyError:
    """Return the error for parameters that ranks have apart."""
    return ApplyError(
        f"ranks have other values of {len(names)} parameters, '{names[0]}' for example: the script has written what each rank "
        "alone has computed, as a copy of the model gives that is trained on a rank's own share (Reptile, MAML)",
        fix="give such copies the whole batch on every rank, so that all write the same; or use a plan of tp alone, where ranks "
        "have one batch; or train by model.step(batch) or model.backward(loss, weight=n), which exchange gradients. Where "
        "plan.reasons tell of draws (rng: ...), do first what they say",
    )


def _entries(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // _NUM_ENTRIES)][:_NUM_ENTRIES].contiguous()
