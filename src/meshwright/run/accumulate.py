"""Gradient accumulation as a building block for users' own training loops."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn

from meshwright.apply.norm import clip_, total_norm
from meshwright.errors import ApplyError, ConfigError
from meshwright.run.gate import plan_over
from meshwright.run.losses.loss import Loss

__all__: list[str] = []


class GradientAccumulation:
    """Runs backward on every call and the optimizer on every `accumulation_steps`-th.

    Plain scalars count alike: the gradient is that of their mean. A `Loss` counts by its weight: the gradient is that of
    sum of sums / sum of weights, so unequal micro-batches come out as one batch would. Under torch's
    DistributedDataParallel the gradients are exchanged in the last backward only.

        accumulation = GradientAccumulation(model, optimizer, 4)
        for inputs, targets in loader:
            stepped = accumulation.step(loss_fn(model(inputs), targets))
        accumulation.flush()

    Args:
        model: The model that computes the losses.
        optimizer: The optimizer of its parameters.
        accumulation_steps: Backward passes for one optimizer step, at least 1 [count].
        max_grad_norm: Clip the gradient of a whole window to this 2-norm; None does not clip.

    Raises:
        ConfigError: `accumulation_steps` is below 1.
        ApplyError: The model is under a plan whose ranks or replicas exchange gradients in `ParallelModel.step` alone.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        accumulation_steps: int,
        *,
        max_grad_norm: float | None = None,
    ) -> None:
        if accumulation_steps < 1:
            raise ConfigError(
                f"accumulation_steps must be at least 1, it is {accumulation_steps}", fix="pass 1 to step each time"
            )
        plan = plan_over(getattr(model, "module", model)) or plan_over(model)
        if plan is not None:
            raise ApplyError(
                f"GradientAccumulation was given a model under the plan '{plan}', whose gradients are summed over its devices "
                "in model.step() and model.backward() alone",
                fix=f"add micro_batches={accumulation_steps} to the plan and call model.step(batch), or call "
                "model.backward(loss) several times before model.optimizer.step()",
            )
        self.model = model
        self.optimizer = optimizer
        self.accumulation_steps = accumulation_steps
        self.max_grad_norm = max_grad_norm
        self.num_accumulated = 0
        """Backward passes since the last optimizer step [count]."""
        self._weight: float | torch.Tensor = 0.0
        self._is_weighted: bool | None = None

    def step(self, loss: torch.Tensor | Loss) -> bool:
        """Run backward from this micro-batch's loss; step the optimizer where the window is full.

        Args:
            loss: A scalar mean, or Loss(sum, weight); of one kind within a window.

        Returns:
            Whether the optimizer stepped.

        Raises:
            ConfigError: Scalars and Loss objects are mixed in one window.
        """
        is_weighted = isinstance(loss, Loss)
        if self.num_accumulated and is_weighted != self._is_weighted:
            raise ConfigError(
                "one window of accumulation holds both plain scalars and meshwright.Loss; their weights cannot be compared",
                fix="pass meshwright.Loss(sum, weight) always, or a mean always",
            )
        if self.num_accumulated == 0:
            self.optimizer.zero_grad(set_to_none=True)
        self._is_weighted = is_weighted
        is_last = self.num_accumulated + 1 == self.accumulation_steps
        with self._without_exchange(skip=not is_last):
            if isinstance(loss, Loss):
                # A count given as a float32 tensor must not reduce a float64 gradient to its precision.
                self._weight = self._weight + torch.as_tensor(loss.weight, dtype=torch.float64)
                loss.sum.backward()
            else:
                (loss / self.accumulation_steps).backward()
        self.num_accumulated += 1
        if is_last:
            self._finish()
        return is_last

    def flush(self) -> bool:
        """Step on a window that is not full, with the mean over what is there; for the end of an epoch.

        Under DistributedDataParallel call `step` a whole number of windows instead: an early end is not exchanged.

        Returns:
            Whether there was anything to step on.

        Raises:
            ConfigError: The model is under DistributedDataParallel, and the window is neither empty nor full.
        """
        if self.num_accumulated == 0:
            return False
        if isinstance(self.model, nn.parallel.DistributedDataParallel):
            raise ConfigError(
                f"the window holds {self.num_accumulated} of {self.accumulation_steps} micro-batches, and their gradients "
                "have not been exchanged between the ranks",
                fix="drop the last partial window, or use apply_plan, whose step takes any share",
            )
        self._finish()
        return True

    def _finish(self) -> None:
        if self._is_weighted:
            self._scale(1.0 / self._weight)
        elif self.num_accumulated != self.accumulation_steps:
            self._scale(self.accumulation_steps / self.num_accumulated)
        gradients = self._gradients()
        if self.max_grad_norm is not None and gradients:
            clip_(gradients, total_norm(gradients, gradients[0].device), self.max_grad_norm)
        self.optimizer.step()
        self.num_accumulated = 0
        self._weight = 0.0

    def _gradients(self) -> list[torch.Tensor]:
        return [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]

    def _scale(self, factor: float | torch.Tensor) -> None:
        for gradient in self._gradients():
            gradient.mul_(factor)

    def _without_exchange(self, *, skip: bool) -> contextlib.AbstractContextManager[Any]:
        no_sync = getattr(self.model, "no_sync", None)
        return no_sync() if skip and no_sync is not None else contextlib.nullcontext()
