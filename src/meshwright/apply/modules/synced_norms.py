"""BatchNorm over the samples of all ranks of a batch (`apply_plan(..., sync_batch_norm=True)`), as one device has it.

Where a rank has a share of the batch, torch's BatchNorm normalises that share. Here the layers of a model exchange, in each step,
the sums and the squares around the common mean of their channels; backward adds up the ranks' gradients of both.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from meshwright._torch_private import is_in_backward
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


def refuse_torch_sync(module: nn.Module, plan: Plan, device: torch.device) -> None:
    """Refuse torch's own SyncBatchNorm where it would fail or exchange with ranks that have the same samples.

    torch takes CUDA tensors alone, and all ranks of the job, of which tp and pp give several one share.

    Raises:
        ApplyError: The model has such a layer.
    """
    if plan.num_ranks == 1 or (device.type != "cpu" and plan.tp * plan.pp == 1):
        return
    name = next((name for name, child in module.named_modules() if isinstance(child, nn.SyncBatchNorm)), None)
    if name is None:
        return
    raise ApplyError(
        f"'{name}' is torch's SyncBatchNorm, which takes no tensors of a CPU, and under tp and pp counts one sample on several "
        f"ranks (plan '{plan}')",
        fix="leave nn.SyncBatchNorm.convert_sync_batchnorm(...) out: apply_plan(..., sync_batch_norm=True) normalises over the "
        "samples of all ranks under dp, ZeRO and tp",
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
    if not is_wanted or plan.batch == "whole":
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

    Raises:
        ApplyError: A layer's forward is not its class's.
    """

    def __init__(self, module: nn.Module, group: Communicator) -> None:
        self._module = module
        self._group = group
        self._home = threading.get_ident()
        """The thread of the model; proofs of layouts have threads of their own."""
        self._owner: int | None = None
        """The thread whose forwards exchange now."""
        self._is_repeating = False
        self._num_samples = 0
        self._few: str | None = None
        """A reason for a call on fewer rows than samples; None until there is one."""
        self.names = [name for name, child in module.named_modules() if isinstance(child, BATCH_NORMS)]
        for name in self.names:
            child = module.get_submodule(name)
            if "forward" in vars(child):
                raise ApplyError(
                    f"'{name}' has a forward that was set on it, in place of its class's: sync_batch_norm cannot be around it",
                    fix="put that forward into a subclass of the layer's class, or sync_batch_norm=False",
                )
            child.__class__ = with_forward(type(child), self._forward_of(name, type(child).forward), is_whole=True)

    @property
    def reasons(self) -> tuple[str, ...]:
        """What the plan tells of them."""
        names = some_of([repr(name) for name in self.names], 1)
        told = f"batch: {names} normalise over the samples of all {self._group.size} ranks (sync_batch_norm)"
        return (told,) if self._few is None else (told, self._few)

    @contextlib.contextmanager
    def running(self, num_samples: int) -> Iterator[None]:
        """Exchange statistics in forwards of this thread inside the context; every rank of the batch runs the same.

        Args:
            num_samples: Samples of this rank's share [count].
        """
        self._owner, self._num_samples = threading.get_ident(), num_samples
        try:
            yield
        finally:
            self._owner = None

    @contextlib.contextmanager
    def repeating(self) -> Iterator[None]:
        """Let this rank repeat its forward alone, one value per channel too: what is not finite is sought so."""
        self._is_repeating = True
        try:
            yield
        finally:
            self._is_repeating = False

    def find_empty(self, num_samples: int) -> ApplyError | None:
        """Return an error for a rank that cannot join a step's exchanges: without a sample it runs no forward."""
        if num_samples or not self._module.training:
            return None
        return ApplyError(
            f"this rank has no sample in its share of the batch, and '{self.names[0]}' normalises over the samples of all "
            f"{self._group.size} ranks (rule: with sync_batch_norm each rank has a sample in each step)",
            fix=f"batches of at least {self._group.size} samples (drop_last=True)",
        )

    def _forward_of(self, name: str, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Return a forward that runs the class's own, in which batch_norm takes all ranks' samples inside of `running`.

        Raises:
            ApplyError: From that forward: the layer takes statistics of its own, or a backward repeats it.
        """
        repeated = False  # whether this layer's last forward was one of `running`, which its backward cannot repeat

        def forward(norm: Any, *args: Any, **kwargs: Any) -> Tensor:
            nonlocal repeated
            uses_batch = norm.training or norm.running_mean is None
            if self._owner != threading.get_ident():
                if repeated and uses_batch and is_in_backward():
                    raise _of_repeated(name)
                repeated = repeated and is_in_backward()
                is_trial = self._is_repeating or self._owner is not None or threading.get_ident() != self._home
                with _PlainOfOne() if is_trial else contextlib.nullcontext():
                    return original(norm, *args, **kwargs)
            repeated, exchanging = True, _Exchanging(self._group)
            with exchanging:
                result = original(norm, *args, **kwargs)
            if uses_batch and not exchanging.has_seen:
                raise _of_unseen(name, norm)
            self._look_at_rows(name, min(exchanging.rows, default=self._num_samples))
            return result

        return forward

    def _look_at_rows(self, name: str, num_rows: int) -> None:
        if num_rows < self._num_samples and self._few is None:
            self._few = (
                f"batch: '{name}' normalised {num_rows} rows of a share of {self._num_samples} samples: where a sample's values "
                "choose it, that is one device's; where its place in the share does (x.chunk(2)), it is not"
            )


class _Exchanging(TorchFunctionMode):
    """Calls of batch_norm in training take the samples of all ranks of a group; classes may compute more beside them."""

    def __init__(self, group: Communicator) -> None:
        super().__init__()
        self._group = group
        self.has_seen = False
        """Whether there was a call."""
        self.rows: list[int] = []
        """Dim 0 of what calls in training got [count]."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        called = _BATCH_NORM_CALLS.get(func)
        if called is None:
            return func(*args, **(kwargs or {}))
        self.has_seen = True
        call = called(*args, **(kwargs or {}))
        if not call.training:
            return func(*args, **(kwargs or {}))
        self.rows.append(call.input.shape[0])
        return self._normalise(call)

    def _normalise(self, call: _NormCall) -> Tensor:
        """Return the result for (samples, channels, ...), by the statistics of all ranks' samples."""
        given, dims = call.input, [0, *range(2, call.input.dim())]
        shape = [1, given.shape[1], *[1] * (given.dim() - 2)]
        with torch.autocast(given.device.type, enabled=False):
            x = given.float() if given.dtype in (torch.float16, torch.bfloat16) else given
            own_count = x.new_full((1,), x.numel() // max(given.shape[1], 1))
            sums = self._over_ranks(torch.cat([x.sum(dims), own_count]))
            count = sums[-1].detach()
            mean = sums[:-1] / count
            centred = x - mean.view(shape)
            # Around the common mean: squares minus the square of the mean would lose half of the digits.
            variance = self._over_ranks(centred.square().sum(dims)) / count
            result = centred * (variance + call.eps).rsqrt().view(shape)
            if call.weight is not None:
                result = result * call.weight.view(shape)
            if call.bias is not None:
                result = result + call.bias.view(shape)
            _keep(call, mean.detach(), variance.detach() * (count / (count - 1).clamp(min=1)))
        return result.to(given.dtype)

    def _over_ranks(self, term: Tensor) -> Tensor:
        """Sum over the ranks; backward sums their gradients."""
        return copy_to_group(reduce_from_group(term, self._group), self._group)


class _PlainOfOne(TorchFunctionMode):
    """Calls of batch_norm with one value per channel, which torch refuses in training, pass it on.

    Proofs and repeated forwards meet them, on the rank that has one value: it would run whole what the others have cut.
    What a layer makes of such a value there is used for nothing else.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        called = _BATCH_NORM_CALLS.get(func)
        call = None if called is None else called(*args, **(kwargs or {}))
        if call is None or not call.training or call.input.numel() != call.input.shape[1]:
            return func(*args, **(kwargs or {}))
        zeros = call.input.detach().new_zeros(call.input.shape[1])
        return F.batch_norm(call.input, zeros, zeros + 1, call.weight, call.bias, eps=call.eps)


@dataclasses.dataclass(frozen=True, slots=True)
class _NormCall:
    """Arguments of torch.nn.functional.batch_norm."""

    input: Tensor
    running_mean: Tensor | None
    running_var: Tensor | None
    weight: Tensor | None = None
    bias: Tensor | None = None
    training: bool = False
    momentum: float = 0.1
    eps: float = 1e-5


def _of_torch(*args: Any, **kwargs: Any) -> _NormCall:
    """Return the arguments of a call of torch.batch_norm, which come in another order."""
    order = ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps", "cudnn_enabled")
    named = {**dict(zip(order, args, strict=False)), **kwargs}
    named.pop("cudnn_enabled", None)
    return _NormCall(**named)


_BATCH_NORM_CALLS: dict[Any, Callable[..., _NormCall]] = {F.batch_norm: _NormCall, torch.batch_norm: _of_torch}
"""Functions that normalise by a batch, and what reads their arguments."""


@torch.no_grad()
def _keep(call: _NormCall, mean: Tensor, unbiased: Tensor) -> None:
    """Move the running statistics, as torch's function does."""
    for running, value in ((call.running_mean, mean), (call.running_var, unbiased)):
        if running is not None:
            running.lerp_(value.to(running.dtype), call.momentum)


def _of_repeated(name: str) -> ApplyError:
    return ApplyError(
        f"backward repeats the forward of '{name}' (torch.utils.checkpoint), which normalised over the samples of all ranks: "
        "the repetition would see this rank's alone (rule: with sync_batch_norm a norm's forward runs once)",
        fix=f"leave '{name}' out of the checkpoint, or sync_batch_norm=False",
    )


def _of_unseen(name: str, norm: nn.Module) -> ApplyError:
    return ApplyError(
        f"'{name}' (a {type(norm).__name__}) does not compute by torch.nn.functional.batch_norm, so that what it takes of "
        "a batch is this rank's own, and sync_batch_norm cannot make it that of all ranks",
        fix=f"put '{name}' into eval mode, where it uses running statistics, or sync_batch_norm=False",
    )
