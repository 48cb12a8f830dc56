"""Blocks of a stream of features: feed-forward parts, recurrences, convolutions, experts, and blocks that keep state.

Each has what a guard must see: functions, floats and indices as attributes, branches on mode, length, flags and values, buffers
and attributes that its forward leaves.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from benchmarks.fuzz import parts
from benchmarks.fuzz.attention import Attention, EinsumAttention, EncoderLayer, TorchAttention
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Mlp(nn.Module):
    """A feed-forward part; `gate` chooses one of the gated forms."""

    takes = "x"
    square: Tensor

    def __init__(self, width: int, form: dict[str, Any]) -> None:
        super().__init__()
        hidden, kind, bias = form.get("hidden", 13), form.get("linear", "plain"), form.get("bias", True)
        self.gate_form = form.get("gate", "none")
        self.act = parts.activation(form.get("act", "GELU"))
        self.up = parts.linear(kind, width, 2 * hidden if self.gate_form == "chunk" else hidden, bias)
        if self.gate_form == "separate":
            self.gate = parts.linear(kind, width, hidden, bias)
        self.inner = parts.norm("layer", hidden) if form.get("inner_norm") else None
        self.down = parts.linear(kind, hidden, width, bias)
        self.length_over = form.get("length_over")
        self.value_over = form.get("value_over")
        self.in_eval = form.get("in_eval")
        self.temperature = form.get("temperature", 0.0)
        self.layer_idx = form.get("layer_idx", 0)
        self.last_form = form.get("when_last")
        self.dropout = nn.Dropout(form["dropout"]) if form.get("dropout") else None
        if form.get("square"):
            self.register_buffer("square", torch.eye(4) + 0.1)
        self.is_squared = form.get("square", False)

    def forward(self, x: Tensor, last: bool = False) -> Tensor:
        if self.is_squared:
            x = torch.cat([x[..., :4] @ self.square, x[..., 4:]], dim=-1)
        h = self.up(x)
        if self.gate_form == "chunk":
            h, gate = h.chunk(2, dim=-1)
            h = self.act(h) * gate
        elif self.gate_form == "separate":
            h = self.act(self.gate(x)) * h
        else:
            h = self.act(h)
        h = self.branch(h, last)
        if self.inner is not None:
            h = self.inner(h)
        if self.dropout is not None:
            h = self.dropout(h)
        return self.down(h)

    def branch(self, h: Tensor, last: bool) -> Tensor:
        if self.temperature > 0.1:
            h = (h / self.temperature).softmax(-1)
        if self.layer_idx % 2:
            h = h.softmax(-1)
        if self.value_over is not None and h.abs().max() > self.value_over:
            h = h * (self.value_over / h.abs().max().detach())
        if self.in_eval and not self.training:
            h = h / (1.0 + h.abs().amax(-1, keepdim=True))
        if last and self.last_form == "normalize":
            h = F.normalize(h, dim=-1)
        if last and self.last_form == "softmax":
            h = h.softmax(-1)
        return h


class FunctionalMlp(nn.Module):
    """Weights as plain parameters, used by functions; the layers themselves are never called."""

    takes = "x"

    def __init__(self, width: int, form: dict[str, Any]) -> None:
        super().__init__()
        hidden = form.get("hidden", 13)
        self.first, self.second = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.scale = nn.Parameter(0.5 * torch.ones(width))
        self.act = parts.activation(form.get("act", "F.gelu"))

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(F.linear(x, self.first.weight, self.first.bias))
        return torch.matmul(h, self.second.weight.t()).add_(self.second.bias) * self.scale


class SequentialMlp(nn.Module):
    """nn.Sequential that begins with an activation, in place as ResNets have it."""

    takes = "x"

    def __init__(self, width: int, form: dict[str, Any]) -> None:
        super().__init__()
        hidden = form.get("hidden", 13)
        act = form.get("act", "ReLU(inplace)")
        layers = [nn.Linear(width, hidden), parts.activation_module(act), nn.Dropout(0.0), nn.Linear(hidden, width)]
        first = [] if form.get("act_last") else [parts.activation_module("ReLU(inplace)")]
        self.net = nn.Sequential(*first, *layers, *([parts.activation_module("ReLU(inplace)")] if not first else []))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class Recurrent(nn.Module):
    takes = "x"

    def __init__(self, width: int, form: dict[str, Any]) -> None:
        super().__init__()
        kind = {"rnn": nn.RNN, "gru": nn.GRU, "lstm": nn.LSTM}[form.get("cell", "gru")]
        self.batch_first = form.get("batch_first", True)
        both = form.get("bidirectional", False)
        self.cell = kind(width, 5, batch_first=self.batch_first, bidirectional=both)
        self.out = nn.Linear(10 if both else 5, width)

    def forward(self, x: Tensor) -> Tensor:
        if self.batch_first:
            return self.out(self.cell(x)[0])
        return self.out(self.cell(x.transpose(0, 1))[0]).transpose(0, 1)


class TokenConv(nn.Module):
    """A convolution along the sequence: plain, depthwise and pointwise, or transposed; causal or centred."""

    takes = "x"

    def __init__(self, width: int, form: dict[str, Any]) -> None:
        super().__init__()
        self.form = form.get("conv", "plain")
        self.causal = form.get("causal", False)
        groups = width if self.form == "depthwise" else 1
        kind = nn.ConvTranspose1d if self.form == "transposed" else nn.Conv1d
        padding = 2 if self.causal and self.form != "transposed" else 1
        self.conv = kind(width, width, 3, padding=padding, groups=groups)
        self.point = nn.Conv1d(width, width, 1)
        self.act = parts.activation(form.get("act", "F.silu"))

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x.transpose(1, 2))[..., : x.shape[1]]
        return self.point(self.act(y)).transpose(1, 2)


class Experts(nn.Module):
    """Experts behind a gate: all of them mixed, or the best two for each token; the balance is left as asked."""

    takes = "x"

    def __init__(self, width: int, form: dict[str, Any]) -> None:
        super().__init__()
        count, hidden = form.get("count", 5), form.get("hidden", 5)
        self.gate = nn.Linear(width, count, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width)) for _ in range(count)
        )
        self.top_k, self.leaves = form.get("top_k", 0), form.get("aux", "none")
        self.aux: Any = 0.0

    def forward(self, x: Tensor) -> Any:
        flat = x.reshape(-1, x.shape[-1])
        weights = self.gate(flat).softmax(-1)
        if self.top_k:
            y = self.routed(flat, weights)
        else:
            y = sum(weights[:, i : i + 1] * expert(flat) for i, expert in enumerate(self.experts))
        balance = (weights.mean(0) ** 2).sum() * len(self.experts)
        if self.leaves == "attribute":
            self.aux = balance
        y = y.view_as(x)
        return (y, balance) if self.leaves == "output" else y

    def routed(self, flat: Tensor, weights: Tensor) -> Tensor:
        best, chosen = weights.topk(self.top_k, dim=-1)
        best = best / best.sum(-1, keepdim=True)
        y = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            rows, place = torch.where(chosen == index)
            if len(rows):
                y = y.index_add(0, rows, best[rows, place, None] * expert(flat[rows]))
        return y


class Stateful(nn.Module):
    """A feed-forward part beside what a forward leaves: statistics, counters, an attribute."""

    takes = "x"
    ema: Tensor
    seen: Tensor

    def __init__(self, width: int, form: dict[str, Any]) -> None:
        super().__init__()
        self.mlp = Mlp(width, form)
        self.form = form.get("state", "ema")
        self.calls = 0
        self.aux: Any = 0.0
        if self.form in ("ema", "ema_assigned"):
            self.register_buffer("ema", torch.zeros(width))
        if self.form == "counter":
            self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        if self.form in ("ema", "ema_assigned"):
            x = x - 0.3 * self.ema
            if self.training:
                mean = x.detach().reshape(-1, x.shape[-1]).mean(0)
                if self.form == "ema":
                    self.ema.mul_(0.5).add_(mean, alpha=0.5)
                else:
                    self.ema = 0.5 * self.ema + 0.5 * mean
        if self.form == "counter":
            self.seen += 1
            x = x / (1.0 + 0.1 * self.seen.to(x.dtype))
        if self.form == "calls":
            self.calls += 1
            x = x / (1.0 + 0.1 * self.calls)
        if self.form == "aux":
            self.aux = (x.reshape(-1, x.shape[-1]).mean(0) ** 2).sum()
        return self.mlp(x)


class Mixing(nn.Module):
    """A layer that looks at several samples, or at the sequence from some length on."""

    takes = "x"

    def __init__(self, width: int, form: dict[str, Any]) -> None:
        super().__init__()
        self.mlp = Mlp(width, form)
        self.over, self.length = form.get("over", "samples"), form.get("length", 5)

    def forward(self, x: Tensor) -> Tensor:
        if self.over == "samples":
            x = x - 0.5 * x.mean(0)
        elif self.over == "length" and x.shape[1] > self.length:
            x = x - 0.5 * x.mean(1, keepdim=True)
        return self.mlp(x)


class Checkpointed(nn.Module):
    """The user's own activation checkpointing."""

    takes = "x"

    def __init__(self, width: int, form: dict[str, Any]) -> None:
        super().__init__()
        self.mlp = Mlp(width, form)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.mlp, x, use_reentrant=False)


KINDS: dict[str, Any] = {
    "mlp": Mlp,
    "functional": FunctionalMlp,
    "sequential": SequentialMlp,
    "attention": Attention,
    "mha": TorchAttention,
    "encoder": EncoderLayer,
    "einsum": EinsumAttention,
    "recurrent": Recurrent,
    "conv": TokenConv,
    "experts": Experts,
    "stateful": Stateful,
    "mixing": Mixing,
    "checkpointed": Checkpointed,
}


class Block(nn.Module):
    """A part after or before a norm, beside a residual: the block that models are made of."""

    def __init__(self, width: int, form: dict[str, Any]) -> None:
        super().__init__()
        self.part = KINDS[form["kind"]](width, form)
        self.norm = parts.norm(form.get("norm", "layer"), width)
        self.post = form.get("post", False)
        self.residual = form.get("residual", True)
        self.gain = nn.Parameter(0.7 * torch.ones(width)) if form.get("gain") else None
        self.takes_mask = self.part.takes == "mask"
        self.is_whole = getattr(self.part, "whole", False)
        self.inplace_residual = form.get("inplace_residual", False)
        self.dropout = nn.Dropout(form.get("dropout", 0.0))
        self.masks_first = form.get("masks_first", False)

    def forward(self, x: Tensor, mask: Tensor | None = None, **keywords: Any) -> Any:
        if self.is_whole:
            return self.part(x)
        if self.masks_first and mask is not None:
            x = x * mask[..., None]
        h = x if self.post else self.norm(x)
        y = self.part(h, mask) if self.takes_mask else self.part(h, **keywords)
        y, aux = y if isinstance(y, tuple) else (y, None)
        if self.gain is not None:
            y = y * self.gain
        y = self.dropout(y)
        if self.inplace_residual:
            y += x
        elif self.residual:
            y = x + y
        y = self.norm(y) if self.post else y
        return y if aux is None else (y, aux)


class DictBlock(nn.Module):
    """A block between layers that hand on a dict."""

    def __init__(self, width: int, form: dict[str, Any]) -> None:
        super().__init__()
        self.block = Block(width, form)

    def forward(self, states: dict[str, Any]) -> dict[str, Any]:
        return {**states, "x": self.block(states["x"], states.get("mask"))}
