"""Run a case under a plan and in plain PyTorch; functions that ranks import."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import logging
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from tests.parity import cases
from tests.tolerances import FLOAT64
from torch.utils._pytree import tree_map

import meshwright as mw
from meshwright import testing
from meshwright.apply.tensor.guards import part_guard
from meshwright.ranks.join import DEVICE_VARIABLE


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a case is run with."""

    num_samples: int = 7
    micro_batches: int = 1
    max_grad_norm: float | None = None
    num_steps: int = 3
    plan_words: str = ""

    def __str__(self) -> str:
        clip = "" if self.max_grad_norm is None else f"-clip{self.max_grad_norm}"
        return f"n{self.num_samples}-mb{self.micro_batches}{clip}{self.plan_words.replace(',', '-')}"


def split_sizes(num_samples: int, parts: int) -> list[int]:
    """Return the documented sizes of contiguous shares: the first n % parts get one more."""
    return [num_samples // parts + (index < num_samples % parts) for index in range(parts)]


def cut(batch: Any, sizes: Sequence[int]) -> list[Any]:
    """Cut a batch along dim 0; None for an empty piece."""
    pieces, start = [], 0
    for size in sizes:
        stop = start + size
        pieces.append(tree_map(lambda t, a=start, b=stop: t[a:b], batch) if size else None)
        start = stop
    return pieces


def pieces_of(batch: Any, num_samples: int, num_ranks: int, micro_batches: int) -> list[list[Any]]:
    """Return each rank's micro-batches, by the documented rule, never an empty one."""
    ranks = []
    for size, share in zip(
        split_sizes(num_samples, num_ranks), cut(batch, split_sizes(num_samples, num_ranks)), strict=True
    ):
        ranks.append(
            [] if share is None else [p for p in cut(share, split_sizes(size, micro_batches)) if p is not None]
        )
    return ranks


def pieces_of_replicas(batch: Any, num_samples: int, num_ranks: int, micro_batches: int) -> list[list[Any]]:
    """Return each replica's chunks of the micro-batches: one process cuts micro-batches first, then chunks of each."""
    sizes = split_sizes(num_samples, micro_batches)
    chunks = [
        cut(piece, split_sizes(size, num_ranks)) for size, piece in zip(sizes, cut(batch, sizes), strict=True) if size
    ]
    return [[row[replica] for row in chunks if row[replica] is not None] for replica in range(num_ranks)]


def options_of(case: cases.Case, setting: Setting) -> testing.StepOptions:
    return testing.StepOptions(
        num_steps=setting.num_steps, optimizer=case.optimizer, max_grad_norm=setting.max_grad_norm
    )


class _CallsThatRanWhole(logging.Handler):
    """Collects what guards of tensor parallelism say of calls that shards are not proven for."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        part, _, reason = record.args or ("", "", "")
        self.found.append((str(part), str(reason)))


@contextlib.contextmanager
def nothing_runs_whole(expected: str = "") -> Iterator[None]:
    """Fail where a part that is cut runs as on one device inside: equal numbers would say nothing of the cut.

    Args:
        expected: What the reasons say of calls that do run whole, where some are meant to.
    """
    log, handler = logging.getLogger(part_guard.__name__), _CallsThatRanWhole()
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
    unexpected = [f"'{part}': {reason}" for part, reason in handler.found if not expected or expected not in reason]
    assert not unexpected, f"calls ran whole, so that nothing cut was compared: {'; '.join(unexpected)}"


def run_case(name: str, plan_text: str, setting: Setting, devices: Any = None) -> list[testing.StepRecord]:
    """Train a case under a plan, on every rank; what tensor parallelism cuts must run cut."""
    case = cases.find(name)
    plan = mw.Plan.parse(f"{plan_text},micro_batches={setting.micro_batches}{setting.plan_words}")
    with nothing_runs_whole(case.runs_whole_in_stages if plan.pp > 1 else ""):
        return testing.plan_steps(
            case.build,
            plan,
            case.batches(setting.num_samples, setting.num_steps),
            case.loss_fn,
            options=options_of(case, setting),
            devices=devices,
        )


def reference(
    name: str, setting: Setting, num_ranks: int | None = None, *, cutting: Any = pieces_of
) -> list[testing.StepRecord]:
    """Train a case in plain PyTorch: on whole batches, or in the pieces of `num_ranks` ranks."""
    case = cases.find(name)
    shares = None
    if num_ranks is not None:
        shares = functools.partial(
            cutting, num_samples=setting.num_samples, num_ranks=num_ranks, micro_batches=setting.micro_batches
        )
    return testing.oracle_steps(
        case.build,
        case.batches(setting.num_samples, setting.num_steps),
        case.loss_fn,
        num_steps=setting.num_steps,
        optimizer=case.optimizer,
        max_grad_norm=setting.max_grad_norm,
        shares=shares,
        are_replicas=cutting is pieces_of_replicas,
        device=os.environ.get(DEVICE_VARIABLE) or "cpu",  # one device is one of the ranks' kind
    )


def refused(function: Any, *args: Any, **kwargs: Any) -> tuple[str, str | None]:
    """Return the message and the fix with which a call is refused; "" and None where it is not."""
    try:
        function(*args, **kwargs)
    except mw.MeshwrightError as error:
        return error.message, error.fix
    return "", None


def refusal_of_case(name: str, plan: str) -> tuple[str, str | None]:
    """Return with what the first step of a case under a plan is refused."""
    case = cases.find(name)
    model = mw.apply_plan(case.build, plan, loss_fn=case.loss_fn)
    return refused(model.step, case.batch(4, 0))


def assert_ranks_agree(per_rank: Sequence[Sequence[testing.StepRecord]]) -> None:
    """Fail where ranks differ by as much as a bit."""
    for records in per_rank[1:]:
        testing.assert_parity(records, per_rank[0], 0.0, buffers=True)


def assert_distributed_parity(
    name: str,
    num_ranks: int,
    setting: Setting,
    *,
    plan_text: str = "",
    tolerance: float = FLOAT64,
    piecewise: bool = False,
) -> list[list[testing.StepRecord]]:
    """Train a case on ranks of the pool, compare all of them, and one of them with the oracle."""
    per_rank = testing.run_ranks(run_case, num_ranks, name, plan_text or f"dp={num_ranks}", setting)
    num_shares = mw.Plan.parse(plan_text).dp if plan_text else num_ranks
    expected = reference(name, setting, num_shares if piecewise else None)
    testing.assert_parity(per_rank[0], expected, tolerance, buffers=piecewise)
    assert_ranks_agree(per_rank)
    return per_rank


def run_wide_case(name: str, plan_text: str, setting: Setting) -> tuple[list[testing.StepRecord] | None, str]:
    """Train a case under a plan; the records come from rank 0 alone, a digest of them from every rank."""
    records = run_case(name, plan_text, setting)
    digest = hashlib.sha1(usedforsecurity=False)  # 340 MB on each rank: the fastest there is
    for record in records:
        digest.update(np.array([record.loss, record.grad_norm]).tobytes())
        for tensors in (record.gradients, record.parameters):
            for key, tensor in tensors.items():
                digest.update(key.encode())
                if tensor is not None:
                    digest.update(tensor.numpy())
    world = mw.current_world()
    return records if world is None or world.rank == 0 else None, digest.hexdigest()


def assert_wide_parity(name: str, num_ranks: int, setting: Setting, plan_text: str) -> None:
    """Compare a model with so many parameters that all ranks' copies of them would be long on their way here."""
    per_rank = testing.run_ranks(run_wide_case, num_ranks, name, plan_text, setting)
    testing.assert_parity(per_rank[0][0], reference(name, setting), FLOAT64)
    assert len({digest for _, digest in per_rank}) == 1, "ranks differ"
