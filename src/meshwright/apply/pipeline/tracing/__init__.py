"""Trace of one plain forward, from which the stages of a pipeline are cut.

One rank runs the first batch on the plain model and records the calls of layers, their cost and what passes between them.

observation   the traced forward, with units that are small enough
observer      calls of units in one forward, and what passes between them
call_trace    calls of layers in order: cost, parameters, reads and writes
functions     torch functions between layers: which of their arguments they write
reads         torch functions whose result depends on values
may_look      units whose code names such functions, or what draws
own_tables    tables that a layer makes of sizes alone, for itself
scene         containers, objects and attributes that a call can write into
memory        memory that several tensors share
shared_state  state that a layer changes and other code uses
stage_map     the stage of each call, the stages of each parameter

To record something more, touch `observer.py`, add a field in `call_trace.py` and use it in `stage_map.py`.
"""

__all__: list[str] = []
