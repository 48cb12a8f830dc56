"""Walk of one stage: its run of the user's whole forward on one micro-batch.

Calls of other stages are skipped, and their results are stand-ins: tensors with a description and no values.

stage_forward    the walk
bookkeeping      the stage that computes each tensor, and sends and receives
stand_ins        stand-ins for tensors of other stages
unit_hooks       dispatch of layer calls to the walk
user_hooks       users' hooks on layers
shapes           output shapes of other stages' calls, cached per call
layer_state      state of another stage's layer while its call is run for its shapes
layer_settings   attributes of layers that a script sets between forwards
without_numbers  code run on fake tensors, or on made-up values where it needs some
other_answers    other numbers where the code of a call reads made-up ones
remembered       a call of another stage: its results and its writes
told_results     layers whose results hold what values decide, beside numbers in tensors
written          tensors that a layer leaves beside its results
argument_checks  checks of distributions, answered where their values are
inside_functions  layers that an autograd.Function calls
own_state        state of the code between layers, on a rank with several stages
stage_hooks      hooks that forwards register, on such a rank
counters         integers that the code between layers counts
draws            random numbers that several stages draw
plain_facts      what results hold beside the numbers in tensors, as numbers
later_writes     state of layers that other code uses, and that a layer begins to write later
path_hash        hash of a forward's path, compared between stages

To let code between layers do more, touch `stage_forward.py`, with a test in `tests/parity/test_never_wrong_pipeline.py`.
"""

__all__: list[str] = []
