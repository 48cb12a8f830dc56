"""Loss functions in the styles that users write them; built on both sides from one description."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from benchmarks.fuzz.models import IGNORED, Output
from torch import Tensor, nn


def logits_of(outputs: Any) -> Tensor:
    if isinstance(outputs, Output):
        return outputs.logits
    if isinstance(outputs, Mapping):
        return outputs["logits"]
    return outputs[0] if isinstance(outputs, tuple) else outputs


def labels_of(batch: Any) -> Any:
    return batch["labels"] if isinstance(batch, Mapping) else batch[1]


class LossFunction:
    """`loss_fn(outputs, batch)` as a description says.

    Args:
        form: The "loss" of a program.
        module: The model, for penalties and for what it leaves on itself; the closure that a user's script has.
        make_loss: What makes a loss of a sum and a weight.
    """

    def __init__(self, form: dict[str, Any], module: nn.Module, make_loss: Callable[[Tensor, Any], Any]) -> None:
        self.form, self.module, self.make_loss = form, module, make_loss
        self.seen: list[float] = []

    def __call__(self, outputs: Any, batch: Any) -> Any:
        logits, labels = logits_of(outputs), labels_of(batch)
        logits = self.prepare(logits)
        if self.form["kind"] == "masked":
            return self.masked(logits, labels)
        loss = self.base(logits, labels, batch)
        return loss + self.extras(outputs, logits)

    def prepare(self, logits: Tensor) -> Tensor:
        how = self.form.get("inplace")
        if how == "div_":
            logits.div_(1.5)
        elif how == "masked_fill_":
            logits.masked_fill_(logits > 0.3, -0.5)
        elif how == "setitem":
            logits[..., -1] = -10.0
        elif how == "clamp_":
            logits = logits.clamp_(-2.0, 2.0)
        elif how == "view":
            logits.view(-1, logits.shape[-1])[:, 0].mul_(0.5)
        if "temperature" in self.form:
            logits = logits / self.form["temperature"]
        if self.form.get("reads"):
            self.seen.append(logits.detach().abs().mean().item())
        return logits

    def base(self, logits: Tensor, labels: Tensor, batch: Any) -> Tensor:
        kind, width = self.form["kind"], logits.shape[-1]
        if kind == "mse":
            return F.mse_loss(logits, labels)
        if kind == "shifted":
            shifted, wanted = logits[..., :-1, :].contiguous(), labels[..., 1:].contiguous()
            return F.cross_entropy(shifted.view(-1, width), wanted.view(-1))
        if kind == "by_hand":
            return -logits.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).mean()
        if kind == "transposed":
            return F.cross_entropy(logits.transpose(1, -1), labels)
        if kind == "focal":
            chance = logits.softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
            return (-((1 - chance) ** 2) * chance.log()).mean()
        if kind == "top":
            best = logits.topk(3, dim=-1).values
            return F.cross_entropy(logits.reshape(-1, width), labels.reshape(-1)) + 0.1 * best.mean()
        if kind == "weighted":
            each = F.cross_entropy(logits.reshape(-1, width), labels.reshape(-1), reduction="none")
            return (each.view(len(labels), -1).mean(1) * batch["weights"]).mean()
        if kind == "batch_max":  # no mean over samples
            each = F.cross_entropy(logits.reshape(-1, width), labels.reshape(-1), reduction="none")
            return each.mean() + 0.3 * each.max()
        smoothing = self.form.get("smoothing", 0.0)
        return F.cross_entropy(logits.reshape(-1, width), labels.reshape(-1), label_smoothing=smoothing)

    def masked(self, logits: Tensor, labels: Tensor) -> Any:
        flat, wanted = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
        total = F.cross_entropy(flat, wanted, ignore_index=IGNORED, reduction="sum")
        weight: Any = (wanted != IGNORED).sum()
        if self.form.get("weight") == "number":
            weight = float(weight)
        if self.form.get("weight") == "graph":
            weight = torch.sigmoid(flat[:, 0]).sum()
        return self.make_loss(total, weight)

    def extras(self, outputs: Any, logits: Tensor) -> Any:
        extra: Any = 0.0
        if "penalty" in self.form:
            extra = extra + 0.05 * self.penalty(self.form["penalty"])
        if "z" in self.form:
            extra = extra + 0.01 * logits.logsumexp(-1).square().mean()
        aux = self.form.get("aux")
        if aux == "output":
            extra = extra + 0.1 * (outputs["aux"] if isinstance(outputs, Mapping) else outputs[2])
        elif aux == "root":
            extra = extra + 0.1 * self.module.aux
        elif aux == "blocks":
            extra = extra + 0.1 * sum(m.aux for m in self.module.blocks.modules() if hasattr(m, "aux"))
        return extra

    def penalty(self, kind: str) -> Tensor:
        named = [(n, p) for n, p in self.module.named_parameters() if not p.is_complex()]
        if kind == "squares":
            return sum((p.square().sum() for _, p in named), torch.zeros((), dtype=torch.float64))
        if kind == "norms":
            return sum((p.norm() for n, p in named if p.dim() > 1), torch.zeros((), dtype=torch.float64))
        if kind == "absolute":
            return sum((p.abs().sum() for n, p in named if n.endswith("weight")), torch.zeros((), dtype=torch.float64))
        weights = [p for n, p in named if p.dim() == 2 and n.startswith("blocks")] or [self.module.head.proj.weight]
        return sum(
            ((p.t() @ p - torch.eye(p.shape[1])).square().sum() for p in weights), torch.zeros((), dtype=torch.float64)
        )
