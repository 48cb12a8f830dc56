"""Functions that ranks import: training in which one rank has a fault, and what every rank says about it."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from tests.parity import losses
from torch import Tensor, nn

import meshwright as mw
from meshwright.apply.data.sharded import ShardedEngine
from meshwright.apply.engine import Engine
from meshwright.apply.nested import OuterEngine
from meshwright.apply.shards.classes import as_plain

ADAM = functools.partial(torch.optim.Adam, lr=0.01)
SGD = functools.partial(torch.optim.SGD, lr=0.1)
VOCABULARY = 13
FAULTY = 1
"""The rank that has the fault."""
FAULTY_STEP = 2
"""Before which step it comes."""


class Adder(nn.Module):
    """Adds what it computes to a tensor that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor, total: Tensor) -> Tensor:
        total.add_(self.layer(x))
        return x


class Adders(nn.Module):
    """Layers that write into one tensor, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Adder() for _ in range(4))
        self.head = nn.Linear(6, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        for layer in self.layers:
            x = layer(x, total)
        return self.head(total)


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.act: nn.Module = nn.GELU()
        self.down = nn.Linear(2 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(self.act(self.up(self.norm(x)))))


class Net(nn.Module):
    """Blocks of which tensor parallelism cuts the matrices and leaves the norms whole, with a buffer and a plain attribute."""

    def __init__(self, dropout: float = 0.0, temperature: float = 1.0, between: float = 0.0) -> None:
        super().__init__()
        self.between = between
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.blocks = nn.ModuleList(Block(8, dropout) for _ in range(2))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, VOCABULARY)
        self.temperature = temperature
        self.scale: Tensor
        self.register_buffer("scale", torch.ones(3))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
            x = F.dropout(x, self.between, self.training) if self.between else x
        return self.head(self.norm(x)) * self.scale[0]


def build_net(dropout: float = 0.0) -> nn.Module:
    return Net(dropout).double()


def build_net_that_drops_between() -> nn.Module:
    """A net that draws in its own forward, between its layers."""
    return Net(0.3, between=0.3).double()


def rank() -> int:
    return mw.current_world().rank


def language(num_samples: int, seed: int) -> Any:
    ids = torch.randint(VOCABULARY, (num_samples, 6), generator=torch.Generator().manual_seed(seed))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def step_until_told(
    model: mw.ParallelModel, num_steps: int, before: Callable[[int, mw.ParallelModel, Any], Any]
) -> dict[str, Any]:
    """Step until an error comes; return what came of it as plain data."""
    done: list[Any] = []
    try:
        for number in range(num_steps):
            share = before(number, model, mw.split_batch(language(8, number), model))
            done.append(model.step(share))
    except mw.MeshwrightError as error:
        told = {"kind": type(error).__name__, "text": str(error), "code": error.exit_code}
        told |= {"part": getattr(error, "part", None), "rank": getattr(error, "rank", None)}
    else:
        told = {"kind": None, "text": "", "code": 0}
    told |= {"steps": len(done), "losses": [result.loss for result in done]}
    return told | {"findings": [text for result in done for text in result.findings]}


def train(plan: str, fault: str, num_steps: int = 8, every: int = 3, **options: Any) -> dict[str, Any]:
    """Train with a fault on one rank before one step."""

    def before(number: int, model: mw.ParallelModel, share: Any) -> Any:
        if number == FAULTY_STEP and rank() == FAULTY:
            return FAULTS[fault](model, share)
        return share

    options = {"optimizer": ADAM, "loss_fn": losses.cross_entropy, "sentinel_every": every} | options
    with mw.apply_plan(build_net, plan, **options) as model:
        return step_until_told(model, num_steps, before)


# -- faults: each changes something on this rank alone, and returns the share to step on ------------------------------


def _pieces(model: mw.ParallelModel) -> list[Tensor]:
    """Return what this rank holds of parameters that no rank holds whole: under ZeRO-3 alone."""
    engine: Engine = model.engine
    while isinstance(engine, OuterEngine):
        engine = engine.inner
    units = engine.units if isinstance(engine, ShardedEngine) else []
    return [piece.tensor for unit in units if unit.is_gathered for piece in unit.pieces]


def some_parameter(model: mw.ParallelModel) -> str:
    """Return the name of a parameter that this rank holds on every plan."""
    names = [name for name, _ in model.module.named_parameters()]
    return next(name for name in names if name.endswith("norm.weight"))


def _flip(tensor: Tensor) -> None:
    """Turn a bit of an entry, as a fault of the memory does: torch does not see it."""
    as_plain(tensor).data.view(-1).view(torch.int64)[0] ^= 1 << 40


def flip_bit(model: mw.ParallelModel, share: Any) -> Any:
    _flip(model.module.get_parameter(some_parameter(model)))
    return share


def flip_bit_of_state(model: mw.ParallelModel, share: Any) -> Any:
    parameter = model.module.get_parameter(some_parameter(model))
    if model.optimizer is not None:
        _flip(model.optimizer.state[parameter]["exp_avg_sq"])
    return share


def flip_bit_of_buffer(model: mw.ParallelModel, share: Any) -> Any:
    _flip(model.module.get_buffer("scale"))
    return share


def write_weight(model: mw.ParallelModel, share: Any) -> Any:
    """One weight of one shard, which no other rank has, changed in place."""
    with torch.no_grad():
        whole = [p for name, p in model.module.named_parameters() if name.endswith("up.weight")]
        as_plain((_pieces(model) or whole)[0]).view(-1)[0] += 0.5
    return share


def write_data(model: mw.ParallelModel, share: Any) -> Any:
    """As `write_weight`, so that torch does not count it."""
    whole = [p for name, p in model.module.named_parameters() if name.endswith("up.weight")]
    _flip((_pieces(model) or whole)[0])
    return share


def other_row(_: mw.ParallelModel, share: Any) -> Any:
    ids, labels = share
    ids = ids.clone()
    ids[1, 2] = (ids[1, 2] + 1) % VOCABULARY
    return ids, labels


def other_labels(_: mw.ParallelModel, share: Any) -> Any:
    ids, labels = share
    return ids, labels.roll(1, 0)


def other_length(_: mw.ParallelModel, share: Any) -> Any:
    ids, labels = share
    return ids[:, :4].contiguous(), labels[:, :4].contiguous()


def no_batch(_: mw.ParallelModel, share: Any) -> Any:
    del share


def other_rate(model: mw.ParallelModel, share: Any) -> Any:
    if model.optimizer is not None:
        model.optimizer.param_groups[0]["lr"] *= 2
    return share


def other_betas(model: mw.ParallelModel, share: Any) -> Any:
    if model.optimizer is not None:
        model.optimizer.param_groups[0]["betas"] = (0.8, 0.99)
    return share


def other_mode(model: mw.ParallelModel, share: Any) -> Any:
    model.module.get_submodule("blocks.0").eval()
    return share


def other_precision(_: mw.ParallelModel, share: Any) -> Any:
    torch.set_float32_matmul_precision("medium")
    return share


FAULTS = {
    function.__name__: function
    for function in (
        *(flip_bit, flip_bit_of_state, flip_bit_of_buffer, write_weight, write_data),
        *(other_row, other_labels, other_length, no_batch),
        *(other_rate, other_betas, other_mode, other_precision),
    )
}


def train_and_restore(plan: str, fault: str) -> dict[str, Any]:
    """As `train`, with torch's switches put back."""
    before = torch.get_float32_matmul_precision()
    try:
        return train(plan, fault)
    finally:
        torch.set_float32_matmul_precision(before)


def train_with_clamps(plan: str, bound: float) -> dict[str, Any]:
    """Clamp every weight on every rank before each step, behind torch's back, as critics of GANs do."""

    def before(number: int, model: mw.ParallelModel, share: Any) -> Any:
        del number
        for group in [] if model.optimizer is None else model.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.data.clamp_(-bound, bound)
        return share

    with mw.apply_plan(build_net, plan, optimizer=SGD, loss_fn=losses.cross_entropy, sentinel_every=2) as model:
        return step_until_told(model, 5, before)


# -- random numbers ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def logged() -> Iterator[list[str]]:
    """Yield the messages that the project's logger is told inside of the context."""
    messages: list[str] = []
    handler, logger = logging.Handler(), logging.getLogger("meshwright")
    handler.emit = lambda record: messages.append(record.getMessage())
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)


def train_with_draws(plan: str, draws: str) -> dict[str, Any]:
    """Train with torch's dropout while nobody, everybody, or rank 0 alone draws a number before each step."""

    def before(number: int, model: mw.ParallelModel, share: Any) -> Any:
        del number, model
        if draws == "everyone" or (draws == "rank 0" and rank() == 0):
            torch.rand(3)
        return share

    options: dict[str, Any] = {"optimizer": SGD, "loss_fn": losses.cross_entropy, "sentinel_every": 2}
    with logged() as messages, mw.apply_plan(functools.partial(build_net, 0.3), plan, rng="torch", **options) as model:
        told = step_until_told(model, 4, before)
        named = model.module.named_parameters()
        whole = {name: p.detach().clone() for name, p in named if name.endswith("norm.weight")}
    return told | {"messages": messages, "whole": whole}


def train_beside_shares() -> dict[str, Any]:
    """Train a tp=2 model with torch's dropout beside one under dp=2, whose ranks have generators of their own."""
    build, found, masks = functools.partial(build_net, 0.3), [], []
    options: dict[str, Any] = {"optimizer": SGD, "loss_fn": losses.cross_entropy, "rng": "torch"}
    apply = functools.partial(mw.apply_plan, build, **options)
    with logged() as messages, apply(plan="tp=2") as cut, apply(plan="dp=2") as shared:
        for number in range(3):
            found.append(cut.step(mw.split_batch(language(8, number), cut)).loss)
            cut.evaluate(mw.split_batch(language(4, number), cut))
            masks.append(float(torch.rand(())))
            shared.step(mw.split_batch(language(8, number), shared))
    return {"losses": found, "masks": masks, "messages": messages}


def own_loop_beside_shares() -> list[float]:
    """Run forwards of a tp=2 and a dp=2 model with torch's dropout in turns; return what each rank's share would have drawn."""
    masks: list[float] = []
    build = functools.partial(build_net, 0.3)
    options: dict[str, Any] = {"optimizer": SGD, "loss_fn": losses.cross_entropy, "rng": "torch"}
    with mw.apply_plan(build, "tp=2", **options) as cut, mw.apply_plan(build, "dp=2", **options) as shared:
        for number in range(2):
            batch = mw.split_batch(language(8, number), cut)
            outputs = cut(batch[0])
            masks.append(float(torch.rand(())))  # as a forward under dp=2 would
            shared(mw.split_batch(language(8, number), shared)[0])
            cut.backward(losses.cross_entropy(outputs, batch))
            masks.append(float(torch.rand(())))
            cut.optimizer.step()
            cut.zero_grad()
    return masks


def train_two_on_drawn_inputs() -> list[Any]:
    """Train two models of one mix in turns on inputs that the script draws, after one rank has drawn a number more."""
    plan, build = "dp=2,tp=2", functools.partial(build_net, 0.3)
    drawn: list[Any] = []
    options: dict[str, Any] = {"optimizer": SGD, "loss_fn": losses.cross_entropy, "rng": "torch"}
    with mw.apply_plan(build, plan, **options) as one, mw.apply_plan(build, plan, **options) as other:
        if rank() == 1:
            torch.rand(1)
        one.step(mw.split_batch(language(8, 0), one))
        for model in (other, one, other):
            ids = torch.randint(VOCABULARY, (4, 6))
            drawn.append(ids.tolist())
            model.step((ids[:, :-1].contiguous(), ids[:, 1:].contiguous()))
    return drawn


def evaluate_in_inference_mode(plan: str) -> list[float]:
    """Return the losses of a batch by `evaluate` and by `model(...)`, outside of inference mode and in it."""
    x = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found: list[float] = []
    with mw.apply_plan(Adders, plan, optimizer=SGD, loss_fn=losses.square) as model:
        model.step(mw.split_batch((x, x[:, :3]), model))
        for context in (torch.no_grad, torch.inference_mode):
            with context():
                batch = (x * 2, x[:, :3] * 2)
                found.append(model.evaluate(mw.split_batch(batch, model))["loss"])
                found.append(float(model(batch[0]).square().sum()))
    return found


def train_with_evaluation(plan: str, evaluates: bool) -> list[float]:
    """Train with dropout, with or without evaluations between the steps."""
    build = build_net_that_drops_between if plan.startswith("pp") else functools.partial(build_net, 0.3)
    with mw.apply_plan(build, plan, optimizer=SGD, loss_fn=losses.cross_entropy) as model:
        found = []
        for number in range(3):
            found.append(model.step(mw.split_batch(language(8, number), model)).loss)
            if evaluates:
                model.evaluate(mw.split_batch(language(4, 100 + number), model))
        return [*found, float(torch.rand(()))]
