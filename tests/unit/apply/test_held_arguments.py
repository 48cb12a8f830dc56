"""Containers as arguments of a checkpoint, where torch (2.11) would build them anew around None."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.checkpoint import checkpoint

from meshwright.apply.recompute import held_arguments as held


class Strict(NamedTuple):
    """A named tuple of a tensor and a number."""

    tensor: Tensor
    factor: int


def weigh(x: Tensor, packed: PackedSequence, pairs: list[Strict], *, offset: Tensor) -> Tensor:
    return x.sum() * packed.data.sum() + sum(pair.tensor.sum() * pair.factor for pair in pairs) + offset


def _arguments(leaves: list[Tensor]) -> tuple[Any, ...]:
    return leaves[0], pack_sequence([leaves[1]]), [Strict(leaves[2], 4)]


@pytest.mark.parametrize("builds_anew", [True, None], ids=["held", "of this torch"])
def test_a_checkpoint_takes_containers(builds_anew: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if builds_anew:
        monkeypatch.setattr(held, "_BUILDS_ANEW", True)
    leaves = [torch.rand(3, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    run, given = held.hold_arguments(weigh, _arguments(leaves))
    result = checkpoint(run, *given, use_reentrant=False, offset=torch.tensor(1.0))
    plain = weigh(*_arguments(leaves), offset=torch.tensor(1.0))
    assert torch.equal(result, plain)
    found, expected = torch.autograd.grad(result, leaves), torch.autograd.grad(plain, leaves)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def _raise(x: Tensor) -> Tensor:
    raise KeyError(str(x.shape))


@pytest.mark.parametrize("leaves_hooks", [True, None], ids=["guarded", "of this torch"])
def test_an_error_leaves_no_hooks_in_force(leaves_hooks: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if leaves_hooks:
        monkeypatch.setattr(held, "_LEAVES_HOOKS", True)
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(KeyError):
        held.checkpoint_closed(_raise, x)
    kept = x.exp()
    assert kept.grad_fn is not None
    assert kept.grad_fn._saved_result is not None  # pyright: ignore - a hook of the checkpoint would ask for a repetition
    (gradient,) = torch.autograd.grad(held.checkpoint_closed(torch.sin, x).sum(), x)
    assert torch.equal(gradient, x.detach().cos())


def test_tensors_alone_are_given_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held, "_BUILDS_ANEW", True)
    args = torch.ones(2), 3, None
    assert held.hold_arguments(weigh, args) == (weigh, args)
