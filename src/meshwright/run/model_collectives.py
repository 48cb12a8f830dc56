"""A model's own code and torch.distributed: it is told that there is no group, as on one device, and its collectives are refused.

A plan runs a model on parts of a batch, and some ranks run it alone: to try out the loss, to find what can be cut. A collective
inside of it would wait for ranks that are elsewhere, or add what the plan adds as well; one of the same size as the plan's own
would get other numbers. torch's own layers and optimizers are left alone (SyncBatchNorm), and so is all that a script calls
outside of its model and its loss.

Layers that gather over ranks by themselves, or choose other layers, where `torch.distributed.is_initialized()` come to one
device's numbers where it says no: in a module's constructor, in its forward, and in the loss.
"""

from __future__ import annotations

from types import FrameType

from torch import nn

from meshwright._torch_collectives import hide_default_group, watch_collectives
from meshwright.errors import ApplyError

__all__: list[str] = []

_SENDING = "all_reduce all_reduce_coalesced broadcast broadcast_object_list barrier reduce"
_BETWEEN = "send recv isend irecv send_object_list recv_object_list gather gather_object"
_JOINING = "all_gather all_gather_single all_gather_into_tensor all_gather_coalesced all_gather_object"
_DIVIDING = "reduce_scatter reduce_scatter_single reduce_scatter_tensor scatter scatter_object_list all_to_all all_to_all_single"
_COLLECTIVES = frozenset(f"{_SENDING} {_BETWEEN} {_JOINING} {_DIVIDING}".split())
_INSIDE = ("torch.distributed.distributed_c10d", "torch.distributed.c10d_logger", "typing_extensions", "warnings")
"""Where collectives are written, and what stands around them: what logs their errors, what tells that they are deprecated."""
_ENGINE = ("meshwright.apply.", "meshwright.run.")
_BUILDING = ("meshwright.run.assembly", "meshwright.run.building.")
"""What runs a builder, which may load files on one rank and wait."""
_IN_USERS_NAME = ("torch.distributed.nn", "torch.distributed._functional_collectives", "torch.autograd.function")
"""Parts of torch that call a collective because a user has, by way of the last one; torch's own layers have another first."""


def refuse_in_models() -> None:
    """Have collectives of torch.distributed refuse to be called by a model's or a loss's code while a plan runs it."""
    watch_collectives(_refuse_inside)


def hide_from_models() -> None:
    """Have `torch.distributed.is_initialized()` say no to a model's or a loss's code while a plan builds or runs it."""
    hide_default_group(_is_of_a_model)


def _is_of_a_model(frame: FrameType) -> bool:
    """Tell whether an engine runs the code that asks for a group, or it is a module's constructor that a plan has called."""
    if module_of(frame).startswith(("torch.", "meshwright.")):
        return False
    return is_run_by_a_plan(frame, in_constructors=True)


def is_run_by_a_plan(caller: FrameType, *, in_constructors: bool = False) -> bool:
    """Tell whether an engine runs some code, other than an optimizer's rule, which all ranks run alike, and a builder.

    Args:
        caller: The frame of the code.
        in_constructors: Whether constructors of modules count, which a builder calls.
    """
    frame: FrameType | None = caller
    constructs = False
    while frame is not None and not module_of(frame).startswith("torch.optim"):
        if module_of(frame).startswith(_ENGINE):
            return constructs or not module_of(frame).startswith(_BUILDING)
        constructs = constructs or (in_constructors and _constructs_a_module(frame))
        frame = frame.f_back
    return False


def _constructs_a_module(frame: FrameType) -> bool:
    code = frame.f_code
    if code.co_name != "__init__" or not code.co_argcount:
        return False
    return isinstance(frame.f_locals.get(code.co_varnames[0]), nn.Module)


def _refuse_inside(called: FrameType) -> None:
    """Raise ApplyError where the caller of a collective is code that an engine runs.

    Args:
        called: The frame of a function of torch.distributed.
    """
    if called.f_code.co_name not in _COLLECTIVES:
        return  # it asks for a rank or a size
    name, frame = "", _outermost(called)
    while frame is not None and module_of(frame).startswith(_INSIDE):
        name = frame.f_code.co_name if frame.f_code.co_name in _COLLECTIVES else name
        frame = frame.f_back
    is_users = frame is not None and module_of(frame).startswith(_IN_USERS_NAME)
    while is_users and frame is not None and module_of(frame).startswith((*_IN_USERS_NAME, *_INSIDE)):
        frame = frame.f_back
    caller = frame
    if caller is None or module_of(caller).startswith(("torch.", "meshwright.")):
        return
    if not is_run_by_a_plan(caller):
        return
    raise ApplyError(
        f"the model or its loss calls torch.distributed.{name} ({caller.f_code.co_filename}:{caller.f_lineno}) while a plan "
        "runs it: ranks run that code on parts of a batch, and some of them alone",
        fix="leave it out there, since a plan adds gradients and losses of all ranks by itself; rows of all ranks come from "
        "mw.gather_batch(rows)",
    )


def _outermost(called: FrameType) -> FrameType:
    """Return the frame of the collective that code has called: a function mode calls it again, by way of torch's and our code."""
    found, frame = called, called.f_back
    while frame is not None and module_of(frame).startswith((*_INSIDE, "torch.", "meshwright.")):
        if frame.f_code.co_name in _COLLECTIVES and module_of(frame) == module_of(called):
            found = frame
        frame = frame.f_back
    return found


def module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))
