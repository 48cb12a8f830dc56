"""A side: one competitor, how many processes it has, and how its training step is made on each of them."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from cases import build_gpt, loss_fn
from torch import nn

Batch = tuple[torch.Tensor, torch.Tensor]
Step = Callable[[Batch], float | None]
"""Train on the rank's share of the batch. The loss is the rank's own mean or the mean of all ranks, whose average over the
ranks is the same number, or None on a rank of a pipeline that does not know it."""
MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


@dataclasses.dataclass(frozen=True)
class Side:
    """One competitor. Nothing is tuned: each side has the options that its user gets."""

    name: str
    make: Callable[..., Step]
    """Called on a rank whose default group exists, if there is one, with the model and the optimizer's factory."""
    backend: str | None
    """What the default group must be. Checked on the ranks: a figure under a wrong name is worse than none."""
    ranks: int = 2
    threads: int = 1
    packages: tuple[str, ...] = ("torch",)
    environment: tuple[tuple[str, str], ...] = ()
    shares_batch: bool = False
    """Whether every rank takes the whole global batch, as ranks do that share each layer, or each other's stages."""
    build: Callable[[str], nn.Module] = build_gpt
    """The model, by the case's name."""
    in_micro_batches: bool = False
    """Whether `make` takes `micro_batches=` as well, see `cases.MICRO_BATCHES`."""
    source: Path | None = None
    """The checkout whose meshwright the ranks import, started as torchrun would; None: this one, by our launcher."""

    def of_checkout(self, source: Path, name: str) -> Side:
        """Return this side of ours with the code of another checkout."""
        path = str(source.resolve() / "src")
        return dataclasses.replace(
            self, name=name, source=source, environment=(*self.environment, ("PYTHONPATH", path))
        )

    @property
    def is_ours(self) -> bool:
        return self.name.startswith("ours")


def make_ours(
    model: nn.Module, make_optimizer: MakeOptimizer, *, preset: str = "distributed", micro_batches: int = 1
) -> Step:
    """Ours: a plan by its preset's name, over whatever transport this rank was started with."""
    import meshwright as mw

    text = preset if micro_batches == 1 else f"{preset},micro_batches={micro_batches}"
    plan = mw.Plan.parse(text, mw.join_world().world_size)
    trained = mw.apply_plan(model, plan, loss_fn=loss_fn, optimizer=make_optimizer)
    return lambda batch: trained.step(batch).loss


def ours(transport: str, preset: str, schedule: str | None = None) -> Side:
    """Our side over a transport, with a schedule of its pipeline where there is one."""
    text = (
        preset if schedule is None else f"{preset},schedule={schedule.replace('interleaved', 'interleaved,virtual=2')}"
    )
    return Side(
        f"ours-{transport}" if schedule is None else f"ours-{transport}-{schedule}",
        functools.partial(make_ours, preset=text),
        transport,
        packages=("torch", "meshwright"),
        environment=(("MESHWRIGHT_TRANSPORT", transport),),
        shares_batch=preset.startswith(("tensor", "pp=")),
        in_micro_batches=schedule is not None,
    )


def plain_step(
    forward: nn.Module,
    optimizer: torch.optim.Optimizer,
    backward: Callable[[torch.Tensor], Any] = torch.Tensor.backward,
) -> Step:
    """Return the loop's step as every tutorial has it; `backward` is the library's own, where it has one."""

    def step(batch: Batch) -> float:
        optimizer.zero_grad()
        loss = loss_fn(forward(batch[0]), batch)
        backward(loss)
        optimizer.step()
        return loss.item()

    return step


KEEP_FREED_MEMORY = (("MALLOC_MMAP_THRESHOLD_", "1073741824"), ("MALLOC_TRIM_THRESHOLD_", "2147483647"))
"""What our ranks ask of the C library, for a user of another library who knows of it."""


def versions(side: Side) -> dict[str, str]:
    return {package: importlib.metadata.version(package) for package in side.packages}
