"""Which calls a forward makes, in which order, what each costs and which parameters it uses: one plain forward, watched.

The calls of units, in the order in which they run, are the chain that is cut into stages. Any forward has such an order, and
no tensor is used before it is computed; so whatever jumps over stages, jumps forward.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from meshwright.apply.pipeline.values import Value, mark, replace_tensors, value_of, values_in
from meshwright.apply.pipeline.walk import METADATA, writes_to
from meshwright.describe.layers import find_layers
from meshwright.describe.tree import map_tensors, tensors_in
from meshwright.errors import ApplyError

__all__: list[str] = []


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnitCall:
    """One call of a unit."""

    unit: str
    """The module's name."""
    flops: int
    """Floating-point operations of the forward, 1 multiply-add = 2 [FLOPs]."""
    parameters: tuple[str, ...]
    """FQNs of what it uses: its own, and those that its code or the code after it looked up elsewhere."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flow:
    """A forward as a chain of calls.

    Args:
        calls: The calls of units, in the order in which they ran.
        units: Names of the modules whose calls are dealt out.
        idle: Unit's name -> FQNs of its parameters, for units that were not called.
        draws: Whether the code between the units drew random numbers.
        reads: What the model's code between the units read of a tensor that a unit computes, as text.
    """

    calls: tuple[UnitCall, ...]
    units: tuple[str, ...]
    idle: dict[str, tuple[str, ...]]
    draws: bool
    reads: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Flow:
        """Return what `to_json` gave."""
        calls = tuple(UnitCall(**{**call, "parameters": tuple(call["parameters"])}) for call in value["calls"])
        idle = {unit: tuple(names) for unit, names in value["idle"].items()}
        reads = tuple(value["reads"])
        return cls(calls=calls, units=tuple(value["units"]), idle=idle, draws=value["draws"], reads=reads)


def observe(
    module: nn.Module, run: Callable[[nn.Module], Any], *, num_stages: int, closed: Collection[str] = ()
) -> Flow:
    """Run a model once, or a few times until its units are small enough for this many stages.

    Args:
        module: The plain model.
        run: Runs it and its loss on a small batch.
        num_stages: Stages that it will be cut into [count].
        closed: Modules that stay in one piece.
    """
    units = [name for name, _ in find_layers(module)]
    while True:
        flow = _observe_once(module, run, units)
        finer = _opened(module, flow, units, num_stages, closed)
        if finer is None:
            return flow
        units = finer


def _opened(
    module: nn.Module, flow: Flow, units: Sequence[str], num_stages: int, closed: Collection[str]
) -> list[str] | None:
    """Return the units with one more of them opened: the heaviest one, while it is too heavy for one stage among several."""
    costs: Counter[str] = Counter()
    for call, cost in zip(flow.calls, call_costs(module, flow), strict=True):
        costs[call.unit] += cost  # pyright: ignore[reportArgumentType] - a Counter of floats
    calls_of = Counter(call.unit for call in flow.calls)
    total = sum(costs.values())
    for name, cost in costs.most_common():
        is_heavy = cost / calls_of[name] > total / num_stages or len(flow.calls) < num_stages
        inner = [child for child, _ in find_layers(module.get_submodule(name))]
        if is_heavy and len(inner) > 1 and name not in closed:
            found: list[str] = []
            for unit in units:
                found += [f"{name}.{child}" if name else child for child in inner] if unit == name else [unit]
            return found
    return None


def _observe_once(module: nn.Module, run: Callable[[nn.Module], Any], units: Sequence[str]) -> Flow:
    observer = _Observer(module, units)
    with torch.enable_grad(), observer.attached(), observer.counter, observer:
        run(module)
    return observer.flow()


class _Observer(TorchFunctionMode):
    """A forward of the whole model, watched: homes are places in the order of calls."""

    def __init__(self, module: nn.Module, units: Sequence[str]) -> None:
        super().__init__()
        self.counter = FlopCounterMode(display=False)
        self._module = module
        self._units = list(units)
        self._names = {id(p): name for name, p in module.named_parameters()}
        self._calls: list[dict[str, Any]] = []
        self._used: list[set[str]] = []
        self._reads: list[str] = []
        self._made_of: dict[int, set[str]] = {}
        self._alive: list[Any] = []
        self._running: int | None = None
        self._is_in_model = False
        self._draws = False
        self._random_state = torch.get_rng_state()

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """Notice the calls of units inside."""
        handles: list[Any] = []
        for name in self._units:
            unit = self._module.get_submodule(name)
            handles.append(unit.register_forward_pre_hook(self._before(name), with_kwargs=True))
            handles.append(unit.register_forward_hook(self._after))
        handles.append(self._module.register_forward_pre_hook(self._enter_model))
        handles.append(self._module.register_forward_hook(self._leave_model))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _note_draws(self) -> None:
        """Take note whether random numbers were drawn since a unit returned."""
        self._draws = self._draws or not torch.equal(torch.get_rng_state(), self._random_state)

    def _enter_model(self, *_: Any) -> None:
        self._is_in_model = True
        self._random_state = torch.get_rng_state()

    def _leave_model(self, *_: Any) -> None:
        self._is_in_model = False

    def _before(self, name: str) -> Callable[..., None]:
        def hook(unit: nn.Module, args: Any, kwargs: Any) -> None:
            if self._running is not None:
                return
            self._note_draws()
            place = len(self._calls)
            own = {self._names[id(p)] for p in unit.parameters()}
            self._used.append(own | self._parameters_in((args, kwargs)))
            self._calls.append({"unit": name, "flops": self.counter.get_total_flops(), "module": unit})
            self._running = place

        return hook

    def _after(self, unit: nn.Module, _args: Any, outputs: Any) -> Any:
        place = self._running
        if place is None or self._calls[place]["module"] is not unit:
            return None
        self._running = None
        self._random_state = torch.get_rng_state()
        call = self._calls[place]
        call["flops"] = self.counter.get_total_flops() - call["flops"]
        # A view of its own: a unit may return its very input.
        return map_tensors(outputs, lambda tensor: self._mark(tensor.view_as(tensor), place))

    def _mark(self, tensor: Tensor, place: int | None) -> Tensor:
        return mark(tensor, Value(self, place, tensor, None))

    def _parameters_in(self, tree: Any) -> set[str]:
        found: set[str] = set()

        def look(tensor: Tensor) -> Tensor:
            if id(tensor) in self._names:
                found.add(self._names[id(tensor)])
            found.update(self._made_of.get(id(tensor), ()))
            return tensor

        replace_tensors(tree, look)
        return found

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func in METADATA:
            return result
        names = self._parameters_in((args, kwargs))
        if self._running is not None:
            self._used[self._running] |= names
            return result
        homes = [value.home for value in values_in((args, kwargs)) if value.owner is self and value.home is not None]
        home = max(homes) if homes else None
        target = writes_to(func, args, kwargs)
        if home is not None:
            self._used[home] |= names
            is_number = isinstance(result, (bool, int, float, complex, list))
            if is_number and self._is_in_model and not any(True for _ in tensors_in(result)):
                self._reads.append(f"{getattr(func, '__name__', func)}() of a tensor of '{self._calls[home]['unit']}'")
        for tensor in tensors_in((result, target)):
            self._alive.append(tensor)  # an id is only worth something while its tensor lives
            if home is not None:
                self._mark(tensor, home)
            elif names and value_of(tensor) is None:
                self._made_of[id(tensor)] = names
        return result

    def flow(self) -> Flow:
        """Return what was seen."""
        if self._running is not None:
            raise ApplyError(f"'{self._calls[self._running]['unit']}' was called and did not return")
        calls = tuple(
            UnitCall(unit=call["unit"], flops=call["flops"], parameters=tuple(sorted(used)))
            for call, used in zip(self._calls, self._used, strict=True)
        )
        called = {call.unit for call in calls}
        idle = {
            name: tuple(self._names[id(p)] for p in self._module.get_submodule(name).parameters())
            for name in self._units
            if name not in called
        }
        self._note_draws()
        reads = tuple(dict.fromkeys(self._reads))
        return Flow(calls=calls, units=tuple(self._units), idle=idle, draws=self._draws, reads=reads)


_FLOPS_PER_PARAMETER = 48
"""What a parameter costs in a step beside its products, as floating-point operations: gradient and optimizer move about 24
bytes of each (Rajbhandari et al. 2020, section 3.1: 16 bytes of state), and a core computes about two operations in the
time in which it moves a byte [FLOPs]."""
_BACKWARD = 3
"""A step's operations for each of forward's: backward takes twice as many (Narayanan et al. 2021, appendix)."""


def call_costs(module: nn.Module, flow: Flow) -> list[float]:
    """Return what each call costs in a step [FLOPs]; a parameter counts where it is first used."""
    sizes = {name: parameter.numel() for name, parameter in module.named_parameters()}
    counted: set[str] = set()
    costs = []
    for call in flow.calls:
        fresh = [name for name in call.parameters if name not in counted]
        counted.update(fresh)
        uncounted = 0
        if not call.flops:  # recurrences, for one: a product with each matrix
            own = [p for p in module.get_submodule(call.unit).parameters() if p.dim() > 1]
            is_table = isinstance(module.get_submodule(call.unit), (nn.Embedding, nn.EmbeddingBag))
            uncounted = 0 if is_table else sum(2 * math.prod(p.shape) for p in own)
        costs.append(
            float(_BACKWARD * (call.flops + uncounted) + _FLOPS_PER_PARAMETER * sum(sizes[name] for name in fresh) + 1)
        )
    return costs
