"""BatchNorm over the samples of all ranks of a batch (`apply_plan(..., sync_batch_norm=True)`), as one device has it.

Where a rank has a share of the batch, torch's BatchNorm normalises that share. Here the layers of a model exchange, in each step,
the sums and the squares around the common mean of their channels; backward adds up the ranks' gradients of both.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.apply.modules.forwards import with_forward
from meshwright.comm.communicator import Communicator
from meshwright.comm.functional import copy_to_group, reduce_from_group
from meshwright.errors import ApplyError, some_of
from meshwright.spec import Plan

__all__: list[str] = []

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def share_reason(module: nn.Module) -> str | None:
    """Return what a plan tells of layers that normalise over each rank's share, or a micro-batch; None where there are none."""
    names = [name for name, child in module.named_modules() if isinstance(child, BATCH_NORMS) and child.training]
    if not names:
        return None
    return (
        f"batch: BatchNorm layers ({some_of(names, 1)}) normalise over each rank's share of the batch or a micro-batch, not over "
        "all samples as one device does, and their statistics follow rank 0's"
    )


def synced_norms(module: nn.Module, plan: Plan, group: Communicator, *, is_wanted: bool) -> SyncedNorms | None:
    """Return the layers of a model that normalise over the samples of all ranks; None where it has none, or nobody asked.

    Args:
        module: The model.
        plan: Its plan.
        group: The ranks that share a batch.
        is_wanted: Whether somebody asked for it.

    Raises:
        ApplyError: The samples of a step do not pass through a layer at the same time on all ranks under this plan.
    """
    if not is_wanted:
        return None
    for setting, is_on, fix in (
        (f"pp={plan.pp}", plan.pp > 1, "pp=1"),
        ("a thread for each device", plan.mode == "data_parallel", "dp=N, whose ranks are processes"),
        (f"micro_batches={plan.micro_batches}", plan.micro_batches > 1, "micro_batches=1"),
        (f"micro_batch_size={plan.micro_batch_size}", bool(plan.micro_batch_size), "no micro_batch_size"),
        (f"recompute={plan.recompute}", plan.recompute != "none", "recompute=none"),
    ):
        if is_on:
            raise ApplyError(
                f"sync_batch_norm takes all samples of a step at once, and the plan '{plan}' has {setting}",
                fix=f"{fix}, or sync_batch_norm=False",
            )
    has_norms = any(isinstance(child, BATCH_NORMS) for child in module.modules())
    return SyncedNorms(module, group) if has_norms and group.size > 1 else None


class SyncedNorms:
    """The BatchNorm layers of a model under a plan, which normalise over all ranks' samples inside of `running`.

    Everywhere else (trials on one rank, evaluation, proofs in other threads) they are torch's own.

    Args:
        module: The model, whose layers get a subclass of their class.
        group: The ranks that share a batch.
    """

    def __init__(self, module: nn.Module, group: Communicator) -> None:
        self._module = module
        self._group = group
        self._owner: int | None = None
        """The thread whose forwards exchange now."""
        self.names = [name for name, child in module.named_modules() if isinstance(child, BATCH_NORMS)]
        for name in self.names:
            child = module.get_submodule(name)
            child.__class__ = with_forward(type(child), self._forward_of(type(child).forward), is_whole=True)

    @property
    def reason(self) -> str:
        """What the plan tells of them."""
        names = some_of([repr(name) for name in self.names], 1)
        return f"batch: {names} normalise over the samples of all {self._group.size} ranks (sync_batch_norm)"

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Exchange statistics in forwards of this thread inside the context; every rank of the batch runs the same."""
        self._owner = threading.get_ident()
        try:
            yield
        finally:
            self._owner = None

    def find_empty(self, num_samples: int) -> ApplyError | None:
        """Return an error for a rank that cannot join a step's exchanges: without a sample it runs no forward."""
        if num_samples or not self._module.training:
            return None
        return ApplyError(
            f"this rank has no sample in its share of the batch, and '{self.names[0]}' normalises over the samples of all "
            f"{self._group.size} ranks (rule: with sync_batch_norm each rank has a sample in each step)",
            fix=f"batches of at least {self._group.size} samples (drop_last=True)",
        )

    def _forward_of(self, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def forward(norm: Any, input: Tensor) -> Tensor:
            if self._owner != threading.get_ident() or not (norm.training or norm.running_mean is None):
                return original(norm, input)
            norm._check_input_dim(input)
            return self._normalise(norm, input)

        return forward

    def _normalise(self, norm: Any, given: Tensor) -> Tensor:
        """Return the layer's result for (samples, channels, ...), by the statistics of all ranks' samples."""
        num_channels, dims = given.shape[1], [0, *range(2, given.dim())]
        shape = [1, num_channels, *[1] * (given.dim() - 2)]
        with torch.autocast(given.device.type, enabled=False):
            x = given.float() if given.dtype in (torch.float16, torch.bfloat16) else given
            own_count = x.new_full((1,), x.numel() // num_channels)
            sums = self._over_ranks(torch.cat([x.sum(dims), own_count]))
            count = sums[-1].detach()
            mean = sums[:-1] / count
            centred = x - mean.view(shape)
            # Around the common mean: squares minus the square of the mean would lose half of the digits.
            variance = self._over_ranks(centred.square().sum(dims)) / count
            result = centred * (variance + norm.eps).rsqrt().view(shape)
            if norm.weight is not None:
                result = result * norm.weight.view(shape) + norm.bias.view(shape)
            _keep(norm, mean.detach(), variance.detach(), count)
        return result.to(given.dtype)

    def _over_ranks(self, term: Tensor) -> Tensor:
        """Sum over the ranks; backward sums their gradients."""
        return copy_to_group(reduce_from_group(term, self._group), self._group)


@torch.no_grad()
def _keep(norm: Any, mean: Tensor, variance: Tensor, count: Tensor) -> None:
    """Move the running statistics, as torch's layer does."""
    if not norm.training or norm.running_mean is None:
        return
    norm.num_batches_tracked.add_(1)
    share = 1.0 / float(norm.num_batches_tracked) if norm.momentum is None else norm.momentum
    unbiased = variance * (count / (count - 1).clamp(min=1))
    norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), share)
    norm.running_var.lerp_(unbiased.to(norm.running_var.dtype), share)
