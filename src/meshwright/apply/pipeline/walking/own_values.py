"""Test of whether a tensor in a stage's forward is one that this stage computes."""

from __future__ import annotations

from torch import Tensor

from meshwright._torch_private import FakeTensor, current_function_mode
from meshwright.apply.pipeline.walking.stage_forward import StageForward
from meshwright.apply.pipeline.walking.stand_ins import value_of

__all__: list[str] = []


def is_own(tensor: Tensor) -> bool:
    """Tell whether the stage whose forward is under way computes a tensor, to one that stands inside of that forward.

    What comes of the inputs alone every stage computes: it counts on the first.
    """
    walk = current_function_mode()
    if isinstance(walk, StageForward):
        value = value_of(tensor)
        home = 0 if value is None or value.owner is not walk or value.home is None else value.home
        return home == walk.stage
    return not isinstance(tensor, FakeTensor)  # inside a layer of another stage, of which only the shapes are found
