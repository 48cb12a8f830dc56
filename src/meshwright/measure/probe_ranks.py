"""Measurements of a probe on its ranks: products, memory, operators, attention, the optimizer and collectives.

Each is taken while all ranks do the same, as in training, and is the mean of repetitions. One rank also takes products
alone.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshwright.host import host_memory_bytes, peak_resident_bytes
from meshwright.measure.host_pace import turn_s
from meshwright.measure.probe_cores import start_watch
from meshwright.measure.probe_exchanges import measure_exchanges, measure_skew
from meshwright.measure.probe_far import far_sets, measure_far
from meshwright.measure.probe_functions import CONVOLUTION_CHANNELS, FUNCTIONS, convolution_of, convolve, moved_bytes
from meshwright.measure.probe_host import measure_host
from meshwright.measure.probe_runtime import measure_runtime
from meshwright.measure.probe_sizes import (
    AT_LEAST,
    CURVE_SHARE,
    FUNCTION_SHAPE,
    FUNCTION_SHARE,
    LARGE,
    MORE_TENSORS,
    MOST_SETS,
    NUM_BLOCKS,
    PRODUCT_SIZES,
    RECURRENCE,
    RUNS,
    RUNS_SET_BYTES,
    SET_BYTES,
    TRAFFIC_ELEMENTS,
    VISITS,
    expected,
)
from meshwright.ranks.world import World, current_world

__all__: list[str] = []


def measure_rank(budget_s: float) -> dict[str, Any]:
    """Return what this rank measured.

    Args:
        budget_s: How long each measurement is repeated [s].

    Returns:
        Rates in FLOP/s and bytes/s, times in s; each a pair of the mean and the spread between quartiles.
    """
    world = current_world()
    if world is None:  # a launched rank has a world
        raise RuntimeError("a rank without a world")
    probe = _Probe(world, budget_s)
    world.default_group.barrier()
    cores, turns = start_watch(torch.get_num_threads()), [turn_s()]
    samples: dict[str, list[Any]] = {}
    for place, stage in enumerate(VISITS):
        world.emit({"probe": stage, "place": place})
        for name, measured in getattr(probe, stage.replace(" ", "_"))().items():
            samples.setdefault(name, []).append(measured)
        world.default_group.barrier()
    found: dict[str, Any] = {"device": _device_facts(world)}
    found |= {name: _mean(each) for name, each in samples.items()}
    found["turn_s"] = (turns[0] + turn_s()) / 2
    found["cores"] = dataclasses.asdict(cores())
    return found


class _Probe:
    """The measurements; a method for each of `STAGES`. Most are made twice, each time for half the budget."""

    def __init__(self, world: World, budget_s: float) -> None:
        self._world = world
        self._device = world.device
        self._sizes = LARGE[world.device.type]
        self._budget_s = budget_s

    def _time(self, call: Callable[[], object], *, share: float = 1.0) -> tuple[float, float]:
        """Return the time of a call and its relative spread, after two that do not count, in a share of the budget.

        See `expected`.
        """
        for _ in range(2):
            call()
        samples: list[float] = []
        end = time.perf_counter() + share * self._budget_s / 2
        while len(samples) < AT_LEAST or time.perf_counter() < end:
            self._wait()
            start = time.perf_counter()
            call()
            self._wait()
            samples.append(time.perf_counter() - start)
        return _expected(samples)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _random(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        values = torch.randn(*shape, device=self._device)
        return values.to(dtype)

    def process(self) -> dict[str, Any]:
        """Memory of a process that has done what every training does, and what more than is alive its allocator holds."""
        if self._device.type == "cuda":  # whose memory no process shares
            return {"process_bytes": (0.0, 0.0), "held": (1.0, 0.0)}
        encoder = nn.TransformerEncoderLayer(64, 2, 64, activation="gelu", batch_first=True)
        network = nn.Sequential(nn.Conv1d(8, 8, 3, padding=1), nn.BatchNorm1d(8), nn.ReLU(), encoder, nn.Linear(64, 8))
        optimizer = torch.optim.AdamW(network.parameters())
        logits = network(self._random(4, 8, 64)).flatten(0, 1)
        F.cross_entropy(logits, torch.zeros(32, dtype=torch.int64)).backward()
        optimizer.step()
        self._world.default_group.all_reduce(torch.zeros(1024)).wait()
        before = peak_resident_bytes()
        return {"process_bytes": (float(before), 0.0), "held": (self._held(before), 0.0)}

    def _held(self, before: int) -> float:
        """Return memory at the peak of some passes over what was alive then [ratio]."""
        width, rows, blocks = 256, 2048, 6
        layers = [
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(blocks)
        ]
        network = nn.Sequential(*layers)
        for _ in range(3):
            network.zero_grad(set_to_none=True)
            network(self._random(rows, width)).square().mean().backward()
        states = 2 * 4 * sum(parameter.numel() for parameter in network.parameters())
        kept = 4 * rows * (blocks * 9 * width + 2 * width)  # the inputs of both products and of GELU, and of the end
        return max(1.0, (peak_resident_bytes() - before) / (states + kept))

    def products(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        rows, inner, columns = self._sizes.product
        for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
            one, other = self._random(rows, inner, dtype=dtype), self._random(inner, columns, dtype=dtype)
            seconds, spread = self._time(lambda one=one, other=other: one @ other)
            found[f"product_{name}"] = (2.0 * rows * inner * columns / seconds, spread)
        return found

    def products_by_size(self) -> dict[str, Any]:
        """Kernels of one size after the other, without what the operator itself costs; on a GPU tiles and waves say it."""
        if self._device.type == "cuda":
            return {}
        idle = self._overhead()
        found: dict[str, Any] = {}
        for size in PRODUCT_SIZES:
            pairs = self._not_cached(lambda size=size: (self._random(4 * size, size), self._random(size, size)))
            seconds, spread = self._time(lambda pairs=pairs: torch.mm(*next(pairs)), share=CURVE_SHARE)
            flops = 8 * size**3
            found[f"product_of_{flops}"] = (flops / max(seconds - idle, 0.2 * seconds), spread)
        return found

    def _overhead(self) -> float:
        """Return the time of an operator on next to nothing [s]."""
        one, other = self._random(2, 2), self._random(2, 2)
        return self._time(lambda: one @ other, share=CURVE_SHARE)[0]

    def products_alone(self) -> dict[str, Any]:
        if self._world.rank != 0:
            return {}
        rows, inner, columns = self._sizes.product
        one, other = self._random(rows, inner), self._random(inner, columns)
        seconds, spread = self._time(lambda: one @ other)
        return {"product_alone": (2.0 * rows * inner * columns / seconds, spread)}

    def memory(self) -> dict[str, Any]:
        one, other = self._random(self._sizes.memory_elements), self._random(self._sizes.memory_elements)
        result = torch.empty_like(one)
        seconds, spread = self._time(lambda: torch.add(one, other, out=result))
        return {"memory": (3.0 * one.nbytes / seconds, spread)}

    def memory_by_size(self) -> dict[str, Any]:
        """Sums whose result is new each time, as a forward's are."""
        if self._device.type == "cuda":
            return {}
        idle = self._overhead()
        found: dict[str, Any] = {}
        for size in TRAFFIC_ELEMENTS:
            pairs = self._not_cached(lambda size=size: (self._random(size), self._random(size)))
            seconds, spread = self._time(lambda pairs=pairs: torch.add(*next(pairs)), share=CURVE_SHARE)
            num_bytes = 3 * 4 * size
            found[f"traffic_of_{num_bytes}"] = (num_bytes / max(seconds - idle, 0.2 * seconds), spread)
        return found | {"run": self._run()}

    def _run(self) -> tuple[float, float]:
        """Return what each run adds where tensors do not lie in one piece: halves of heads, beside whole tensors [s]."""
        samples, positions, heads, size = RUNS
        table = self._random(positions, size // 2)
        rows = [self._random(samples, positions, heads, size) for _ in range(RUNS_SET_BYTES // (4 * math.prod(RUNS)))]
        parts = itertools.cycle([one.transpose(1, 2)[..., : size // 2] for one in rows])
        whole = itertools.cycle([one.transpose(1, 2)[..., : size // 2].contiguous() for one in rows])
        apart, spread = self._time(lambda: next(parts) * table, share=CURVE_SHARE)
        together, _ = self._time(lambda: next(whole) * table, share=CURVE_SHARE)
        return max(0.0, apart - together) / (samples * positions * heads), spread

    def memory_far_away(self) -> dict[str, Any]:
        """Kernels whose results lie in memory that was last used a pass ago; a GPU's caches are small."""
        if self._device.type == "cuda":
            return {}
        sets = far_sets(host_memory_bytes(), self._world.world_size)
        return measure_far(sets, functools.partial(self._time, share=CURVE_SHARE))

    def _not_cached(self, make: Callable[[], tuple[torch.Tensor, ...]]) -> Iterator[Sequence[torch.Tensor]]:
        """Return tensors in turn, so many that none is in the cache when its turn comes, as in a pass over a model."""
        first = make()
        num_bytes = sum(tensor.nbytes for tensor in first)
        copies = ([one.detach().clone().requires_grad_(one.requires_grad) for one in first] for _ in range(MOST_SETS))
        return itertools.cycle([first, *itertools.islice(copies, SET_BYTES // num_bytes)])

    def functions(self) -> dict[str, Any]:
        """Elementwise functions: seconds of forward and of backward, and the bytes that forward moves."""
        if self._device.type == "cuda":
            return {}
        found: dict[str, Any] = {}
        idle = self._overhead()
        for name, function in FUNCTIONS.items():
            values = self._random(*FUNCTION_SHAPE).requires_grad_()
            result = function(values)
            gradient = torch.ones_like(result)
            inputs = self._not_cached(lambda: (self._random(*FUNCTION_SHAPE).requires_grad_(),))

            def forward(function: Any = function, inputs: Any = inputs) -> tuple[Tensor, Tensor]:
                (values,) = next(inputs)
                return values, function(values)

            def both(forward: Any = forward, gradient: Tensor = gradient) -> object:
                values, result = forward()
                return torch.autograd.grad(result, values, gradient)

            seconds, spread = self._time(forward, share=FUNCTION_SHARE)
            total = self._time(both, share=FUNCTION_SHARE)[0] if result.requires_grad else seconds
            times = max(seconds - idle, 0.0), max(total - seconds - idle, 0.0)
            found[f"function_{name}"] = ([*times, moved_bytes(values, result, name)], spread)
        return found | self._convolutions(idle)

    def _convolutions(self, idle: float) -> dict[str, Any]:
        """Return the time of a convolution's forward and backward by its arithmetic, without what the operator itself costs."""
        found: dict[str, Any] = {}
        for channels in CONVOLUTION_CHANNELS:
            make, flops = convolution_of(channels)
            inputs = self._not_cached(make)
            gradient = torch.ones_like(convolve(*next(inputs)))

            def both(inputs: Any = inputs, gradient: Tensor = gradient) -> object:
                images, kernel = next(inputs)
                return torch.autograd.grad(convolve(images, kernel), (images, kernel), gradient)

            seconds, spread = self._time(lambda inputs=inputs: convolve(*next(inputs)), share=FUNCTION_SHARE)
            total, _ = self._time(both, share=FUNCTION_SHARE)
            times = max(seconds - idle, 0.2 * seconds), max(total - seconds - idle, 0.2 * seconds)
            found[f"convolution_of_{int(flops)}"] = ([flops, *times], spread)
        return found

    def operators(self) -> dict[str, Any]:
        """Layers on next to nothing: what calling an operator takes, with the views around it, whatever it computes."""
        chain = nn.Sequential(*(_SmallBlock() for _ in range(NUM_BLOCKS))).to(self._device)
        start = self._random(2, 4, 8).requires_grad_()
        forward, _ = self._time(lambda: chain(start))
        seconds, spread = self._time(lambda: chain(start).sum().backward())
        count = NUM_BLOCKS * _SmallBlock.num_operators
        found = {"operator": (forward / count, spread), "operator_backward": ((seconds - forward) / count, spread)}
        return found | measure_host(functools.partial(self._time, share=CURVE_SHARE), self._device)

    def recurrence(self) -> dict[str, Any]:
        """An LSTM, whose kernels are others than those of products."""
        if self._device.type == "cuda":
            return {}
        length, rows, size = RECURRENCE
        layer, values = nn.LSTM(size, size), self._random(length, rows, size).requires_grad_()
        flops = 2.0 * length * rows * 2 * size * 4 * size
        forward, spread = self._time(lambda: layer(values)[0])
        total, _ = self._time(lambda: layer(values)[0].sum().backward())
        return {
            "recurrence_forward": (flops / forward, spread),
            "recurrence_backward": (2 * flops / max(total - forward, 0.1 * forward), spread),
        }

    def attention(self) -> dict[str, Any]:
        """Attention of two sizes of heads: products grow with them, the scores' exponentials do not."""
        found: dict[str, Any] = {}
        shape, dtype = self._sizes.attention, getattr(torch, self._sizes.attention_dtype)
        for size in self._sizes.head_sizes:
            query, key, value = (self._random(*shape, size, dtype=dtype).requires_grad_() for _ in range(3))

            def attend(query: Any = query, key: Any = key, value: Any = value) -> torch.Tensor:
                return F.scaled_dot_product_attention(query, key, value, is_causal=True)

            forward, spread = self._time(attend)
            total, _ = self._time(lambda attend=attend: attend().sum().backward())
            found[f"attention_forward_{size}"] = (forward, spread)
            found[f"attention_backward_{size}"] = (max(total - forward, 0.1 * forward), spread)
        return found

    def optimizer(self) -> dict[str, Any]:
        # One large tensor, a small one, and many small ones: the time by element, of a step, and by tensor.
        groups = {
            "optimizer": [self._random(self._sizes.adam_elements)],
            "step": [self._random(8)],
            "tensors": [self._random(8) for _ in range(1 + MORE_TENSORS)],
        }
        found: dict[str, tuple[float, float]] = {}
        for name, parameters in groups.items():
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            found[name] = self._time(torch.optim.AdamW(parameters).step)
        seconds, spread = found["optimizer"]
        found["optimizer"] = (seconds / self._sizes.adam_elements, spread)
        more = max(0.0, found["tensors"][0] - found["step"][0])
        found["tensor"] = (more / MORE_TENSORS, found["tensors"][1])
        return found

    def collectives(self) -> dict[str, Any]:
        if self._world.world_size == 1:
            return {}
        found: dict[str, Any] = {
            name: _expected(times) for name, times in measure_exchanges(self._world, self._wait).items()
        }
        return found | ({"skew": (measure_skew(self._world), 0.0)} if self._device.type == "cpu" else {})

    def steps_of_plans(self) -> dict[str, Any]:
        """What the runtime adds; on a GPU the host runs ahead of the kernels."""
        return {} if self._device.type == "cuda" else measure_runtime(self._world, self._budget_s)


class _SmallBlock(nn.Module):
    """Operators as models have them, each with the views that come with it."""

    num_operators = 4

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.linear = nn.Linear(8, 8)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        heads = self.linear(self.norm(values)).view(2, 4, 2, 4).transpose(1, 2)
        return values + F.gelu(heads).transpose(1, 2).reshape(2, 4, 8)


def _expected(samples: list[float]) -> tuple[float, float]:
    low, middle, high = statistics.quantiles(samples, n=4)
    return expected(samples), (high - low) / middle


def _mean(values: Sequence[Any]) -> Any:
    """Return the mean of numbers, or of their pairs and lists, place by place."""
    if isinstance(values[0], list | tuple):
        return type(values[0])(_mean(each) for each in zip(*values, strict=True))
    return statistics.fmean(values)


def _device_facts(world: World) -> dict[str, Any]:
    if world.device.type != "cuda":
        return {"type": world.device.type, "num_units": 1, "memory_bytes": None, "name": "cpu"}
    facts = torch.cuda.get_device_properties(world.device)
    return {
        "type": "cuda",
        "num_units": facts.multi_processor_count,
        "memory_bytes": facts.total_memory,
        "name": facts.name.lower().replace(" ", "-"),
    }
