"""Our shared-memory backend against gloo, Open MPI and plain copies: same processes, blocks that alternate, one thread a rank.

    python benchmarks/transport/bench.py --out benchmarks/transport/results/NAME.json

A block is as many calls as take some 60 ms; its figure is the time of the slowest rank over the number of calls. The sides of a
pair follow each other, and who goes first alternates; ratios are taken pair by pair. Against gloo both groups lie over ranks that
`mw.launch` started; against Open MPI, mpirun starts the ranks, and they join a group of torch.distributed besides.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import blocks
import psutil
import tables

import meshwright as mw

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from surroundings import environment  # noqa: E402

KIB, MIB = 2**10, 2**20
ALL_REDUCE = [("all_reduce", num_bytes) for num_bytes in (KIB, 64 * KIB, MIB, 16 * MIB)]
OTHERS = [
    *(
        (op, size)
        for op in ("all_gather_into_tensor", "reduce_scatter_tensor", "broadcast")
        for size in (64 * KIB, MIB)
    ),
    ("barrier", 0),
    ("send_recv", MIB),
]
# Shared memory alone, and a rank that waits lets another run: with more ranks than cores nothing else is fair.
MPI_COMMON = {"pml": "ob1", "btl": "self,sm", "mpi_yield_when_idle": "1"}
MPI_PEERS = {
    "openmpi": {},  # as it comes: large messages by cross-memory attach, where the kernel allows that
    "openmpi-nocma": {"smsc": "^cma"},  # everything through the shared buffer, as any algorithm without that call must
}
STOP_GRACE_S = 10.0
PR_SET_PDEATHSIG = 1
PRCTL = ctypes.CDLL(None).prctl if sys.platform == "linux" else None
QUIET_SHARE = 0.02


def launched(settings: dict[str, Any], num_ranks: int, deadline_s: float) -> dict[str, Any]:
    """Run the cases on ranks of `mw.launch`."""
    with _deadline(deadline_s):
        timeout_s = settings["timeout_s"]
        return mw.launch(
            blocks.compare_on_rank,
            num_ranks,
            settings,
            threads_per_rank=1,
            timeout_s=timeout_s,
            stop_grace_s=STOP_GRACE_S,
        )[0]


@contextlib.contextmanager
def _deadline(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the main thread when the time is over; the launch then ends its ranks."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"the ranks were not done within {seconds:g} s; see --deadline-s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def mpirun_command(peer: str, num_ranks: int, deadline_s: float) -> list[str]:
    """Return the command line up to the program."""
    command = ["--allow-run-as-root", "-n", str(num_ranks), "--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"]
    command += ["--timeout", str(round(deadline_s))]  # mpirun's own limit holds where this process is killed
    for name, value in {**MPI_COMMON, **MPI_PEERS[peer]}.items():
        command += ["--mca", name, value]
    return ["mpirun", *command]


def under_mpirun(settings: dict[str, Any], num_ranks: int, deadline_s: float) -> dict[str, Any]:
    """Run the cases on ranks of mpirun."""
    command = mpirun_command(settings["peer"], num_ranks, deadline_s)
    command[0] = str(Path(sys.executable).parent / "mpirun")  # the wheel's, whatever else is on the PATH
    # Open MPI's sockets lie in TMPDIR, and their names must be short.
    with tempfile.TemporaryDirectory(prefix="mpi") as folder:
        given, result = Path(folder, "settings.json"), Path(folder, "result.json")
        given.write_text(json.dumps(settings))
        program = [sys.executable, "-m", "mpi4py", str(HERE / "mpi_ranks.py"), str(given), str(result)]
        environment = {**os.environ, "TMPDIR": folder, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            [*command, *program],
            env=environment,
            stdin=subprocess.DEVNULL,
            preexec_fn=_stop_with_parent,  # noqa: PLW1509 - it takes no lock: one system call, found beforehand
        )
        try:
            code = process.wait(timeout=deadline_s + STOP_GRACE_S)
        finally:
            _end(process)
        if code or not result.exists():
            raise RuntimeError(f"mpirun ended with {code}; what the ranks said stands above")
        return {**json.loads(result.read_text()), "mpirun": mpirun_command(settings["peer"], num_ranks, deadline_s)}


def _stop_with_parent() -> None:
    """Have the kernel ask mpirun to stop where this process is killed; runs in the child."""
    if PRCTL is not None:
        PRCTL(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Leave nothing of an mpirun behind: ask it first, for it knows its ranks; then end what is still there, by id."""
    if process.poll() is not None:
        return
    ranks = psutil.Process(process.pid).children(recursive=True)
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=STOP_GRACE_S)
    for rank in ranks:
        with contextlib.suppress(psutil.NoSuchProcess):
            rank.kill()
    process.kill()
    process.wait()


class OthersShare:
    """How much of the cores others used meanwhile: with two ranks on two cores, hardly anything spoils a figure sooner."""

    def __init__(self) -> None:
        self._start_s, self._busy_s, self._own_s = time.perf_counter(), self._busy(), self._own()

    @staticmethod
    def _busy() -> float:
        times = psutil.cpu_times()
        return sum(times) - times.idle - getattr(times, "iowait", 0.0)

    @staticmethod
    def _own() -> float:
        both = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return sum(usage.ru_utime + usage.ru_stime for usage in both)

    def share(self) -> float:
        """Return it, 0 to 1; to be called when the children have ended, for the system counts them only then."""
        available_s = (time.perf_counter() - self._start_s) * (os.cpu_count() or 1)
        return (self._busy() - self._busy_s - self._own() + self._own_s) / available_s


def measure(arguments: argparse.Namespace) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the cases with their samples, and how each set of ranks was started."""
    rows: list[dict[str, Any]] = []
    starts = []
    for num_ranks in arguments.ranks:
        for peer in arguments.peers:
            cases = ALL_REDUCE if peer in MPI_PEERS else [*ALL_REDUCE, *OTHERS]
            settings = {
                "left": arguments.left,
                "peer": peer,
                "cases": [case for case in cases if case[0] in arguments.ops],
                "blocks": arguments.blocks,
                "block_s": arguments.block_ms / 1e3,
                "timeout_s": arguments.timeout_s,
            }
            if not settings["cases"]:
                continue
            run = under_mpirun if peer in MPI_PEERS else launched
            others, start = OthersShare(), time.perf_counter()
            found = run(settings, num_ranks, arguments.deadline_s)
            share = others.share()
            rows += [{"ranks": num_ranks, "left": arguments.left, "peer": peer, **row} for row in found.pop("rows")]
            took_s = time.perf_counter() - start
            starts.append({"ranks": num_ranks, "peer": peer, "others_share": share, "took_s": took_s, **found})
            warning = "; too much for a result" if share > QUIET_SHARE else ""
            print(
                f"{num_ranks} ranks against {peer}: {took_s:.0f} s, others used {max(0, share):.1%} of the cores{warning}",
                flush=True,
            )
    return rows, starts


def parse() -> argparse.Namespace:
    every_op = list(dict.fromkeys(op for op, _ in [*ALL_REDUCE, *OTHERS]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--peers", nargs="+", choices=["gloo", *MPI_PEERS], default=["gloo", "openmpi"])
    parser.add_argument("--ops", nargs="+", choices=every_op, default=every_op)
    parser.add_argument("--left", choices=["shm", "gloo"], default="shm", help="gloo: to try the benchmark itself")
    parser.add_argument("--blocks", type=int, default=30, help="blocks of each side and case")
    parser.add_argument("--block-ms", type=float, default=60.0, help="what a block should take")
    parser.add_argument("--quick", action="store_true", help="6 blocks of 20 ms: a look, no result")
    parser.add_argument("--timeout-s", type=float, default=60.0, help="how long one exchange may wait")
    parser.add_argument("--deadline-s", type=float, default=900.0, help="how long one set of ranks may take")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.blocks, arguments.block_ms = 6, 20.0
    return arguments


def main() -> None:
    arguments = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that what it started is ended
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    about = environment()
    rows, starts = measure(arguments)
    lines = [line for row in rows for line in tables.comparisons(row)]
    print(tables.table(lines, arguments.left))
    options = {**vars(arguments), "out": None}
    everything = {"options": options, "environment": about, "starts": starts, "summary": lines, "cases": rows}
    arguments.out.write_text(json.dumps(everything, indent=1))


if __name__ == "__main__":
    main()
