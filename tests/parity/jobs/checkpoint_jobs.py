"""Models that are saved under one plan and continued under another; ranks import them."""

from __future__ import annotations

import functools
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.checkpoint import store
from meshwright.run.checkpoints import live_share
from meshwright.run.checkpoints.live_share import memory_for

PLANS = [
    "dp=2",
    "dp=2,zero=1",
    "dp=2,zero=2",
    "dp=2,zero=3,whole_below=1",
    "dp=4,zero=3,shard=2",
    "tp=2",
    "dp=2,tp=2,zero=3",
    "pp=2,micro_batches=2",
    "pp=2,schedule=zbv,micro_batches=4",
    "pp=2,tp=2,micro_batches=2",
    "dp=2,pp=2,zero=2,micro_batches=2",
]
"""A plan of each kind that leaves a rank something else than one device has."""


class Block(nn.Module):
    """A residual MLP behind a norm, with dropout where asked for."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 36), nn.Linear(36, 16)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(torch.tanh(self.up(self.norm(x)))))


class Words(nn.Module):
    """Embedding and head share a weight; a buffer counts calls, and a parameter has no entries."""

    calls: Tensor

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens = nn.Embedding(26, 16)
        self.blocks = nn.ModuleList([Block(dropout) for _ in range(3)])
        self.head = nn.Linear(16, 26, bias=False)
        self.head.weight = self.tokens.weight
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.tokens(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.scale


class Images(nn.Module):
    """Convolutions in channels_last, with statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 12, 3))
        self.head = nn.Linear(12, 26)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x).mean((2, 3)))


OPTIMIZERS: dict[str, Any] = {
    "adamw": functools.partial(torch.optim.AdamW, lr=0.01),
    "adafactor": functools.partial(torch.optim.Adafactor, lr=0.01),
    "momentum": functools.partial(torch.optim.SGD, lr=0.01, momentum=0.9),
    "sgd": functools.partial(torch.optim.SGD, lr=0.01),
}


def loss_fn(outputs: Tensor, pair: Any) -> Tensor:
    return nn.functional.cross_entropy(outputs.reshape(-1, 26), pair[1].reshape(-1))


def build(kind: str, dropout: float = 0.0) -> nn.Module:
    if kind == "images":
        images: Any = Images().double()
        return images.to(memory_format=torch.channels_last)
    return Words(dropout).double()


def batch(kind: str, number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    if kind == "images":
        images = torch.randn(7, 3, 6, 6, generator=generator, dtype=torch.float64)
        return images, torch.randint(0, 26, (7,), generator=generator)
    tokens = torch.randint(0, 26, (7, 5), generator=generator)
    return tokens, tokens.roll(1, 1)


def apply(
    plan: str, kind: str, optimizer: str, *, dropout: float = 0.0, is_prepared: bool = False, **options: Any
) -> mw.ParallelModel:
    model = functools.partial(build, kind, dropout)
    example = batch(kind, 99) if is_prepared else None
    return mw.apply_plan(
        model, plan, loss_fn=loss_fn, optimizer=OPTIMIZERS[optimizer], seed=0, example_batch=example, **options
    )


def train(
    plan: str,
    kind: str,
    optimizer: str,
    *,
    steps: tuple[int, int],
    source: str = "",
    target: str = "",
    dropout: float = 0.0,
) -> list[float]:
    """Return the losses of some steps, after a load from `source` and before a save to `target`, where given."""
    model = apply(plan, kind, optimizer, dropout=dropout)
    if source:
        assert mw.load_checkpoint(model, source) == steps[0]
    losses = [model.step(mw.split_batch(batch(kind, number), model)).loss for number in range(*steps)]
    if target:
        mw.save_checkpoint(model, target, step=steps[1])
    return losses


def resave(plan: str, kind: str, optimizer: str, source: str, target: str) -> int:
    """Load under a plan, and save at once."""
    model = apply(plan, kind, optimizer, is_prepared=True)
    step = mw.load_checkpoint(model, source)
    mw.save_checkpoint(model, target, step=step)
    return step


def written_after_a_load(plan: str, source: str) -> tuple[float, float]:
    """Load, write into a parameter, and return an evaluation's loss and the parameter."""
    model = apply(plan, "words", "sgd")
    mw.load_checkpoint(model, source, with_optimizer=False)
    with model.whole_parameters():
        model.module.get_parameter("scale").data.fill_(3.0)
    loss = model.evaluate(mw.split_batch(batch("words", 1), model))["loss"]
    return loss, model.full_state_dict()["scale"].item()


class More(Words):
    """One block more, and a scale of another shape."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks.append(Block(0.0))
        self.scale = nn.Parameter(torch.ones(1))


def partly_loaded(plan: str, source: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the state before and after a partial load into a larger model."""
    optimizer = OPTIMIZERS["adamw"]
    model = mw.apply_plan(lambda: More().double(), plan, loss_fn=loss_fn, optimizer=optimizer, seed=0)
    before = model.full_state_dict()
    assert mw.load_checkpoint(model, source, partial=True, with_optimizer=False) == 2
    after = model.full_state_dict()
    model.step(mw.split_batch(batch("words", 0), model))
    return before, after


def refusal(plan: str, kind: str, optimizer: str, source: str, width: int | None = None) -> str:
    """Return with what a load is refused, and that it has left the parameters as they were."""
    model = apply(plan, kind, optimizer)
    before = model.full_state_dict()
    if width is not None:
        model.module.get_submodule("head").register_parameter("extra", nn.Parameter(torch.zeros(width)))
    try:
        mw.load_checkpoint(model, source)
    except mw.CheckpointError as error:
        now = model.full_state_dict()
        assert all(torch.equal(now[name], value) for name, value in before.items())
        return f"{error.message} fix: {error.fix}"
    return ""


def saved_into_a_file(directory: str) -> str:
    """Return with what a save is refused whose directory is a file."""
    model = apply("dp=2", "words", "sgd")
    Path(directory).parent.mkdir(exist_ok=True)
    Path(directory).touch()
    try:
        mw.save_checkpoint(model, directory, step=1)
    except mw.StorageError as error:
        return error.message
    return ""


def saved_by_two(plan: str, directory: str) -> list[str]:
    """Have models save into one directory; return names of what was saved, and with what a save was refused."""
    first, second = (apply(plan, "words", "sgd", is_prepared=True) for _ in range(2))
    found = [mw.save_checkpoint(first, directory, step=1).name]
    try:
        mw.save_checkpoint(second, directory, step=1)
    except mw.CheckpointError as error:
        found.append(error.message)
    found.append(mw.save_checkpoint(second, directory, step=2).name)
    first.close()
    found.append(mw.save_checkpoint(second, directory, step=1).name)
    del second  # nobody can save or load it any more
    return [*found, mw.save_checkpoint(apply(plan, "words", "sgd", is_prepared=True), directory, step=1).name]


def refused_save(plan: str, directory: str, how: str) -> str:
    """Return with what a save is refused that cannot be one checkpoint."""
    model = apply(plan, "words", "sgd", is_prepared=True)
    rank = model.world.rank
    try:
        if how == "whole":
            with model.whole_parameters():
                mw.save_checkpoint(model, directory, step=1)
        elif how == "closed":
            model.close()
            mw.save_checkpoint(model, directory, step=1)
        elif how == "steps":
            mw.save_checkpoint(model, directory, step=rank)
        elif how == "states":
            schedule = torch.optim.lr_scheduler.StepLR(model.optimizer, 1 + rank)
            mw.save_checkpoint(model, directory, step=1, extra={"schedule": schedule})
        else:
            mw.save_checkpoint(model, f"{directory}/{rank}", step=1)
    except mw.CheckpointError as error:
        return error.message
    return ""


def save_beside(plan: str, directory: str, *, breaks: bool = False) -> list[Any]:
    """Train beside saves in the background; with `breaks`, the last rank's disk fails in the first one, for its note as well.

    Returns:
        The loss of each step; before that of one that raised what a save has met, the error.
    """
    model = apply(plan, "words", "adamw")
    losses: list[Any] = [model.step(mw.split_batch(batch("words", number), model)).loss for number in range(2)]
    if breaks and model.world.rank == model.world.world_size - 1:
        with mock.patch("meshwright.checkpoint.store.write_new_file", side_effect=mw.StorageError("no space")):
            mw.save_checkpoint(model, directory, step=2, in_background=True)
            if model.saving is not None:
                model.saving.wait()
    else:
        mw.save_checkpoint(model, directory, step=2, in_background=True)
    for number in range(2, 4):
        share = mw.split_batch(batch("words", number), model)
        try:
            losses.append(model.step(share).loss)
        except mw.StorageError as error:
            losses += [error.message, model.step(share).loss]
    mw.save_checkpoint(model, directory, step=4, in_background=True, keep=2)
    mw.wait_for_checkpoint(model)
    return losses


def save_in_place(plan: str, directory: str, *, writes: bool = False) -> list[str]:
    """Save twice after a step: at once, and in the background from training's own memory, beside further steps.

    No file is written before the next step but one has begun, and every tensor is read in place. With `writes`, the last rank's
    script writes into its parameters meanwhile.

    Returns:
        What was raised, by a step or at the end.
    """
    # A comparison of copies would stop the step before the save is looked at.
    model = apply(plan, "words", "adamw", **({"sentinel_every": 0} if writes else {}))
    model.step(mw.split_batch(batch("words", 0), model))
    mw.save_checkpoint(model, f"{directory}/then", step=1)
    memory_for(model.module).mode = "read"
    is_free, write, found = threading.Event(), store.write_new_file, list[str]()

    def late(path: Path, *args: Any) -> int:
        if path.suffix == ".safetensors" and not is_free.wait(60.0):
            raise mw.StorageError("the test never let it go")
        return write(path, *args)

    with (
        mock.patch.object(live_share, "LEAST_BYTES", 1),
        mock.patch.object(live_share, "PIECE_BYTES", 256),
        mock.patch.object(store, "write_new_file", late),
    ):
        mw.save_checkpoint(model, f"{directory}/beside", step=1, in_background=True)
        if writes and model.world.rank == model.world.world_size - 1:
            for group in model.optimizer.param_groups if model.optimizer is not None else ():
                for parameter in group["params"]:
                    parameter.data.mul_(1.5)
        model.step(mw.split_batch(batch("words", 1), model))
        is_free.set()
        try:
            model.step(mw.split_batch(batch("words", 2), model))
            mw.wait_for_checkpoint(model)
        except mw.CheckpointError as error:
            found.append(error.message)
    return found
