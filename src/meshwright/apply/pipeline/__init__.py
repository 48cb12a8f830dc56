"""Pipeline parallelism: layers assigned to stages, stages to ranks (ADR 0011).

Each stage runs the user's whole forward. It computes its own layers and holds stand-ins for the tensors of all others.

tracing/        trace of one plain forward: calls, costs, and tensors that pass between calls
walking/        one stage's forward of one micro-batch
ownership/      parameters and buffers of other stages: removed, tied, gathered
stage           forward and backward of a micro-batch on one stage
split_backward  backward in two halves, for zero-bubble schedules
executor        execution of a schedule's actions in their order
p2p             tensors sent between stages
notes           messages without tensors: end of a forward, failure, missing gradient
tensor_cut      tensor parallelism inside stages
inspection      digests of received tensors compared with those of the sent ones
engine          the engine
expected_bytes  expected bytes of a step

To add a schedule, touch `schedule/orders.py` alone.
"""

__all__: list[str] = []
