"""The trace of one plain forward, from which stages are cut.

observation        the forward, watched
call_trace         calls of layers in order: cost, parameters, what they read and leave
functions          what functions between layers do to their arguments
scene              what a call can write into beside its results
memory             memory that several tensors share
shared_attributes  attributes that a layer changes and other code uses
stage_map          which stage runs which call and holds which parameter

To watch something more: `observation.py`, a field in `call_trace.py`, its use in `stage_map.py`.
"""

__all__: list[str] = []
