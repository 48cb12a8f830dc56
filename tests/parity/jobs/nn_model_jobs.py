"""Conversions of plain modules, a whole tensor parallel model, layouts and mistakes; the functions that ranks run."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from tests.parity.jobs.nn_jobs import Tensors, full_gradients, full_parameters, group_of_all, numbers
from torch import Tensor, nn

import meshwright as mw
from meshwright import testing
from meshwright.comm import functional
from meshwright.comm.communicator import Communicator
from meshwright.layout import ShardLayout

# ---- conversion and copies


class Conv1D(nn.Module):
    """A linear layer as GPT-2 of Hugging Face has it; theirs takes seconds to import in every rank."""

    def __init__(self, num_out: int, num_in: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(num_in, num_out))
        self.bias = nn.Parameter(torch.randn(num_out))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x, self.weight)


def run_conversions() -> dict[str, Tensors]:
    """Return the full states of modules that were made from plain ones, and check what is kept."""
    group = group_of_all()
    torch.manual_seed(11)
    linear = nn.Linear(5, 7).double().eval()
    linear.weight.requires_grad_(False)
    conv1d = Conv1D(9, 5).double()
    embedding = nn.Embedding(7, 3, padding_idx=-1, dtype=torch.bfloat16)
    state = torch.get_rng_state()
    input = numbers(2, 5, seed=1)
    found = {}
    for kind, options in ((mw.nn.ColumnParallelLinear, {"gather_output": True}), (mw.nn.RowParallelLinear, {})):
        row = {} if options else {"input_is_parallel": False}
        module = kind.from_linear(linear, group=group, **options, **row)
        assert (module.training, module.weight.requires_grad, module.bias.requires_grad) == (False, False, True)
        found[f"{kind.__name__} from linear"] = module.full_state_dict() | {"output": module(input)}
        copied = copy.deepcopy(module)
        assert copied.group is group
        assert copied.weight is not module.weight
        found[f"a copy of {kind.__name__}"] = copied.full_state_dict() | {"output": copied(input)}
        fused = {"groups": (3, 3, 3)} if options else {}
        module = kind.from_conv1d(conv1d, group=group, **options, **row, **fused)
        found[f"{kind.__name__} from conv1d"] = module.full_state_dict() | {"output": module(input)}
    module = mw.nn.VocabParallelEmbedding.from_embedding(embedding, group=group)
    assert module.weight.dtype == torch.bfloat16
    found["embedding"] = module.full_state_dict() | {"output": module(torch.arange(7))}
    assert torch.equal(torch.get_rng_state(), state), "random numbers were drawn"
    return found


def plain_conversions() -> dict[str, Tensors]:
    torch.manual_seed(11)
    linear = nn.Linear(5, 7).double().eval()
    conv1d = Conv1D(9, 5).double()
    embedding = nn.Embedding(7, 3, padding_idx=-1, dtype=torch.bfloat16)
    input, found = numbers(2, 5, seed=1), {}
    for kind in (mw.nn.ColumnParallelLinear, mw.nn.RowParallelLinear):
        for name in ("{} from linear", "a copy of {}"):
            found[name.format(kind.__name__)] = {**linear.state_dict(), "output": linear(input)}
        found[f"{kind.__name__} from conv1d"] = {**conv1d.state_dict(), "output": conv1d(input)}
    found["embedding"] = {**embedding.state_dict(), "output": embedding(torch.arange(7))}
    return found


# ---- a whole model

TOKENS, LENGTH, HEADS, KV_HEADS, HEAD = 13, 7, 6, 3, 2


class Decoder(nn.Module):
    """Embedding, attention with grouped queries, a fused gated layer, and logits: plain without a group."""

    def __init__(self, group: Communicator | None, sequence_parallel: bool = False) -> None:
        super().__init__()
        torch.manual_seed(13)
        width, q, kv = 10, HEADS * HEAD, KV_HEADS * HEAD
        self.group = group
        if group is None:
            self.embed: nn.Module = nn.Embedding(TOKENS, width)
            self.qkv: nn.Module = nn.Linear(width, q + 2 * kv)
            self.out: nn.Module = nn.Linear(q, width)
            self.gate_up: nn.Module = nn.Linear(width, 2 * 9, bias=False)
            self.down: nn.Module = nn.Linear(9, width)
            self.head: nn.Module = nn.Linear(width, TOKENS)
        else:
            common: dict[str, Any] = {"group": group, "sequence_parallel": sequence_parallel}
            column = {**common, "sequence_length": LENGTH}
            per_key = HEADS // KV_HEADS * HEAD
            self.embed = mw.nn.VocabParallelEmbedding(TOKENS, width, **common)
            self.qkv = mw.nn.ColumnParallelLinear(
                width, q + 2 * kv, groups=(q, kv, kv), units=(per_key, HEAD, HEAD), **column
            )
            self.out = mw.nn.RowParallelLinear(q, width, unit=per_key, **common)
            self.gate_up = mw.nn.ColumnParallelLinear(width, 18, bias=False, groups=(9, 9), **column)
            self.down = mw.nn.RowParallelLinear(9, width, **common)
            self.head = mw.nn.ColumnParallelLinear(width, TOKENS, **column)
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)
        fused = self.qkv(F.layer_norm(hidden, hidden.shape[-1:]))
        heads = fused.unflatten(-1, (fused.shape[-1] // HEAD, HEAD)).transpose(-2, -3)
        num_keys = heads.shape[-3] // (HEADS // KV_HEADS + 2)
        query, key, value = heads.split([heads.shape[-3] - 2 * num_keys, num_keys, num_keys], -3)
        key, value = (part.repeat_interleave(HEADS // KV_HEADS, -3) for part in (key, value))
        scores = (query @ key.transpose(-1, -2)).masked_fill(torch.ones(LENGTH, LENGTH).triu(1).bool(), -torch.inf)
        hidden = hidden + self.out((scores.softmax(-1) @ value).transpose(-2, -3).flatten(-2))
        gate, up = self.gate_up(F.layer_norm(hidden, hidden.shape[-1:])).chunk(2, -1)
        return self.head(hidden + self.down(F.silu(gate) * up))

    def loss(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self(ids)
        if self.group is None:
            return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), label_smoothing=0.1)
        return mw.nn.vocab_parallel_cross_entropy(logits, labels, self.group, vocab_size=TOKENS, label_smoothing=0.1)


def train_decoder(model: Decoder, gradients: Callable[[nn.Module], Tensors]) -> Tensors:
    """Three steps of SGD: losses, and the gradients of the first step."""
    found: Tensors = {}
    for step in range(3):
        ids = torch.randint(TOKENS, (2, LENGTH), generator=torch.Generator().manual_seed(step))
        labels = ids.roll(-1, -1)
        labels[:, -1] = -100
        model.zero_grad()
        loss = model.loss(ids, labels)
        loss.backward()
        found[f"loss {step}"] = loss.detach()
        if not step:
            found |= {f"gradient {name}": tensor.clone() for name, tensor in gradients(model).items()}
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
    return found


def plain_decoder() -> Tensors:
    model = Decoder(None)
    found = train_decoder(model, lambda plain: {name: p.grad for name, p in plain.named_parameters()})
    return found | {f"parameter {name}": parameter.detach() for name, parameter in model.named_parameters()}


def run_decoder(sequence_parallel: bool) -> tuple[Tensors, list[tuple[int, ...]]]:
    model = Decoder(group_of_all(), sequence_parallel)
    found = train_decoder(model, full_gradients)
    found |= {f"parameter {name}": tensor for name, tensor in full_parameters(model).items()}
    return found, [tuple(parameter.shape) for parameter in model.parameters()]


# ---- layouts and errors


def run_layouts() -> dict[str, dict[str, ShardLayout]]:
    group = group_of_all()
    return {
        "column": mw.nn.ColumnParallelLinear(4, 5, group=group).layouts(),
        "row": mw.nn.RowParallelLinear(5, 4, group=group).layouts(),
        "no bias": mw.nn.RowParallelLinear(5, 4, False, group=group).layouts(),
        "embedding": mw.nn.VocabParallelEmbedding(5, 4, group=group).layouts(),
    }


def run_mistakes() -> dict[str, str]:
    """Return the errors of calls that fit no group of two; none of them exchanges anything."""
    group = group_of_all()
    ids, logits = torch.tensor([0, 5]), numbers(2, 3 - group.group_rank)
    entropy = mw.nn.vocab_parallel_cross_entropy
    column = mw.nn.ColumnParallelLinear(4, 6, group=group, sequence_parallel=True, sequence_length=5)
    calls: dict[str, Callable[[], Any]] = {
        "token": lambda: mw.nn.VocabParallelEmbedding(5, 4, group=group)(ids),
        "target": lambda: entropy(logits, ids, group, vocab_size=5),
        "logits": lambda: entropy(logits, ids, group, vocab_size=9),
        "targets": lambda: entropy(logits, ids.float(), group, vocab_size=5),
        "smoothing": lambda: entropy(logits, ids, group, vocab_size=5, label_smoothing=2.0),
        "reduction": lambda: entropy(logits, ids, group, vocab_size=5, reduction="maen"),  # type: ignore[arg-type]
        "class sizes": lambda: entropy(logits, ids, group, vocab_size=5, sizes=(3, 3)),
        "class weight": lambda: entropy(logits, ids, group, vocab_size=5, weight=torch.ones(4)),
        "sizes": lambda: functional.gather_from_group(logits, group, dim=0, sizes=(2,)),
        "slice": lambda: functional.all_gather_along(logits, group, dim=0, sizes=(3, 3)),
        "full": lambda: functional.reduce_scatter_along(logits, group, dim=0, sizes=(2, 1)),
        "dim": lambda: functional.scatter_to_group(logits, group, dim=2, sizes=(1, 1)),
        "sequence": lambda: column(torch.zeros(4, 4)),
        "groups": lambda: mw.nn.ColumnParallelLinear(4, 6, group=group, groups=(3, 2)),
        "unit": lambda: mw.nn.RowParallelLinear(6, 4, group=group, unit=4),
        "features": lambda: mw.nn.ColumnParallelLinear(0, 4, group=group),
        "padding": lambda: mw.nn.VocabParallelEmbedding(5, 4, 5, group=group),
        "max_norm": lambda: mw.nn.VocabParallelEmbedding.from_embedding(nn.Embedding(5, 4, max_norm=1.0), group=group),
        "conv1d": lambda: mw.nn.RowParallelLinear.from_conv1d(nn.Conv1d(2, 2, 1), group=group),
        "state": lambda: column.load_full_state_dict({"weight": torch.zeros(6, 4), "scale": torch.zeros(6)}),
    }
    found = {}
    with testing.count_collectives(group) as counts:
        for name, call in calls.items():
            try:
                call()
            except mw.ConfigError as error:
                found[name] = str(error)
    assert counts.calls() == 0
    return found
