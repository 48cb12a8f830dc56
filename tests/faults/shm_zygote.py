"""A process that has imported torch and forks ranks: ``python -m tests.faults.shm_zygote``. It is told what to do line by line.

A rank costs some milliseconds this way rather than the seconds that torch takes to import, and nothing watches over it but
its peers: there is no launching process that would notice a death first.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import selectors
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import torch  # noqa: F401 - so that no rank has to
from tests.faults.jobs import host_ranks, shm_jobs, shm_lives, shm_places

import meshwright as mw
from meshwright.errors import exit_code_of


class Teller(logging.Handler):
    """Hands on what a rank writes on the log."""

    def emit(self, record: logging.LogRecord) -> None:
        shm_jobs.say(log=record.getMessage(), level=record.levelname)


def run(request: dict[str, Any]) -> None:
    """Be a rank: do the job, and end at once, unless the job is to end as a program does that has come to its end."""
    shm_jobs.die_with_parent()
    errors = os.open(Path(request["place"], f"errors-{request['rank']}"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(errors, 2)
    os.close(errors)
    os.environ.update(request["env"])
    log = logging.getLogger("meshwright")
    log.setLevel(logging.DEBUG)
    log.addHandler(Teller())
    me = shm_jobs.Me(request["group"], request["rank"], request["size"], request["place"], request["timeout_s"])
    shm_jobs.be(me)
    shm_jobs.say(born=os.getpid())
    try:
        module = next(each for each in (shm_jobs, shm_lives, shm_places, host_ranks) if hasattr(each, request["job"]))
        getattr(module, request["job"])(me, **request["args"])
    except Exception as error:
        shm_jobs.say(failed=traceback.format_exc()[-1500:])
        status = exit_code_of(error)
    else:
        status = 0
    if not request["finalizes"]:
        os._exit(status)  # to take down an interpreter that has torch takes longer than most of these tests
    sys.exit(status)


def main() -> None:
    mw.register_shm()
    ranks: dict[int, tuple[int, dict[str, Any]]] = {}
    rest = b""
    with selectors.DefaultSelector() as selector:
        selector.register(0, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fd != 0:
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    pid, request = ranks.pop(key.fd)
                    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                    shm_jobs.say(group=request["group"], rank=request["rank"], exit=status)
                    continue
                part = os.read(0, 1 << 16)
                if not part:
                    for pid, _ in ranks.values():
                        os.kill(pid, signal.SIGKILL)
                    return
                *lines, rest = (rest + part).split(b"\n")
                for line in lines:
                    request = json.loads(line)
                    for module in request["imports"]:  # once, rather than in each rank
                        importlib.import_module(module)
                    pid = os.fork()
                    if pid == 0:
                        # As any program: no file of the zygote's, and nobody reads its input.
                        selector.close()
                        for file in ranks:
                            os.close(file)
                        null = os.open(os.devnull, os.O_RDONLY)
                        os.dup2(null, 0)
                        os.close(null)
                        run(request)
                        return
                    file = os.pidfd_open(pid)
                    ranks[file] = (pid, request)
                    selector.register(file, selectors.EVENT_READ)


if __name__ == "__main__":
    main()
