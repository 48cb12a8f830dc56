"""Runs transformers' own tests of its Trainer against the Trainer under plans, and writes a table of them by name.

    python benchmarks/trainer_tests/run.py CHECKOUT --plans "dp=2; dp=2,zero=3; tp=2" --json NAME.json

CHECKOUT is a checkout of huggingface/transformers, of which the folder `tests` is read. A test applies where it passes here
with transformers' own Trainer in one process. Then all ranks run it at the same time, in directories that they share.
What the table has already is not run again; `--seconds` ends a run between two tests, for the next one to go on.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import itertools
import json
import os
import re
import shutil
import sys
import tempfile
import time
import types
import unittest
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import meshwright as mw

MODULE = "tests.trainer.test_trainer"
GROUP = 12
"""Tests that one start of ranks runs at most [count]."""
_REFUSAL = re.compile(r"^meshwright\.errors\.(ApplyError|ConfigError): ", re.MULTILINE)


def all_tests(checkout: str) -> list[str]:
    """Return the names of all tests, class and method."""
    module = _import(checkout)
    suites = unittest.defaultTestLoader.loadTestsFromModule(module)
    return [test.id().removeprefix(f"{MODULE}.") for suite in suites for test in suite]


def run_tests(checkout: str, names: list[str], plan: str | None, base: str, log: str, until: float) -> int:
    """Run tests on this rank until one fails, or the time is over; write each one's outcome; return how many were run.

    After a refusal that is the same on all ranks they go on. What fails after one is noted as "again", for new ranks.
    """
    world = mw.join_world()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    _share_directories(base)
    if plan is not None:
        _use_plan(plan)
    module = _import(checkout)
    if (
        world.rank
    ):  # transformers gives the state of callbacks to the rank that saves alone, and a resumed run reads it on all
        module.TrainerIntegrationCommon.check_trainer_state_are_the_same = lambda *args: None
        _leave_out_assertions()
    _rewrite_once(module.TrainerIntegrationCommon, world)
    return run_in_turn(
        names,
        lambda name: _run_one(module, name),
        lambda number: _share_directories(f"{base}/{number}"),
        log=log,
        until=until,
    )


def run_in_turn(
    names: list[str],
    run_one: Callable[[str], tuple[str, str]],
    prepare: Callable[[int], None],
    *,
    log: str,
    until: float,
    goes_on: Callable[[str], Any] = _REFUSAL.search,
) -> int:
    """Run tests on this rank as `run_tests` does.

    Args:
        names: The tests.
        run_one: name -> the test's outcome and a text.
        prepare: Called with a test's number before it.
        log: Where outcomes are noted.
        until: The time after which no test begins [s].
        goes_on: Tells of a failure's text, alike on all ranks, whether other tests may follow in the same ranks.

    Returns:
        How many were run.
    """
    world = mw.join_world()
    has_refused = False
    for number, name in enumerate(names):
        prepare(number)
        _note(f"{log}.{world.rank}", name, "hung", "")
        kind, text = run_one(name)
        told = [(kind, text, time.time())]
        if world.world_size > 1:
            told = [tuple(each) for each in world.default_group.all_gather_json(told[0])]
        is_refused = all(each[0] == "failed" and goes_on(each[1]) for each in told)
        is_refused = is_refused and len({each[1] for each in told}) == 1
        is_bad = any(each[0] not in ("passed", "skipped") for each in told)
        _note(f"{log}.{world.rank}", name, "again" if has_refused and is_bad and not is_refused else kind, text)
        has_refused |= is_refused
        if world.world_size > 1 and is_bad and not is_refused:
            return number + 1  # what it has left on the ranks belongs to no other test
        if told[0][2] > until:
            return number + 1
    return len(names)


def _note(path: str, name: str, kind: str, text: str) -> None:
    with Path(path).open("a") as file:
        file.write(json.dumps([name, kind, text]) + "\n")


def _import(checkout: str) -> Any:
    if checkout not in sys.path:
        sys.path.insert(0, checkout)
    from transformers import testing_utils

    for name in ("require_sentencepiece", "require_tokenizers"):  # of whole classes, which mostly train on numbers
        setattr(testing_utils, name, lambda test: test)
    for node in ast.walk(ast.parse(Path(checkout, *MODULE.split(".")).with_suffix(".py").read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("transformers"):
            with contextlib.suppress(ModuleNotFoundError):
                source = importlib.import_module(node.module)
                # Tests may be of another version: what uses a missing name is skipped, or fails in one process too.
                for name in (alias.name for alias in node.names):
                    if not hasattr(source, name):
                        setattr(source, name, unittest.skip(f"{name} is not in the installed version"))
    return importlib.import_module(MODULE)


def _run_one(module: Any, name: str) -> tuple[str, str]:
    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromName(name, module).run(result)
    if result.skipped:
        return "skipped", result.skipped[0][1]
    wrong = [*result.errors, *result.failures]
    return ("failed", wrong[0][1][-600:]) if wrong else ("passed", "")


def _use_plan(plan: str) -> None:
    from meshwright.integrations.hf_trainer import Trainer

    class Planned(Trainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{"plan": plan, **kwargs})

    # Only now: transformers puts another module object in its place when its Trainer is first imported.
    for module in ("transformers", "transformers.trainer"):
        sys.modules[module].Trainer = Planned  # type: ignore[attr-defined]


def _rewrite_once(tests: Any, world: Any) -> None:
    """Have a checkpoint that tests rewrite be rewritten by one rank: it deletes the files that another would read."""
    rewrite = tests.convert_to_sharded_checkpoint

    def on_one_rank(*args: Any, **kwargs: Any) -> None:
        if world.rank == 0:
            rewrite(*args, **kwargs)
        if world.world_size > 1:
            world.default_group.barrier()

    tests.convert_to_sharded_checkpoint = on_one_rank


def _leave_out_assertions() -> None:
    """Have a rank that does not log or save run all of a test, and judge nothing: tests look at what one rank has."""
    for name in (
        "Equal",
        "In",
        "True",
        "False",
        "AlmostEqual",
        "ListEqual",
        "DictEqual",
        "Greater",
        "Less",
        "NotIn",
        "NotEqual",
    ):
        setattr(unittest.TestCase, f"assert{name}", lambda *args, **kwargs: None)


def _share_directories(base: str) -> None:
    """Have temporary directories be the same on all ranks, and stay until all tests are over."""
    count = itertools.count()

    def make(suffix: Any = None, prefix: Any = None, dir: Any = None) -> str:
        path = f"{base}/{next(count)}"
        os.makedirs(path, exist_ok=True)
        return path

    if not hasattr(os, "makedirs_of_one"):
        os.makedirs_of_one = os.makedirs  # type: ignore[attr-defined]
    os.makedirs = lambda name, mode=0o777, exist_ok=True: os.makedirs_of_one(name, mode, exist_ok=True)
    tempfile.mkdtemp = make
    tempfile.TemporaryDirectory.cleanup = lambda self: None  # type: ignore[method-assign]
    tempfile.TemporaryDirectory._cleanup = classmethod(lambda cls, *a, **k: None)  # type: ignore[attr-defined]
    from transformers import testing_utils

    kept = types.SimpleNamespace(**vars(shutil))
    kept.rmtree = lambda *a, **k: None
    testing_utils.shutil = kept


def run_all(
    checkout: str,
    names: list[str],
    plan: str | None,
    keep: Callable[[Any], Any],
    *,
    known: dict[str, tuple[str, str]],
    seconds: float,
    limit_s: float,
    tests: Callable[..., int] = run_tests,
    group: int = GROUP,
) -> dict[str, tuple[str, str]]:
    """Return each test's outcome, the worst of all ranks; those that are known already stay."""
    num_ranks = 1 if plan is None else mw.Plan.parse(plan).num_ranks
    found = dict(known)
    left = [name for name in names if name not in found]
    end = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as base:
        for start in itertools.count():
            if not left or time.monotonic() > end:
                return found
            log = f"{base}/log{start}"
            until = time.time() + end - time.monotonic()
            try:
                mw.launch(
                    *(tests, num_ranks, checkout, left[:group], plan, f"{base}/dirs{start}", log, until),
                    timeout_s=limit_s,
                )  # fmt: skip
            except Exception as error:  # a test's own, or of a rank that waits for the one that failed
                print(f"  ranks ended: {str(error).splitlines()[0][:150]}", flush=True)
            told = _read_outcomes(Path(base).glob(f"log{start}.*"))
            if not told:
                print(f"{plan or 'one process'}: the ranks did not start; {len(left)} tests are left", flush=True)
                return found
            found |= {name: outcome for name, outcome in told.items() if outcome[0] != "again"}
            keep(found)
            left = [name for name in left if name not in found]
            print(f"{plan or 'one process'}: {len(found)} of {len(names)}", flush=True)
    return found


def _read_outcomes(logs: Iterable[Path]) -> dict[str, tuple[str, str]]:
    """Return each test's outcome, the worst of all ranks."""
    order = ("passed", "skipped", "hung", "failed", "again")
    told: dict[str, tuple[str, str]] = {}
    for path in logs:
        last = {name: (kind, text) for name, kind, text in map(json.loads, path.read_text().splitlines())}
        for name, outcome in last.items():
            if name not in told or order.index(outcome[0]) > order.index(told[name][0]):
                told[name] = outcome
    return told


def options() -> argparse.ArgumentParser:
    """Return the options of a run of another project's tests under plans."""
    parser = argparse.ArgumentParser()
    parser.add_argument("checkout")
    parser.add_argument("--plans", default="dp=2; dp=2,zero=3; tp=2")
    parser.add_argument("--json", required=True)
    parser.add_argument("--again", action="store_true", help="run again what has not passed")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no test after so long")
    parser.add_argument("--limit", type=float, default=30.0, help="how long a rank waits for another in a test [s]")
    return parser


def main() -> None:
    parser = options()
    parser.add_argument("--only", default="", help="tests whose name has this text")
    parser.add_argument("--names", help="a file with the names of tests to run, one a line")
    given = parser.parse_args()
    checkout = str(Path(given.checkout).resolve())
    path = Path(given.json)
    table: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    if "transformers" not in table:
        names = [name for name in mw.launch(all_tests, 1, checkout)[0] if given.only in name]
        table["transformers"] = run_all(
            checkout, names, None, lambda found: None, known={}, seconds=given.seconds, limit_s=given.limit
        )
        path.write_text(json.dumps(table, indent=1))
    applying = [
        name for name, outcome in table["transformers"].items() if outcome[0] == "passed" and given.only in name
    ]
    if given.names:
        wanted = Path(given.names).read_text().split()
        applying = [name for name in applying if name in wanted]
    for plan in (text.strip() for text in given.plans.split(";")):

        def keep(found: Any, plan: str = plan) -> None:
            table[plan] = found
            path.write_text(json.dumps(table, indent=1))

        known = table.get(plan, {})
        if given.again:
            known = {name: outcome for name, outcome in known.items() if outcome[0] == "passed"}
        table[plan] = run_all(checkout, applying, plan, keep, known=known, seconds=given.seconds, limit_s=given.limit)
        print(plan, sum(kind == "passed" for kind, _ in table[plan].values()), "of", len(applying))


if __name__ == "__main__":
    main()
