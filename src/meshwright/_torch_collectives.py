"""torch.distributed's collectives and torch.autograd's backward, looked at from inside, however code holds them.

Nothing here is documented as public by torch. Checked on torch 2.13.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch
from torch.distributed import distributed_c10d

__all__ = ["hide_default_group", "watch_backwards", "watch_collectives"]


def watch_collectives(look: Callable[[FrameType], None]) -> None:
    """Have what each function of `torch.distributed` asks about its group call a function with that one's frame first.

    The functions stay torch's own: code may have taken them out of their module before, and torch knows some by identity.
    """
    torchs = distributed_c10d._rank_not_in_group
    if hasattr(torchs, "_meshwright_looks"):
        return

    @functools.wraps(torchs)
    def watched(*arguments: Any, **keywords: Any) -> bool:
        look(sys._getframe(1))
        return torchs(*arguments, **keywords)

    watched._meshwright_looks = True  # pyright: ignore[reportFunctionMemberAccess, reportAttributeAccessIssue]
    distributed_c10d._rank_not_in_group = watched


def watch_backwards(look: Callable[[FrameType, Sequence[Any], Sequence[Any]], None]) -> None:
    """Have each backward that adds to `.grad` call a function first: with its frame, its roots, and its `inputs=` if it has any.

    `Tensor.backward` and `torch.autograd.backward` stay torch's own functions, as above.
    """
    torchs = torch.autograd._engine_run_backward  # pyright: ignore[reportPrivateImportUsage]
    if hasattr(torchs, "_meshwright_looks"):
        return

    @functools.wraps(torchs)
    def watched(tensors: Sequence[Any], *arguments: Any, accumulate_grad: bool = False, **keywords: Any) -> Any:
        if accumulate_grad:
            look(sys._getframe(1), tensors, arguments[3] if len(arguments) > 3 else ())
        return torchs(tensors, *arguments, accumulate_grad=accumulate_grad, **keywords)

    watched._meshwright_looks = True  # pyright: ignore[reportFunctionMemberAccess, reportAttributeAccessIssue]
    torch.autograd._engine_run_backward = watched  # pyright: ignore[reportPrivateImportUsage]


def hide_default_group(hides: Callable[[FrameType], bool]) -> None:
    """Have `torch.distributed.is_initialized()` say no where a function says so of the frame that asks.

    `get_world_size()` is 1 and `get_rank()` 0 there. They stay torch's own functions, whose insides are replaced: code may have
    taken them out of their module before.
    """
    world = distributed_c10d._WorldMeta.WORLD
    group, size = distributed_c10d._get_default_group, distributed_c10d._get_group_size
    if hasattr(world.fget, "_meshwright_hides"):
        return

    def hidden(inside: FrameType, asking: Callable[..., Any]) -> bool:
        return inside.f_code is asking.__code__ and inside.f_back is not None and hides(inside.f_back)

    def default_group_or_none(kind: type) -> Any:
        return None if hidden(sys._getframe(1), distributed_c10d.is_initialized) else world.__get__(kind)

    @functools.wraps(group)
    def default_group() -> Any:
        return _GroupOfOne() if hidden(sys._getframe(1), distributed_c10d.get_rank) else group()

    @functools.wraps(size)
    def group_size(of: Any) -> int:
        return 1 if of is None and hidden(sys._getframe(1), distributed_c10d.get_world_size) else size(of)

    default_group_or_none._meshwright_hides = True  # pyright: ignore[reportFunctionMemberAccess]
    distributed_c10d._WorldMeta.WORLD = world.getter(default_group_or_none)  # pyright: ignore[reportAttributeAccessIssue]
    distributed_c10d._get_default_group, distributed_c10d._get_group_size = default_group, group_size


class _GroupOfOne:
    """The default group of a job of one process, as far as `get_rank` asks it."""

    def rank(self) -> int:
        return 0
