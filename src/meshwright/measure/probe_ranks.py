"""Measurements of a probe on its ranks: products, memory, operators, attention, the optimizer and collectives.

Each is taken while all ranks do the same, as in training, and as a median of repetitions. One rank also takes products alone.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, Final

import torch
from torch.nn import functional as F

from meshwright.ranks.world import World, current_world

__all__: list[str] = []

STAGES: Final = ("products", "products alone", "memory", "operators", "attention", "optimizer", "collectives")
"""What is measured, in order."""

_PRODUCT: Final = (512, 1024, 1024)
_LARGE_PRODUCT: Final = (8192, 8192, 8192)
_MEMORY_ELEMENTS: Final = 8 * 2**20
_NUM_OPERATORS: Final = 64
_ATTENTION: Final = (1, 8, 256, 64)
_ADAM_ELEMENTS: Final = 4 * 2**20
_COLLECTIVE_BYTES: Final = (1024, 64 * 1024, 2**20, 16 * 2**20)


def measure_rank(budget_s: float) -> dict[str, Any]:
    """Return what this rank measured.

    Args:
        budget_s: How long each measurement is repeated [s].

    Returns:
        Rates in FLOP/s and bytes/s, times in s; each a pair of the median and the spread between quartiles over it.
    """
    world = current_world()
    if world is None:  # a launched rank has a world
        raise RuntimeError("a rank without a world")
    probe = _Probe(world, budget_s)
    found: dict[str, Any] = {"device": _device_facts(world)}
    for stage in STAGES:
        world.emit({"probe": stage})
        found |= getattr(probe, stage.replace(" ", "_"))()
        world.default_group.barrier()
    return found


class _Probe:
    """The measurements; a method for each of `STAGES`."""

    def __init__(self, world: World, budget_s: float) -> None:
        self._world = world
        self._device = world.device
        self._budget_s = budget_s

    def _time(self, call: Callable[[], object], *, at_least: int = 5) -> tuple[float, float]:
        """Return the median time of a call and its relative spread, after two that do not count."""
        for _ in range(2):
            call()
        samples: list[float] = []
        end = time.perf_counter() + self._budget_s
        while len(samples) < at_least or time.perf_counter() < end:
            self._wait()
            start = time.perf_counter()
            call()
            self._wait()
            samples.append(time.perf_counter() - start)
        low, middle, high = statistics.quantiles(samples, n=4)
        return middle, (high - low) / middle

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _random(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        values = torch.randn(*shape, device=self._device)
        return values.to(dtype)

    def _sizes(self) -> tuple[int, int, int]:
        return _PRODUCT if self._device.type == "cpu" else _LARGE_PRODUCT

    def products(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        rows, inner, columns = self._sizes()
        for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
            one, other = self._random(rows, inner, dtype=dtype), self._random(inner, columns, dtype=dtype)
            seconds, spread = self._time(lambda one=one, other=other: one @ other)
            found[f"product_{name}"] = (2.0 * rows * inner * columns / seconds, spread)
        return found

    def products_alone(self) -> dict[str, Any]:
        if self._world.rank != 0:
            return {}
        rows, inner, columns = self._sizes()
        one, other = self._random(rows, inner), self._random(inner, columns)
        seconds, spread = self._time(lambda: one @ other)
        return {"product_alone": (2.0 * rows * inner * columns / seconds, spread)}

    def memory(self) -> dict[str, Any]:
        one, other = self._random(_MEMORY_ELEMENTS), self._random(_MEMORY_ELEMENTS)
        result = torch.empty_like(one)
        seconds, spread = self._time(lambda: torch.add(one, other, out=result))
        return {"memory": (3.0 * one.nbytes / seconds, spread)}

    def operators(self) -> dict[str, Any]:
        start = self._random(8).requires_grad_()

        def run() -> None:
            value = start
            for _ in range(_NUM_OPERATORS):
                value = value * 1.5
            value.sum().backward()

        seconds, spread = self._time(run)
        return {"operator": (seconds / (2 * _NUM_OPERATORS), spread)}

    def attention(self) -> dict[str, Any]:
        batch, heads, length, size = _ATTENTION
        query, key, value = (self._random(batch, heads, length, size).requires_grad_() for _ in range(3))
        flops = 4.0 * batch * heads * length * length * size / 2  # half of it is masked

        def attend() -> torch.Tensor:
            return F.scaled_dot_product_attention(query, key, value, is_causal=True)

        forward, spread = self._time(attend)
        total, _ = self._time(lambda: attend().sum().backward())
        backward = max(total - forward, 0.1 * forward)
        return {"attention_forward": (flops / forward, spread), "attention_backward": (2.5 * flops / backward, spread)}

    def optimizer(self) -> dict[str, Any]:
        large, small = (self._random(size).requires_grad_() for size in (_ADAM_ELEMENTS, 8))
        found: dict[str, Any] = {}
        for name, parameter in (("optimizer", large), ("step", small)):
            parameter.grad = torch.ones_like(parameter)
            seconds, spread = self._time(torch.optim.AdamW([parameter]).step)
            found[name] = (seconds / (parameter.numel() if name == "optimizer" else 1), spread)
        return found

    def collectives(self) -> dict[str, Any]:
        if self._world.world_size == 1:
            return {}
        found: dict[str, Any] = {}
        for num_bytes in _COLLECTIVE_BYTES:
            tensor = torch.zeros(num_bytes // 4, device=self._device)
            found[f"all_reduce_{num_bytes}"] = self._exchange(tensor)
        return found

    def _exchange(self, tensor: torch.Tensor) -> tuple[float, float]:
        # Every rank repeats as often: a time that ended the loop would end it at different rounds.
        samples: list[float] = []
        for round_index in range(22):
            self._wait()
            start = time.perf_counter()
            self._world.default_group.all_reduce(tensor).wait()
            self._wait()
            if round_index >= 2:
                samples.append(time.perf_counter() - start)
        low, middle, high = statistics.quantiles(samples, n=4)
        return middle, (high - low) / middle


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
