"""Optimizers of a script: torch's own in several settings, and ones whose step couples parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn


class GlobalNormStep(torch.optim.Optimizer):
    """Steps along the gradient divided by the norm of all gradients together."""

    def __init__(self, params: Iterable[Any], lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        held = [(p, group["lr"]) for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p, _ in held]).norm() + 1e-6
        for p, lr in held:
            p.sub_(lr * p.grad / norm)


class TrustRatio(torch.optim.Optimizer):
    """LAMB's rule without its moments: the step of each tensor is scaled by the norms of the tensor."""

    def __init__(self, params: Iterable[Any], lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    ratio = (p.norm() + 1e-2) / (p.grad.norm() + 1e-2)
                    p.sub_(group["lr"] * 0.1 * ratio * p.grad)


def orthogonal(matrix: Tensor) -> Tensor:
    """One step of Newton and Schulz, which couples all entries of a matrix."""
    x = matrix / (matrix.norm() + 1e-6)
    return 1.5 * x - 0.5 * x @ x.t() @ x


class Hybrid(torch.optim.Optimizer):
    """Plain steps for the first group, Muon's for the second."""

    def __init__(self, groups: Iterable[Any], lr: float = 0.1, matrices: bool = False) -> None:
        super().__init__(groups, {"lr": lr, "matrices": matrices})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * (orthogonal(p.grad) if group["matrices"] and p.dim() == 2 else p.grad))


def _torch_optimizer(kind: str, lr: float, decay: float) -> Callable[[Any], torch.optim.Optimizer]:
    makers: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "sgd": lambda p: torch.optim.SGD(p, lr=lr, weight_decay=decay),
        "momentum": lambda p: torch.optim.SGD(p, lr=lr, momentum=0.9, weight_decay=decay),
        "nesterov": lambda p: torch.optim.SGD(p, lr=lr, momentum=0.8, nesterov=True),
        "adamw": lambda p: torch.optim.AdamW(p, lr=lr / 10, eps=1e-5, weight_decay=decay),
        "adam": lambda p: torch.optim.Adam(p, lr=lr / 10, eps=1e-5, amsgrad=True),
        "rmsprop": lambda p: torch.optim.RMSprop(p, lr=lr / 10, eps=1e-4),
        "adagrad": lambda p: torch.optim.Adagrad(p, lr=lr / 3, eps=1e-4),
        "global_norm": lambda p: GlobalNormStep(p, lr=lr),
        "trust_ratio": lambda p: TrustRatio(p, lr=lr),
    }
    return makers[kind]


OPTIMIZERS = ["sgd", "momentum", "nesterov", "adamw", "adam", "rmsprop"]
RARE = ["global_norm", "trust_ratio", "hybrid", "adagrad"]
"""Whose step couples parameters; and one that has state before its first step."""


class Factory:
    """From parameters to an optimizer; `of_module` makes the groups that a script makes by name.

    Args:
        form: The "optimizer" of a program.
    """

    def __init__(self, form: dict[str, Any]) -> None:
        self.form = form
        self.lr, self.decay = form.get("lr", 0.2), form.get("decay", 0.0)

    @property
    def needs_module(self) -> bool:
        return self.form.get("groups", "one") != "one" or self.form["kind"] == "hybrid"

    def __call__(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return _torch_optimizer(self.form["kind"], self.lr, self.decay)(list(parameters))

    def of_module(self, module: nn.Module) -> torch.optim.Optimizer:
        named = list(module.named_parameters())
        if self.form["kind"] == "hybrid":
            inside = [p for name, p in named if name.startswith("blocks") and p.dim() == 2]
            rest = [p for name, p in named if not (name.startswith("blocks") and p.dim() == 2)]
            return Hybrid([{"params": rest}, {"params": inside, "matrices": True}], lr=self.lr)
        if self.form.get("groups") == "trainable":
            chosen = [p for _, p in named if p.requires_grad]
            return _torch_optimizer(self.form["kind"], self.lr, self.decay)(chosen)
        if self.form.get("groups") == "head_first":
            groups = [p for name, p in named if name.startswith("head")]
            return _torch_optimizer(self.form["kind"], self.lr, self.decay)(groups)
        vectors, matrices = [p for _, p in named if p.dim() < 2], [p for _, p in named if p.dim() >= 2]
        groups: list[Any] = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "lr": self.lr / 20}]
        return _torch_optimizer(self.form["kind"], self.lr, self.decay)([g for g in groups if g["params"]])
