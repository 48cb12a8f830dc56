"""What ranks run for `faults.py`: a small model trained under a plan, with one fault on one rank from one step on."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshwright as mw
from meshwright._torch_private import without_function_subclasses
from meshwright.apply.data.sharded import ShardedEngine
from meshwright.apply.engine import Engine
from meshwright.apply.nested import OuterEngine
from meshwright.apply.pipeline.p2p import Post, Route
from meshwright.apply.tensor.proof import proof

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
VOCABULARY, WIDTH, LENGTH, BATCH = 13, 8, 5, 8


def faulty_rank(fault: str, num_ranks: int) -> int:
    """Return the rank that has a fault: one that has inputs of another stage, where it is in those."""
    return num_ranks - 1 if fault == "stage_input" else 1


class Block(nn.Module):
    """A block of two matrices; with `mixes`, a softmax over the hidden dim, which no shard can compute alone."""

    def __init__(self, *, dropout: float, mixes: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(dropout)
        self.mixes = mixes

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(self.norm(x))
        hidden = hidden.softmax(-1) if self.mixes else F.gelu(hidden)
        return x + self.drop(self.down(hidden))


class Net(nn.Module):
    """An embedding, blocks, a norm, a head, and a buffer that scales the outputs."""

    def __init__(self, dropout: float = 0.0, *, mixes: bool = False, blocks: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout=dropout, mixes=mixes) for _ in range(blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.scale: Tensor
        self.register_buffer("scale", torch.ones(3))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) * self.scale[0]


def build(dtype: str, dropout: float = 0.0, mixes: bool = False) -> nn.Module:
    """Return the model in a dtype."""
    return Net(dropout, mixes=mixes).to(DTYPES[dtype])


def loss_fn(outputs: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(outputs.float().flatten(0, -2), batch[1].flatten())


def global_batch(step: int) -> Any:
    ids = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


# -- faults: each changes something on the faulty rank, and returns the share to step on -------------------------------


def _held(model: mw.ParallelModel) -> list[tuple[str, Tensor]]:
    """Return (FQN, values) of what this rank's optimizer updates: parameters, shards of them, or pieces of ZeRO."""
    engine: Engine = model.engine
    while isinstance(engine, OuterEngine):
        engine = engine.inner
    if isinstance(engine, ShardedEngine):
        return [(unit.names[piece.span.index], piece.tensor) for unit in engine.units for piece in unit.pieces]
    updated = {} if model.optimizer is None else {id(p) for g in model.optimizer.param_groups for p in g["params"]}
    return [(name, p) for name, p in model.module.named_parameters() if id(p) in updated and p.stride() != (0, 0)]


def _matrix(model: mw.ParallelModel) -> tuple[str, Tensor]:
    """Return a weight of which this rank has a part."""
    held = [(name, value) for name, value in _held(model) if name.endswith("weight") and value.numel() > 1]
    named = dict(model.module.named_parameters())
    matrices = [(name, value) for name, value in held if "norm" not in name and "embedding" not in name]
    return next(((n, v) for n, v in matrices if "up" in n and n in named), matrices[0] if matrices else held[0])


def _copy(model: mw.ParallelModel) -> tuple[str, Tensor]:
    """Return a parameter that this rank holds whole."""
    named = [(name, p) for name, p in model.module.named_parameters() if name.endswith("norm.weight")]
    found = [(name, p) for name, p in named if 0 not in p.stride() and p.numel() == WIDTH]
    return found[0] if found else _held(model)[0]  # ZeRO-3 has put it aside


def _flip(tensor: Tensor) -> None:
    """Turn one bit of the mantissa of one entry, as a fault of the memory does: torch counts no write."""
    words = {8: (torch.int64, 48), 4: (torch.int32, 19), 2: (torch.int16, 4)}
    kind, bit = words[tensor.element_size()]
    with without_function_subclasses():  # memory asks nobody whether this is a part
        tensor.data.view(-1).view(kind)[1] ^= 1 << bit


def _of_optimizer(model: mw.ParallelModel, parameter: Tensor) -> Tensor:
    if model.optimizer is None:
        raise RuntimeError("there is no optimizer")
    return model.optimizer.state[parameter]["exp_avg_sq"]


def weight_written(model: mw.ParallelModel, share: Any, told: dict[str, Any]) -> Any:
    name, value = _matrix(model)
    told["name"] = name
    with torch.no_grad():
        value.mul_(1.5)  # each entry by itself: an index into a part is refused
    return share


def weight_bit(model: mw.ParallelModel, share: Any, told: dict[str, Any]) -> Any:
    name, value = _matrix(model)
    told["name"] = name
    _flip(value)
    return share


def state_bit(model: mw.ParallelModel, share: Any, told: dict[str, Any]) -> Any:
    name, value = _matrix(model)
    told["name"] = f"{name} (the optimizer's exp_avg_sq)"
    _flip(_of_optimizer(model, value))
    return share


def copy_bit(model: mw.ParallelModel, share: Any, told: dict[str, Any]) -> Any:
    name, value = _copy(model)
    told["name"] = name
    _flip(value)
    return share


def buffer_bit(model: mw.ParallelModel, share: Any, told: dict[str, Any]) -> Any:
    told["name"] = "scale"
    _flip(model.module.get_buffer("scale"))
    return share


def other_row(_: mw.ParallelModel, share: Any, told: dict[str, Any]) -> Any:
    told["name"] = "[0] has other values"
    ids = share[0].clone()
    ids[1, 2] = (ids[1, 2] + 1) % VOCABULARY
    return ids, share[1]


def other_rate(model: mw.ParallelModel, share: Any, told: dict[str, Any]) -> Any:
    told["name"] = "the learning rate of group 0"
    if model.optimizer is not None:
        model.optimizer.param_groups[0]["lr"] *= 2
    return share


def other_decay(model: mw.ParallelModel, share: Any, told: dict[str, Any]) -> Any:
    told["name"] = "weight_decay"
    if model.optimizer is not None:
        model.optimizer.param_groups[0]["weight_decay"] = 0.5
    return share


def extra_draw(_: mw.ParallelModel, share: Any, told: dict[str, Any]) -> Any:
    told["name"] = "generator"
    torch.rand(3)
    return share


def stage_input(model: mw.ParallelModel, share: Any, told: dict[str, Any]) -> Any:
    """From now on a value of what this rank's stage receives in forward is another than what was sent."""
    told["name"] = "boundary of stage 1"
    receive = Post.receive

    def wrong(self: Post, meta: Any, route: Route) -> Tensor:
        tensor = receive(self, meta, route)
        if tensor.is_floating_point() and tensor.numel():
            tensor.view(-1)[0] += 0.25
        return tensor

    told["undo"].enter_context(mock.patch.object(Post, "receive", wrong))
    return share


FAULTS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        *(weight_written, weight_bit, state_bit, copy_bit, buffer_bit),
        *(other_row, stage_input, other_rate, other_decay, extra_draw),
    )
}


@contextlib.contextmanager
def everything_is_proven() -> Iterator[None]:
    """Have the search believe each proposal, whatever its numbers and types say: a wrong layout is forced."""

    def nothing(*_: Any, **__: Any) -> tuple[str, ...]:
        return ()

    with (
        mock.patch.object(proof, "check_equal", nothing),
        mock.patch.object(proof, "check_gradient", nothing),
        mock.patch.object(proof, "check_left", nothing),
        mock.patch.object(proof.Experiment, "_check_types", nothing),
    ):
        yield


def _is_faulty(fault: str) -> bool:
    world = mw.current_world()
    return world is not None and world.rank == faulty_rank(fault, world.world_size)


# -- a run -------------------------------------------------------------------------------------------------------------


def run(plan: str, dtype: str, fault: str, at: int, every: int, num_steps: int, dropout: float) -> dict[str, Any]:
    """Train; return on each rank what stopped it, and when.

    Args:
        plan: The plan.
        dtype: Of the model.
        fault: A name of FAULTS, "wrong_layout", or "" for none.
        at: Before which step the fault comes.
        every: Steps between two sentinels.
        num_steps: The most steps.
        dropout: Of the model.
    """
    told: dict[str, Any] = {"name": "", "error": "", "text": "", "rank": None, "part": None, "steps": 0}
    with contextlib.ExitStack() as undo:
        told["undo"] = undo
        if fault == "wrong_layout":
            undo.enter_context(everything_is_proven())
            told["name"] = "blocks."
        make = functools.partial(build, dtype, dropout, fault == "wrong_layout")
        optimizer = functools.partial(torch.optim.AdamW, lr=0.01)
        try:
            model = mw.apply_plan(make, plan, optimizer=optimizer, loss_fn=loss_fn, sentinel_every=every)
            undo.enter_context(contextlib.closing(model))
            for step in range(num_steps):
                share = mw.split_batch(global_batch(step), model)
                if step == at and fault in FAULTS and _is_faulty(fault):
                    share = FAULTS[fault](model, share, told)
                told["losses"] = [*told.get("losses", []), model.step(share).loss]
                told["steps"] += 1
        except mw.MeshwrightError as error:
            told |= {"error": type(error).__name__, "text": str(error)}
            told |= {"rank": getattr(error, "rank", None), "part": getattr(error, "part", None)}
    del told["undo"]
    return told
