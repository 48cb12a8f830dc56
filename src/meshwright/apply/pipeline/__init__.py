"""Pipeline parallelism: layers assigned to stages, stages to ranks (ADR 0011).

Each stage runs the user's whole forward. It computes its own layers and holds stand-ins for the tensors of all others.

first_forward   the trace, seen by one rank for all
tracing/        trace of one plain forward: calls, costs, and tensors that pass between calls
walking/        one stage's forward of one micro-batch
ownership/      parameters and buffers of other stages: removed, tied, gathered
stage           forward and backward of a micro-batch on one stage
split_backward  backward in halves, for zero-bubble schedules
placed          what exists once calls are dealt out: this rank's stages and what they share
executor        actions of a schedule, in their order, whatever the schedule
p2p             tensors between stages
channels        a queue for each way between two stages, where messages have no tags: NCCL
notes           notes beside tensors: a forward has ended, a stage has failed
tensor_cut      tensor parallelism inside of stages
engine          the engine
expected_bytes  expected bytes of a step
rehearsal       the cut and the bytes of a step, foreseen by one process

To add a schedule, touch `schedule/orders.py` alone.
"""

__all__: list[str] = []
