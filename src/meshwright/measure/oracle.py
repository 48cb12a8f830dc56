"""Oracle: the reference in plain PyTorch and one process, sharing no code with the rest of the package.

Nothing here imports meshwright. The model is called, the loss weighted, the gradients clipped and the parameters updated as in a
textbook loop, on the whole global batch at once. So a mistake in batch splitting, weighting, reduction or clipping cannot cancel
out.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

__all__: list[str] = []


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class StepRecord:
    """What one optimizer step did, as CPU tensors of the full shapes, under the names of the user's own model."""

    loss: float
    """The step's loss, over the whole global batch."""
    grad_norm: float
    """Global 2-norm of the gradients before clipping."""
    gradients: dict[str, Tensor | None]
    """What the optimizer saw: after clipping, before the update; in the parameters' full shapes, None where there is none."""
    parameters: dict[str, Tensor]
    """Values after the update, in their full shapes."""
    buffers: dict[str, Tensor]
    """Buffers after the update, in their own shapes."""
    skipped: bool = False
    """Whether the update was left out because something was not finite."""
    outputs: Mapping[str, ModuleOutputs] = dataclasses.field(default_factory=dict)
    """What modules gave in the first step, in the order in which they ended first; empty in the others."""


@dataclasses.dataclass(slots=True)
class ModuleOutputs:
    """Outputs of a module in one step: two numbers for each floating-point tensor.

    Both add up over shares of the batch and over slices of a tensor. Squares alone would miss a wrong sign, or a rotation.
    """

    num_forwards: int
    """Forwards of the whole model in that step: the micro-batches [count]."""
    squares: list[float]
    """Sum of x * x, over all calls."""
    signed_squares: list[float]
    """Sum of x * abs(x), over all calls."""


def oracle_steps(
    build_model: nn.Module | Callable[[], nn.Module],
    batches: Sequence[Any],
    loss_fn: Callable[[Any, Any], Any] | None = None,
    *,
    num_steps: int | None = None,
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
    seed: int = 0,
    max_grad_norm: float | None = None,
    dtype: torch.dtype | None = None,
    shares: Callable[[Any], Sequence[Sequence[Any]]] | None = None,
    are_replicas: bool = False,
    before_step: Callable[[int, nn.Module], None] | None = None,
    around: Callable[[int, nn.Module, Any], contextlib.AbstractContextManager[None]] | None = None,
    device: torch.device | str = "cpu",
) -> list[StepRecord]:
    """Train in plain PyTorch on whole global batches and record every step.

    Args:
        build_model: A module, which is copied and left alone, or a callable that returns one; `torch.manual_seed(seed)` is
            called just before it.
        batches: Global batches; step i uses batch i, starting over at the end.
        loss_fn: `loss_fn(outputs, batch)` returning a scalar mean over the samples, or an object with `.sum` and
            `.weight`. None: the outputs' own `.loss`.
        num_steps: Optimizer steps; None: one per batch [count].
        optimizer: Factory from parameters to an optimizer; None: SGD with a learning rate of 0.1.
        seed: Seed of the model's initialisation.
        max_grad_norm: Clip the gradients to this global 2-norm; None: do not clip.
        dtype: Convert floating-point parameters, buffers and batches to this, complex ones to complex numbers of it; None: leave
            them.
        shares: Instead of the whole batch at once, take these pieces: one inner sequence of micro-batches for each
            rank. Every rank starts a step from the same buffers and rank 0's are kept, which is the rule for models
            with batch statistics, where what is normalised together changes the result.
        are_replicas: Whether the shares are those of replicas in one process, which nn.DataParallel makes anew in each
            forward: every micro-batch starts from the buffers that the first replica left after the one before.
        before_step: Called with the step's index and the model before every step, for example to freeze a part.
        around: Gives the context of a step's forward and backward, from its index, the model and the global batch.
        device: Where the model is trained, once it has been built on the CPU; kernels of a GPU round otherwise, some by 1e-8.

    Returns:
        One record for each step.

    Raises:
        ValueError: `shares` was given without a `loss_fn`.

    >>> layer = nn.Linear(2, 1)
    >>> batch = (torch.ones(3, 2), torch.zeros(3, 1))
    >>> records = oracle_steps(layer, [batch], lambda y, batch: (y - batch[1]).square().mean(), num_steps=2)
    >>> records[1].loss < records[0].loss
    True
    """
    if shares is not None and loss_fn is None:
        raise ValueError("shares need a loss_fn: a model's own loss says nothing about its weight")
    model = _build(build_model, seed)
    if dtype is not None:
        model_to_dtype(model, dtype)
        batches = [to_dtype(batch, dtype) for batch in batches]
    model.to(device)
    batches = [to_device(batch, device) for batch in batches]
    make = optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    opt = make(model.parameters())
    records = []
    for step in range(len(batches) if num_steps is None else num_steps):
        if before_step is not None:
            before_step(step, model)
        batch = batches[step % len(batches)]
        opt.zero_grad(set_to_none=True)
        with (
            around(step, model, batch) if around is not None else contextlib.nullcontext(),
            record_outputs(model) if step == 0 and shares is None else contextlib.nullcontext({}) as outputs,
        ):
            if shares is None:
                loss = whole_batch_loss(model, batch, loss_fn)
                loss.backward()
                loss_value = float(loss.detach())
            else:
                loss_value = _backward_in_pieces(model, shares(batch), loss_fn, are_replicas=are_replicas)
        norm = _clip(model, max_grad_norm)
        gradients = copy_gradients(model)
        opt.step()
        records.append(
            StepRecord(
                loss=loss_value,
                grad_norm=norm,
                gradients=gradients,
                parameters={name: p.detach().clone().cpu() for name, p in model.named_parameters()},
                buffers={name: b.detach().clone().cpu() for name, b in model.named_buffers()},
                outputs=outputs,
            )
        )
    return records


@contextlib.contextmanager
def record_outputs(
    model: nn.Module, local: Callable[[Tensor], Tensor | None] = lambda tensor: tensor
) -> Iterator[dict[str, ModuleOutputs]]:
    """Record the outputs of every module while the model's forward runs inside; recomputation in backward is left out.

    The hooks are global, not on this model's modules, so that a copy made meanwhile has none.

    Args:
        model: The model whose modules are recorded.
        local: Returns the tensor to record in place of one; None where another process records it.

    Returns:
        Name of a module -> its numbers, in the order in which modules end first; complete when the block ends.
    """
    names = {id(module): name for name, module in model.named_modules()}
    found: dict[str, ModuleOutputs] = {}
    running, num_forwards = 0, 0

    def begin(module: nn.Module, _: Any) -> None:
        nonlocal running, num_forwards
        if module is model:
            num_forwards += running == 0
            running += 1

    def end(module: nn.Module, _: Any, outputs: Any) -> None:
        nonlocal running
        name = names.get(id(module))
        if running and name is not None:
            with torch.no_grad():
                # A tensor without dims is a mean or a sum of the model's own: it does not add up over shares of the samples.
                values = [local(t) for t in _tensors_in(outputs) if t.is_floating_point() and t.dim() > 0]
                if not values or any(value is not None for value in values):
                    _add_outputs(found.setdefault(name, ModuleOutputs(0, [], [])), values)
        if module is model:
            running -= 1

    hooks = [register_module_forward_pre_hook(begin), register_module_forward_hook(end)]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
        for numbers in found.values():
            numbers.num_forwards = num_forwards


def _add_outputs(numbers: ModuleOutputs, values: Sequence[Tensor | None]) -> None:
    missing = len(values) - len(numbers.squares)
    numbers.squares += [0.0] * missing
    numbers.signed_squares += [0.0] * missing
    for index, value in enumerate(values):
        if value is not None:
            exact = value.detach().double()
            numbers.squares[index] += float(exact.square().sum())
            numbers.signed_squares[index] += float((exact * exact.abs()).sum())


def _tensors_in(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, Mapping):
        items: Iterable[Any] = tree.values()
    elif isinstance(tree, tuple | list):
        items = tree
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        items = [getattr(tree, field.name) for field in dataclasses.fields(tree)]
    else:
        items = ()
    return [tensor for item in items for tensor in _tensors_in(item)]


def whole_batch_loss(model: nn.Module, batch: Any, loss_fn: Callable[[Any, Any], Any] | None) -> Tensor:
    """Return the scalar loss of one batch taken at once."""
    outputs = call_plain(model, batch)
    if loss_fn is None:
        return outputs["loss"] if isinstance(outputs, Mapping) else outputs.loss
    value = loss_fn(outputs, batch)
    return value if isinstance(value, Tensor) else value.sum / value.weight


def call_plain(model: nn.Module, batch: Any) -> Any:
    """Call a model on a batch: a mapping as keywords, a tensor, or the first of a pair as keywords, positions or one tensor."""
    inputs = batch if isinstance(batch, (Mapping, Tensor)) else batch[0]
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple | list) else model(inputs)


def copy_gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """Return clones of the gradients as they stand now; None stays None."""
    return {name: None if p.grad is None else p.grad.detach().clone().cpu() for name, p in model.named_parameters()}


def to_dtype(value: Any, dtype: torch.dtype) -> Any:
    """Return the value with every floating-point tensor anywhere inside converted, and complex ones to as many bits."""
    return _converted(value, lambda tensor: _in_dtype(tensor, dtype))


def model_to_dtype(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Convert a model as `to_dtype` does, in place, and return it; `Module.to` takes the real part of complex parameters."""
    tensors = [*model.parameters(), *model.buffers()]
    if not any(tensor.is_complex() for tensor in tensors):
        return model.to(dtype)
    for tensor in tensors:
        tensor.data = _in_dtype(tensor.data, dtype)
    return model


def _in_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if tensor.is_complex():
        return tensor.to(dtype.to_complex())
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def to_device(value: Any, device: torch.device | str) -> Any:
    """Return the value with every tensor anywhere inside on the device."""
    return _converted(value, lambda tensor: tensor.to(device))


def _converted(value: Any, convert: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return convert(value)
    if isinstance(value, Mapping):
        return {key: _converted(item, convert) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_converted(item, convert) for item in value))
    if isinstance(value, tuple | list):
        return type(value)(_converted(item, convert) for item in value)
    return value


def _build(build_model: nn.Module | Callable[[], nn.Module], seed: int) -> nn.Module:
    if isinstance(build_model, nn.Module):
        return copy.deepcopy(build_model)
    torch.manual_seed(seed)
    return build_model()


def _backward_in_pieces(
    model: nn.Module, shares: Sequence[Sequence[Any]], loss_fn: Any, *, are_replicas: bool
) -> float:
    total, weight = 0.0, 0.0
    # Shares of replicas are taken a micro-batch at a time; a replica may have none of the last ones.
    rounds: Sequence[Sequence[Sequence[Any]]] = [shares]
    if are_replicas:
        rounds = [[[piece] for piece in turn if piece is not None] for turn in itertools.zip_longest(*shares)]
    for of_ranks in rounds:
        start = _copy_buffers(model)
        kept: dict[str, Tensor] = {}
        for rank, pieces in enumerate(of_ranks):
            _write_buffers(model, start)
            for piece in pieces:
                value = loss_fn(call_plain(model, piece), piece)
                piece_weight = float(_num_samples(piece) if isinstance(value, Tensor) else value.weight)
                piece_sum = value * piece_weight if isinstance(value, Tensor) else value.sum
                piece_sum.backward()
                total += float(piece_sum.detach())
                weight += piece_weight
            if rank == 0:
                kept = _copy_buffers(model)
        _write_buffers(model, kept)
    for p in model.parameters():
        if p.grad is not None:
            p.grad.div_(weight)
    return total / weight


def _copy_buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.detach().clone() for name, buffer in model.named_buffers()}


def _write_buffers(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(values[name])


def _num_samples(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.shape[0]
    items = value.values() if isinstance(value, Mapping) else value
    return _num_samples(next(item for item in items if isinstance(item, Tensor | Mapping | tuple | list)))


def _clip(model: nn.Module, max_grad_norm: float | None) -> float:
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    if max_grad_norm is not None and not any(g.is_sparse for g in gradients):
        return float(torch.nn.utils.clip_grad_norm_(list(model.parameters()), max_grad_norm))
    dense = [g.to_dense() if g.is_sparse else g for g in gradients]
    norms = [torch.linalg.vector_norm(g.to(torch.complex128) if g.is_complex() else g.double()) for g in dense]
    norm = float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0
    if max_grad_norm is not None:
        # torch's own function takes no sparse gradients; this is its rule.
        for gradient in gradients:
            gradient.mul_(min(1.0, max_grad_norm / (norm + 1e-6)))
    return norm
