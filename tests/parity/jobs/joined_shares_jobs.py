"""Steps of ranks that join their shares by themselves, and scripts around them; for ranks."""

from __future__ import annotations

import collections
import functools
import logging
import random
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from tests.parity.jobs.whole_batch_jobs import LOSSES, NUM_SAMPLES, STEPS, Contrast, alter, batch, build, own_loss, sgd
from torch import Tensor, nn

import meshwright as mw
from meshwright.describe.batches import split_samples
from meshwright.ranks.join import join_world


def shares(kind: str, line: str, sizes: tuple[int, ...], change: str = "", loss: str = "own") -> dict[str, Any]:
    """Train on shares of the ranks' own, of these sizes, perhaps changed; an own loop may follow."""
    model = mw.apply_plan(functools.partial(build, kind), line, loss_fn=LOSSES[loss], optimizer=sgd)
    share, losses = model.dp_rank, list[float]()
    for step in range(STEPS):
        whole = batch(step, sum(sizes))
        given = {name: tensor.split(list(sizes))[share] for name, tensor in whole.items()} if sizes[share] else None
        if change == "always" or (change not in ("", "loop") and share and step == STEPS - 1):
            given = changed(given, change)
        losses.append(model.step(given).loss)
    found = {"losses": losses, "state": model.full_state_dict(), "reasons": model.plan.reasons}
    if change == "loop":
        whole = batch(0)
        model.backward(model(**whole)["loss"], weight=len(whole["x"]))
        model.optimizer.step()
    return found


class Longest(nn.Module):
    """Code that fails on samples none of which is long, as on a padded batch that is longer than all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 3)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        if x[:, 0].max() < 5:
            raise ValueError("no sample is as long as the batch")
        return {"loss": (self.down(self.up(x).tanh()) - y[:, :3]).square().mean()}


def longest(line: str) -> list[float]:
    """Train on batches whose first half alone is long: no trial of the first rank's share fails."""
    batches = [batch(step, 8) for step in range(STEPS)]
    for each in batches:
        each["x"][:4, 0] += 10
    torch.manual_seed(0)
    module = Longest().double()
    if line == "plain":
        optimizer, losses = sgd(module.parameters()), list[float]()
        for each in batches:
            loss = module(**each)["loss"]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses
    model = mw.apply_plan(module, line, optimizer=sgd)
    return [model.step(mw.split_batch(each, model)).loss for each in batches]


def gather_between(line: str) -> list[Tensor]:
    """Gather outputs of an evaluation between steps on joined shares."""
    model, found = mw.apply_plan(functools.partial(build, "Contrast"), line, optimizer=sgd), list[Tensor]()
    for step in range(2):
        model.step(mw.split_batch(batch(step), model))
        model.eval()
        with torch.no_grad():
            found.append(mw.gather_batch(model(**mw.split_batch(batch(9), model))["left"], model))
        with model.whole_parameters(), torch.no_grad():
            found.append(model.module(**batch(9))["left"])
        model.train()
    return found


def gather_in_loss(line: str) -> tuple[list[float], dict[str, Tensor]]:
    """Train on a loss that gathers by itself."""
    models = list[mw.ParallelModel]()

    def gathered_loss(outputs: Any, given: Any) -> Tensor:
        left = mw.gather_batch(outputs["left"], models[0])
        return (left @ left.T).square().mean()

    models.append(mw.apply_plan(functools.partial(build, "Contrast"), line, loss_fn=gathered_loss, optimizer=sgd))
    losses = [models[0].step(mw.split_batch(batch(step), models[0])).loss for step in range(STEPS)]
    return losses, models[0].full_state_dict()


def logged(line: str, is_whole: bool) -> list[str]:
    """Step on shares, or on the whole batch on each rank; return what is logged."""
    texts: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: texts.append(record.getMessage())
    logging.getLogger("meshwright").addHandler(handler)
    try:
        model = mw.apply_plan(functools.partial(build, "Contrast"), line, optimizer=sgd)
        for step in range(STEPS):
            model.step(batch(step) if is_whole else mw.split_batch(batch(step), model))
    finally:
        logging.getLogger("meshwright").removeHandler(handler)
    return texts


def early(line: str, change: str, ranks: Sequence[int]) -> dict[str, Any]:
    """Train on joined shares after these ranks have changed the model between `apply_plan` and the first step."""
    model = mw.apply_plan(functools.partial(build, "Contrast"), line, optimizer=sgd)
    if model.world.rank in ranks:
        alter(model.module, change)
    losses = [model.step(mw.split_batch(batch(step), model)).loss for step in range(STEPS)]
    return {"losses": losses, "state": model.full_state_dict()}


def changed(given: Any, change: str) -> Any:
    """Return a share that cannot be joined with the others'."""
    if change == "key":
        return {**given, "more": given["x"]}
    if change == "width":
        return {**given, "y": given["y"][:, :5]}
    if change == "number":
        return {**given, "x": given["x"].float()}
    return {**given, "x": given["x"].clone().requires_grad_()}


class Shaken(Contrast):
    """Contrast with numbers of Python's generator while it trains."""

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return super().forward(x * (1 + 0.01 * random.random()) if self.training else x, y)


def drawn_between(line: str, rng: Literal["global", "torch"]) -> tuple[list[list[float]], tuple[str, ...]]:
    """Return what a script draws after each step, by torch's generator, Python's and NumPy's, and the plan's reasons."""
    rank = join_world().rank
    random.seed(rank)
    np.random.seed(rank)
    model = mw.apply_plan(lambda: Shaken().double(), line, optimizer=sgd, rng=rng)
    found: list[list[float]] = []
    for step in range(STEPS):
        model.step(mw.split_batch(batch(step), model))
        found.append([torch.rand(()).item(), random.random(), np.random.rand()])
    return found, model.plan.reasons


def listed(step: int) -> tuple[dict[str, Any], ...]:
    """Return the shares of two ranks, with a list of as many numbers as samples in each."""
    return tuple({**part, "names": ["a", "a", "a"]} for part in split_samples(batch(step, 6), [3, 3]))


class Listed(Contrast):
    """Contrast, whose loss counts what it is given a list of."""

    def forward(self, x: Tensor, y: Tensor, names: list[str]) -> dict[str, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        found = super().forward(x, y)
        return {"loss": found["loss"] * len(names), "left": found["left"]}


def train_listed(line: str) -> None:
    """Step on shares with a list of texts beside."""
    model = mw.apply_plan(lambda: Listed().double(), line, optimizer=sgd)
    model.step(listed(0)[model.dp_rank])


class Named(dict[str, Tensor]):
    """A batch of a class of its own."""


class Noted(nn.Module):
    """Contrast over batches of other kinds, with a number and a word beside the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Contrast()

    def forward(self, x: Tensor, y: Tensor, power: Tensor, word: str, flags: Tensor | None = None) -> dict[str, Tensor]:
        found = self.inner(x, y)
        scale = power.to(x.dtype) * (2.0 if word == "twice" else 1.0)
        if flags is not None:
            scale = scale * flags.to(x.dtype).sum()
        return {"loss": found["loss"] * scale, "left": found["left"]}


def noted(form: str, step: int) -> tuple[Any, ...]:
    """Return a batch as the shares of two ranks see it, and whole: of a class of its own, a pair, or with tensors twice."""
    whole: dict[str, Any] = dict(batch(step))
    whole |= {"power": torch.tensor(3, dtype=torch.bfloat16), "word": "twice"}
    whole["flags"] = torch.arange(NUM_SAMPLES) % 2 == 0
    if form in ("twice", "once"):
        whole["y"] = whole["x"]
    if form == "column":
        wide = torch.stack([whole["x"][:, 0], whole["flags"].double()], dim=1)
        whole["flags"] = wide[:, 1]
    kinds = {"class": Named, "default": functools.partial(collections.defaultdict, list)}
    made = kinds.get(form, dict)(whole)
    parts = split_samples(made, [6, 1] if form == "column" else [4, 3])
    if form == "once":  # one tensor in two places in the first share alone
        made["y"] = torch.cat([made["x"][:4], made["x"][4:] + 1.0])
        parts[1]["y"] = made["y"][4:]
    if form == "pair":
        return tuple(
            ((each["x"], each["y"], each["power"], each["word"], each["flags"]), each["x"]) for each in (*parts, made)
        )
    return (*parts, made)


def train_noted(form: str, line: str) -> list[float]:
    """Train on batches of another form; alone, by a plain loop."""
    torch.manual_seed(0)
    module = Noted().double().eval()
    if line == "plain":
        optimizer, losses = sgd(module.parameters()), list[float]()
        for step in range(STEPS):
            whole = noted(form, step)[-1]
            loss = (module(**whole) if form != "pair" else module(*whole[0]))["loss"]
            losses.append(loss.item())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return losses
    model = mw.apply_plan(module, line, optimizer=sgd, loss_fn=own_loss if form == "pair" else None)
    return [model.step(noted(form, step)[model.dp_rank]).loss for step in range(STEPS)]


class Views(nn.Module):
    """A mean over samples, and a term over pairs of views of one sample, which may lie on two ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, ids: Tensor) -> dict[str, Tensor]:
        h = self.down(self.up(x).tanh())
        pairs = (ids[:, None] == ids) & ~torch.eye(len(ids), dtype=torch.bool)
        apart = (torch.cdist(h, h + 1e-3) * pairs).sum() / pairs.sum().clamp(min=1)
        return {"loss": h.square().mean() + apart, "h": h}


def train_views(line: str, num_views: int = 2) -> list[float]:
    """Train on views of four samples, the first of all samples before the second; alone, by a plain loop."""
    torch.manual_seed(0)
    module, losses = Views().double(), list[float]()
    model = None if line == "plain" else mw.apply_plan(module, line, optimizer=sgd)
    optimizer = sgd(module.parameters())
    for step in range(STEPS):
        given = {"x": batch(step, 4 * num_views)["x"], "ids": torch.arange(4).repeat(num_views)}
        if model is not None:
            losses.append(model.step(mw.split_batch(given, model)).loss)
            continue
        loss = module(**given)["loss"]
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses
