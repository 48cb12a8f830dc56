"""Program of a rank on one of several hosts: ``python -m tests.faults.jobs.host_ranks WHAT ...``; prints JSON lines.

plans PLAN ...            trains under each plan beside one process in float64, and says which groups share memory
start INDEX COUNT SOURCE ...   starts a host's ranks with a job's variables, as a shell script or srun would
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from tests.faults.jobs.shm_jobs import Me

WIDTH = 16
SAMPLES = 7
NUM_STEPS = 2
_SET_NAME = 15  # PR_SET_NAME
LOST_S = 60.0
"""How long an exchange of a zygote's ranks may wait [s]."""
NAMESPACES = ("net", "uts", "pid", "mnt")  # the last one takes the way to the others
_marks: dict[str, Any] = {}
"""What every line has."""


def say(**line: Any) -> None:
    sys.stdout.write(json.dumps(_marks | line) + "\n")  # in one piece: ranks share the stream
    sys.stdout.flush()


def build() -> Any:
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up, self.down = (
                nn.LayerNorm(WIDTH),
                nn.Linear(WIDTH, 4 * WIDTH),
                nn.Linear(4 * WIDTH, WIDTH),
            )

        def forward(self, x: Any) -> Any:
            return x + self.down(torch.tanh(self.up(self.norm(x))))

    return nn.Sequential(nn.Linear(5, WIDTH), *(Block() for _ in range(4)), nn.Linear(WIDTH, 3)).double()


def loss_fn(outputs: Any, batch: Any) -> Any:
    return (outputs - batch[1]).square().mean()


def batch_of(step: int) -> Any:
    import torch

    generator = torch.Generator().manual_seed(step)
    sizes = torch.arange(1, SAMPLES + 1, dtype=torch.float64).unsqueeze(1)  # a missing term cannot look right
    return (
        torch.randn(SAMPLES, 5, generator=generator, dtype=torch.float64) * sizes,
        torch.randn(SAMPLES, 3, generator=generator, dtype=torch.float64),
    )


def compare_plans(plans: Sequence[str]) -> int:
    """Train under each plan; say whether it equals one process, and what its groups exchange through."""
    import meshwright as mw
    from meshwright import testing
    from meshwright.ranks.join import join_world

    world = join_world(timeout_s=60.0)
    batches = [batch_of(step) for step in range(NUM_STEPS)]
    expected = testing.oracle_steps(build, batches, loss_fn)
    for text in plans:
        plan, began = mw.Plan.parse(text), time.monotonic()
        before = {key: entry.num_calls for key, entry in world.ledger.entries.items()}
        problem = ""
        try:
            tolerance = (
                1e-11 if plan.compress == "none" else 0.1
            )  # int8 gradients are other numbers, and not other ones by much
            testing.assert_parity(testing.plan_steps(build, plan, batches, loss_fn), expected, tolerance)
        except AssertionError as error:
            problem = str(error)
        axes = {key[1] for key, entry in world.ledger.entries.items() if entry.num_calls > before.get(key, 0)}
        say(
            plan=text,
            rank=world.rank,
            equal=not problem,
            problem=problem,
            tp=plan.mesh.group("tp", rank=world.rank) if plan.tp > 1 else (),
            axes=sorted(axes),
            seconds=round(time.monotonic() - began, 2),
        )
    groups = [(group.ranks, group.shares_memory) for group in world.subgroups.values() if group.size > 1]
    with open("/proc/self/maps") as maps:
        num_segments = len({line.split()[4] for line in maps if "memfd:meshwright" in line})
    say(rank=world.rank, groups=groups, world_shares_memory=world.default_group.shares_memory, segments=num_segments)
    return 0


def train_until_lost(plan: str) -> int:
    """Train until an exchange fails; say which rank was missing, and who has told it."""
    import itertools

    import meshwright as mw
    from meshwright.ranks.join import join_world

    world = join_world(timeout_s=60.0)
    try:
        with world.sharing_failures(), mw.apply_plan(build, plan, loss_fn=loss_fn, seed=0) as model:
            for step in itertools.count():
                model.step(mw.split_batch(batch_of(step), model))
                if step == 3:
                    say(rank=world.rank, trains=True)
    except Exception as error:
        say(rank=world.rank, error=type(error).__name__, peer=getattr(error, "peer", None), text=str(error))
        return 12
    return 0


def be_on_host(me: Me, firsts: list[int], plan: str, endless: str, variables: dict[str, str]) -> None:
    """Be one of a zygote's ranks on a host: compare a plan, then train under another one until an exchange fails.

    Args:
        me: The rank.
        firsts: The first process of each host.
        plan: The plan that is compared.
        endless: The plan of the training that has no end; one without tp costs no second search for a layout.
        variables: What a job sets for all its ranks.
    """
    from tests.faults.jobs.shm_jobs import die_with_parent

    from meshwright.ranks.join import join_world

    _marks["group"] = me.group
    count = me.size // len(firsts)
    enter_host(firsts[me.rank // count])
    child = os.fork()  # which is in the host's namespace of processes; this one is not
    if child:
        os._exit(abs(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))
    die_with_parent()
    place = {"RANK": me.rank, "WORLD_SIZE": me.size, "LOCAL_RANK": me.rank % count, "LOCAL_WORLD_SIZE": count}
    os.environ.update({name: str(value) for name, value in place.items()} | variables)
    ctypes.CDLL(None).prctl(_SET_NAME, f"rank{me.rank}".encode())
    join_world(timeout_s=LOST_S)
    code = compare_plans([plan]) or train_until_lost(endless)
    sys.stdout.flush()
    os._exit(code)


def enter_host(first: int) -> None:
    """Make this process one of a host, but for its number, which the processes that it forks have there alone."""
    here, libc = os.getcwd(), ctypes.CDLL(None, use_errno=True)
    files = [os.open(f"/proc/{first}/ns/{name}", os.O_RDONLY) for name in NAMESPACES]
    for file in files:
        if libc.setns(file, 0) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        os.close(file)
    os.chdir(here)


def serve(index: int, count: int) -> int:
    """Fork ranks of one of two hosts, which run `meshwright`, for each request; say with what they have ended."""
    import torch._dynamo  # noqa: F401 - as everything that the ranks need: once for all of them

    import meshwright.train.session  # noqa: F401

    say(ready=index)
    for line in sys.stdin:
        request = json.loads(line)
        children = []
        for local in range(count):
            if child := os.fork():
                children.append(child)
            else:
                _run_command(request, index * count + local, local, count)
        say(codes=[os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children])
    return 0


def _run_command(request: dict[str, Any], rank: int, local: int, count: int) -> NoReturn:
    from meshwright import cli

    faulthandler.register(signal.SIGUSR2, all_threads=True)  # where it stands, for whoever looks into a case
    ctypes.CDLL(None).prctl(_SET_NAME, f"rank{rank}".encode())
    os.chdir(request["folder"])
    said = os.open(f"output-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for number in (1, 2):
        os.dup2(said, number)
    place = {"RANK": rank, "WORLD_SIZE": 2 * count, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": count}
    if request["launcher"] == "srun":
        place = _of_srun(rank, local, count)
    os.environ.update({name: str(value) for name, value in (place | request["variables"]).items()})
    sys.argv = ["meshwright", *request["arguments"]]
    code = 0
    try:
        cli.main()
    except SystemExit as leave:
        code = leave.code if isinstance(leave.code, int) else int(leave.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 10
    # What a process does at its end, without the collection of a heap that it shares with the server: a second of each core.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _of_srun(rank: int, local: int, count: int) -> dict[str, Any]:
    place = {"SLURM_PROCID": rank, "SLURM_NTASKS": 2 * count, "SLURM_LOCALID": local}
    return place | {
        "SLURM_NODELIST": "host[0-1]",
        "SLURM_JOB_ID": 4242,
        "SLURM_STEP_TASKS_PER_NODE": f"{count}(x2)",
    }


def start(index: int, count: int, source: str, arguments: Sequence[str]) -> int:
    """Start ranks of one of two hosts with variables as Kubernetes ("env") or srun ("srun") sets them; wait for them."""
    ranks = []
    for local in range(count):
        rank = index * count + local
        if source == "env":
            place = {"RANK": rank, "WORLD_SIZE": 2 * count, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": count}
        else:
            place = _of_srun(rank, local, count)
        variables = os.environ | {name: str(value) for name, value in place.items()}
        ranks.append(subprocess.Popen([sys.executable, *arguments], env=variables))
    codes = [rank.wait() for rank in ranks]
    say(host=index, codes=codes)
    return max(abs(code) for code in codes)


def main() -> int:
    what, *rest = sys.argv[1:]
    if what == "plans":
        return compare_plans(rest)
    if what == "serve":
        return serve(int(rest[0]), int(rest[1]))
    return start(int(rest[0]), int(rest[1]), rest[2], rest[3:])


if __name__ == "__main__":
    sys.exit(main())
