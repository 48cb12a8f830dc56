"""Pipeline parallelism: each stage runs the user's whole forward, its own part for real and the rest as stand-ins (ADR 0011).

tracing/        one plain forward, watched: calls, costs, and what passes between them
walking/        one stage's forward of one micro-batch
ownership/      parameters and buffers of other stages: taken out, tied, gathered
stage           forward and backward of a micro-batch on one stage
split_backward  backward in halves, for zero-bubble schedules
placed          what exists once calls are dealt out: this rank's stages and what they share
executor        actions of a schedule, in their order, whatever the schedule
p2p             tensors between stages
notes           notes beside tensors: a forward has ended, a stage has failed
tensor_cut      tensor parallelism inside of stages
inspection      what stages receive, compared with what was sent
engine          the engine
expected_bytes  bytes that a step should send

To add a schedule: `schedule/orders.py` alone.
"""

__all__: list[str] = []
