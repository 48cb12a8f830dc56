"""Activations, norms and linear layers in the styles that users write them: as modules, as functions, in place."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class SquaredReLU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x).square()


class LearnedSwish(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.beta = nn.Parameter(torch.tensor(1.2))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.beta * x)


class ClampSTE(torch.autograd.Function):
    """A custom function: clamps forward, lets gradients through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clamp(-1.0, 1.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 0.9 * grad


def quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def hidden_softmax(x: Tensor) -> Tensor:
    return x.softmax(-1)


def unit_length(x: Tensor) -> Tensor:
    return F.normalize(x, dim=-1)


def centred(x: Tensor) -> Tensor:
    return x - x.mean(-1, keepdim=True)


def halved_relu(x: Tensor) -> Tensor:
    y = x * 0.5
    y.relu_()
    y += 0.1 * x
    return y


def written(x: Tensor) -> Tensor:
    y = torch.tanh(x)
    y[..., :2] = 0.5 * y[..., 1:3]
    return y


def sorted_features(x: Tensor) -> Tensor:
    return x.sort(-1).values


def running_sum(x: Tensor) -> Tensor:
    return x.cumsum(-1) / x.shape[-1]


def feature_index(x: Tensor) -> Tensor:
    return x * torch.arange(1, x.shape[-1] + 1).to(x.dtype) / x.shape[-1]


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "F.relu": F.relu,
    "F.gelu": F.gelu,
    "F.silu": F.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "relu_": torch.relu_,
    "sin": torch.sin,
    "F.elu": F.elu,
    "F.softplus": F.softplus,
    "quick_gelu": quick_gelu,
    "halved_relu": halved_relu,
    "written": written,
    "ste": ClampSTE.apply,
    "softmax": hidden_softmax,
    "unit_length": unit_length,
    "centred": centred,
    "sorted": sorted_features,
    "running_sum": running_sum,
    "feature_index": feature_index,
}
"""Name -> what a module keeps as `self.act = F.gelu` or calls directly. The last seven look at more than one feature."""

MODULES: dict[str, Callable[[], nn.Module]] = {
    "ReLU": nn.ReLU,
    "ReLU(inplace)": lambda: nn.ReLU(inplace=True),
    "GELU": nn.GELU,
    "GELU(tanh)": lambda: nn.GELU("tanh"),
    "SiLU": nn.SiLU,
    "SiLU(inplace)": lambda: nn.SiLU(inplace=True),
    "Tanh": nn.Tanh,
    "Sigmoid": nn.Sigmoid,
    "LeakyReLU": nn.LeakyReLU,
    "LeakyReLU(inplace)": lambda: nn.LeakyReLU(0.2, inplace=True),
    "ELU": nn.ELU,
    "CELU": nn.CELU,
    "SELU": nn.SELU,
    "ReLU6": nn.ReLU6,
    "Softplus": nn.Softplus,
    "Softsign": nn.Softsign,
    "Mish": nn.Mish,
    "Hardswish": nn.Hardswish,
    "Hardtanh": nn.Hardtanh,
    "Tanhshrink": nn.Tanhshrink,
    "LogSigmoid": nn.LogSigmoid,
    "PReLU": nn.PReLU,
    "SquaredReLU": SquaredReLU,
    "LearnedSwish": LearnedSwish,
    "Softmax": lambda: nn.Softmax(dim=-1),
    "Dropout0": lambda: nn.Dropout(0.0),
}

ACTIVATIONS = [*FUNCTIONS, *MODULES]


class Activated(nn.Module):
    """A function kept as an attribute, as configurations do it (`self.act = ACT2FN[name]`)."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def activation(name: str) -> Any:
    """Return a module, or a function, by its name."""
    return MODULES[name]() if name in MODULES else FUNCTIONS[name]


def activation_module(name: str) -> nn.Module:
    return MODULES[name]() if name in MODULES else Activated(FUNCTIONS[name])


# -- norms ------------------------------------------------------------------------------------------------------------


class OwnRMSNorm(nn.Module):
    """As LLaMA's code has it."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class TokenGroupNorm(nn.Module):
    """GroupNorm over the features of each token."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(next(n for n in (3, 2, 1) if width % n == 0), width)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.reshape(-1, x.shape[-1])).view_as(x)


class TokenBatchNorm(nn.Module):
    """BatchNorm1d over all tokens of the batch."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.reshape(-1, x.shape[-1])).view_as(x)


def jitter(norm: nn.Module) -> nn.Module:
    """Give a norm weights that are not all equal, so that features cannot be mixed up unnoticed."""
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return norm


NORMS: dict[str, Callable[[int], nn.Module]] = {
    "layer": nn.LayerNorm,
    "rms": OwnRMSNorm,
    "nn.RMSNorm": nn.RMSNorm,
    "group": TokenGroupNorm,
    "plain": lambda width: nn.LayerNorm(width, elementwise_affine=False),
    "batch": TokenBatchNorm,
    "none": lambda _: nn.Identity(),
}


def norm(kind: str, width: int) -> nn.Module:
    return jitter(NORMS[kind](width))


# -- linear layers ----------------------------------------------------------------------------------------------------


class LoRALinear(nn.Module):
    """A frozen linear layer with a trainable adapter of rank 2."""

    def __init__(self, width_in: int, width_out: int, bias: bool) -> None:
        super().__init__()
        self.base = nn.Linear(width_in, width_out, bias=bias)
        self.base.requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(2, width_in) / 3)
        self.lora_b = nn.Parameter(torch.randn(width_out, 2) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 0.5 * (x @ self.lora_a.t() @ self.lora_b.t())


class Conv1DLinear(nn.Module):
    """GPT-2's linear layer, whose weight is stored the other way round."""

    def __init__(self, width_in: int, width_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width_in, width_out) / math.sqrt(width_in))
        self.bias = nn.Parameter(0.1 * torch.randn(width_out))

    def forward(self, x: Tensor) -> Tensor:
        flat = torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight)
        return flat.view(*x.shape[:-1], self.weight.shape[1])


def linear(kind: str, width_in: int, width_out: int, bias: bool = True) -> nn.Module:
    if kind == "lora":
        return LoRALinear(width_in, width_out, bias)
    if kind == "conv1d":
        return Conv1DLinear(width_in, width_out)
    plain = nn.Linear(width_in, width_out, bias=bias)
    if kind == "weight_norm":
        return nn.utils.parametrizations.weight_norm(plain)
    if kind == "spectral_norm":
        return nn.utils.parametrizations.spectral_norm(plain)
    if kind == "old_weight_norm":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            return nn.utils.weight_norm(plain)
    return plain


LINEARS = ["plain", "lora", "conv1d", "weight_norm", "spectral_norm", "old_weight_norm"]
