"""Texts for people about draws that depend on the layout, or may."""

from __future__ import annotations

__all__: list[str] = []

UNPROVEN = (
    "rng: parts of the first batch did not give the outputs of the whole with the same random numbers; they may depend on the "
    "layout"
)
LATE = "a forward drew that drew nothing with the first batch, which is left to torch's generator: each rank draws for itself"
OWN_GENERATOR = (
    "a generator that the model's code keeps (random.Random, numpy.random.Generator, torch.Generator) draws for each rank "
    "and micro-batch by itself"
)
UNSEEN = (
    "a forward draws from torch's generator where it cannot be seen (another thread, or code compiled by itself): each rank "
    "draws for itself"
)
VARIES = (
    "Python's or NumPy's generator draws more or less often for parts of the first batch, whose outputs do not show why: its "
    "numbers may depend on the layout"
)
LOOSE = "with other numbers than those of its forward; which ones depends on the plan"
UNPROVEN_CUT = (
    "rng: the cut model did not give the outputs of the whole one with the same random numbers; they may depend on tp"
)
