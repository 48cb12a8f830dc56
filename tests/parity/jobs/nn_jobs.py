"""Tensor parallel modules and operations beside the plain ones; the functions that ranks run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshwright as mw
from meshwright import testing
from meshwright.comm import functional
from meshwright.comm.communicator import Communicator
from meshwright.layout import even_sizes

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
