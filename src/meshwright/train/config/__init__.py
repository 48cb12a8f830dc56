"""Configuration of a training run. It never imports torch: every mistake is found before a rank starts.

A TOML file and overrides are read into frozen sections, which travel to the ranks as JSON.

types      sections and keys
load       TOML and overrides, read and checked
checks     rules beyond types
targets    model, data, optimizer and loss, looked up
imports    callables named in a configuration
deepspeed  a DeepSpeed configuration beside the training's own
traced_steps steps that a run records

To add a key, add a field in `types.py`, and its rule in `checks.py`.
"""

__all__: list[str] = []
