"""Loggers of a run: its numbers in the tools that people look at already, by those tools' own libraries.

The launching process feeds them from the run's events. Each has a thread of its own. One that fails
is told once and left out, and one that hangs is not waited for: the run goes on.

fan_out          the loggers of a run, and what they are told
feeding          a logger's own thread
metrics_csv      metrics.csv in the run's folder
tensorboard_log  TensorBoard's event files
wandb_log        Weights & Biases
mlflow_log       MLflow

To add a logger, add a module with a class like `metrics_csv.MetricsCsv`, its line in `fan_out.py`, its name in `config/types.py`.
"""

__all__: list[str] = []
