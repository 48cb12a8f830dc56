"""Fit of `efficiency.toml` to published step times: coordinate search, every source with the same weight.

    python -m benchmarks.planner.fit ROWS.json [ROWS.json ...] --seconds 600 --out FIT.json
    python -m benchmarks.planner.fit ROWS.json --seconds 300 --leave-out zero-bubble --out FIT.json

It starts from the table, prints errors before and after, and writes the constants; it never edits the table. A source's score is
its median error and part of its 90th percentile, so that a few odd rows cannot pull the constants. ``--leave-out`` fits without
a source and reports the error on it: the honest estimate for rows that nobody has seen.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
from benchmarks.planner import errors
from benchmarks.planner.rows import cluster_of, model_of, setup_of

from meshwright.hardware.efficiency import Efficiency, read_table
from meshwright.plan.costs.setup import Setup
from meshwright.plan.costs.step_costs import StepCosts

BOUNDS = {
    "memory": (0.5, 0.92),
    "attention_forward": (0.15, 0.75),
    "attention_backward": (0.15, 0.7),
    "native_attention": (1.0, 2.5),
    "link": (0.55, 0.95),
    "network": (0.5, 0.95),
    "rails": (0.05, 1.0),
    "overlap": (0.2, 0.95),
    "tp_overlap": (0.0, 0.9),
    "interference": (0.02, 0.4),
    "elementwise_passes": (1.0, 5.0),
    "kernel_s": (2e-6, 12e-6),
    "operator_s": (8e-6, 60e-6),
    "collective_host_s": (20e-6, 600e-6),
    "optimizer_bytes": (26.0, 60.0),
    "inner_overhead": (16.0, 200.0),
    "network_latency_s": (5e-6, 60e-6),
    "link_latency_s": (4e-6, 30e-6),
    "hop_s": (0.5e-6, 8e-6),
    "step_s": (0.0, 20e-3),
    "matmul": (0.2, 0.87),
}
"""What a constant may be: outside it would no longer mean what it is called. 0.87 is what a product alone reaches at most."""

KIN = {
    "v100-sxm2-16gb": ("v100-sxm2-32gb",),
    "v100-sxm2-32gb": ("v100-sxm2-16gb",),
    "a100-sxm-40gb": ("a100-sxm-80gb",),
    "a100-sxm-80gb": ("a100-sxm-40gb",),
    "h100-sxm": ("h200-sxm", "h100-hbm2e-500w"),
    "h100-hbm2e-500w": ("h100-sxm", "h200-sxm"),
    "h200-sxm": ("h100-sxm",),
    "b200": ("b300", "h100-sxm"),
    "b300": ("b200", "h100-sxm"),
}
"""Devices -> those of the same generation, the most alike first."""

_NEAR = 0.03
"""Distance below which a row is as good as met: what repeated runs differ by [ratio]."""

Name = tuple[str, ...]
"""("all", field), (device, field), or (device, "matmul", dtype)."""


@dataclasses.dataclass
class Case:
    """A row, ready to be costed."""

    row: errors.Row
    setup: Setup
    costs: StepCosts
    device: str


class Fit:
    """Constants, and the score that they get."""

    def __init__(self, rows: list[errors.Row], *, most: int) -> None:
        table = read_table()
        self._known: dict[str, Efficiency] = {}
        self.common: dict[str, float] = {key: value for key, value in table["all"].items() if key != "source"}
        self.devices: dict[str, dict[str, Any]] = {
            name: {
                key: dict(value) if isinstance(value, dict) else value for key, value in own.items() if key != "source"
            }
            for name, own in table["devices"].items()
        }
        self.groups = {
            group: [self._case(row) for row in random.sample(own, min(most, len(own)))]
            for group, own in errors.by_group(rows).items()
        }

    def begin_in_the_middle(self) -> None:
        """Forget all constants: each is in the middle of what it may be."""
        for name in self.names():
            low, high = BOUNDS.get(name[1], (0.0, 1.0))
            self[name] = (low + high) / 2

    def take_from_kin(self, without: str) -> None:
        """Give devices that the other sources do not have the shares of the device that is most like it."""
        seen = {case.device for group, cases in self.groups.items() if group != without for case in cases}
        for device, others in KIN.items():
            if device in self.devices and device not in seen:
                kin = next((other for other in others if other in seen), None)
                if kin is not None:
                    units = self.devices[device]["num_units"]
                    own = self.devices[kin] | {"matmul": self.devices[device]["matmul"] | self.devices[kin]["matmul"]}
                    self.devices[device] = own | {"num_units": units}
        self._known.clear()

    def begin(self, found: dict[str, Any]) -> None:
        """Take over constants that another fit found."""
        self.common |= found["all"]
        for device, own in found["devices"].items():
            self.devices[device] |= own

    @staticmethod
    def _case(row: errors.Row) -> Case:
        cluster = cluster_of(row)
        return Case(row, setup_of(row), StepCosts(model_of(row), cluster), cluster.device.name)

    def names(self) -> list[Name]:
        used = {case.device for cases in self.groups.values() for case in cases}
        found: list[Name] = [("all", key) for key in self.common]
        for device in sorted(used & set(self.devices)):
            for key, value in self.devices[device].items():
                if key == "matmul":
                    found += [(device, key, dtype) for dtype in value if dtype != "fp32"]
                elif key != "num_units":
                    found.append((device, key))
        return found

    def __getitem__(self, name: Name) -> float:
        if name[0] == "all":
            return self.common[name[1]]
        own = self.devices[name[0]][name[1]]
        return own[name[2]] if len(name) == 3 else own

    def __setitem__(self, name: Name, value: float) -> None:
        self._known.clear()
        low, high = BOUNDS.get(name[1], (0.0, math.inf))
        value = min(high, max(low, value))
        if name[0] == "all":
            self.common[name[1]] = value
        elif len(name) == 3:
            self.devices[name[0]][name[1]][name[2]] = value
        else:
            self.devices[name[0]][name[1]] = value

    def efficiency(self, device: str) -> Efficiency:
        shares: dict[str, Any] = {**self.common, **self.devices.get(device, self.devices["other"])}
        return Efficiency(**shares)

    def ratios(self, group: str) -> list[float]:
        known: dict[str, Efficiency] = {}
        found: list[float] = []
        for case in self.groups[group]:
            if case.device not in known:
                known[case.device] = self.efficiency(case.device)
            case.costs.use(known[case.device])
            found.append(case.costs.seconds(case.setup) / case.row["measured"]["step_time_s"])
        return found

    def distances(self, without: str | None, only: str | None = None) -> dict[int, float]:
        """Return the logarithm of predicted over measured by case; of one device alone where it is named."""
        found: dict[int, float] = {}
        for group, cases in self.groups.items():
            for case in cases:
                if group == without or (only is not None and case.device != only):
                    continue
                if case.device not in self._known:
                    self._known[case.device] = self.efficiency(case.device)
                case.costs.use(self._known[case.device])
                found[id(case)] = math.log(case.costs.seconds(case.setup) / case.row["measured"]["step_time_s"])
        return found

    def descend(self, seconds: float, *, without: str | None) -> None:
        """Improve all constants together: least squares, in which a row counts less the farther it is off."""
        names, start, damping = self.names(), time.monotonic(), 0.02
        weights = {
            id(case): (1.0 if len(cases) >= 10 else 0.4) / len(cases)
            for cases in self.groups.values()
            for case in cases
        }
        now = self.distances(without)
        best = sum(weights[key] * _loss(gap) for key, gap in now.items())
        while time.monotonic() - start < seconds and damping < 10:
            slopes = self._slopes(names, now, without)
            moved = False
            while not moved and damping < 10:
                before = [self[name] for name in names]
                for name, step in zip(names, _step(slopes, now, weights, damping), strict=True):
                    self[name] = self[name] + step * self._scale(name)
                then = self.distances(without)
                loss = sum(weights[key] * _loss(gap) for key, gap in then.items())
                moved = loss < best - 1e-6
                if moved:
                    gain, best, now, damping = best - loss, loss, then, damping / 2
                    print(f"{time.monotonic() - start:5.0f} s: {loss:.5f}", flush=True)
                    if gain < 1e-4:
                        return
                else:
                    damping *= 4
                    for name, value in zip(names, before, strict=True):
                        self[name] = value

    def _scale(self, name: Name) -> float:
        low, high = BOUNDS.get(name[1], (0.0, 1.0))
        return max(abs(self[name]), 0.1 * (high - low))

    def _slopes(self, names: list[Name], now: dict[int, float], without: str | None) -> list[dict[int, float]]:
        """Return by how much each case's distance changes for a constant's change by its scale."""
        found: list[dict[int, float]] = []
        for name in names:
            value, step = self[name], 0.02 * self._scale(name)
            self[name] = value + step
            if self[name] < value + step / 2:
                self[name] = value - step
            by = (self[name] - value) / self._scale(name)
            then = self.distances(without, None if name[0] == "all" else name[0])
            found.append({key: (gap - now[key]) / by for key, gap in then.items() if gap != now[key]})
            self[name] = value
        return found

    def score(self, *, without: str | None = None) -> float:
        total = weights = 0.0
        for group in self.groups:
            if group == without:
                continue
            gaps = sorted(abs(math.log(ratio)) for ratio in self.ratios(group))
            weight = 1.0 if len(gaps) >= 10 else 0.4
            mean = sum(min(gap, 0.6) for gap in gaps) / len(gaps)
            total += weight * (errors.quantile(gaps, 0.5) + 0.4 * errors.quantile(gaps, 0.9) + 0.3 * mean)
            weights += weight
        return total / weights

    def search(self, seconds: float, *, without: str | None) -> None:
        names = self.names()
        steps = dict.fromkeys(names, 0.15)
        best, start = self.score(without=without), time.monotonic()
        while time.monotonic() - start < seconds and max(steps.values()) > 0.01:
            random.shuffle(names)
            for name in names:
                value, moved = self[name], False
                for factor in (1 + steps[name], 1 / (1 + steps[name])):
                    self[name] = value * factor
                    score = self.score(without=without)
                    if score < best - 1e-6:
                        best, moved = score, True
                        break
                    self[name] = value
                steps[name] = min(0.4, 1.3 * steps[name]) if moved else 0.6 * steps[name]
                if time.monotonic() - start > seconds:
                    break


def _loss(gap: float) -> float:
    return math.sqrt(min(abs(gap), 0.6) ** 2 + _NEAR**2) - _NEAR


def _step(
    slopes: list[dict[int, float]], now: dict[int, float], weights: dict[int, float], damping: float
) -> list[float]:
    """Return the change of each constant, in its scale."""
    place = {key: index for index, key in enumerate(now)}
    matrix = torch.zeros(len(now), len(slopes), dtype=torch.float64)
    for column, changes in enumerate(slopes):
        for key, slope in changes.items():
            matrix[place[key], column] = slope
    gaps = torch.tensor(list(now.values()), dtype=torch.float64)
    counts = torch.tensor([weights[key] for key in now], dtype=torch.float64)
    counts /= (gaps.abs().square() + _NEAR**2).sqrt() * (1 + (gaps / 0.4).square())
    square = matrix.T @ (counts[:, None] * matrix)
    square += damping * torch.eye(len(slopes), dtype=torch.float64) * square.diagonal().mean()
    return [float(one) for one in torch.linalg.solve(square, -matrix.T @ (counts * gaps))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path, nargs="+")
    parser.add_argument("--seconds", type=float, default=600.0, help="how long to search")
    parser.add_argument("--polish", type=float, default=0.0, help="how long to search one constant after the other")
    parser.add_argument("--most", type=int, default=120, help="rows of one source that are used, drawn at random")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--leave-out", help="a source that is not fitted, whose error is reported")
    parser.add_argument("--start", type=Path, help="constants to start from, as --out wrote them; None means the table")
    parser.add_argument("--middle", action="store_true", help="start from the middle of what each constant may be")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    random.seed(options.seed)
    fit = Fit(errors.read(options.rows), most=options.most)
    if options.start is not None:
        fit.begin(json.loads(options.start.read_text()))
    if options.middle:
        fit.begin_in_the_middle()
    print(f"score {fit.score(without=options.leave_out):.4f}", flush=True)
    fit.descend(options.seconds, without=options.leave_out)
    print(f"score {fit.score(without=options.leave_out):.4f}", flush=True)
    if options.polish:
        fit.search(options.polish, without=options.leave_out)
    print(f"score {fit.score(without=options.leave_out):.4f}")
    if options.leave_out:
        fit.take_from_kin(options.leave_out)
        fit.ratios(options.leave_out)  # which costs its rows with these from now on
    cases = {id(case.row): case for cases in fit.groups.values() for case in cases}
    seconds = {key: case.costs.seconds(case.setup) for key, case in cases.items()}
    table = errors.errors_of([case.row for case in cases.values()], lambda row: seconds[id(row)])
    print(errors.show(table))
    if options.out is not None:
        found = {"all": fit.common, "devices": fit.devices, "errors": table, "left_out": options.leave_out}
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
