"""Start and loop of a search for tiny models of a library: a deadline and a bound on memory for each, a row for each."""

from __future__ import annotations

import argparse
import json
import resource
import signal
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

Row = dict[str, Any]

_LIMIT_S = 25
"""For one model: to be found, built, and run once forward and backward [s]."""
_MOST_BYTES = 10 * 2**30
"""Of addresses: a model that wants more is no tiny one [bytes]."""


def prepare() -> None:
    """Have torch compute in float64 on one thread, without warnings, in this process."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)


def begin(about: str | None) -> tuple[argparse.Namespace, list[Row]]:
    """Read the arguments of a search, set torch up for it, and return them with the rows that there are already."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=1e6)
    arguments = parser.parse_args()
    prepare()
    signal.signal(signal.SIGALRM, _late)
    resource.setrlimit(resource.RLIMIT_AS, (_MOST_BYTES, _MOST_BYTES))
    rows = [json.loads(line) for line in arguments.out.read_text().splitlines()] if arguments.out.exists() else []
    return arguments, rows


def find_each(library: str, wanted: Iterable[tuple[str, Callable[[], Row]]], arguments: argparse.Namespace) -> None:
    """Append a row for each name, until the minutes are over: what its search returns, or that it was too late."""
    end = time.monotonic() + 60 * arguments.minutes
    for name, find in wanted:
        if time.monotonic() > end:
            break
        signal.alarm(_LIMIT_S)
        try:
            row = find()
        except TimeoutError as error:
            row = {"type": f"{library}/{name}", "library": library, "problem": str(error)}
        finally:
            signal.alarm(0)
        with arguments.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(name, row["type"], row.get("config"), row.get("seconds"), row.get("problem", ""), flush=True)


def _late(*_: Any) -> None:
    raise TimeoutError(f"no model within {_LIMIT_S} s")
