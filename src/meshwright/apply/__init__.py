"""apply: a plain module and a plan become a module that computes the same on many devices.

data/            ranks that share a batch
tensor/          ranks that share each layer
pipeline/        ranks that run some of the layers
engine.py        what a strategy does for the step; outer.py: an engine around another
replicas.py      data_parallel: a replica and a thread per device
layers.py        model_parallel: layers spread over devices; balance.py: equal work for each
recompute.py     layers that run again in backward
supported.py     what this version can apply
first_look.py    one rank looks at the first batch, and tells the others
guard.py         all ranks hold one model and one plan, and nobody changes them afterwards
state_guard.py   parts of parameters are not taken for whole ones
finding.py       a difference from one device, as a value
norm.py          the global gradient norm, and clipping by it
buffers.py       buffers by name
attributes.py    what a forward leaves on its module, for a repetition
mirror.py        attributes of a module and of its copies in other threads
hooks.py         hooks that stay behind where the module is copied
subclass.py      another forward for one module
"""

__all__: list[str] = []
