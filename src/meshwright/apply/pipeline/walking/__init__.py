"""One stage's forward of one micro-batch: calls of other stages stand still, their tensors are stand-ins.

stage_forward    the forward
bookkeeping      where tensors are computed, what was sent and received
stand_ins        stand-ins for tensors that are computed elsewhere
unit_hooks       calls of layers, on their way to the forward
user_hooks       users' hooks on layers
shapes           output shapes of other stages' calls, cached per call
without_numbers  code run on fake tensors, or on zeros where it needs numbers
remembered       a call of another stage: its results and what it wrote
written          what a layer leaves, on the stage that runs it
own_state        state of the code between layers, on a rank with several stages
draws            random numbers that several stages draw
path_hash        the way that a forward takes, as a number
received         a tensor from another stage, as an autograd leaf
own_values       test of which tensors a stage computes, for those who look on

To let code between layers do more: `stage_forward.py`, with a test in `tests/parity/test_never_wrong_pipeline.py`.
"""

__all__: list[str] = []
