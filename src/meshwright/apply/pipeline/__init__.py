"""Pipeline parallelism: calls of layers, dealt out to stages; each stage runs the user's whole forward, its own part for real.

See docs/adr/0011.

What is found in one plain forward:

flow.py            which calls it makes, what each costs and which parameters it uses
observation.py     that forward, watched
functions.py       what functions between layers do to their arguments
stages.py          which stage runs which call and holds which parameter
tensor_cut.py      tensor parallelism inside of stages
early_copies.py    copies of the model that were made before it was cut

What a stage does:

stage.py           forward of a micro-batch, and its backward
split.py           backward in halves
walk.py            the user's own forward, in which the other stages' part stands still
interception.py    calls of units and of the model, on their way to the walk
bookkeeping.py     where tensors are computed, and what has been sent and received
values.py          what stands for tensors that are computed elsewhere
received.py        a tensor that came from another stage
remembered.py      a call that another stage runs: its results and what it wrote
shapes.py          shapes of what other stages' calls give
scene.py           what a call can write into beside its results
written.py         what a layer leaves there, on the stage that runs it
memory.py          memory that several tensors share
own_state.py       state of the code between layers, on a rank with several stages
hooks.py           users' hooks on layers
draws.py           random numbers that several stages draw
way.py             the way that a forward takes, as a number

What stages exchange and hold:

post.py            what travels between the stages
frames.py          notes that travel beside tensors
tied.py            parameters that several stages use
holding.py         parameters of other stages leave the module, and come back
collect.py         what one rank has, given to all
whole_buffers.py   buffers on every rank
inspection.py      boundaries of stages, inspected in turn
engine.py          what the step sees
"""
