"""Loggers of a run: its numbers in the tools that people look at already, by those tools' own libraries.

The launching process feeds them from the run's events. A logger that fails is told once and left out: the run goes on.

fan_out          the loggers of a run, and what they are told
metrics_csv      metrics.csv in the run's folder
tensorboard_log  TensorBoard's event files
wandb_log        Weights & Biases
mlflow_log       MLflow

To add a logger, add a module with a class like `metrics_csv.MetricsCsv`, its line in `fan_out.py`, its name in `config/types.py`.
"""

__all__: list[str] = []
