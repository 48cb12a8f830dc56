"""A model from its description: a stem, blocks in an order of calls, what the root's forward does between them, a head."""

from __future__ import annotations

import dataclasses
import json
import types
from typing import Any

import torch
import torch.nn.functional as F
from benchmarks.fuzz import images, parts
from benchmarks.fuzz.blocks import Block, DictBlock
from torch import Tensor, nn

MAX_LENGTH = 12
IGNORED = -100


@dataclasses.dataclass
class Output:
    """What Hugging Face's models give: an object with attributes."""

    logits: Tensor
    loss: Tensor | None = None
    hidden: tuple[Tensor, ...] = ()


class Stem(nn.Module):
    """From the inputs to the stream: an embedding with positions, or a linear layer, or a convolution."""

    def __init__(self, spec: dict[str, Any]) -> None:
        super().__init__()
        width, form = spec["width"], spec.get("stem", {})
        self.domain = spec["domain"]
        if self.domain == "tokens":
            self.embedding = nn.Embedding(
                spec["vocabulary"],
                width,
                padding_idx=form.get("padding_idx"),
                max_norm=form.get("max_norm"),
                scale_grad_by_freq=form.get("scale_grad_by_freq", False),
            )
            self.positions = nn.Embedding(MAX_LENGTH, width) if form.get("positions", True) else None
        elif self.domain == "images":
            self.conv = nn.Conv2d(3, width, 3, padding=1, stride=form.get("stride", 1))
        else:
            self.linear = nn.Linear(spec["inputs"], width)

    def forward(self, x: Tensor) -> Tensor:
        if self.domain == "images":
            return self.conv(x)
        if self.domain != "tokens":
            return self.linear(x)
        h = self.embedding(x)
        if self.positions is not None:
            h = h + self.positions(torch.arange(x.shape[1]))
        return h


class Head(nn.Module):
    """Norm, pooling where there is one answer a sample, and the last layer."""

    def __init__(self, spec: dict[str, Any]) -> None:
        super().__init__()
        self.domain, self.pool = spec["domain"], spec.get("pool", "none")
        kind = spec.get("head_norm", "layer")
        self.norm = parts.norm("none" if self.domain == "images" else kind, spec["width"])
        self.proj = nn.Linear(spec["width"], spec["outputs"], bias=spec.get("head_bias", True))

    def forward(self, h: Tensor) -> Tensor:
        h = self.norm(h)
        if self.domain == "images":
            return self.proj(F.adaptive_avg_pool2d(h, 1).flatten(1))
        if self.pool == "mean":
            h = h.mean(1)
        elif self.pool == "first":
            h = h[:, 0]
        elif self.pool == "last":
            h = h[:, -1]
        return self.proj(h)


class Net(nn.Module):
    """The model that a description stands for.

    Args:
        spec: The "model" of a program: see draw.py.
    """

    ema: Tensor
    square: Tensor

    def __init__(self, spec: dict[str, Any]) -> None:
        super().__init__()
        self.root = dict(spec.get("root", {}))
        width = spec["width"]
        self.stem = Stem(spec)
        make = self.make_block(spec)
        self.blocks = nn.ModuleList(make(width, form) for form in spec["blocks"])
        self.calls_of_blocks = [tuple(call) for call in spec["calls"]]
        self.head = Head(spec)
        self.output = spec.get("output", "tensor")
        self.tau, self.calls, self.seen_loss = float(self.root.get("tau", 1.0)), 0, 0.0
        self.aux: Any = 0.0
        self.add_parameters(width)
        self.add_buffers(width)
        if spec.get("tie") == "assign":
            self.head.proj.weight = self.stem.embedding.weight

    @staticmethod
    def make_block(spec: dict[str, Any]) -> Any:
        if spec["domain"] == "images":
            return lambda width, form: images.KINDS[form["kind"]](width, form)
        return DictBlock if "dict_blocks" in spec.get("root", {}) else Block

    def add_parameters(self, width: int) -> None:
        count, root = len(self.calls_of_blocks), self.root
        if "scales" in root:
            self.scales = nn.Parameter(1.0 + 0.1 * torch.randn(count))
        if "lambdas" in root:
            self.lambdas = nn.Parameter(torch.tensor([0.8, 0.3]))
        if "cls" in root:
            self.cls = nn.Parameter(0.3 * torch.randn(1, 1, width))
        if "logit_scale" in root:
            self.logit_scale = nn.Parameter(torch.tensor(0.3))
        if "unused" in root:
            self.unused = nn.Linear(width, 3)
        if "complex" in root:
            phase = torch.randn(width, dtype=torch.complex128)
            self.phase = nn.Parameter(phase.conj() if root["complex"] == "conjugated" else phase)
        if "side" in root:
            self.side = nn.Linear(width, width)
        if "twin" in root:
            self.twin = nn.Linear(width, 4)

    def add_buffers(self, width: int) -> None:
        if "ema" in self.root:
            self.register_buffer("ema", torch.zeros(width))
        if "square" in self.root:
            size = int(self.root["square"])
            self.register_buffer("square", torch.eye(size) + 0.1 * torch.randn(size, size))

    # -- forward --------------------------------------------------------------------------------------------------

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        lengths: Tensor | None = None,
        depth: int | None = None,
        hidden: bool = False,
        labels: Tensor | None = None,
        rounds: Tensor | None = None,
        **_: Any,
    ) -> Any:
        if "input_gradient" in self.root:
            x = x.detach().requires_grad_()
        h = self.enter(self.stem(x))
        first, collected, aux = h, [h], []
        for index, (number, last) in enumerate(self.calls_of_blocks[: None if depth is None else int(depth)]):
            if index == 1 and "trim" in self.root and lengths is not None:
                longest = lengths.max()
                h, first = h[:, :longest], first[:, :longest]
                mask, collected = None if mask is None else mask[:, :longest], []
            h = self.run_block(self.blocks[number], h, mask, last, index)
            if isinstance(h, tuple):
                h, balance = h
                aux.append(balance)
            h = self.between(h, first, index, mask)
            collected.append(h)
        if hidden:
            h = torch.stack(collected).mean(0)
        if rounds is not None:
            h = self.repeat(h, rounds, mask)
        logits = self.leave(h)
        if "input_gradient" in self.root:
            slope = torch.autograd.grad(logits.square().sum(), x, create_graph=True)[0]
            logits = logits + 0.1 * slope.square().mean(-1, keepdim=True)
        return self.finish(logits, h, aux, labels)

    def repeat(self, h: Tensor, rounds: Tensor, mask: Tensor | None) -> Tensor:
        """Call blocks in turn, as often as the data say: each sample takes part in as many rounds as it asks for."""
        for number in range(int(rounds.max())):
            more = (rounds > number).view(-1, *[1] * (h.dim() - 1))
            # With the mask: else what a batch is padded to would count, and a rank's share may be padded to less.
            h = torch.where(
                more, torch.tanh(self.run_block(self.blocks[number % len(self.blocks)], h, mask, False, 0)), h
            )
        return h

    def run_block(self, block: nn.Module, h: Tensor, mask: Tensor | None, last: bool, index: int) -> Any:
        if "select" in self.root and mask is not None and index:
            return torch.zeros_like(h).masked_scatter(mask[..., None], block(h[mask]))
        if isinstance(block, DictBlock):
            return block({"x": h, "mask": mask})["x"]
        if "dtype_probe" in self.root:
            h = h.to(next(block.parameters()).dtype)
        keywords = {"last": True} if last else {}
        return block(h) if mask is None and not keywords else block(h, mask, **keywords)

    def enter(self, h: Tensor) -> Tensor:
        if "cls" in self.root:
            h = torch.cat([self.cls.expand(len(h), -1, -1), h], dim=1)
        if "calls" in self.root:
            self.calls += 1
            h = h / (1.0 + 0.05 * self.calls)
        if "ema" in self.root:
            h = h - 0.3 * self.ema
            if self.root["ema"] == "early" and self.training:
                self.move_average(h)
        if "square" in self.root:
            size = self.square.shape[0]
            h = torch.cat([h[..., :size] @ self.square, h[..., size:]], dim=-1)
        if "inplace_entry" in self.root:
            h = h * 1.0
            h[..., 1:3] = 0.5 * h[..., :2]
        return h

    def move_average(self, h: Tensor) -> None:
        self.ema.mul_(0.5).add_(h.detach().reshape(-1, h.shape[-1]).mean(0), alpha=0.5)

    def between(self, h: Tensor, first: Tensor, index: int, mask: Tensor | None) -> Tensor:
        root = self.root
        if "scales" in root:
            h = h * self.scales[index]
        if "lambdas" in root:
            h = self.lambdas[0] * h + self.lambdas[1] * first
        if index:
            return h
        if "ema" in root and root["ema"] == "late" and self.training:
            self.move_average(h)
        if "value_branch" in root and h.abs().mean() > root["value_branch"]:
            h = h * 0.5
        if "mode_branch" in root and not self.training:
            h = h / (1.0 + h.abs().amax(-1, keepdim=True))
        if "inplace_between" in root:
            h.mul_(0.9)
        if "detach" in root:
            h = 0.5 * h + 0.5 * h.detach()
        if "complex" in root:
            h = (h * self.phase).real + h
        if "side" in root:
            h = h + torch.tanh(self.side(first))
        return h

    def leave(self, h: Tensor) -> Tensor:
        root = self.root
        if "cls" in root:
            h = h[:, 1:] + 0.1 * h[:, :1]
        logits = self.head(h)
        if self.tau != 1.0:
            logits = logits * self.tau
        if "logit_scale" in root:
            logits = logits * self.logit_scale.exp()
        if "softcap" in root:
            logits = 3.0 * torch.tanh(logits / 3.0)
        if "pad_logits" in root:
            logits[..., logits.shape[-1] - 2 :] = -1e4
        return logits

    def finish(self, logits: Tensor, h: Tensor, aux: list[Tensor], labels: Tensor | None) -> Any:
        if "aux_sum" in self.root:
            aux = [
                *aux,
                *(m.aux for m in self.modules() if m is not self and isinstance(getattr(m, "aux", None), Tensor)),
            ]
        self.aux = sum(aux) if aux else 0.0
        if self.output == "own_loss":
            if "own_shift" in self.root:
                loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
            else:
                loss = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED)
            return Output(logits=logits, loss=loss + 0.1 * self.aux)
        if self.output == "tuple":
            return logits, h, self.aux
        if self.output == "dict":
            twin = {"twin": self.twin(h)} if "twin" in self.root else {}
            return {"logits": logits, "hidden": h, "aux": self.aux, **twin}
        return Output(logits=logits, hidden=(h,)) if self.output == "dataclass" else logits


def log_sizes(module: nn.Module, _: Any, output: Any) -> None:
    """A hook that reads a number, as loggers do."""
    tensor = output[0] if isinstance(output, tuple) else output
    if isinstance(tensor, Tensor):
        module.logged = tensor.detach().abs().max().item()  # pyright: ignore[reportAttributeAccessIssue]


def patch(block: nn.Module) -> None:
    """Replace a block's forward on the instance, as acceleration libraries do."""
    inner = block.forward

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return inner(*args, **kwargs)

    block.forward = types.MethodType(forward, block)


def build_model(text: str) -> nn.Module:
    """Build the model that a program's JSON describes, from the generator as it stands."""
    spec = json.loads(text)
    model = Net(spec).double()
    if spec.get("tie") == "data":
        model.head.proj.weight.data = model.stem.embedding.weight.data
    if "item_hook" in spec.get("root", {}):
        model.blocks[0].register_forward_hook(log_sizes)
    if "patched" in spec.get("root", {}):
        patch(model.blocks[-1])
    for name in spec.get("frozen", ()):
        for parameter in part_of(model, name):
            parameter.requires_grad_(False)
    return model


def part_of(model: nn.Module, name: str) -> list[nn.Parameter]:
    """Return the parameters that a script calls "norms", "all_but_head", "biases", or by a submodule's name."""
    named = list(model.named_parameters())
    if name == "norms":
        return [p for full, p in named if "norm" in full or "bn" in full]
    if name == "biases":
        return [p for full, p in named if full.endswith("bias")]
    if name == "all_but_head":
        return [p for full, p in named if not full.startswith("head")]
    if name == "all_but_norms":
        return [p for full, p in named if ".norm" not in full and "bn" not in full]
    return [p for full, p in named if full.startswith(f"{name}.")]
