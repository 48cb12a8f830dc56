"""The kinds of training that are compared: our preset, the libraries that do the same, and the bounds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from cases import build_gpt, build_llama, build_untied_gpt
from competitors.deepspeed_peers import deepspeed
from competitors.pipeline_peers import PIPELINES
from competitors.replicated_peers import REPLICATED
from competitors.sharded_peers import FSDP2, ZERO_REDUNDANCY
from competitors.tensor_peers import DTENSOR, TRANSFORMERS
from side import KEEP_FREED_MEMORY, Side, ours
from torch import nn

Bounds = dict[str, float]
HERE = Path(__file__).resolve().parents[2]
"""This checkout."""


def everywhere(bound: float) -> Bounds:
    return {"latency-bound": bound, "balanced": bound, "bandwidth-bound": bound}


@dataclasses.dataclass(frozen=True)
class Kind:
    """One way to train: our preset, and the libraries that do the same."""

    preset: str
    peers: tuple[Side, ...]
    bounds: Bounds
    """What our step may take at most over shared memory, as a ratio to the fastest other library's."""
    gloo_bounds: Bounds = dataclasses.field(default_factory=dict)
    build: Callable[[str], nn.Module] = build_gpt
    schedule: str | None = None
    """Of our pipeline, unless `--schedules` names others."""

    def sides(self, options: Any) -> list[Side]:
        """Return what `options` asks for, ours first."""
        schedules: Collection[str | None] = [self.schedule]
        if self.schedule is not None:
            schedules = options.schedules or schedules
        preset = ",".join(filter(None, (self.preset, options.settings)))
        sides = [ours(transport, preset, schedule) for transport in options.ours for schedule in schedules]
        if options.base is not None:
            named = [(side, side.name.replace("ours", "base", 1)) for side in sides]
            sides = [side.of_checkout(HERE, side.name) for side in sides]
            return [
                dataclasses.replace(side, build=self.build)
                for side in (*sides, *(side.of_checkout(options.base, name) for side, name in named))
            ]
        peers = [side for side in self.peers if options.peers is None or side.name in options.peers]
        if options.keep_freed_memory:
            peers = [dataclasses.replace(side, environment=(*side.environment, *KEEP_FREED_MEMORY)) for side in peers]
        return [dataclasses.replace(side, build=self.build) for side in sides + peers]

    def bounds_of(self, side: str) -> Bounds:
        return self.gloo_bounds if side.startswith("ours-gloo") else self.bounds


ZERO_2_BOUNDS = {"latency-bound": 0.70, "balanced": 0.93, "bandwidth-bound": 0.55}
KINDS = {
    "distributed": Kind("distributed", REPLICATED, {"latency-bound": 0.82, "balanced": 0.96, "bandwidth-bound": 0.70}),
    "zero1": Kind("zero1", (ZERO_REDUNDANCY, deepspeed("deepspeed-1", stage=1)), ZERO_2_BOUNDS),
    "zero2": Kind("zero2", (ZERO_REDUNDANCY, deepspeed("deepspeed-2", stage=2)), ZERO_2_BOUNDS),
    "zero3": Kind(
        "zero3",
        (FSDP2, deepspeed("deepspeed-3", stage=3)),
        {"latency-bound": 0.45, "balanced": 0.82, "bandwidth-bound": 0.45},
        everywhere(0.9),
    ),
    "tensor": Kind(
        "tensor",
        (DTENSOR,),
        {"latency-bound": 0.30, "balanced": 0.65, "bandwidth-bound": 0.52},
        everywhere(0.9),
    ),
    "tensor-whole-sequence": Kind("tensor,sequence_parallel=off", (DTENSOR,), {}),
    "transformers-tp": Kind("tensor", (TRANSFORMERS,), {}, build=build_llama),
    "pipeline": Kind(
        "pp=2",
        PIPELINES,
        {"latency-bound": 0.80, "balanced": 0.92, "bandwidth-bound": 0.85},
        everywhere(0.97),
        build=build_untied_gpt,
        schedule="1f1b",
    ),
}
BOUND_TO_BASE = everywhere(1.02)
"""Of a commit to an earlier one."""
BOUND_TO_ONE_PROCESS = {"balanced": 1.0}
