"""Models whose code depends on what a first batch does not show, and scripts that show it; run by ranks and by one process."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshwright as mw

VOCABULARY, WIDTH, HEADS = 24, 16, 4


class Attention(nn.Module):
    def __init__(self, width: int = WIDTH, heads: int = HEADS) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (y.view(b, t, -1, c // HEADS).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, t, -1))


class Mlp(nn.Module):
    """Its activation is told by an attribute, by the mode, by an argument, by a length, or by values."""

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.kind = kind
        self.temperature = 0.0
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, last: bool = False) -> Tensor:
        h = F.gelu(self.up(x))
        mixes = (
            (self.kind == "mode" and not self.training)
            or (self.kind == "argument" and last)
            or (self.kind == "length" and x.shape[1] > 8)
            or self.temperature > 0
        )
        if mixes:
            h = h / (1 + h.abs().amax(-1, keepdim=True))
        return self.down(h)


class Block(nn.Module):
    def __init__(self, kind: str = "", dropout: float = 0.0) -> None:
        super().__init__()
        self.kind = kind
        self.ln1, self.ln2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn, self.mlp = Attention(), Mlp(kind)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor, last: bool = False) -> Tensor:
        if self.kind == "stream length" and x.shape[1] > 8:
            x = x - x.mean(1, keepdim=True)
        if self.kind == "samples":
            x = x - x.mean(0, keepdim=True)
        x = x + self.drop(self.attn(self.ln1(x)))
        return x + self.mlp(self.ln2(x), last)


class Gpt(nn.Module):
    """A GPT whose loop over layers may leave some out, collect hidden states, or call one with another argument."""

    def __init__(self, kind: str = "", num_layers: int = 3, dropout: float = 0.0) -> None:
        super().__init__()
        self.kind = kind
        self.depth = num_layers
        self.emb = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block(kind, dropout) for _ in range(num_layers))
        self.ln = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(
        self, ids: Tensor, last: bool = False, collect: bool = False, skip: int = -1, depth: int | None = None
    ) -> Tensor:
        x, states = self.emb(ids), []
        for index, layer in enumerate(self.layers[:depth]):
            if index == skip:
                continue
            x = layer(x, last=last)
            states.append(x)
        if collect:
            x = x + sum(state * (1 + state.mean((1, 2), keepdim=True)) for state in states)
        return self.head(self.ln(x))


class InPlaceLogits(Gpt):
    def forward(self, ids: Tensor, **options: Any) -> Tensor:
        logits = super().forward(ids, **options)
        if self.kind == "setitem":
            logits[..., VOCABULARY - 4 :] = -1e9
        return logits


def build(kind: str = "", **options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = InPlaceLogits if kind == "setitem" else Gpt
    return model(kind, **options).double()


def loss_fn(outputs: Tensor, batch: Any) -> mw.Loss:
    labels = batch[1]
    total = F.cross_entropy(outputs.flatten(0, 1), labels.flatten(), reduction="sum")
    return mw.Loss(total, labels.numel())


def scaled_loss(outputs: Tensor, batch: Any) -> mw.Loss:
    """A loss that writes over the logits."""
    outputs.div_(1.7)
    return loss_fn(outputs, batch)


def filled_loss(outputs: Tensor, batch: Any) -> mw.Loss:
    """A loss that writes over a view of the logits, and then reads the logits."""
    outputs.detach()[..., :2].fill_(0.25)
    view = outputs[:, :-1].reshape(-1, VOCABULARY)
    outputs[..., 3].zero_()
    total = F.cross_entropy(view, batch[1][:, 1:].flatten(), reduction="sum")
    return mw.Loss(total + outputs.square().sum(), batch[1].numel())


LOSSES = {"plain": loss_fn, "scaled": scaled_loss, "filled": filled_loss}


def tokens(num_samples: int, length: int, seed: int = 0, **options: Any) -> Any:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCABULARY, (num_samples, length + 1), generator=generator)
    return {"ids": ids[:, :-1], **options}, ids[:, 1:]


@dataclasses.dataclass(frozen=True)
class Action:
    """One thing that a training script does: "step" or "evaluate" on a batch, or "change" the module."""

    kind: str
    value: Any = None


def step(num_samples: int = 4, length: int = 6, seed: int = 0, **options: Any) -> Action:
    return Action("step", (num_samples, length, seed, options))


def evaluate(num_samples: int = 4, length: int = 6, seed: int = 9, **options: Any) -> Action:
    return Action("evaluate", (num_samples, length, seed, options))


def change(function: Callable[[nn.Module], None]) -> Action:
    return Action("change", function)


def _batch(value: Any) -> Any:
    num_samples, length, seed, options = value
    return tokens(num_samples, length, seed, **options)


Seen = list[tuple[float, dict[str, Tensor | None]]]


def run_script(
    kind: str, script: list[Action], plan: str, loss: str = "plain", **options: Any
) -> tuple[Seen, list[str]]:
    """Return the losses and gradients of each action on this rank, and what the plan says at the end."""
    sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.1)  # noqa: E731
    model = mw.apply_plan(lambda: build(kind, **options), plan, loss_fn=LOSSES[loss], optimizer=sgd)
    seen: Seen = []
    try:
        for action in script:
            if action.kind == "change":
                action.value(model.module)
            elif action.kind == "evaluate":
                seen.append((model.evaluate(mw.split_batch(_batch(action.value), model))["loss"], {}))
            else:
                result = model.step(mw.split_batch(_batch(action.value), model))
                gradients = model.full_gradients()
                seen.append((result.loss, {n: None if g is None else g.clone() for n, g in gradients.items()}))
        state = {name: value.clone() for name, value in model.full_state_dict().items()}
        seen.append((0.0, state))  # pyright: ignore[reportArgumentType]
        return seen, list(model.plan.reasons)
    finally:
        model.close()


def run_plain(kind: str, script: list[Action], loss: str = "plain", **options: Any) -> Seen:
    """Return the same of one plain process."""
    model = build(kind, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: Seen = []
    for action in script:
        if action.kind == "change":
            action.value(model)
            continue
        inputs, labels = _batch(action.value)
        model.train(action.kind == "step")
        with torch.set_grad_enabled(action.kind == "step"):
            found = LOSSES[loss](model(**inputs), (inputs, labels))
            value = found.sum / found.weight
        gradients: dict[str, Tensor | None] = {}
        if action.kind == "step":
            optimizer.zero_grad(set_to_none=True)
            value.backward()
            gradients = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
            optimizer.step()
        seen.append((float(value.detach()), gradients))
    seen.append((0.0, {name: value.clone() for name, value in model.state_dict().items()}))
    return seen


# -- models that cannot be followed --------------------------------------------------------------------------------------


class Locked(nn.Linear):
    """A layer with an attribute that cannot be copied."""

    def __init__(self) -> None:
        super().__init__(7, 7)
        self.lock = threading.Lock()


def build_scripted() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 9), torch.jit.script(nn.Linear(9, 5)))  # pyright: ignore[reportArgumentType]


def build_lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(9), nn.Tanh(), nn.Linear(9, 5))


def build_locked() -> nn.Module:
    return nn.Sequential(Locked(), nn.Tanh(), nn.Linear(7, 5))


def step_of(build: Any, plan: str) -> float:
    """Take one step with a model."""
    with mw.apply_plan(build, plan, loss_fn=lambda outputs, batch: (outputs - batch[1]).square().mean()) as model:
        return model.step(mw.split_batch((torch.ones(6, 7), torch.ones(6, 5)), model)).loss
