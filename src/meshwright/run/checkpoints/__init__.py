"""Checkpoints of a model under a plan: what the ranks hold goes into files, and comes back under any other plan.

What is in the files, and how they are written, is `checkpoint/`; what a rank holds, its engine says (`held_state`).

saving          save_checkpoint: every rank writes its share, one commits
background      saves that are written while training goes on
live_share      what such a save writes, read from training's own memory
loading         load_checkpoint: checked by all ranks, then read in parts
stored_parts    this rank's parts of the model, as rows that all ranks know
optimizer_rows  the optimizer's state and options, by FQN
extra_states    states of loaders and schedules
random_streams  generators of a rank
encoded         values without tensors as JSON
together        errors of one rank, raised on all

To save another kind of state, add it in `stored_parts.py` and read it in `loading.py`.
"""

__all__: list[str] = []
