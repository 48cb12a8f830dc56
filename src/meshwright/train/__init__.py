"""Training from a TOML file to a trained model.

The launching side checks the configuration without torch; every rank then runs the same session.

config/      the configuration and its checks
data/        sources, order and loading of samples
planning/    plans and predictions for a configuration on this machine
loggers/     TensorBoard, Weights & Biases, MLflow, CSV
session      the training loop, as every rank runs it
opening      the applied model, its loaders and the event of its start
checkpoints  checkpoints of a run, as its ranks take them
launcher     the launching side of a run
joined       training in a process of a job
failures     report of a failed run
resume       settings that a run keeps when it is continued
restarts     restarts of ranks that were lost
models       model targets
model_names  models that a command line names, described
optim        optimizer, parameter groups and learning rate
losses       losses that a configuration can name
events       a run's folder
tracing_run  trace of a run's steps
states_file  what each rank is doing, once a second
held_tensors listing of what each rank holds of each tensor
report_at_end  the report of a run, whose modules are loaded at its start
lock         the lock of a folder
progress     display of a run

To add a key, add a field in `config/types.py`, its check in `config/checks.py`, and in `resume.py`
whether it may change in a run that is continued.
"""

__all__: list[str] = []
