"""A model's own code that runs backward into its parameters: refused while a plan runs it that adds up gradients.

A plan weighs what the loss gives by each part's and each rank's samples. What a backward inside of a forward or a loss adds to
`.grad` would be added up unweighed: over micro-batches, over ranks, or on some of those that share a layer. One that reaches no
parameter (a gradient of the inputs), and `torch.autograd.grad`, are left alone; so are optimizers, and one device with one batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch
from torch import nn

from meshwright._torch_collectives import watch_backwards
from meshwright._torch_private import is_in_backward
from meshwright.run.loss_graph import trains_parameters
from meshwright.run.losses.trial_writes import own_backward_error
from meshwright.run.model_collectives import is_run_by_a_plan, module_of
from meshwright.run.step import Stepper

__all__: list[str] = []


def refuse_backwards_in_models() -> None:
    """Have each backward that a model's or a loss's code runs be looked at while a plan runs that code."""
    watch_backwards(_refuse_inside)


def _refuse_inside(called: FrameType, roots: Sequence[Any], inputs: Sequence[Any]) -> None:
    """Raise ApplyError where code that an engine runs adds to the gradients of parameters.

    Args:
        called: The frame of `torch.autograd.backward`.
        roots: What it begins from.
        inputs: The tensors that get gradients; empty: all leaves.
    """
    frame: FrameType | None = called
    # A function mode, torch's or ours, calls it once more.
    while frame is not None and (module_of(frame).startswith("torch.") or frame.f_code.co_name == "__torch_function__"):
        frame = frame.f_back
    if frame is None or module_of(frame).startswith("meshwright.") or not is_run_by_a_plan(frame):
        return
    # One of a function that repeats its forward in its backward (reversible layers) hands on a gradient: it is a part of ours.
    if is_in_backward() and called.f_locals.get("grad_tensors") is not None:
        return
    if inputs:
        reaches = any(isinstance(tensor, nn.Parameter) for tensor in inputs)
    else:
        reaches = trains_parameters([root for root in roots if isinstance(root, torch.Tensor)])
    if not reaches:
        return
    stepper = _stepper_of(frame)
    if stepper is None or _adds_up(stepper):
        raise own_backward_error()


def _adds_up(stepper: Stepper) -> bool:
    """Tell whether a step's gradient is a sum over micro-batches, ranks or devices."""
    engine = stepper.engine
    is_cut = stepper.micro_batches > 1 or stepper.micro_batch_size is not None
    return is_cut or engine.everyone.size * engine.num_replicas > 1


def _stepper_of(caller: FrameType) -> Stepper | None:
    """Return what steps the model whose code runs; None in a thread of an engine, which only parallel plans have."""
    frame: FrameType | None = caller
    while frame is not None:
        if module_of(frame).startswith("meshwright.run."):
            own = frame.f_locals.get("self")
            found = own if isinstance(own, Stepper) else getattr(own, "stepper", None)
            if isinstance(found, Stepper):
                return found
        frame = frame.f_back
    return None
