"""One process and several devices: data_parallel and model_parallel.

data_parallel   a thread and a replica of the module per device
model_parallel  layers spread over devices
balance         a chain of layers cut into stages of equal work
expected_bytes  bytes that a step should move

To change how layers are dealt out, here and for pipelines: `balance.py`.
"""

__all__: list[str] = []
