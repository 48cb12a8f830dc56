"""Collectives that a model's own code calls: refused by name where a plan runs that code.

A plan runs a model on parts of a batch, and some ranks run it alone: to try out the loss, to find what can be cut. A collective
inside of it would wait for ranks that are elsewhere, or add what the plan adds as well. torch's own layers and optimizers are
left alone (SyncBatchNorm), and so is all that a script calls outside of its model and its loss.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from meshwright.errors import ApplyError

__all__: list[str] = []

_ENGINE = ("meshwright.apply.", "meshwright.run.")
_BUILDING = ("meshwright.run.assembly", "meshwright.run.building.")
"""What runs a builder, which may load files on one rank and wait."""
_IN_USERS_NAME = ("torch.distributed.nn", "torch.distributed._functional_collectives")
"""Parts of torch that call a collective because a user has."""


def refuse_in_models() -> None:
    """Have collectives of torch.distributed refuse to be called by a model's or a loss's code while a plan runs it."""
    _watch_collectives(_refuse_inside)


def _refuse_inside(name: str) -> None:
    """Raise ApplyError where the caller of a collective is code that an engine runs.

    Args:
        name: The collective's.
    """
    frame: FrameType | None = sys._getframe(2)  # the caller of torch.distributed's function
    while frame is not None and _module_of(frame).startswith(_IN_USERS_NAME):
        frame = frame.f_back
    caller = frame
    if caller is None or _module_of(caller).startswith(("torch.", "meshwright.")):
        return
    while frame is not None and not _module_of(frame).startswith(_ENGINE):
        if _module_of(frame).startswith("torch.optim"):
            return  # an optimizer's rule, which all ranks run alike
        frame = frame.f_back
    if frame is None or _module_of(frame).startswith(_BUILDING):
        return
    raise ApplyError(
        f"the model or its loss calls torch.distributed.{name} ({caller.f_code.co_filename}:{caller.f_lineno}) while a plan "
        "runs it: ranks run that code on parts of a batch, and some of them alone",
        fix="leave it out there, since a plan adds gradients and losses of all ranks by itself (a library that asks "
        "torch.distributed.is_initialized() mostly has a flag for it); rows of all ranks come from mw.gather_batch(rows)",
    )


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


_SENDING = "all_reduce broadcast broadcast_object_list barrier reduce send recv batch_isend_irecv"
_JOINING = "all_gather all_gather_into_tensor all_gather_object gather gather_object all_to_all all_to_all_single"
_DIVIDING = "reduce_scatter reduce_scatter_tensor scatter scatter_object_list"


def _watch_collectives(look: Callable[[str], None]) -> None:
    """Have `torch.distributed`'s collectives call a function with their name first; once in a process.

    `isend` and `irecv` stay torch's own objects, by which `P2POp` knows them.
    """

    def watched(name: str, torchs: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(torchs)
        def collective(*arguments: Any, **keywords: Any) -> Any:
            look(name)
            return torchs(*arguments, **keywords)

        collective._meshwright_looks = True  # pyright: ignore[reportFunctionMemberAccess, reportAttributeAccessIssue]
        return collective

    for name in f"{_SENDING} {_JOINING} {_DIVIDING}".split():
        if not hasattr(function := getattr(torch.distributed, name), "_meshwright_looks"):
            setattr(torch.distributed, name, watched(name, function))
