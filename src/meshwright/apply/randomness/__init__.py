"""Randomness that does not know the layout: a draw is a function of seed, step, sample, call and element (ADR 0025).

philox           counter-based numbers by the places of elements
native           the same bits from C++, built once where there is a compiler
gpu              the same bits from a CUDA kernel
distributions    uniform, Bernoulli, normal, exponential numbers, integers
sample_dims      which dim of a drawn tensor holds the samples, and the places that follow
known_dims       the dims of a draw, among those that trials have found
draw_cuts        the part of a drawn tensor that each rank of a cut layer draws
sample_loops     draws of a loop over samples, each known by its sample
row_slices       slices of rows that begin or end inside of a sample
sample_blocks    blocks of one sample each, in no order of the samples
probes           zeros added to draws, by which a trial sees what they have influence on
choice_by_index  one choice of rows by an index
chosen_rows      rows that an index has chosen, followed to their samples
row_choices      torch operators that choose rows, seen where draws follow them
row_places       places of draws on such rows, and draws that may be on some unseen
names            names of modules, by which calls are known
forward_draws    one forward: how often modules have drawn, and what a trial notes
sites            calls that draw, the step and forward that they belong to
passed_over      draws that another pipeline stage makes, counted on this one
alike            draws that are the same in several runs of one piece of code
single_numbers   numbers by which code decides, near either end of their range in trials
python_calls     calls of Python's and NumPy's generators, known by their place in the code and their sample
python_seeding   the functions of these generators, seeded at each call while a forward runs
recurrences      recurrent layers with dropout between them, on a GPU and of packed samples
dropouts         dropout, in tensors without entries too
operators        torch operators that draw, replaced while a step runs

To draw another distribution by place, write its operator into `operators`, over what `distributions` gives.
"""

from __future__ import annotations

__all__: list[str] = []
