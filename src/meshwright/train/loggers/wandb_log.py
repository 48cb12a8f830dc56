"""Logger of Weights & Biases, by the package `wandb`; offline where nobody has said which account is meant."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__: list[str] = []


class WandbLog:
    """Logs to one run of wandb. WANDB_MODE, WANDB_PROJECT and the other variables of wandb count.

    Args:
        folder: The run's folder; an offline run's files are in its folder `wandb`, for `wandb sync`.
        name: The run's name.
        settings: The run's configuration.
    """

    def __init__(self, folder: Path, name: str, settings: Mapping[str, Any]) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        # Without a key wandb would ask on the terminal, and a training would wait for the answer.
        is_known = bool(os.environ.get("WANDB_API_KEY")) or (Path.home() / ".netrc").exists()
        mode = os.environ.get("WANDB_MODE") or ("online" if is_known else "offline")
        project = os.environ.get("WANDB_PROJECT") or "meshwright"
        self._run: Any = wandb.init(
            project=project, name=name, dir=str(folder), mode=mode, config=dict(settings), reinit="create_new"
        )

    def begin(self, step: int) -> None:
        """Note where the run goes on: wandb keeps what it has of later steps."""
        if step:
            self._run.summary["resumed_after_step"] = step

    def log(self, step: int, metrics: Mapping[str, float], at: float) -> None:
        """Log the numbers of a step."""
        self._run.log({**metrics, "time": at}, step=step)

    def end(self, *, has_failed: bool) -> None:
        """End wandb's run."""
        self._run.finish(exit_code=1 if has_failed else 0)
