"""Fuzzing of everything that a user or a launcher hands to `meshwright`: each input is an answer or an error, never a traceback.

    python -m benchmarks.faults.fuzz_inputs --count 20000 --out benchmarks/faults/results/fuzz_inputs.json

Parts of a run, `--first 0 --count 5000`, `--first 5000 --count 5000` and so on, go into one file. A case is its number:
`--first 17 --count 1 --show` repeats the eighteenth. Cases run in this process, through the command's own `main`, with ranks
replaced by nothing; `--commands N` of those that end in an error run again as processes. A finding is a traceback, an
exit code outside of the contract, a raw control character in what is shown, or more than two seconds.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import importlib
import io
import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from benchmarks.faults.fuzz_cases import Case, Inputs

from meshwright import cli
from meshwright.train import launcher

CODES = {0, 1, 2, 3, 10, 11, 12, 13, 14, 15, 16, 75, 130}
"""Of the contract; 1 is what `verify` says of a plan that is not equal [exit code]."""
LIMIT_S = 2.0
TORCH_S = 3.0
"""Processor time of `import torch`, which a process of its own may need as well [s]."""
MEMORY_BYTES = 6 * 2**30
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class TooSlowError(BaseException):
    """Two seconds are over; derived so that no handler of errors takes it."""


@contextlib.contextmanager
def limited(case: Case) -> Iterator[None]:
    """Set a case's arguments, variables and time, and put back what was."""

    def over(_number: int, _frame: object) -> None:
        raise TooSlowError

    arguments, variables = sys.argv, dict(os.environ)
    sys.argv = ["meshwright", *case.arguments]
    os.environ.update({name: text.replace("\0", "").encode("utf-8", "surrogatepass").decode("utf-8", "surrogateescape")
                       for name, text in case.variables.items()})  # fmt: skip
    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, 5 * LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        sys.argv = arguments
        os.environ.clear()
        os.environ.update(variables)


def run_here(case: Case) -> tuple[int | None, list[str], float]:
    """Run a case in this process; return its exit code, findings and processor time [s]."""
    shown = io.StringIO()
    found: list[str] = []
    code: int | None = 0
    begin, begin_wall = time.process_time(), time.monotonic()
    try:
        with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown), limited(case):
            cli.main()
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else 0 if left.code is None else 1
    except TooSlowError:
        code = None
        found.append(f"over {5 * LIMIT_S:g} s")
    except BaseException:
        code = None
        found.append("traceback: " + traceback.format_exc()[-1500:])
    seconds, wall = time.process_time() - begin, time.monotonic() - begin_wall
    if not found and min(seconds, wall) > LIMIT_S:
        found.append(f"{seconds:.1f} s")
    if match := _CONTROL.search(shown.getvalue()):
        found.append(
            f"shows the control character {match[0]!r}: {shown.getvalue()[max(0, match.start() - 40) :][:80]!r}"
        )
    if code is not None and code not in CODES:
        found.append(f"exit code {code}")
    return code, found, seconds


def run_command(case: Case) -> list[str]:
    """Run a case as a process of its own; return its findings."""
    variables = {name: text.replace("\0", "").encode("utf-8", "surrogatepass") for name, text in case.variables.items()}
    environment = {**{os.fsencode(name): os.fsencode(text) for name, text in os.environ.items()},
                   **{name.encode(): text for name, text in variables.items()}}  # fmt: skip
    arguments = [argument.encode("utf-8", "surrogatepass") for argument in case.arguments]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    try:
        ran = subprocess.run(
            [sys.executable, "-m", "meshwright", *arguments],
            env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=30, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return ["over 30 s"]
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    shown = (ran.stdout + ran.stderr).decode(errors="replace")
    found = [f"exit code {ran.returncode}"] if ran.returncode not in CODES else []
    if "Traceback (most recent call last)" in shown:
        found.append(f"traceback: {shown[-600:]}")
    if match := _CONTROL.search(shown):
        found.append(f"shows the control character {match[0]!r}")
    return found + ([f"{seconds:.1f} s of processor time"] if seconds > LIMIT_S + TORCH_S else [])


def main() -> int:
    """Run the cases, write the result, and return 0 where nothing was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--commands", type=int, default=200, help="cases that run as processes, too")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--show", action="store_true", help="write each finding as it is met")
    wanted = parser.parse_args()
    out = None if wanted.out is None else wanted.out.resolve()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    # What starts ranks is left out: everything up to it is tried.
    launcher._Run.execute = lambda self, **_: 0  # type: ignore[method-assign] # pyright: ignore[reportPrivateUsage]
    launcher.train_beside = lambda config, end: 0  # type: ignore[assignment]
    for module in ("checkpoint.listing", "checkpoint.verification", "describe.describing"):
        importlib.import_module(f"meshwright.{module}")  # with torch, which takes seconds that are no input's
    cli.app = typer.main.get_command(cli.app)  # pyright: ignore[reportAttributeAccessIssue] - built once, not for each case
    codes: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    findings: list[dict[str, Any]] = []
    slowest, num_commands, begin = 0.0, 0, time.monotonic()
    every = max(1, wanted.count // max(1, wanted.commands))
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        os.chdir(folder)
        inputs = Inputs(Path(folder))
        for number in range(wanted.first, wanted.first + wanted.count):
            case = inputs.make(number)
            code, found, seconds = run_here(case)
            slowest = max(slowest, seconds)
            codes[case.entry][str(code)] += 1
            if wanted.commands and number % every == 0 and (code or case.arguments[0] != "train"):
                num_commands += 1
                found += [f"as a process: {text}" for text in run_command(case)]
            if found:
                shown = [argument[:200] for argument in case.arguments]
                findings.append({"number": number, "entry": case.entry, "arguments": shown, "found": found})
                if wanted.show:
                    print(
                        number,
                        case.entry,
                        shown,
                        {k: v[:80] for k, v in case.variables.items()},
                        *found,
                        sep="\n  ",
                        flush=True,
                    )
        os.chdir("/")
    result = {
        "inputs": wanted.count,
        "first": wanted.first,
        "as_processes": num_commands,
        "findings": findings,
        "slowest_s": round(slowest, 3),
        "exit_codes": {entry: dict(sorted(counts.items())) for entry, counts in sorted(codes.items())},
        "seconds": round(time.monotonic() - begin, 1),
        "python": sys.version.split()[0],
    }
    if out is not None:
        parts = json.loads(out.read_text())["parts"] if out.exists() else []
        parts = [part for part in parts if part["first"] != wanted.first]
        parts = sorted([*parts, result], key=lambda part: part["first"])
        out.write_text(json.dumps({"parts": parts}, indent=1) + "\n")
    print(
        json.dumps({name: value for name, value in result.items() if name != "findings"}, indent=1),
        f"{len(findings)} findings",
    )
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
