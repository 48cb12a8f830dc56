"""Fit of `efficiency.toml` to published step times: least squares over all sources, held to what is known beforehand.

    python -m benchmarks.planner.fit ROWS.json [ROWS.json ...] --seconds 300 --out FIT.json
    python -m benchmarks.planner.fit ROWS.json --leave-out zero-bubble --out FIT.json

Each source has the same weight, and each constant a price for being far from what `priors.py` expects. It starts there, prints
errors before and after, and writes the constants; it never edits the table. ``--leave-out`` fits without a source and reports
the error on it: the honest estimate for rows that nobody has seen.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import random
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from benchmarks.planner import errors
from benchmarks.planner.fields import cleaned
from benchmarks.planner.priors import (
    ATTENTION,
    COMMON,
    DEVICE_SPREAD,
    GENERATION,
    MATMUL,
    POWER,
    TRAINING,
    Prior,
    kind_of,
)
from benchmarks.planner.rows import cluster_of, model_of, setup_of

from meshwright.hardware.efficiency import Efficiency, read_table
from meshwright.plan.costs.setup import Setup
from meshwright.plan.costs.step_costs import StepCosts

_LOWEST, _HIGHEST = math.log(0.35), math.log(3.0)
"""Logarithms of ratios to what is expected, beyond which a constant would no longer mean what it is called."""

_AT_MOST_ONE = (
    "memory",
    "link",
    "network",
    "rails",
    "tp_overlap",
    "overlap",
    "attention_forward",
    "attention_backward",
)

_PRICE = 0.004
"""What half a square of a constant's spread costs, beside sources whose weights are 1."""

_NEAR = 0.03
"""Distance below which a row is as good as met: what repeated runs differ by [ratio]."""

Name = tuple[str, ...]
"""("all", field), ("training", kind), (generation, field) or (device, "matmul", dtype)."""


@dataclasses.dataclass
class Case:
    """A row, ready to be costed."""

    row: errors.Row
    setup: Setup
    costs: StepCosts
    device: str


class Fit:
    """Constants as logarithms of their ratios to what is expected, and distances of rows under them."""

    def __init__(self, rows: list[errors.Row], *, most: int) -> None:
        self._known: dict[str, Efficiency] = {}
        self._units = {name: own["num_units"] for name, own in read_table()["devices"].items()}
        self.groups = {
            group: [self._case(row) for row in random.sample(own, min(most, len(own)))]
            for group, own in errors.by_group(rows).items()
        }
        self.priors = _priors()
        self.logs = dict.fromkeys(self.priors, 0.0)

    @staticmethod
    def _case(row: errors.Row) -> Case:
        read = cleaned(row)
        cluster = cluster_of(read)
        return Case(row, setup_of(read), StepCosts(model_of(read), cluster), cluster.device.name)

    def move(self, logs: dict[Name, float]) -> None:
        """Take over constants, none farther from its expectation than it may be."""
        self._known.clear()
        for name, log in logs.items():
            self.logs[name] = min(self._highest(name), max(_LOWEST, log))

    def start(self, path: Path) -> None:
        """Take over constants that ``--out`` wrote, as far as there are such."""
        read = json.loads(path.read_text(encoding="utf-8"))["logs"]
        self.move({name: log for key, log in read.items() if (name := tuple(key.split("/"))) in self.priors})

    def _highest(self, name: Name) -> float:
        most = -math.log(self.priors[name].value) - 1e-6 if name[-1] in _AT_MOST_ONE else _HIGHEST
        return min(_HIGHEST, most)

    def value(self, name: Name) -> float:
        return self.priors[name].value * math.exp(self.logs[name])

    def shares(self, device: str) -> dict[str, Any]:
        """Return what the table says of a device that differs from the others."""
        generation = GENERATION.get(device, "ampere")
        power = POWER.get(device, 1.0)
        own: dict[str, Any] = {
            field: self.value((generation, field)) * (power if field != "native_attention" else 1.0)
            for field in ATTENTION[generation]
        }
        matmul = {"fp32": 0.8}
        for dtype, alone in MATMUL.get(device, {"bf16": 0.8}).items():
            share = alone * self.value(("training", kind_of(dtype)))
            if (device, "matmul", dtype) in self.logs:
                share *= math.exp(self.logs[device, "matmul", dtype])
            matmul[dtype] = min(1.0, share)
        return own | {"matmul": matmul, "num_units": self._units.get(device, 108)}

    def efficiency(self, device: str) -> Efficiency:
        if device not in self._known:
            common: dict[str, Any] = {field: self.value(("all", field)) for field in COMMON}
            self._known[device] = Efficiency(**(common | self.shares(device)))
        return self._known[device]

    def ratios(self, group: str) -> list[float]:
        """Return predicted over measured for the rows of a source."""
        return [math.exp(self._distance(case)) for case in self.groups[group]]

    def _distance(self, case: Case) -> float:
        case.costs.use(self.efficiency(case.device))
        return math.log(case.costs.seconds(case.setup) / case.row["measured"]["step_time_s"])

    def distances(self, without: str | None, name: Name | None = None) -> dict[int, float]:
        """Return the logarithm of predicted over measured by case; of those alone that ``name`` can change, where it is given."""
        return {
            id(case): self._distance(case)
            for group, cases in self.groups.items()
            if group != without
            for case in cases
            if name is None or self._matters(name, case.device)
        }

    def _matters(self, name: Name, device: str) -> bool:
        if len(name) == 3:
            return name[0] == device
        return name[0] in ("all", "training") or name[0] == GENERATION.get(device, "ampere")

    def weights(self) -> dict[int, float]:
        return {
            id(case): (1.0 if len(cases) >= 10 else 0.4) / len(cases)
            for cases in self.groups.values()
            for case in cases
        }

    def loss(self, now: dict[int, float], weights: dict[int, float]) -> float:
        price = sum((self.logs[name] / prior.spread) ** 2 for name, prior in self.priors.items())
        return sum(weights[key] * _loss(gap) for key, gap in now.items()) + 0.5 * _PRICE * price

    def descend(self, seconds: float, *, without: str | None) -> None:
        """Improve all constants together: least squares, in which a row counts less the farther it is off."""
        start, damping, weights = time.monotonic(), 0.02, self.weights()
        now = self.distances(without)
        best = self.loss(now, weights)
        while time.monotonic() - start < seconds and damping < 10:
            slopes = self.slopes(now, without)
            moved = False
            while not moved and damping < 10:
                before = dict(self.logs)
                steps = self.step(slopes, now, weights, damping)
                self.move({name: before[name] + steps[name] for name in before})
                then = self.distances(without)
                loss = self.loss(then, weights)
                moved = loss < best - 1e-6
                if moved:
                    gain, best, now, damping = best - loss, loss, then, damping / 3
                    print(f"{time.monotonic() - start:5.0f} s: {loss:.5f}", flush=True)
                    if gain < 1e-3:
                        return
                else:
                    damping *= 4
                    self.move(before)

    def slopes(self, now: dict[int, float], without: str | None) -> dict[Name, dict[int, float]]:
        """Return by how much each case's distance changes with each constant's logarithm."""
        found: dict[Name, dict[int, float]] = {}
        for name, log in list(self.logs.items()):
            self.move({name: log - 0.02})
            then = self.distances(without, name)
            by = self.logs[name] - log
            self.move({name: log})
            found[name] = {key: (gap - now[key]) / by for key, gap in then.items() if by and gap != now[key]}
        return found

    def step(
        self, slopes: dict[Name, dict[int, float]], now: dict[int, float], weights: dict[int, float], damping: float
    ) -> dict[Name, float]:
        """Return the change of each constant's logarithm."""
        place = {key: index for index, key in enumerate(now)}
        matrix = torch.zeros(len(now), len(slopes), dtype=torch.float64)
        for column, changes in enumerate(slopes.values()):
            for key, slope in changes.items():
                matrix[place[key], column] = slope
        gaps = torch.tensor(list(now.values()), dtype=torch.float64)
        counts = torch.tensor([weights[key] for key in now], dtype=torch.float64)
        counts /= (gaps.abs().square() + _NEAR**2).sqrt() * (1 + (gaps / 0.4).square())
        prices = torch.tensor([_PRICE / self.priors[name].spread ** 2 for name in slopes], dtype=torch.float64)
        logs = torch.tensor([self.logs[name] for name in slopes], dtype=torch.float64)
        square = matrix.T @ (counts[:, None] * matrix) + torch.diag(prices * (1 + damping * 10))
        square += damping * torch.diag(square.diagonal())
        found = torch.linalg.solve(square, -matrix.T @ (counts * gaps) - prices * logs)
        return {name: float(one) for name, one in zip(slopes, found.clamp(-0.7, 0.7), strict=True)}

    def left_out(self, slopes: dict[Name, dict[int, float]], now: dict[int, float], group: str) -> dict[Name, float]:
        """Return logarithms of constants that suit all other sources, where distances change with them by these slopes.

        Args:
            slopes: How much each case's distance changes with each constant's logarithm, at the present constants.
            now: Distances at the present constants.
            group: The source whose cases count nothing.
        """
        weights, own = self.weights(), {id(case) for case in self.groups[group]}
        keys = [key for key in now if key not in own]
        place = {key: index for index, key in enumerate(keys)}
        matrix = torch.zeros(len(keys), len(slopes), dtype=torch.float64)
        for column, changes in enumerate(slopes.values()):
            for key, slope in changes.items():
                if key in place:
                    matrix[place[key], column] = slope

        def vector(numbers: Iterable[float]) -> torch.Tensor:
            return torch.tensor(list(numbers), dtype=torch.float64)

        start, counts = vector(self.logs[name] for name in slopes), vector(weights[key] for key in keys)
        lowest, highest = torch.full_like(start, _LOWEST), vector(self._highest(name) for name in slopes)
        prices, gaps = (
            vector(_PRICE / self.priors[name].spread ** 2 for name in slopes),
            vector(now[key] for key in keys),
        )

        def loss(logs: torch.Tensor) -> float:
            apart = (gaps + matrix @ (logs - start)).abs().clamp(max=0.6)
            return float((counts * ((apart**2 + _NEAR**2).sqrt() - _NEAR)).sum() + 0.5 * (prices * logs**2).sum())

        logs, best, share = start, loss(start), 1.0
        while share > 1e-3:
            apart = gaps + matrix @ (logs - start)
            heavy = counts / ((apart.square() + _NEAR**2).sqrt() * (1 + (apart / 0.4).square()))
            square = matrix.T @ (heavy[:, None] * matrix) + torch.diag(prices)
            step = torch.linalg.solve(square, -matrix.T @ (heavy * apart) - prices * logs)
            then = torch.maximum(lowest, torch.minimum(highest, logs + share * step))
            if (found := loss(then)) < best - 1e-9:
                logs, best, share = then, found, 1.0
            else:
                share /= 2
        return {name: float(log) for name, log in zip(slopes, logs, strict=True)}

    def table(self) -> dict[str, Any]:
        """Return the constants as `efficiency.toml` has them."""
        common = {field: self.value(("all", field)) for field in COMMON}
        return {"all": common, "devices": {device: self.shares(device) for device in MATMUL}}


def _priors() -> dict[Name, Prior]:
    found: dict[Name, Prior] = {("all", field): prior for field, prior in COMMON.items()}
    found |= {("training", kind): prior for kind, prior in TRAINING.items()}
    found |= {(generation, field): prior for generation, own in ATTENTION.items() for field, prior in own.items()}
    for device, shares in MATMUL.items():
        found |= {(device, "matmul", dtype): Prior(1.0, DEVICE_SPREAD, "as all devices") for dtype in shares}
    return found


def _loss(gap: float) -> float:
    return math.sqrt(min(abs(gap), 0.6) ** 2 + _NEAR**2) - _NEAR


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path, nargs="+")
    parser.add_argument("--seconds", type=float, default=300.0, help="how long to search")
    parser.add_argument("--most", type=int, default=120, help="rows of one source that are used, drawn at random")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--leave-out", help="a source that is not fitted, whose error is reported")
    parser.add_argument("--start", type=Path, help="logarithms to start from, as --out wrote them")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    random.seed(options.seed)
    fit = Fit(errors.read(options.rows), most=options.most)
    if options.start is not None:
        fit.start(options.start)
    fit.descend(options.seconds, without=options.leave_out)
    cases = [case for own in fit.groups.values() for case in own]
    ratios = {
        id(case.row): ratio
        for group in fit.groups
        for case, ratio in zip(fit.groups[group], fit.ratios(group), strict=True)
    }
    table = errors.errors_of([case.row for case in cases], lambda row: ratios[id(row)] * row["measured"]["step_time_s"])
    print(errors.show(table))
    for name, prior in fit.priors.items():
        print(
            f"{'/'.join(name):36}{prior.value:12.4g} ->{fit.value(name):12.4g}{fit.logs[name] / prior.spread:8.1f} spreads"
        )
    if options.out is not None:
        logs = {"/".join(name): log for name, log in fit.logs.items()}
        found = fit.table() | {"logs": logs, "errors": table, "left_out": options.leave_out}
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
