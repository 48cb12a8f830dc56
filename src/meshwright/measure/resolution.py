"""Resolution of a model's own arithmetic, which may compute in float32 whatever its weights are, and round away what follows.

Hugging Face's models compute norms, rotary angles and the loss in float32. Two correct orders of summation then differ by 1e-7,
and a bound of 1e-11 would reject every plan. So one process is run again, each result in a lower precision moved by up to one
rounding. A correct plan may differ by about as much as that changes a loss or a gradient.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from meshwright._torch_private import TorchDispatchMode
from meshwright.measure.oracle import StepRecord, oracle_steps
from meshwright.measure.parity import TensorDifference, compare_tensors, relative_difference

__all__: list[str] = []

_NUM_RUNS = 3
_MARGIN = 16.0
"""How many times the floor counts as equal: sums in another order round more often than once [ratio]."""
_MOST_ROUNDINGS = 64.0
"""No bound is looser than so many roundings: 8e-6 in float32 [ratio]."""
_LEAST_SHARE = 0.25
"""What is moved at all is taken to be moved by this part of a rounding at least; three runs may miss it [ratio]."""
_NOISE = 16.0
"""What is moved by more roundings of its own size is noise [ratio]."""
_TOUCHED = 1e-13


class LowerPrecision(TorchDispatchMode):
    """Records operators with results in a lower precision than the dtype that all should have, and can perturb those results.

    Args:
        dtype: What all tensors should have.
        seed: With it, each such result is multiplied by 1 + a random part of its dtype's rounding; None: nothing is changed.
    """

    def __init__(self, dtype: torch.dtype, seed: int | None = None) -> None:
        super().__init__()
        self._precision = torch.finfo(dtype).eps
        self._generator = None if seed is None else torch.Generator().manual_seed(seed)
        self.dtype: torch.dtype | None = None
        """The lowest precision that was seen; None: none below the dtype."""
        self.operators: dict[str, int] = {}
        """How often each operator gave a lower precision, by its name."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.layout == torch.strided:
                precision = torch.finfo(tensor.dtype).eps
                if precision > self._precision:
                    self._note(func, tensor, precision)
                    if self._generator is not None and is_new(tensor, args):
                        self._move(tensor, precision)
        return out

    def _note(self, func: Any, tensor: Tensor, precision: float) -> None:
        name = str(func).split(".")[1].strip("_")
        self.operators[name] = self.operators.get(name, 0) + 1
        if self.dtype is None or precision > torch.finfo(self.dtype).eps:
            self.dtype = tensor.dtype

    def _move(self, tensor: Tensor, precision: float) -> None:
        noise = torch.rand(tensor.shape, generator=self._generator, dtype=torch.float64) * 2 - 1
        tensor.copy_(tensor.double() * (1 + noise.to(tensor.device) * precision))


def is_new(tensor: Tensor, args: Any) -> bool:
    """Tell whether an operator's result is neither an argument nor a view of one."""
    given = [item for arg in args for item in (arg if isinstance(arg, (tuple, list)) else (arg,))]
    pointers = {item.untyped_storage().data_ptr() for item in given if isinstance(item, Tensor)}
    is_dense = tensor.numel() == 0 or tensor.untyped_storage().nbytes() >= tensor.numel() * tensor.element_size()
    return is_dense and tensor.untyped_storage().data_ptr() not in pointers


@dataclasses.dataclass(frozen=True, kw_only=True)
class NumericResolution:
    """Bounds within which quantities of one comparison count as equal."""

    bound: float
    """The bound of what no lower precision touches."""
    dtype: torch.dtype | None = None
    """The lower precision; None: there is none."""
    operators: tuple[str, ...] = ()
    """The operators that compute in it, the most frequent first."""
    loss: float = 0.0
    grad_norm: float = 0.0
    tensors: Mapping[tuple[str, str], float] = dataclasses.field(default_factory=dict)
    """(kind, name) -> bound of that gradient, value or buffer, where it is looser."""

    noisy: frozenset[tuple[str, str]] = frozenset()
    """(kind, name) of what is zero but for roundings in the lower precision, and is compared relative to all others."""

    def compare(
        self, kind: str, candidate: Mapping[str, Tensor | None], reference: Mapping[str, Tensor | None]
    ) -> list[TensorDifference]:
        """Compare the gradients, values or buffers of a step."""
        return compare_tensors(candidate, reference, [name for noisy, name in self.noisy if noisy == kind])

    def of(self, kind: str, name: str) -> float:
        """Return the bound of one tensor."""
        return max(self.bound, self.tensors.get((kind, name), 0.0))

    @property
    def note(self) -> str | None:
        """A remark for the reader of the report."""
        if self.dtype is None:
            return None
        word = str(self.dtype).removeprefix("torch.")
        loosest = max([self.loss, self.grad_norm, *self.tensors.values()])
        return (
            f"the model computes in {word} in places ({', '.join(self.operators[:3])}), whatever its weights are: what that "
            f"touches counts as equal within {_MARGIN:.0f} times what one rounding moves it, which is {self.loss:.1e} for the "
            f"loss and at most {loosest:.1e}"
        )


def find_lower_precision(run: Callable[[], Any], dtype: torch.dtype) -> LowerPrecision:
    """Run a forward and return the operations that compute in less than `dtype`."""
    mode = LowerPrecision(dtype)
    with mode:
        run()
    return mode


def measure_resolution(
    build_model: Callable[[], nn.Module],
    batches: Sequence[Any],
    loss_fn: Callable[[Any, Any], Any] | None,
    reference: Sequence[StepRecord],
    *,
    bound: float,
    found: LowerPrecision,
    **options: Any,
) -> NumericResolution:
    """Return the bounds within which one process's own roundings allow a comparison.

    Args:
        build_model: As for `oracle_steps`.
        batches: As for `oracle_steps`.
        loss_fn: As for `oracle_steps`.
        reference: The unperturbed steps.
        bound: The bound of quantities that no lower precision affects.
        found: The operations that compute in less than the comparison's dtype.
        **options: As for `oracle_steps`, dtype among them.
    """
    if found.dtype is None:
        return NumericResolution(bound=bound)
    precision = torch.finfo(found.dtype).eps
    runs: list[tuple[StepRecord, StepRecord]] = []
    for seed in range(_NUM_RUNS):
        with _moved(LowerPrecision(options["dtype"], seed)) as before_step:
            records = oracle_steps(build_model, batches, loss_fn, before_step=before_step, **options)
        runs += zip(records, reference, strict=True)
    loss = max(relative_difference(record.loss, expected.loss) for record, expected in runs)
    norm = max(relative_difference(record.grad_norm, expected.grad_norm) for record, expected in runs)
    floors = _floors(NumericResolution(bound=bound), runs)
    noisy = frozenset(key for key, floor in floors.items() if floor > _NOISE * precision)
    floors = _floors(NumericResolution(bound=bound, noisy=noisy), runs)

    def loosen(floor: float) -> float:
        if floor <= max(_TOUCHED, bound / _MARGIN):
            return bound
        return max(bound, min(_MARGIN * max(floor, _LEAST_SHARE * precision), _MOST_ROUNDINGS * precision))

    return NumericResolution(
        bound=bound,
        dtype=found.dtype,
        operators=tuple(sorted(found.operators, key=lambda name: -found.operators[name])),
        loss=loosen(loss),
        grad_norm=loosen(norm),
        tensors={key: loosen(floor) for key, floor in floors.items() if loosen(floor) > bound},
        noisy=noisy,
    )


def _floors(
    resolution: NumericResolution, runs: Sequence[tuple[StepRecord, StepRecord]]
) -> dict[tuple[str, str], float]:
    """Return the largest difference between the runs, by (kind, name)."""
    floors: dict[tuple[str, str], float] = {}
    for record, expected in runs:
        for kind, got, wanted in pairs_of(record, expected):
            for row in resolution.compare(kind, got, wanted):
                floors[kind, row.name] = max(floors.get((kind, row.name), 0.0), row.relative)
    return floors


def pairs_of(
    record: StepRecord, expected: StepRecord
) -> list[tuple[str, Mapping[str, Tensor | None], Mapping[str, Tensor | None]]]:
    """Return (kind, candidate, reference) of all results of a step."""
    return [
        ("gradient", record.gradients, expected.gradients),
        ("value", record.parameters, expected.parameters),
        ("buffer", record.buffers, expected.buffers),
    ]


@contextlib.contextmanager
def _moved(mode: LowerPrecision) -> Iterator[Callable[[int, nn.Module], None]]:
    """Enter the mode before the first step, since the model is built unperturbed."""
    with contextlib.ExitStack() as stack:

        def before_step(step: int, _: nn.Module) -> None:
            if step == 0:
                stack.enter_context(mode)

        yield before_step
