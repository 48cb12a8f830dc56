"""Events of the campaign: which are drawn for a seed, and what must come of each."""

from __future__ import annotations

import random
from typing import Any

DEATHS = ("SIGKILL", "SIGSEGV", "SIGABRT", "SIGBUS", "os._exit(0)", "sys.exit(3)", "os.abort()")
ERRORS = ("raise ValueError", "raise unpicklable", "raise MemoryError")
HANGS = ("SIGSTOP", "sleep", "hold the interpreter")
STOPS = ("launcher SIGTERM", "launcher SIGINT", "launcher SIGHUP", "SIGTERM", "SIGINT", "pulse")
LOCAL_KINDS = {
    **dict.fromkeys(DEATHS, 6),
    **dict.fromkeys((f"forward {kind}" for kind in ("os._exit(0)", "os.abort()")), 2),
    "birth SIGKILL": 10,
    "two SIGKILL": 3,
    **dict.fromkeys(ERRORS, 4),
    **dict.fromkeys((f"forward {kind}" for kind in ERRORS), 2),
    **dict.fromkeys(HANGS, 2),
    "forward sleep": 1,
    **dict.fromkeys(STOPS, 2),
    "launcher SIGINT twice": 1,
}
"""Kind of event -> how often."""
COMMAND_KINDS = {**LOCAL_KINDS, "full disk": 5, "no descriptors": 2}
JOB_KINDS = {
    **dict.fromkeys((*DEATHS, *ERRORS), 4),
    **dict.fromkeys(HANGS, 2),
    "agent SIGKILL": 4,
    "agent SIGTERM": 3,
}
OWN_KINDS = {
    "launcher SIGKILL": 6,
    "SIGKILL": 4,
    "raise ValueError": 2,
    "os._exit(0)": 2,
    "SIGSTOP": 1,
    "launcher SIGTERM": 2,
}
WIRE_KINDS = {"wire down": 4, "wire lose": 4}
LOSS = "wire loss"
"""A tenth of a host's packets is lost for a while; the run goes on, and is asked to stop afterwards."""
LOSS_S = 6.0
LOCAL_PLANS = (
    "dp=2",
    "dp=3",
    "dp=4",
    "dp=2,zero=1",
    "dp=2,zero=2",
    "dp=3,zero=3",
    "tp=2",
    "pp=2,micro_batches=2",
    "dp=2,tp=2",
)
HOST_PLANS = ("dp=4", "dp=4,zero=3", "dp=2,tp=2", "pp=4,micro_batches=4", "tp=2,pp=2,micro_batches=2")
QUICK_S = 60.0
"""Limit of an exchange where no event waits for it [s]."""
HANG_S = 4.0


def draw(seed: int, entry: str, kind: str = "") -> dict[str, Any]:
    """Return the event of a seed.

    Args:
        seed: Its number.
        entry: "launch" and "command" are called in the campaign's process, "own" is the command as a process of its own,
            "torchrun" and "hosts" are jobs.
        kind: What happens; "" means that it is drawn too.
    """
    source = random.Random(f"{entry} {seed}")
    if entry in ("launch", "command"):
        plan = source.choice(LOCAL_PLANS)
        kinds = LOCAL_KINDS if entry == "launch" else COMMAND_KINDS
        launcher = entry
    elif entry == "own":
        plan, kinds, launcher = source.choice(LOCAL_PLANS), OWN_KINDS, "own"
    elif entry == "torchrun":
        plan, kinds, launcher = source.choice(("dp=2", "dp=3", "tp=2", "dp=2,zero=3")), JOB_KINDS, "torchrun"
    else:
        plan, launcher = source.choice(HOST_PLANS), source.choice(("torchrun", "env", "srun"))
        kinds = {**JOB_KINDS, **WIRE_KINDS}
    if launcher in ("env", "srun"):  # nobody is there to be killed
        kinds = {kind: often for kind, often in kinds.items() if not kind.startswith("agent")}
    if not _harms_in_forward(plan):
        kinds = {kind: often for kind, often in kinds.items() if not kind.startswith("forward")}
    kind = kind or source.choices(list(kinds), list(kinds.values()))[0]
    num = num_ranks(plan)
    rank = source.randrange(num)
    if kind.startswith(("wire", "agent")) and entry == "hosts":
        rank = source.choice((0, 2))
    return {
        "seed": seed,
        "entry": entry,
        "launcher": launcher,
        "plan": plan,
        "transport": "gloo" if entry == "launch" and source.random() < 0.25 else "shm",
        "ranks": num,
        "kind": kind,
        "rank": rank,
        "second": source.choice([other for other in range(num) if other != rank]),
        "delay_s": round(source.uniform(0.0, 0.5), 4),
    }


def num_ranks(plan: str) -> int:
    """Return the ranks of one of the plans above [count]."""
    found = 1
    for part in plan.split(","):
        name, _, value = part.partition("=")
        found *= int(value) if name in ("dp", "tp", "pp") else 1
    return found


def _harms_in_forward(plan: str) -> bool:
    return plan.startswith("dp=") and "," not in plan


def is_death(kind: str) -> bool:
    return kind.removeprefix("forward ") in DEATHS or kind in ("birth SIGKILL", "two SIGKILL")


def is_hang(kind: str) -> bool:
    return kind.removeprefix("forward ") in HANGS or (kind.startswith("wire") and kind != LOSS)


def is_stop(kind: str) -> bool:
    return kind in STOPS or kind in ("launcher SIGINT twice", LOSS)


def limit_s(kind: str) -> float:
    """Return how long an exchange may wait in an event's run [s]."""
    return HANG_S if is_hang(kind) else QUICK_S


def codes(kind: str) -> tuple[int, ...]:
    """Return with what `meshwright train` may end after an event."""
    if kind == "launcher SIGKILL":
        return (-9,)
    if is_stop(kind):
        return (130, 75) if kind == "launcher SIGINT twice" else (75,)
    if is_hang(kind):
        return (12,)
    if "raise" in kind or "sys.exit" in kind:
        return (10,)
    return {"full disk": (13,), "no descriptors": (2, 13)}.get(kind, (11,))


def guilty(event: dict[str, Any]) -> tuple[int, ...]:
    """Return which ranks may be named; () where none is at fault."""
    kind = event["kind"]
    if is_stop(kind) or kind in ("full disk", "no descriptors", "launcher SIGKILL"):
        return ()
    return (event["rank"], event["second"]) if kind == "two SIGKILL" else (event["rank"],)
