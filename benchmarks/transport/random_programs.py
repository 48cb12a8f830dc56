"""Random programs of collectives and messages over overlapping groups, for as long as one likes: is any value ever wrong?

    python benchmarks/transport/random_programs.py --seconds 600 --ranks 8 --out benchmarks/transport/results/NAME.json

Every rank derives the same program from a seed, goes through it in its own time and compares every result with what plain
torch computes. A wrong value, an error or a step that does not end prints the seed and where each rank stood, ends with
exit code 1 and leaves no process behind; `--seed N --programs 1` runs that program again. `--prove corrupt` and
`--prove hang` have one rank do something wrong, to show that it is noticed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from surroundings import environment  # noqa: E402

ROOT = HERE.parent.parent


def arguments_of(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--seconds", type=float, default=600.0, help="no program is begun after that long")
    parser.add_argument("--programs", type=int, default=10**9, help="or after so many")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0, help="of the first program; the next ones count on")
    parser.add_argument("--steps", type=int, default=None, help="of each program; 50 to 200 where it is not given")
    parser.add_argument("--backend", default="shm", choices=["shm", "gloo"])
    parser.add_argument("--stall-s", type=float, default=60.0, help="how long one operation may take")
    parser.add_argument("--prove", choices=["corrupt", "hang"], default=None)
    parser.add_argument("--out", type=Path, default=None)
    return parser.parse_args(words)


class Watchdog:
    """Kills the ranks where a program does not end: a rank may be stuck where nothing in it runs any more."""

    def __init__(self, pids: list[int], limit_s: float, progress: str) -> None:
        self._pids = pids
        self._limit_s = limit_s
        self._progress = progress
        self.has_bitten = False

    @contextlib.contextmanager
    def over(self, read: Any) -> Iterator[None]:
        """Watch a block: each rank has to come to another step within the limit."""
        done = threading.Event()
        thread = threading.Thread(target=self._watch, args=(done, read), name="watchdog")
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def _watch(self, done: threading.Event, read: Any) -> None:
        seen, changed_at = read(self._progress), time.monotonic()
        while not done.wait(0.25):
            steps = read(self._progress)
            if steps != seen:
                seen, changed_at = steps, time.monotonic()
            elif time.monotonic() - changed_at > self._limit_s:
                self.has_bitten = True
                for pid in self._pids:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                return


def idle_s() -> float:
    """Return how long this host's cores have done nothing, all together."""
    return psutil.cpu_times().idle


def used_s(pids: list[int]) -> float:
    """Return how long these processes have computed, all together."""
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)


def run_programs(arguments: argparse.Namespace, progress: str) -> dict[str, Any]:
    """Run programs until the time is over or one fails; returns the counts."""
    # Read on import, here and in the ranks.
    os.environ["MESHWRIGHT_TEST_BACKEND"] = arguments.backend
    sys.path.insert(0, str(ROOT))
    from tests.transport import player
    from tests.transport.programs import make_program

    from meshwright.ranks.launch import RankGroup

    found: dict[str, Any] = {"programs": 0, "operations": 0, "checks": 0, "bytes": 0, "seconds": 0.0}
    found |= {"slowest": {"seconds": 0.0}, "failures": []}
    sabotage = None if arguments.prove is None else player.Sabotage(arguments.prove, arguments.ranks - 1, 20)
    begin = time.monotonic()
    with contextlib.ExitStack() as stack:
        group = stack.enter_context(RankGroup(arguments.ranks, threads_per_rank=1, timeout_s=arguments.stall_s))
        # Later than the operation's own timeout and the stacks that ranks print: those say more.
        watchdog = Watchdog(group.pids, 1.5 * arguments.stall_s + 2, progress)
        for seed in range(arguments.seed, arguments.seed + arguments.programs):
            if time.monotonic() - begin > arguments.seconds:
                break
            player.Progress.create(progress, arguments.ranks)
            program_begin, idle_before, own_before = time.monotonic(), idle_s(), used_s(group.pids)
            try:
                with watchdog.over(player.Progress.read):
                    played = group.submit(player.play, seed, arguments.steps, arguments.stall_s, progress, sabotage)
            except Exception as error:
                found["failures"].append(
                    {
                        "seed": seed,
                        "steps_of_ranks": player.Progress.read(progress),
                        "stalled": watchdog.has_bitten,
                        "error": f"{type(error).__name__}: {error}",
                        "notes": getattr(error, "__notes__", []),
                    }
                )
                break
            program = make_program(seed, arguments.ranks, arguments.steps, player.takes)
            took_s = time.monotonic() - program_begin
            if took_s > found["slowest"]["seconds"]:
                # Slow on idle cores is a wake-up that came late; slow on cores that others use, their work.
                cores_s = took_s * (os.cpu_count() or 1)
                found["slowest"] = {
                    "seconds": round(took_s, 2),
                    "seed": seed,
                    "idle_share": round((idle_s() - idle_before) / cores_s, 2),
                    "own_share": round((used_s(group.pids) - own_before) / cores_s, 2),
                }
            found["programs"] += 1
            found["operations"] += len(program.steps)
            found["checks"] += sum(rank.checks for rank in played)
            found["bytes"] += sum(rank.tensor_bytes for rank in played)
            if found["programs"] % 20 == 0:
                print(f"{time.monotonic() - begin:.0f} s: {found['programs']} programs, seed {seed} done", flush=True)
    found["seconds"] = round(time.monotonic() - begin, 2)
    return found


def main(words: list[str] | None = None) -> int:
    arguments = arguments_of(words)
    before = environment()
    names_before = set(os.listdir("/dev/shm"))
    with tempfile.TemporaryDirectory(prefix="random-programs-") as scratch:
        found = run_programs(arguments, os.path.join(scratch, "progress"))
    left = sorted(set(os.listdir("/dev/shm")) - names_before)
    if left:
        found["failures"].append({"error": f"left in /dev/shm: {left}"})
    for failure in found["failures"]:
        print("FAILED:", json.dumps({key: value for key, value in failure.items() if key != "notes"}, indent=1))
        print(*failure.get("notes", []), sep="\n", flush=True)
    settings = {
        name: value for name, value in vars(arguments).items() if name not in ("out", "prove") and value is not None
    }
    record = {"environment": before, "command": sys.argv, "settings": settings, **found}
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps({key: value for key, value in found.items() if key != "failures"}))
    return 1 if found["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
