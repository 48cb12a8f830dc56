"""Tensors of which a rank has only a part (a shard or a term), as user code may reach them.

Operations that are right on a part run as usual; all others raise an error that names the tensor and a way to read it whole.

facts            record of the part that a rank has
elementwise      torch functions with the same result on parts
classes          the tensor classes
switch           plain class inside the engine, guarded class in user code
gradient_hooks   users' hooks on gradients
optimizer_state  an optimizer's state of which ranks have parts
state_dicts      state dicts, copies and pickles of modules with parts

To allow a function on parts, add its name in `elementwise.py`.
"""

__all__: list[str] = []
