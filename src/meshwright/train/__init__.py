"""train: from a TOML file to a trained model.

config/   the configuration and its checks
data/     sources, order and loading of samples
session   the training loop, as every rank runs it
launcher  the side that starts a run
entry     functions that ranks are told to call
models    model targets
optim     optimizer, parameter groups and learning rate
losses    losses that a configuration can name
events    a run's folder
progress  what a person sees of a run

To add a key: a field in `config/types.py`, its check in `config/checks.py`.
"""

__all__: list[str] = []
