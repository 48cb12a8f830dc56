"""torch's own test suite of distributed backends over our shared memory, beside gloo: does all that passes there pass here?

    python benchmarks/transport/torch_suite.py --backend gloo --out benchmarks/transport/results/NAME.json
    python benchmarks/transport/torch_suite.py --backend shm --out benchmarks/transport/results/NAME.json

The suite ships with torch: `torch.testing._internal.distributed.distributed_test`. It knows backends by name, and skips most
tests for a name that it does not know. So shm runs under gloo's name: where torch makes a gloo backend, this script makes ours;
and where the suite looks for profiler events called "gloo:...", it is given those called "shm:...", under that name. Nothing
else of the suite or of torch is changed. A group that could not have shared memory fails its test.
Results are added to the file, and a test that has one there for this backend is not run again: a run can be cut in pieces.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import sys
import sysconfig
import tempfile
import time
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from surroundings import environment  # noqa: E402


def arguments_of(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--backend", choices=["gloo", "shm"], required=True)
    parser.add_argument("--ranks", type=int, default=3, help="torch's own number is 3")
    parser.add_argument("--match", default="", help="part of the tests' names")
    parser.add_argument("--deadline-s", type=int, default=60, help="for one test")
    parser.add_argument("--budget-s", type=float, default=1e9, help="no test is begun after that long")
    parser.add_argument("--out", type=Path, default=None, help="added to, where it exists")
    return parser.parse_args(words)


def stand_in_for_gloo() -> None:
    """Have torch make our backend wherever it would make gloo's, in this process and those forked from it."""
    from torch.distributed import distributed_c10d

    from meshwright.comm.shm.backend import make_backend
    from meshwright.comm.shm.build import load_extension

    shm = load_extension().ShmBackend

    class IsShm(type):
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, shm)

    class StandIn(metaclass=IsShm):
        """Called as torch calls gloo's class."""

        def __new__(cls, store: Any, rank: int, size: int, timeout: Any) -> Any:
            made = make_backend(store, rank, list(range(size)), timeout.total_seconds())
            if not isinstance(made, shm):
                raise RuntimeError("the ranks got gloo itself: shared memory cannot be had here")
            return made

    mock.patch.object(distributed_c10d, "ProcessGroupGloo", StandIn).start()


def suite_class(arguments: argparse.Namespace) -> type[unittest.TestCase]:
    """Return the suite's class. It reads its settings on import, and ranks are forked from here."""
    os.environ |= {
        "BACKEND": "gloo",
        "WORLD_SIZE": str(arguments.ranks),
        "TEMP_DIR": tempfile.mkdtemp(prefix="torch-suite-"),
        "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(arguments.deadline_s),
        "OMP_NUM_THREADS": "1",
    }
    if arguments.backend == "shm":
        stand_in_for_gloo()
    import torch.multiprocessing
    from torch.testing._internal.distributed import distributed_test

    if arguments.backend == "shm":
        find_events = distributed_test.get_profiling_event

        def find_ours(name: str, *more: Any, **options: Any) -> Any:
            found = find_events(name.replace("gloo:", "shm:"), *more, **options)
            for event in found:
                event.name = event.name.replace("shm:", "gloo:")
            return found

        mock.patch.object(distributed_test, "get_profiling_event", find_ours).start()

    class TorchSuite(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    return TorchSuite


_PACKAGES = sysconfig.get_path("purelib") + os.sep
"""Where torch lies, which is no part of a result."""


def outcome_of(found: unittest.TestResult) -> tuple[str, str]:
    """Return how one test ended, as a word and a reason."""
    for word, entries in (("failed", found.errors + found.failures), ("skipped", found.skipped)):
        if entries:
            # The end of a traceback says what it was; the suite's advice stands behind it.
            text = " ".join(entries[-1][1].split()).split(" To execute this test")[0]
            return word, text.replace(_PACKAGES, "")[-300:]
    return "passed", ""


def run_suite(arguments: argparse.Namespace, results: dict[str, Any]) -> None:
    """Run the tests that have no result yet."""
    suite = suite_class(arguments)
    begin = time.monotonic()
    for name in unittest.TestLoader().getTestCaseNames(suite):
        if name in results or arguments.match not in name:
            continue
        if time.monotonic() - begin > arguments.budget_s:
            return
        found = unittest.TestResult()
        started = time.monotonic()
        suite.setUpClass()
        suite(name).run(found)
        word, reason = outcome_of(found)
        results[name] = {"outcome": word, "seconds": round(time.monotonic() - started, 1)}
        if reason:
            results[name]["reason"] = reason
        tell(arguments.backend, name, results[name])


def tell(backend: str, name: str, result: dict[str, Any]) -> None:
    sys.stdout.write(f"{backend} {name}: {result['outcome']} {result.get('reason', '')[:160]}\n")
    sys.stdout.flush()


def summary(record: dict[str, Any]) -> str:
    """Say how many passed, and name what passes over gloo and does not over shm."""
    lines = []
    for backend, results in record["results"].items():
        counts = collections.Counter(result["outcome"] for result in results.values())
        lines.append(f"{backend}: " + ", ".join(f"{count} {word}" for word, count in sorted(counts.items())))
    gloo, shm = (record["results"].get(backend, {}) for backend in ("gloo", "shm"))
    for name, result in gloo.items():
        if result["outcome"] == "passed" and name in shm and shm[name]["outcome"] != "passed":
            lines.append(f"over gloo alone: {name}: {shm[name]['outcome']}, {shm[name].get('reason', '')}")
    return "\n".join(lines)


def main(words: list[str] | None = None) -> int:
    arguments = arguments_of(words)
    record: dict[str, Any] = {"environment": environment(), "ranks": arguments.ranks, "results": {}}
    if arguments.out is not None and arguments.out.exists():
        record["results"] = json.loads(arguments.out.read_text())["results"]
    try:
        run_suite(arguments, record["results"].setdefault(arguments.backend, {}))
    finally:
        if arguments.out is not None:
            arguments.out.write_text(json.dumps(record, indent=1) + "\n")
    sys.stdout.write(summary(record) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
