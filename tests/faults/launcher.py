"""A launching process of its own: ``python -m tests.faults.launcher JSON``. Prints a JSON line per event and at the end.

It imports no torch, which the jobs do in the ranks.
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

from meshwright.errors import exit_code_of
from meshwright.ranks.launch import launch


def say(**line: Any) -> None:
    print(json.dumps(line), flush=True)


def call(job: str, *args: Any) -> Any:
    """In a rank: do a job."""
    return getattr(importlib.import_module("tests.faults.jobs.rank_jobs"), job)(*args)


def main() -> int:
    request = json.loads(sys.argv[1])
    say(started=True)
    try:
        results = launch(
            call,
            request.get("num", 2),
            request["job"],
            *request.get("args", []),
            on_event=lambda rank, event: say(rank=rank, event=event),
            **request.get("options", {}),
        )
    except BaseException as error:
        say(error=type(error).__name__, text=str(error), notes=getattr(error, "__notes__", []))
        return exit_code_of(error)
    say(results=results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
