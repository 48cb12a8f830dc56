"""Entry into a world: ranks of this package's launch, or ranks that torchrun, srun or Kubernetes started."""

from __future__ import annotations

import atexit
import contextlib
import datetime
import functools
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist

# Documented as torch.distributed's own, though its stubs do not say so.
from torch.distributed import FileStore, PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from meshwright._torch_private import default_store
from meshwright.comm.communicator import Communicator
from meshwright.comm.ledger import Ledger
from meshwright.comm.shm.backend import register_shm
from meshwright.errors import ConfigError, LostPeerError
from meshwright.ranks.agent import follow_agent
from meshwright.ranks.allocator import keep_freed_memory
from meshwright.ranks.environment import Place, choose_transport, read_join_timeout, read_place
from meshwright.ranks.joined_failures import sharing
from meshwright.ranks.joined_watch import HOST_KEY, JoinedWatch
from meshwright.ranks.listening import interface_towards, listen
from meshwright.ranks.store_connections import limit_connections
from meshwright.ranks.world import Link, World, current_world, leave_group, set_current_world

__all__: list[str] = []

# The launching process reports hanging ranks at timeout_s; gloo's own limit is a longer fallback.
_BEHIND_S = 30.0
_CONNECT_S = 5.0
_RETRY_S = 0.2
# A client of the store that waits for an answer looks at no other limit, and an exchange's limit waits for it.
_STORE_PATIENCE_S = 10.0
_LEAST_SILENCE_S = 3.0
"""How long a store may answer nothing, however short an exchange's limit is: its host may be busy [s]."""
DEVICE_VARIABLE = "MESHWRIGHT_DEVICE"

_P = ParamSpec("_P")
_T = TypeVar("_T")


def join_launched(start: Mapping[str, Any], link: Link) -> World:
    """Join the ranks of the launch that started this process.

    Args:
        start: The launching process's first message, see `supervisor.py`.
        link: The connection to it.
    """
    rank, world_size = start["rank"], start["world_size"]
    if start["threads"] is not None:
        torch.set_num_threads(start["threads"])
    device = device_of_rank(rank, world_size)
    store = FileStore(start["store"], world_size)
    limit = datetime.timedelta(seconds=start["start_timeout_s"] + _BEHIND_S)
    store.set_timeout(limit)
    return _make_world(
        Place("launch", rank, world_size, rank, world_size),
        store,
        device,
        timeout_s=start["timeout_s"],
        link=link,
    )


def device_of_rank(local_rank: int, local_size: int) -> torch.device:
    """Return the local rank's GPU if every local rank has one, else the CPU; MESHWRIGHT_DEVICE overrides it.

    "cpu" and "cuda" are for all ranks; "cuda:0", with its number, is one GPU that this host's ranks share, for tests.
    """
    wanted = os.environ.get(DEVICE_VARIABLE, "")
    if not wanted:
        has_enough = torch.cuda.is_available() and torch.cuda.device_count() >= local_size
        return torch.device("cuda", local_rank) if has_enough else torch.device("cpu")
    try:
        device = torch.device(wanted)
    except RuntimeError as error:
        raise ConfigError(
            f"{DEVICE_VARIABLE} is {wanted!r}, which is not a valid device", fix="set it to cpu, cuda or cuda:0"
        ) from error
    if device.type != "cuda":
        return device
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    chosen = device if device.index is not None else torch.device("cuda", local_rank)
    if chosen.index >= found:
        raise ConfigError(
            f"{DEVICE_VARIABLE} is {wanted!r}: local rank {local_rank} of {local_size} needs GPU {chosen.index}, and "
            f"{found} {'is' if found == 1 else 'are'} visible, counted from 0",
            fix="start at most as many ranks as there are GPUs, set it to cuda:0 to share one, or unset it",
        )
    return chosen


def _share_gpu(place: Place) -> None:
    """Let NCCL take several ranks on one GPU, which it refuses within a host: each rank counts as a host of its own.

    They exchange through sockets then, and take turns on the GPU: for tests of the numbers, not for speed.
    """
    os.environ.setdefault("NCCL_HOSTID", f"{socket.gethostname()}-rank-{place.rank}")
    if place.address is None or place.is_one_host:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")


def _make_world(
    place: Place, store: Store, device: torch.device, *, timeout_s: float, link: Link | None = None
) -> World:
    """Make the default group over a store, and the world around it."""
    group_timeout_s = timeout_s if link is None else timeout_s + _BEHIND_S
    if device.type == "cuda":
        torch.cuda.set_device(device)
        if place.local_size > 1 and ":" in os.environ.get(DEVICE_VARIABLE, ""):
            _share_gpu(place)
    else:
        keep_freed_memory()
    transport = choose_transport(os.environ)
    if transport == "shm":
        register_shm()
    dist.init_process_group(
        # Both where there is a GPU: plans and errors travel as CPU tensors.
        f"cpu:{transport},cuda:nccl" if device.type == "cuda" else transport,
        store=store,
        rank=place.rank,
        world_size=place.world_size,
        timeout=datetime.timedelta(seconds=group_timeout_s),
    )
    world = _world_around(
        *(dist.group.WORLD, place, device),
        timeout_s=timeout_s,
        group_timeout_s=group_timeout_s,
        link=link,
        store=store,
    )
    atexit.register(leave_group, world)
    return world


def _default_store() -> Store | None:
    """Return the store of the caller's default group, under a prefix of ours."""
    store = default_store()
    return None if store is None else PrefixStore("meshwright", store)


def _world_around(
    group: dist.ProcessGroup | None,
    place: Place,
    device: torch.device,
    *,
    timeout_s: float,
    group_timeout_s: float | None = None,
    link: Link | None = None,
    store: Store | None = None,
) -> World:
    ledger = Ledger()
    communicator = Communicator(
        group, ranks=range(place.world_size), rank=place.rank, ledger=ledger, timeout_s=timeout_s
    )
    return World(
        communicator,
        rank=place.rank,
        world_size=place.world_size,
        local_rank=place.local_rank,
        device=device,
        ledger=ledger,
        timeout_s=timeout_s,
        group_timeout_s=group_timeout_s,
        link=link,
        store=store,
        share=sharing,
        watch=None if store is None or link is not None or place.address is None else _watch(store, place, timeout_s),
    )


def _watch(store: Store, place: Place, timeout_s: float) -> JoinedWatch:
    """Return the watch of a joined rank, which has begun."""
    host, port = _store_address(place)
    clone = getattr(store, "clone", None)  # not in torch's stubs
    first = place.rank - place.local_rank  # where launchers lay ranks host by host
    neighbours = range(max(0, first), min(place.world_size, first + place.local_size))
    watch = JoinedWatch(
        store if clone is None else clone(),
        place.rank,
        place.world_size,
        neighbours,
        guarded=(host, port, max(timeout_s, _LEAST_SILENCE_S)),
        store_rank=None if place.has_agent_store else 0,
    )
    limit_connections(host, port, _STORE_PATIENCE_S)
    watch.start()
    return watch


def _join(device: torch.device | None, *, timeout_s: float, join_timeout_s: float) -> World:
    """Join a world that another launcher has started."""
    choose_transport(os.environ)  # raises for an invalid value at once, also on a single rank
    place = _place_of_default_group() if dist.is_initialized() else read_place(os.environ)
    device = device or device_of_rank(place.local_rank, place.local_size)
    if dist.is_initialized():
        return _world_around(dist.group.WORLD, place, device, timeout_s=timeout_s, store=_default_store())
    if place.address is None:
        return _world_around(None, place, device, timeout_s=timeout_s)
    if place.is_one_host:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    elif "GLOO_SOCKET_IFNAME" not in os.environ and (interface := interface_towards(*place.address)) is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    follow_agent(os.environ)
    store = _open_store(place, join_timeout_s)
    _await_all(store, place, join_timeout_s)
    return _make_world(place, store, device, timeout_s=timeout_s)


def _place_of_default_group() -> Place:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    local_rank = os.environ.get("LOCAL_RANK", "")
    if local_rank.isdigit():
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        return Place("torch.distributed", rank, world_size, int(local_rank), max(local_size, int(local_rank) + 1))
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return Place("torch.distributed", rank, world_size, rank % num_gpus if num_gpus else rank, max(1, num_gpus))


def _open_store(place: Place, join_timeout_s: float) -> Store:
    """Open the store at the master's address; rank 0 hosts it unless torchrun's agent does."""
    host, port = _store_address(place)
    deadline = time.monotonic() + join_timeout_s
    listener = None
    try:
        if place.rank == 0 and not place.has_agent_store:
            listener = listen(host, port, one_host=place.is_one_host)
        else:
            _await_master(host, port, deadline)
        store: Store = TCPStore(
            host,
            port,
            place.world_size,
            is_master=listener is not None,
            timeout=datetime.timedelta(seconds=max(1.0, deadline - time.monotonic())),
            wait_for_workers=False,
            master_listen_fd=None if listener is None else listener.detach(),
        )
    except (RuntimeError, OSError) as error:
        text = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise LostPeerError(
            f"rank {place.rank} of {place.world_size} could not reach the master at {host}:{port} ({place.source}) "
            f"within {join_timeout_s:g} s: {text}",
            rank=place.rank,
            peer=0,
            fix="check that MASTER_ADDR names rank 0's host, that rank 0 has started, and that the port is open",
        ) from error
    prefix = f"meshwright/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    return PrefixStore(prefix, store)


def _store_address(place: Place) -> tuple[str, int]:
    """Return where the store of a job listens."""
    host, port = place.address or ("", 0)
    # Rank 0 listens on loopback where all ranks are on one host, whatever address the master's name means here.
    return ("127.0.0.1" if place.is_one_host and not place.has_agent_store else host), port


def _await_master(host: str, port: int, deadline: float) -> None:
    """Wait until a process listens at the master's address.

    The store's own client may take twice its timeout, and reports neither "refused" nor "no such name".

    Raises:
        OSError: Nothing listened until the deadline; the last reason.
    """
    pause = threading.Event()
    while True:
        left = deadline - time.monotonic()
        try:
            socket.create_connection((host, port), timeout=max(0.1, min(left, _CONNECT_S))).close()
        except OSError:
            if left < _RETRY_S:
                raise
            pause.wait(_RETRY_S)
        else:
            return


def _await_all(store: Store, place: Place, join_timeout_s: float) -> None:
    """Wait until every rank has connected to the store.

    Raises:
        LostPeerError: Some ranks are missing; the message has their numbers.
    """
    keys = [f"{HOST_KEY}/{rank}" for rank in range(place.world_size)]
    try:
        store.set(keys[place.rank], socket.gethostname())
        store.wait(keys, datetime.timedelta(seconds=join_timeout_s))
    except RuntimeError as error:
        missing = []
        with contextlib.suppress(RuntimeError):
            missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
        names = ", ".join(map(str, missing[:16])) + (", ..." if len(missing) > 16 else "")
        raise LostPeerError(
            f"rank {place.rank} of {place.world_size} ({place.source}): "
            + (f"rank{'s' if len(missing) > 1 else ''} {names} did not come" if missing else "the master is gone")
            + f" within {join_timeout_s:g} s",
            rank=place.rank,
            peer=missing[0] if len(missing) == 1 else None,
            fix=place.start_hint,
        ) from error


def join_world(
    device: torch.device | str | None = None,
    *,
    timeout_s: float = 300.0,
    join_timeout_s: float | None = None,
) -> World:
    """Return this process's world, joining it first where that has not been done.

    Looked for in this order: the world already joined; a default group that the caller has initialised; the variables of
    torchrun and of Kubernetes' PyTorchJob (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT); those of srun (SLURM_PROCID,
    SLURM_NTASKS, ...). Where nothing is set the world is this process alone, without a process group.

    Args:
        device: Where this rank computes; None is the GPU of its local rank, else the CPU.
        timeout_s: How long one exchange may wait [s].
        join_timeout_s: How long to wait for the master and for the other ranks [s]; None is 60, or
            MESHWRIGHT_JOIN_TIMEOUT_S where that is set.

    Returns:
        The world; the same object at every call.

    Raises:
        ConfigError: The environment is incomplete or contradicts itself, or the master's port is taken.
        LostPeerError: The master cannot be reached, or ranks are missing.
    """
    known = current_world()
    if known is not None:
        return known
    patience = join_timeout_s if join_timeout_s is not None else read_join_timeout(os.environ)
    world = _join(None if device is None else torch.device(device), timeout_s=timeout_s, join_timeout_s=patience)
    set_current_world(world)
    return world


def told_to_peers(fn: Callable[_P, _T]) -> Callable[_P, _T]:
    """Tell the other ranks about an exception of a function that applies a plan."""

    @functools.wraps(fn)
    def told(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        with join_world().calls.during("apply"):
            return fn(*args, **kwargs)

    return told
