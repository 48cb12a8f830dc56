"""Local SGD: each rank steps on its own share alone, and values are averaged every so many steps (arXiv:1805.09767)."""

from __future__ import annotations

import torch
from tests.parity.local_sgd.expected_bytes import AveragesForecast
from torch import nn

from meshwright.apply.data.base import make_copies_equal
from meshwright.apply.engine import Engine
from meshwright.apply.forecast import Forecast
from meshwright.apply.held_state import HeldPart
from meshwright.apply.passes import StepWork, TermT
from meshwright.comm.communicator import Communicator
from meshwright.errors import ApplyError


class LocalStepsEngine(Engine):
    """Data parallelism whose ranks exchange values instead of gradients. Losses are means; buffers stay each rank's own.

    Args:
        module: The user's module, on `device`.
        group: The ranks that share a global batch.
        device: This rank's device.
        every: Steps between two averages [count].
    """

    def __init__(self, module: nn.Module, group: Communicator, device: torch.device, *, every: int) -> None:
        super().__init__(module, group, device)
        self._every = every
        self._num_steps = 0
        self._own_weight = 0.0
        make_copies_equal(self.parameters, group)
        make_copies_equal(module.buffers(), group)

    def run(self, work: StepWork[TermT]) -> list[TermT]:
        self._own_weight = sum(micro_batch.weight or 0.0 for micro_batch in work.micro_batches)
        return super().run(work)

    def finish_gradients(self, scale: float) -> None:
        """Leave each rank with the gradient of its own mean: backward ran from its part of the mean over all ranks."""
        if scale != 1.0:
            raise ApplyError(
                "loss_fn returned meshwright.Loss, and local steps know how much a mean counts alone",
                fix="return a mean",
            )
        total = torch.tensor([self._own_weight], dtype=torch.float64, device=self.device)
        self.group.all_reduce(total)
        super().finish_gradients(float(total) / self._own_weight if self._own_weight else 1.0)

    def sum_over_pieces(self, values: torch.Tensor) -> None:
        self.group.all_reduce(values)

    def gradient_norm(self) -> torch.Tensor:
        """Return the norm over the gradients of all ranks: whether a step is left out, all decide alike."""
        return self.norm_of_squares()

    def finish_step(self) -> None:
        self._num_steps += 1
        if self._num_steps % self._every == 0:
            for parameter in self.parameters:
                values = parameter.detach()  # of the same memory
                self.group.all_reduce(values)
                values /= self.group.size

    def held_state(self) -> list[HeldPart]:
        """Refuse checkpoints: one has each tensor once, taken from any rank that holds it."""
        raise ApplyError(
            "ranks that take local steps have values and optimizer states of their own, and a checkpoint has one",
            fix=f"torch.save(model.full_state_dict(), path) after a multiple of {self._every} steps",
        )

    def forecast(self) -> Forecast:
        return AveragesForecast(self.module, self.group.size, self._every)
