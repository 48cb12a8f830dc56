"""Runs Lightning's own tests of its Fabric against Fabric under plans, and writes a table of them by name.

    python benchmarks/trainer_tests/fabric_tests.py CHECKOUT --plans "dp=2; dp=2,zero=3; tp=2" --json NAME.json

CHECKOUT has the folder `tests` of Lightning-AI/pytorch-lightning, with `lightning.fabric` written as `lightning_fabric`, as
Lightning's release of that package does. A test applies where it passes here in one process by Fabric alone, and makes a Fabric
that a plan can stand in for: of one device, or of DDP on CPUs. Then all ranks run it at the same time, as `run.py` does.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from run import options, run_all, run_in_turn

import meshwright as mw

FILES = (
    "tests_fabric/test_fabric.py",
    "tests_fabric/test_wrappers.py",
    "tests_fabric/strategies/test_single_device.py",
    "tests_fabric/strategies/test_ddp_integration.py",
    "tests_fabric/plugins/precision/test_all.py",
    "tests_fabric/plugins/precision/test_amp_integration.py",
    "tests_fabric/plugins/precision/test_double_integration.py",
    "tests_fabric/utilities/test_spike.py",
    "tests_fabric/utilities/test_throughput.py",
    "parity_fabric/test_parity_simple.py",
)
_STOOD_IN_FOR = (None, "auto", "ddp", "ddp_spawn", "ddp_fork")
ALONE = "one process"
GROUP = 30
"""Tests that one start of ranks runs at most [count]."""


class _Run:
    """A plugin of pytest: names of tests, outcome of the last one, and directories that ranks share."""

    def __init__(self, base: str = "") -> None:
        self.names: list[str] = []
        self.outcome = ("failed", "it was not collected")
        self._base = base

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        self.names = [item.nodeid for item in items]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.outcome = ("failed", str(report.longrepr)[-600:])
        elif report.skipped:
            self.outcome = ("skipped", str(report.longrepr)[-200:])
        elif report.when == "call":
            self.outcome = ("passed", "")

    @pytest.fixture
    def tmp_path(self, request: pytest.FixtureRequest) -> Path:
        path = Path(self._base, hashlib.sha1(request.node.nodeid.encode()).hexdigest())
        path.mkdir(parents=True, exist_ok=True)
        return path


def all_tests(checkout: str) -> list[str]:
    """Return the names of all tests of these files."""
    run = _Run()
    with _in_checkout(checkout):
        pytest.main([*_OPTIONS, "--collect-only", *FILES], plugins=[run])
    return run.names


_OPTIONS = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:timeout", "--rootdir=.", "-o", "addopts="]


def run_tests(checkout: str, names: list[str], plan: str | None, base: str, log: str, until: float) -> int:
    """Run tests on this rank, as `run.run_tests` does; return how many were run."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    mw.join_world()
    with _in_checkout(checkout):
        made = _use_plan(plan)
        from parity_fabric.models import ConvNet

        ConvNet.num_steps = 100  # of 1,000

        def run_one(name: str) -> tuple[str, str]:
            made.clear()
            run = _Run(base)
            pytest.main([*_OPTIONS, name], plugins=[run])
            if run.outcome[0] == "passed" and not made:
                return "skipped", "it makes no Fabric that a plan stands in for"
            return run.outcome

        # Each test makes its own Fabric and model: a failure that is alike on all ranks leaves nothing to the next one.
        return run_in_turn(names, run_one, lambda number: None, log=log, until=until, goes_on=lambda text: True)


@contextlib.contextmanager
def _in_checkout(checkout: str) -> Any:
    tests = f"{checkout}/tests"
    if tests not in sys.path:
        sys.path.insert(0, tests)
    before = Path.cwd()
    os.chdir(tests)
    try:
        yield
    finally:
        os.chdir(before)


def _use_plan(plan: str | None) -> list[str]:
    """Have each Fabric that a plan can stand in for be under it; return the list to which each is added."""
    import lightning_fabric
    from lightning_fabric.utilities import distributed

    distributed._destroy_dist_connection = lambda: None  # the ranks' own, which tests would end
    made: list[str] = []
    init = lightning_fabric.Fabric.__init__

    def init_planned(self: Any, *args: Any, **kwargs: Any) -> None:
        strategy, accelerator = kwargs.get("strategy"), kwargs.get("accelerator", "auto")
        is_ours = not args and strategy in _STOOD_IN_FOR and accelerator in ("auto", "cpu")
        is_ours = is_ours and kwargs.get("devices", 1) in (1, 2, "auto") and kwargs.get("num_nodes", 1) == 1
        if is_ours:
            made.append(str(strategy))
        if is_ours and plan is not None:
            kwargs |= {"strategy": _planned(plan), "devices": 1, "accelerator": "cpu"}
        elif is_ours and strategy not in (None, "auto"):
            kwargs |= {"strategy": "auto", "devices": 1, "accelerator": "cpu"}
        init(self, *args, **kwargs)

    lightning_fabric.Fabric.__init__ = init_planned
    return made


def _planned(plan: str) -> Any:
    from meshwright.integrations.fabric import PlanStrategy

    class Planned(PlanStrategy):
        def backward(self, tensor: Any, module: Any, *args: Any, **kwargs: Any) -> None:
            """Weigh each rank's mean alike, as DDP does, which the tests are written for."""
            super().backward(tensor, module, *args, **{"weight": 1.0, **kwargs})

    return Planned(plan)


def main() -> None:
    given = options().parse_args()
    checkout = str(Path(given.checkout).resolve())
    path = Path(given.json)
    table: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    if "names" not in table:
        table["names"] = mw.launch(all_tests, 1, checkout)[0]
    plans = [text.strip() for text in given.plans.split(";")]
    for plan in (None, *plans):
        key = plan or ALONE
        applying = (
            table["names"] if plan is None else [name for name, told in table[ALONE].items() if told[0] == "passed"]
        )

        def keep(found: Any, key: str = key) -> None:
            table[key] = found
            path.write_text(json.dumps(table, indent=1))

        known = {
            name: told for name, told in table.get(key, {}).items() if not (given.again and plan) or told[0] == "passed"
        }
        table[key] = run_all(
            *(checkout, applying, plan, keep),
            known=known,
            seconds=given.seconds,
            limit_s=given.limit,
            tests=run_tests,
            group=GROUP,
        )
        if len(table[key]) < len(applying):
            break  # the next run goes on
        print(key, sum(told[0] == "passed" for told in table[key].values()), "of", len(applying))


if __name__ == "__main__":
    main()
