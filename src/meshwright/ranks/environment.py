"""A rank's place, read from the variables of torchrun, Kubernetes or srun. Pure: no process is touched."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping

from meshwright.errors import ConfigError

__all__: list[str] = []

_ENV_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_SLURM_VARIABLES = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
# Ports for jobs of srun: below the range that Linux hands out for outgoing connections (32768 and up).
_SLURM_FIRST_PORT = 15000
_SLURM_NUM_PORTS = 16000


_MOST = 2**31 - 1
"""Largest number in a variable: what the libraries that read them, too, take [count]."""
_MOST_HOSTS = 100_000
_MOST_SECONDS = 7 * 86400


JOIN_TIMEOUT_VARIABLE = "MESHWRIGHT_JOIN_TIMEOUT_S"
TRANSPORT_VARIABLE = "MESHWRIGHT_TRANSPORT"
_TRANSPORTS = ("shm", "gloo")


def choose_transport(environment: Mapping[str, str]) -> str:
    """Return the backend for CPU tensors: the value of MESHWRIGHT_TRANSPORT, else shm.

    Raises:
        ConfigError: The variable names neither "shm" nor "gloo".
    """
    chosen = environment.get(TRANSPORT_VARIABLE, "") or "shm"
    if chosen not in _TRANSPORTS:
        raise ConfigError(
            f"{TRANSPORT_VARIABLE} is {_shortened(chosen)}, which is not a valid transport",
            fix=f"set it to {' or '.join(_TRANSPORTS)}",
        )
    return chosen


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """One rank's place, as its launcher describes it."""

    source: str
    """Who says so, for messages."""
    rank: int
    world_size: int
    local_rank: int
    local_size: int
    """Ranks on this host, as far as it is known [count]."""
    address: tuple[str, int] | None = None
    """Host and port of the master; None where there is nobody to find."""
    is_one_host: bool = False
    """Whether all ranks are known to be on this host."""
    has_agent_store: bool = False
    """Whether an agent (torchrun's) hosts the store, rather than rank 0."""

    @property
    def is_of_job(self) -> bool:
        """Whether a launcher of others has started this process, as one of its ranks."""
        return self.world_size > 1 or self.address is not None

    @property
    def start_hint(self) -> str:
        """The fix for missing ranks."""
        if self.source == "srun":
            return f"start the program with srun, which starts all {self.world_size} tasks"
        return f"start all {self.world_size} ranks, or unset RANK and WORLD_SIZE to run alone"


ALONE = Place("nothing", 0, 1, 0, 1)


def read_place(environment: Mapping[str, str]) -> Place:
    """Return this process's place.

    Args:
        environment: The environment variables.

    Returns:
        The place; `ALONE` without a launcher's variables.

    Raises:
        ConfigError: A launcher's variables are incomplete, or contradict each other.
    """
    if "RANK" in environment or "WORLD_SIZE" in environment:
        return _from_env(environment)
    if "SLURM_PROCID" in environment:
        return _from_slurm(environment)
    if "MASTER_ADDR" in environment or "MASTER_PORT" in environment:
        return _from_env(environment)
    return ALONE


def read_restart_count(environment: Mapping[str, str]) -> int:
    """Return how often torchrun has started this job's ranks again; 0 where it has not, or did not start them [count].

    Raises:
        ConfigError: The variable is not a number.
    """
    return _number(environment, "TORCHELASTIC_RESTART_COUNT", 0)


def _require(environment: Mapping[str, str], names: tuple[str, ...], source: str, fix: str) -> None:
    missing = [name for name in names if not environment.get(name)]
    if missing:
        there = [f"{name}={environment[name]}" for name in names if environment.get(name)]
        raise ConfigError(
            f"the environment is incomplete: {', '.join(there)} is set as by {source}, "
            f"but {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing",
            fix=fix,
        )


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name)
    if not text and default is not None:
        return default
    try:
        value = int(text or "")
    except ValueError:
        raise ConfigError(f"{name} is {_shortened(text or '')}, which is not a whole number") from None
    if value < 0:
        raise ConfigError(f"{name} is {value}; it must not be negative")
    if value > _MOST:
        raise ConfigError(f"{name} is {value}; it must be at most {_MOST}")
    return value


def read_join_timeout(environment: Mapping[str, str]) -> float:
    """Return how long to wait for the other ranks: MESHWRIGHT_JOIN_TIMEOUT_S, else 60 [s].

    Raises:
        ConfigError: The variable is not a number of seconds.
    """
    text = environment.get(JOIN_TIMEOUT_VARIABLE, "") or "60"
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= _MOST_SECONDS:
        raise ConfigError(
            f"{JOIN_TIMEOUT_VARIABLE} is {text[:60]!r} (rule: a number of seconds, above 0 and at most {_MOST_SECONDS})",
            fix=f"{JOIN_TIMEOUT_VARIABLE}=60",
        )
    return value


def _check_rank(rank: int, world_size: int, names: tuple[str, str]) -> None:
    if rank >= world_size:
        raise ConfigError(
            f"{names[0]} is {rank} but {names[1]} is {world_size}; ranks count from 0 to {world_size - 1}"
        )


def _from_env(environment: Mapping[str, str]) -> Place:
    there = [name for name in _ENV_VARIABLES if environment.get(name)]
    _require(
        environment,
        _ENV_VARIABLES,
        "torchrun or Kubernetes",
        f"start with torchrun, or to run alone: unset {' '.join(there)}",
    )
    rank, world_size = _number(environment, "RANK"), _number(environment, "WORLD_SIZE")
    _check_rank(rank, world_size, ("RANK", "WORLD_SIZE"))
    local_size = _number(environment, "LOCAL_WORLD_SIZE", 1)
    local_rank = _number(environment, "LOCAL_RANK", 0)
    _check_rank(local_rank, max(local_size, local_rank + 1), ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    agent = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Place(
        "torchrun" if "TORCHELASTIC_RUN_ID" in environment else "RANK, WORLD_SIZE",
        rank,
        world_size,
        local_rank,
        max(local_size, local_rank + 1),
        address=(_host(environment), _port(environment)),
        is_one_host=local_size == world_size and "LOCAL_WORLD_SIZE" in environment,
        has_agent_store=agent,
    )


def _host(environment: Mapping[str, str]) -> str:
    host = environment["MASTER_ADDR"]
    if not re.fullmatch(r"[\w.:%\[\]-]{1,255}", host, re.ASCII) or host.startswith("-"):
        raise ConfigError(
            f"MASTER_ADDR is {_shortened(host)}, which is not a host's name or address", fix="MASTER_ADDR=127.0.0.1"
        )
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host  # as in an address with a port


def _port(environment: Mapping[str, str]) -> int:
    port = _number(environment, "MASTER_PORT")
    if not 0 < port < 65536:
        raise ConfigError(f"MASTER_PORT is {port}; ports count from 1 to 65535")
    return port


def _from_slurm(environment: Mapping[str, str]) -> Place:
    _require(environment, _SLURM_VARIABLES, "srun", "start the program with srun, or to run alone: unset SLURM_PROCID")
    rank, world_size = _number(environment, "SLURM_PROCID"), _number(environment, "SLURM_NTASKS")
    _check_rank(rank, world_size, ("SLURM_PROCID", "SLURM_NTASKS"))
    local_rank = _number(environment, "SLURM_LOCALID")
    if world_size == 1:
        return dataclasses.replace(ALONE, source="srun")
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_NODELIST", "")
    nodes = nodes or environment.get("SLURM_JOB_NODELIST", "")
    job = environment.get("SLURM_JOB_ID") or environment.get("SLURM_JOBID", "")
    if not environment.get("MASTER_ADDR") and not nodes:
        raise ConfigError("SLURM_PROCID is set, but neither SLURM_NODELIST nor MASTER_ADDR says where rank 0 is")
    if not environment.get("MASTER_PORT") and not re.fullmatch(r"[0-9]{1,18}", job):
        raise ConfigError("SLURM_PROCID is set, but neither SLURM_JOB_ID nor MASTER_PORT gives a port")
    hosts = expand_nodes(nodes) if nodes else []
    address = _host(environment) if environment.get("MASTER_ADDR") else hosts[0]
    port = _port(environment) if environment.get("MASTER_PORT") else _SLURM_FIRST_PORT + int(job) % _SLURM_NUM_PORTS
    tasks = re.match(
        r"[0-9]{1,9}", environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE", "")
    )
    one_host = len(hosts) == 1
    local_size = world_size if one_host else int(tasks.group()) if tasks else local_rank + 1
    return Place(
        "srun",
        rank,
        world_size,
        local_rank,
        max(local_size, local_rank + 1),
        address=(address, port),
        is_one_host=one_host,
    )


def expand_nodes(text: str) -> list[str]:
    """Return the hosts of a SLURM node list, in order.

    Args:
        text: For example ``"login,node[01-03,07]-ib"``.

    Raises:
        ConfigError: It is not a node list.

    >>> expand_nodes("login,node[01-03,07]-ib")
    ['login', 'node01-ib', 'node02-ib', 'node03-ib', 'node07-ib']
    >>> expand_nodes("r[1-2]n[08-09]")
    ['r1n08', 'r1n09', 'r2n08', 'r2n09']
    """
    if len(text) > _MOST_HOSTS:
        raise ConfigError(f"{_shortened(text)} is not a list of hosts (SLURM_NODELIST): it has {len(text)} characters")
    hosts: list[str] = []
    for item in re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", text):
        found = [""]
        for plain, ranges in re.findall(r"([^\[\]]+)|\[([^\[\]]*)\]", item):
            endings = [plain] if plain else _expand_ranges(ranges, text)
            if len(found) * len(endings) + len(hosts) > _MOST_HOSTS:
                raise ConfigError(f"{_shortened(text)} names more than {_MOST_HOSTS} hosts (SLURM_NODELIST)")
            found = [host + ending for host in found for ending in endings]
        hosts += found
    is_whole = text.count("[") == text.count("]") == len(re.findall(r"\[[^\[\]]*\]", text))
    if (
        not is_whole
        or not hosts
        or any(not re.fullmatch(r"[A-Za-z0-9.:_-]+", host) or host.startswith("-") for host in hosts)
    ):
        raise ConfigError(f"{_shortened(text)} is not a list of hosts (SLURM_NODELIST)")
    return hosts


def _expand_ranges(ranges: str, text: str) -> list[str]:
    numbers: list[str] = []
    for part in ranges.split(","):
        match = re.fullmatch(r"([0-9]{1,18})(?:-([0-9]{1,18}))?", part)
        if match is None or int(match[2] or match[1]) - int(match[1]) not in range(_MOST_HOSTS):
            raise ConfigError(
                f"{_shortened(text)} is not a list of hosts (SLURM_NODELIST): {_shortened(part)} is not a range"
            )
        first, last = match[1], match[2] or match[1]
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
        if len(numbers) > _MOST_HOSTS:
            raise ConfigError(f"{_shortened(text)} names more than {_MOST_HOSTS} hosts (SLURM_NODELIST)")
    return numbers


def _shortened(text: str) -> str:
    return repr(text) if len(text) <= 100 else f"{text[:97]!r}..."
