"""The reference: the script's own loop in plain float64 PyTorch, one process, no meshwright.

A model whose samples see one another (batch statistics, balance losses, moving averages) is by its documented rule computed
in the shares that ranks have: it is run in these pieces here, too. Where ranks have joined their shares, and for every other
model, the whole batch is seen at once.
"""

from __future__ import annotations

import contextlib
import json
from typing import Any, NamedTuple

import numpy as np
import torch
from benchmarks.fuzz import data, script
from benchmarks.fuzz.losses import LossFunction, logits_of
from benchmarks.fuzz.models import IGNORED, build_model
from benchmarks.fuzz.optim import Factory
from torch import Tensor, nn

SEED = 3


class PlainLoss(NamedTuple):
    """A loss as a sum and a weight."""

    sum: Tensor
    weight: Any


def to_array(tensor: Tensor | None) -> np.ndarray | None:
    return None if tensor is None else tensor.detach().cpu().resolve_conj().clone().numpy()


def saved_buffers(module: nn.Module) -> dict[str, Any]:
    """Return the buffers that belong to the state; caches that are not saved may differ between ranks."""
    return {
        f"{prefix}.{name}" if prefix else name: to_array(buffer)
        for prefix, owner in module.named_modules()
        for name, buffer in owner._buffers.items()
        if buffer is not None and name not in owner._non_persistent_buffers_set
    }


class PlainTrainer:
    """Trains as a textbook does."""

    def __init__(self, program: dict[str, Any], moved: int = 0) -> None:
        self.program, self.form = program, program["loss"]
        torch.manual_seed(SEED)
        self.module = build_model(json.dumps(program["model"]))
        if moved:
            move_last_bits(self.module, moved)
        factory = Factory(program["optimizer"])
        self.optimizer = (
            factory.of_module(self.module) if factory.needs_module else factory(list(self.module.parameters()))
        )
        self.loss_fn = LossFunction(self.form, self.module, PlainLoss)
        self.clip = program.get("clip")

    def loss(self, batch: Any) -> tuple[Any, Any, float]:
        """Return the loss as a mean, as a sum, and its weight."""
        outputs = data.call(self.module, batch)
        if self.form["kind"] == "own":
            labels = batch["labels"]
            shifted = "own_shift" in self.program["model"].get("root", {})
            weight = float(((labels[:, 1:] if shifted else labels) != IGNORED).sum())
            return outputs.loss, outputs.loss * weight, weight
        value = self.loss_fn(outputs, batch)
        if isinstance(value, PlainLoss):
            return value.sum / value.weight, value.sum, float(value.weight)
        weight = data.samples_in(batch)
        return value, value * weight, float(weight)

    def step(self, batch: Any) -> dict[str, Any]:
        self.optimizer.zero_grad(set_to_none=True)
        if self.program["pieces"]:
            loss = self.in_pieces(batch, is_training=True)
        else:
            mean = self.loss(batch)[0]
            mean.backward()
            loss = float(mean.detach())
        norm = self.clip_gradients()
        grads = {name: to_array(p.grad) for name, p in self.module.named_parameters()}
        self.optimizer.step()
        return {"loss": loss, "norm": norm, "grads": grads, **self.held()}

    def in_pieces(self, batch: Any, *, is_training: bool) -> float:
        mode, degree, micro = self.program["mode"], self.program["degree"], self.program["micro_batches"]
        shares = data.pieces(batch, mode, degree, micro)
        total, weight = 0.0, 0.0
        # Replicas of one process start each micro-batch from the module's buffers, ranks each step.
        rounds = (
            [[[piece] for piece in row] for row in zip(*shares, strict=True)] if mode == "data_parallel" else [shares]
        )
        kept = self.buffers()
        for members in rounds:
            start = kept
            for rank, share in enumerate(members):
                self.write_buffers(start)
                for piece in share:
                    if piece is None:
                        continue
                    _, piece_sum, piece_weight = self.loss(piece)
                    if is_training:
                        piece_sum.backward()
                    total, weight = total + float(piece_sum.detach()), weight + piece_weight
                if rank == 0:
                    kept = self.buffers()
        self.write_buffers(kept)
        if is_training:
            for p in self.module.parameters():
                if p.grad is not None:
                    p.grad.div_(weight)
        return total / weight

    def buffers(self) -> dict[str, Tensor]:
        return {name: buffer.detach().clone() for name, buffer in self.module.named_buffers()}

    def write_buffers(self, values: dict[str, Tensor]) -> None:
        for name, value in values.items():
            owner, _, own = name.rpartition(".")
            self.module.get_submodule(owner)._buffers[own] = value.clone()

    def clip_gradients(self) -> float:
        if self.clip is not None:
            return float(torch.nn.utils.clip_grad_norm_(self.module.parameters(), self.clip))
        norms = [p.grad.norm() for p in self.module.parameters() if p.grad is not None]
        return float(torch.stack(norms).norm()) if norms else 0.0

    def held(self) -> dict[str, Any]:
        return {
            "values": {name: to_array(p) for name, p in self.module.named_parameters()},
            "buffers": saved_buffers(self.module),
        }

    def evaluate(self, batch: Any) -> float:
        modes = [(module, module.training) for module in self.module.modules()]
        self.module.eval()
        with torch.no_grad():
            if self.program["pieces"]:
                found = self.in_pieces(batch, is_training=False)
            else:
                found = float(self.loss(batch)[0])
        for module, mode in modes:
            module.training = mode
        return found

    def forward(self, batch: Any) -> Any:
        with torch.no_grad():
            return to_array(logits_of(data.call(self.module, batch)))

    def state(self) -> dict[str, Any]:
        return {name: to_array(value) for name, value in self.module.state_dict().items()}

    def load(self, state: dict[str, Any]) -> None:
        self.module.load_state_dict({name: torch.from_numpy(value) for name, value in state.items()})

    def own_step(self, batch: Any) -> None:
        """Take the step of a loop of the user's own."""
        self.optimizer.zero_grad()
        self.loss(batch)[0].backward()
        self.optimizer.step()

    is_first = True
    as_array = staticmethod(to_array)

    def reading(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def read_all(self) -> dict[str, Any]:
        return self.held()


def move_last_bits(module: nn.Module, seed: int) -> None:
    """Change each parameter by about its last bit: how far results then move is what float64 can resolve of them."""
    source = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            noise = torch.randn(parameter.shape, generator=source, dtype=torch.float64)
            parameter.mul_(1.0 + torch.finfo(torch.float64).eps * noise)


def run_plain(program: dict[str, Any], moved: int = 0) -> list[dict[str, Any]]:
    """Run the program's script in plain PyTorch and return what it recorded; `moved` for `move_last_bits`."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        records: list[dict[str, Any]] = []
        script.play(program, PlainTrainer(program, moved), records)
        return records
    finally:
        torch.set_num_threads(before)
