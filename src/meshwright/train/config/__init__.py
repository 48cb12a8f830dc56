"""The configuration of a training run. Never imports torch: every mistake is found before a rank starts.

types      sections and keys
load       TOML and overrides, read and checked
checks     rules beyond types
imports    callables named in a configuration
deepspeed  a DeepSpeed configuration beside the training's own

To add a key: a field in `types.py`, its rule in `checks.py`.
"""

__all__: list[str] = []
