"""Tensor parallel modules beside the plain ones; the functions that ranks run."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshwright as mw
from meshwright import testing
from meshwright.checkpoint.layout import ShardLayout, even_sizes
from meshwright.comm import functional
from meshwright.comm.communicator import Communicator

Tensors = dict[str, Tensor]


def group_of_all() -> Communicator:
    world = mw.current_world()
    assert world is not None
    return world.default_group.over("tp")


def numbers(*shape: int, seed: int = 0) -> Tensor:
    """Fixed numbers without structure, the same on every rank and in the reference."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def own(tensor: Tensor, dim: int, group: Communicator, sizes: tuple[int, ...] | None = None) -> Tensor:
    """This rank's slice, in memory of its own."""
    sizes = sizes or even_sizes(tensor.shape[dim], group.size)
    return tensor.split(sizes, dim)[group.group_rank].clone()


def joined(tensor: Tensor, dim: int, size: int, group: Communicator, sizes: tuple[int, ...] | None = None) -> Tensor:
    """The slices of all ranks."""
    sizes = sizes or even_sizes(size, group.size)
    return functional.gather_from_group(tensor.detach(), group, dim=dim, sizes=sizes)


def full_gradients(model: nn.Module) -> Tensors:
    """The full gradients by the names of the plain model."""
    found = {}
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            assert parameter.grad is not None, f"{prefix}.{name} has no gradient"
            assert isinstance(module, mw.nn.ShardedModule)
            found[f"{prefix}.{name}"] = module.gather_full(name, parameter.grad)
    return found


def full_parameters(model: nn.Module) -> Tensors:
    found = {}
    for prefix, module in model.named_modules():
        if isinstance(module, mw.nn.ShardedModule):
            found |= {f"{prefix}.{name}": tensor for name, tensor in module.full_state_dict().items()}
    return found


# ---- a column and a row


@dataclasses.dataclass(frozen=True)
class Pair:
    """A column and a row parallel layer with something in between."""

    hidden: int = 7
    bias: bool = True
    sequence_parallel: bool = False
    gathered: bool = False
    """The hidden features are gathered and cut again."""
    shape: tuple[int, ...] = (2, 5)

    def plain(self) -> nn.Sequential:
        torch.manual_seed(3)
        first = nn.Linear(6, self.hidden, self.bias, dtype=torch.float64)
        return nn.Sequential(first, nn.Tanh(), nn.Linear(self.hidden, 3, self.bias, dtype=torch.float64))

    def parallel(self, group: Communicator) -> nn.Sequential:
        torch.manual_seed(3)
        column = mw.nn.ColumnParallelLinear(
            6,
            self.hidden,
            self.bias,
            group=group,
            gather_output=self.gathered,
            sequence_parallel=self.sequence_parallel,
            sequence_length=self.shape[-1] if self.sequence_parallel else None,
            dtype=torch.float64,
        )
        row = mw.nn.RowParallelLinear(
            self.hidden,
            3,
            self.bias,
            group=group,
            input_is_parallel=not self.gathered,
            sequence_parallel=self.sequence_parallel,
            dtype=torch.float64,
        )
        return nn.Sequential(column, nn.Tanh(), row)

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        """The input, and what the output's entries weigh in the loss."""
        return numbers(*self.shape, 6, seed=1), numbers(*self.shape, 3, seed=2)

    def reference(self) -> Tensors:
        model, (input, weights) = self.plain(), self.tensors
        input.requires_grad_()
        output = model(input)
        (output * weights).sum().backward()
        found = {"output": output.detach(), "input": input.grad}
        found |= {f"parameter {name}": parameter.detach() for name, parameter in model.named_parameters()}
        return found | {f"gradient {name}": parameter.grad for name, parameter in model.named_parameters()}


def run_pair(pair: Pair) -> tuple[Tensors, dict[str, tuple[int, int]], dict[str, tuple[int, int]]]:
    """Return outputs and full gradients, and the calls and bytes of what forward and backward exchange."""
    group = group_of_all()
    model, (input, weights) = pair.parallel(group), pair.tensors
    if pair.sequence_parallel:
        input, weights = own(input, -2, group), own(weights, -2, group)
    input.requires_grad_()
    kept = input.detach().clone()
    with testing.count_collectives(group) as forward:
        output = model(input)
    with testing.count_collectives(group) as backward:
        (output * weights).sum().backward()
    assert torch.equal(input, kept)
    found = {"output": output.detach(), "input": input.grad}
    if pair.sequence_parallel:
        found = {name: joined(tensor, -2, pair.shape[-1], group) for name, tensor in found.items()}
    found |= {f"parameter {name}": tensor for name, tensor in full_parameters(model).items()}
    found |= {f"gradient {name}": tensor for name, tensor in full_gradients(model).items()}
    return found, _counted(forward), _counted(backward)


def _counted(counts: testing.CollectiveCounts) -> dict[str, tuple[int, int]]:
    assert {axis for _, axis in counts.entries} <= {"tp"}
    return {name: (entry.num_calls, entry.tensor_bytes) for (name, _), entry in counts.entries.items()}


# ---- fused groups


def run_fused(groups: tuple[int, ...], units: tuple[int, ...] | None, transposed: bool) -> tuple[Tensors, Any]:
    """Return what a fused column layer gives when its output is gathered, and its own output with its layout."""
    group = group_of_all()
    torch.manual_seed(5)
    module = mw.nn.ColumnParallelLinear(
        4, sum(groups), group=group, groups=groups, units=units, gather_output=True, transposed=transposed
    ).double()
    input, weights = numbers(2, 3, 4, seed=1).requires_grad_(), numbers(2, 3, sum(groups), seed=2)
    output = module(input)
    (output * weights).sum().backward()
    found = {"output": output.detach(), "input": input.grad}
    found |= {name: module.gather_full(name, parameter.grad) for name, parameter in module.named_parameters()}
    module.gather_output = False
    with torch.no_grad():
        return found, (module(input), module.layouts())


# ---- embedding


def run_embedding(
    num_tokens: int, padding_idx: int | None, sequence_parallel: bool, ids: Tensor
) -> tuple[Tensors, dict[str, tuple[int, int]]]:
    group = group_of_all()
    torch.manual_seed(7)
    module = mw.nn.VocabParallelEmbedding(
        num_tokens, 3, padding_idx, group=group, sequence_parallel=sequence_parallel, dtype=torch.float64
    )
    weights = numbers(*ids.shape, 3, seed=2)
    if sequence_parallel:
        weights = own(weights, -2, group)
    with testing.count_collectives(group) as counts:
        output = module(ids)
        (output * weights).sum().backward()
    full = joined(output, -2, ids.shape[-1], group) if sequence_parallel else output.detach()
    assert module.weight.grad is not None
    gradient = module.gather_full("weight", module.weight.grad)
    return {"output": full, "weight": module.full_state_dict()["weight"], "gradient": gradient}, _counted(counts)


# ---- cross-entropy


@dataclasses.dataclass(frozen=True)
class Entropy:
    """Arguments of a cross-entropy, besides logits and targets."""

    shape: tuple[int, ...] = (6,)
    vocab_size: int = 11
    ignored: int = 0
    """How many targets are ignored."""
    ignore_index: int = -100
    label_smoothing: float = 0.0
    reduction: str = "mean"
    weighted: bool = False
    masked: bool = False
    """Some classes have no chance: a logit of -inf."""
    scale: float = 1.0
    sizes: tuple[int, ...] | None = None
    """Every rank's classes; only for the number of ranks that it has."""
    dtype: torch.dtype = torch.float64

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor | None]:
        logits = (numbers(*self.shape, self.vocab_size, seed=1) * self.scale).to(self.dtype)
        if self.masked:
            logits[..., 1::3] = -torch.inf
        targets = torch.randint(self.vocab_size, self.shape, generator=torch.Generator().manual_seed(2))
        if self.masked:
            targets = targets // 3 * 3
        targets.view(-1)[: self.ignored] = self.ignore_index
        weight = numbers(self.vocab_size, seed=3).exp().to(self.dtype) if self.weighted else None
        return logits, targets, weight

    @property
    def options(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("ignore_index", "label_smoothing", "reduction")}

    def reference(self) -> Tensors:
        logits, targets, weight = self.tensors
        logits.requires_grad_()
        flat = logits.reshape(targets.numel(), self.vocab_size)
        losses = F.cross_entropy(flat, targets.reshape(-1), weight, **self.options)
        return self.gradients(losses.reshape(self.shape) if self.reduction == "none" else losses, logits)

    @staticmethod
    def gradients(losses: Tensor, logits: Tensor) -> Tensors:
        (losses * numbers(*losses.shape, seed=4)).sum().backward()
        return {"losses": losses.detach(), "gradient": logits.grad}


def run_entropies(cases: dict[str, Entropy]) -> dict[str, tuple[Tensors, dict[str, tuple[int, int]]]]:
    group, found = group_of_all(), {}
    for name, case in cases.items():
        logits, targets, weight = case.tensors
        shard = own(logits, -1, group, case.sizes).requires_grad_()
        kept = shard.detach().clone()
        with testing.count_collectives(group) as counts:
            losses = mw.nn.vocab_parallel_cross_entropy(
                shard, targets, group, vocab_size=case.vocab_size, sizes=case.sizes, weight=weight, **case.options
            )
            tensors = case.gradients(losses, shard)
        assert torch.equal(shard, kept)
        tensors["gradient"] = joined(tensors["gradient"], -1, case.vocab_size, group, case.sizes)
        found[name] = (tensors, _counted(counts))
    return found


def run_autocast() -> list[tuple[torch.dtype, torch.dtype]]:
    """Return the dtypes of parallel and plain modules in mixed precision."""
    group, found = group_of_all(), []
    ids = torch.tensor([[0, 1, 2, 3, 4]])
    for sequence_parallel in (False, True):
        common: dict[str, Any] = {"group": group, "sequence_parallel": sequence_parallel}
        parallel = [
            mw.nn.VocabParallelEmbedding(7, 6, **common),
            mw.nn.ColumnParallelLinear(6, 5, sequence_length=5, **common),
            mw.nn.RowParallelLinear(5, 7, **common),
        ]
        plain = [nn.Embedding(7, 6), nn.Linear(6, 5), nn.Linear(5, 7)]
        with torch.autocast("cpu", torch.bfloat16):
            one, many = ids, ids
            for module, other in zip(plain, parallel, strict=True):
                one, many = module(one), other(many)
                found.append((many.dtype, one.dtype))
            loss = F.cross_entropy(one.flatten(0, 1), ids.flatten())
            shard = own(one, -1, group)
            found.append((mw.nn.vocab_parallel_cross_entropy(shard, ids, group, vocab_size=7).dtype, loss.dtype))
    return found


# ---- the operations themselves


def run_functional(shape: tuple[int, ...], dim: int, sizes: tuple[int, ...]) -> None:
    """Check the six operations against what they stand for, forward and backward."""
    group = group_of_all()
    me, ranks = group.group_rank, range(group.size)
    full = [numbers(*shape, seed=rank).transpose(0, -1).contiguous().transpose(0, -1) for rank in ranks]
    slices = [full[0].split(sizes, dim)[rank].clone() for rank in ranks]
    outer = [numbers(*shape, seed=10 + rank) for rank in ranks]  # what each rank's output weighs in its loss
    total, total_outer = torch.stack(full).sum(0), torch.stack(outer).sum(0)

    def mine(tensor: Tensor) -> Tensor:
        return tensor.split(sizes, dim)[me]

    cut = {"group": group, "dim": dim, "sizes": sizes}
    _check(lambda x: functional.copy_to_group(x, group), full[0], outer[me], full[0], total_outer)
    _check(lambda x: functional.reduce_from_group(x, group), full[me], outer[0], total, outer[0])
    _check(lambda x: functional.gather_from_group(x, **cut), slices[me], outer[0], full[0], mine(outer[0]))
    _check(lambda x: functional.scatter_to_group(x, **cut), full[0], mine(outer[0]), slices[me], outer[0])
    _check(lambda x: functional.all_gather_along(x, **cut), slices[me], outer[me], full[0], mine(total_outer))
    _check(lambda x: functional.reduce_scatter_along(x, **cut), full[me], mine(outer[0]), mine(total), outer[0])


def _check(
    operation: Callable[[Tensor], Tensor], input: Tensor, weights: Tensor, output: Tensor, gradient: Tensor
) -> None:
    input = input.detach().clone().requires_grad_()
    kept, incoming = input.detach().clone(), weights.clone()
    result = operation(input)
    testing.assert_parity({"output": result}, {"output": output})
    (found,) = torch.autograd.grad(result, input, incoming, retain_graph=True)
    testing.assert_parity({"gradient": found}, {"gradient": gradient})
    assert torch.equal(input, kept), "the input was written to"
    assert torch.equal(incoming, weights), "the incoming gradient was written to"
    # The gradient is linear in what comes in, so its own derivative is the operation again.
    wanted = incoming.requires_grad_()
    (again,) = torch.autograd.grad(result, input, wanted, create_graph=True)
    (second,) = torch.autograd.grad(again, wanted, kept)
    testing.assert_parity({"second": second}, {"second": output})


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
