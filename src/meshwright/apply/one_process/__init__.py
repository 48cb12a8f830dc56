"""One process with several devices: data_parallel and model_parallel.

These need no launcher. They are for notebooks, and for models that do not fit on one device.

data_parallel   a thread and a replica of the module for each device
model_parallel  layers spread over devices
layer_moves     moves of tensors between layers on several devices, and the count of their bytes
rehearsal       bytes that a configuration's model will move, before its run
description     costs of a model's layers, found without a trace in the model
expected_bytes  bytes that a step should move

To change how layers are assigned to stages, here, for pipelines and in the planner, touch `schedule/balance.py`.
"""

__all__: list[str] = []
