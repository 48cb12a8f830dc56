"""Tensors of which a rank has a part: what is right on a part is done, the rest raises by name.

facts            what a rank has of a tensor
elementwise      functions of torch that give the same on parts
classes          the tensor classes
switch           plain class inside of the engine, guarded class where user code runs
gradient_hooks   users' hooks on gradients
optimizer_state  an optimizer's state where ranks have parts
state_dicts      state dicts, copies and pickles of modules that hold parts

To allow a function on parts: its name in `elementwise.py`.
"""

__all__: list[str] = []
