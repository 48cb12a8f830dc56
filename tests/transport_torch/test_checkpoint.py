"""torch.distributed.checkpoint: written by sharded training on 4 ranks, read by 2 that are cut otherwise, bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.transport_torch import models
from tests.transport_torch.harness import (
    BACKEND,
    BITWISE,
    REFERENCE,
    Numbers,
    assert_equal,
    make_group,
    make_mesh,
    record_end,
    strictly,
    whole,
)
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from meshwright import testing

ROWS = 8
WRITERS, READERS = 4, 2


def _cut(backend: str, how: str, num_ranks: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = models.build(models.Transformer)
    assert isinstance(model, models.Transformer)
    if how == "fsdp":
        mesh = make_mesh(backend, (num_ranks,), ("shard",))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif how == "tp":
        # Not a program that computes anything, but every kind of cut: rows, columns, and copies.
        styles = {
            "embedding": ColwiseParallel(),
            "head": ColwiseParallel(),
            "norm": SequenceParallel(),
            "layers.*.mlp.up": ColwiseParallel(),
            "layers.*.mlp.down": RowwiseParallel(),
        }
        parallelize_module(model, make_mesh(backend, (num_ranks,), ("tp",)), styles)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    rank = torch.distributed.get_rank()
    for step in steps:
        x, y = (models.share(t, rank, WRITERS) for t in models.tokens(step, ROWS))
        model(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def _numbers(model: nn.Module, optimizer: torch.optim.Optimizer) -> Numbers:
    """Return all parameters and all of Adam's state, whole, by the parameters' names."""
    numbers: Numbers = {}
    record_end(numbers, model)
    for name, parameter in model.named_parameters():
        for kind, value in optimizer.state[parameter].items():
            numbers[f"{kind} {name}"] = whole(value)
    return numbers


def write(backend: str, folder: Path) -> Numbers:
    """Train under FSDP, write a checkpoint, and return what it has to hold."""
    model, optimizer = _cut(backend, "fsdp", WRITERS)
    _step(model, optimizer, range(2))
    dcp.save(_state(model, optimizer), checkpoint_id=folder, process_group=make_group(backend))
    return _numbers(model, optimizer)


def write_meanwhile(backend: str, folder: Path) -> Numbers:
    """As `write`, but training goes on while a thread writes, over a group of its own."""
    model, optimizer = _cut(backend, "fsdp", WRITERS)
    _step(model, optimizer, range(2))
    numbers = _numbers(model, optimizer)
    group = make_group(backend, purpose="checkpoint")
    written = dcp.async_save(_state(model, optimizer), checkpoint_id=folder, process_group=group)
    _step(model, optimizer, range(2, 5))
    written.result(timeout=30)
    after = _numbers(model, optimizer)
    assert not torch.equal(after["parameter head.weight"], numbers["parameter head.weight"])
    return numbers


def read(backend: str, how: str, folder: Path) -> Numbers:
    """Read a checkpoint into a model that is cut in another way and has other weights, and return all it holds."""
    model, optimizer = _cut(backend, how, READERS)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(-1.0)
    state = _state(model, optimizer)
    dcp.load(state, checkpoint_id=folder, process_group=make_group(backend))
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return _numbers(model, optimizer)


def _write(writer: Any, backend: str, folder: Path) -> Numbers:
    """Have all ranks write, see that they agree on what is in the checkpoint, and return it."""
    per_rank = testing.run_ranks(strictly, WRITERS, writer, backend, folder)
    assert len(list(folder.glob("*.distcp"))) == WRITERS
    assert any(name.startswith("exp_avg_sq") for name in per_rank[0])
    for rank, numbers in enumerate(per_rank[1:], start=1):
        assert_equal(numbers, per_rank[0], BITWISE, f"rank {rank} of those that wrote over {backend}")
    return per_rank[0]


def _assert_read(backend: str, how: str, folder: Path, written: Numbers) -> None:
    for rank, numbers in enumerate(testing.run_ranks(strictly, READERS, read, backend, how, folder)):
        assert_equal(numbers, written, BITWISE, f"{folder.name}, read over {backend} by {how} rank {rank}")


@pytest.mark.long
def test_every_reader_gets_the_written_bits(tmp_path: Path) -> None:
    contents = []
    of_reference = ((BACKEND, "fsdp"),)  # it holds the same, see below, as far as sums in another order are
    of_backend = ((REFERENCE, "fsdp"), (BACKEND, "fsdp"), (BACKEND, "tp"), (BACKEND, "whole"))
    for number, (writes_over, readers) in enumerate(((REFERENCE, of_reference), (BACKEND, of_backend))):
        folder = tmp_path / f"{number}, written over {writes_over}"
        contents.append(_write(write, writes_over, folder))
        for reads_over, how in readers:
            _assert_read(reads_over, how, folder, contents[-1])
    for name, value in contents[0].items():
        torch.testing.assert_close(contents[1][name], value, rtol=1e-9, atol=1e-12, msg=name)


def test_training_goes_on_while_a_thread_writes(tmp_path: Path) -> None:
    written = _write(write_meanwhile, BACKEND, tmp_path / "meanwhile")
    _assert_read(BACKEND, "tp", tmp_path / "meanwhile", written)
