"""Micro-batches one after the other: the order of every strategy but pipelines.

    forward 0, backward 0, ..., forward n: losses are there ── their sum travels ─┐
                                backward n: gradients may leave as they come      ▼

Where ranks exchange within a forward, each runs as many passes as the one with the most micro-batches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from meshwright.apply.passes import MicroBatch, StepWork, TermT
from meshwright.comm.communicator import Communicator

__all__: list[str] = []

T = TypeVar("T")


class RunsPasses(Protocol):
    """What an engine does before, around and after a micro-batch; see `apply.engine.Engine`."""

    num_replicas: int
    group: Communicator

    @property
    def needs_lockstep(self) -> bool: ...

    def arm(self) -> None: ...

    def begin_backward(self) -> None: ...

    def idle_pass(self) -> None: ...

    def forward_backward(self, batch: Any, compute: Callable[[nn.Module, Any], T]) -> list[T]: ...


def run_one_by_one(engine: RunsPasses, work: StepWork[TermT]) -> list[TermT]:
    """Run a step's micro-batches, backward too where gradients are on, and return the losses that this rank computes.

    Raises:
        ApplyError: The ranks cannot take this step.
        Exception: What the user's code raises; the other ranks have been told of it where they can be.
    """
    micro_batches = work.micro_batches
    num_passes = work.agree() if engine.needs_lockstep else 0
    terms: list[TermT] = []
    for place, micro_batch in enumerate(micro_batches):
        is_last = place == len(micro_batches) - 1
        if is_last and torch.is_grad_enabled():
            engine.arm()
        compute = functools.partial(_run_one, engine, work, micro_batch, place, list(terms) if is_last else None)
        terms += [term for term in engine.forward_backward(micro_batch.batch, compute) if term is not None]
    if engine.needs_lockstep:
        for _ in range(num_passes - len(micro_batches)):
            engine.idle_pass()
        if torch.is_grad_enabled():
            work.end_losses(terms)
    return terms


def _run_one(
    engine: RunsPasses,
    work: StepWork[TermT],
    micro_batch: MicroBatch,
    place: int,
    before: list[TermT] | None,
    *given: Any,
) -> TermT | None:
    """Run forward, loss and backward of a micro-batch, or of a replica's chunk of it.

    Args:
        engine: The strategy.
        work: What the step has it run.
        micro_batch: The micro-batch.
        place: Its number in the step.
        before: The losses of those before, where it is the last one.
        *given: The module, and the batch that it takes.
    """
    module, batch = given
    has_backward = torch.is_grad_enabled()
    # A chunk has a weight of its own.
    chunk = micro_batch if batch is micro_batch.batch else MicroBatch(batch)
    ledger = engine.group.ledger
    try:
        with ledger.span("forward", f"F{place}", {"micro_batch": place}):
            term = work.loss_of(module, chunk)
    except Exception as error:
        if work.may_stop_alone:  # the others hear of it before this rank stops
            work.tell_failure(error, is_alone=True)
        raise
    if term is None or not has_backward:
        return term
    if before is not None and engine.num_replicas == 1 and not engine.needs_lockstep:
        work.end_losses([*before, term])
    root = work.root_of(term)
    with ledger.span("backward", f"B{place}", {"micro_batch": place}):
        engine.begin_backward()
        if root is not None:
            torch.autograd.backward(*root)
    return term
