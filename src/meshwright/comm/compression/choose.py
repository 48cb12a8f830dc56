"""Choice of the reducer for a plan's `compress`."""

from __future__ import annotations

from collections.abc import Callable

import torch

from meshwright.comm.communicator import Communicator
from meshwright.comm.compression.blockwise import BlockwiseReducer
from meshwright.comm.compression.codecs import Cast, Int4, Int8
from meshwright.comm.compression.power_sgd import PowerSGDReducer
from meshwright.comm.compression.reducer import PlainReducer, Reducer
from meshwright.errors import InternalError

__all__: list[str] = []

_MAKE: dict[str, Callable[[Communicator], Reducer]] = {
    "none": PlainReducer,
    "bf16": lambda group: BlockwiseReducer(group, Cast(torch.bfloat16), "bf16, rounded to 8 significant bits"),
    "int8": lambda group: BlockwiseReducer(group, Int8(), "int8, 256 of which share a scale"),
    "int4": lambda group: BlockwiseReducer(group, Int4(), "int4, 128 of which share a scale"),
    "powersgd": PowerSGDReducer,
}


def make_reducer(compress: str, group: Communicator) -> Reducer:
    """Return the reducer of gradients over a group, as a plan's `compress` says."""
    if compress not in _MAKE:
        raise InternalError(f"no reducer for compress={compress}")
    return _MAKE[compress](group)
