"""Hosts of one machine: processes with interfaces, numbers, a name and shared memory of their own, on one switch. Needs root.

Nothing has a name on the machine: the namespaces are their first processes', which end with the pipe to them, also where
whoever made them is killed.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

SUBNET = "10.77.0"
WIRE = "wire0"
# Classic BPF, since not every kernel has netem: a random number (SKF_AD_RANDOM); below 0.1 * 2**32 the packet is dropped.
_DROP, _PASS = 2, 0xFFFFFFFF  # TC_ACT_SHOT, TC_ACT_UNSPEC
DROPPING = f"4,32 0 0 {0xFFFFF000 + 56},37 1 0 {2**32 // 10},6 0 0 {_DROP},6 0 0 {_PASS}"
# First process of a host: makes it what it is, says its number, and reaps whoever is left to it, until its input ends.
_FIRST = """
import os, signal, socket, subprocess, sys
name, hosts, is_switch = sys.argv[1:]
def run(*words): subprocess.run(words, check=True, stdin=subprocess.DEVNULL)
run("ip", "link", "set", "lo", "up")
if is_switch == "1":
    run("ip", "link", "add", "switch", "type", "bridge")
    run("ip", "link", "set", "switch", "up")
else:
    socket.sethostname(name)
    run("mount", "-t", "tmpfs", "tmpfs", "/dev/shm")
    run("mount", "--bind", hosts, "/etc/hosts")
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
os.write(1, b"ready\\n")
os.read(0, 1)
"""


def can_make_hosts() -> bool:
    """Tell whether this process may make namespaces, and has the programs for it."""
    words = ["unshare", "--net", "--pid", "--mount", "--uts", "--fork", "ip", "link", "add", "switch", "type", "bridge"]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        return os.geteuid() == 0 and subprocess.run(words, capture_output=True, check=False, timeout=10).returncode == 0
    return False


class Host:
    """One host, or the switch that they are on."""

    def __init__(self, name: str, address: str, names: Path, *, is_switch: bool = False) -> None:
        self.name = name
        self.address = address
        # A switch hands wires over by the numbers that processes have outside.
        self._entered = ("--net",) if is_switch else ("--net", "--pid", "--mount", "--uts")
        words = ["unshare", "--net", "--pid", "--mount", "--uts", "--fork", "--kill-child", "--mount-proc"]
        first = [sys.executable, "-I", "-S", "-c", _FIRST, name, str(names), str(int(is_switch))]
        self._first = subprocess.Popen([*words, *first], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        if self._first.stdout is None or self._first.stdout.readline() != b"ready\n":
            raise RuntimeError(f"host {name} could not be made")
        self.pid = int(Path(f"/proc/{self._first.pid}/task/{self._first.pid}/children").read_text().split()[0])

    def inside(self, *command: str) -> list[str]:
        """Return the command that runs another one on this host."""
        return ["nsenter", "-t", str(self.pid), *self._entered, *command]

    def run(self, *command: str) -> str:
        """Run a command to its end; return what it said."""
        done = subprocess.run(self.inside(*command), check=True, capture_output=True, text=True, timeout=30)
        return done.stdout

    def start(
        self, command: Sequence[str], variables: Mapping[str, str], cwd: Path, *, stdin: int = subprocess.DEVNULL
    ) -> subprocess.Popen[bytes]:
        """Start a command; both its streams come through one pipe."""
        return subprocess.Popen(
            self.inside("sh", "-c", 'cd "$0" && exec "$@"', str(cwd), *command),
            env={**os.environ, **variables},
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def processes(self) -> dict[int, str]:
        """Return the processes of this host but its first, by their numbers outside."""
        found = {}
        own = os.readlink(f"/proc/{self.pid}/ns/pid")
        for name in os.listdir("/proc"):
            with contextlib.suppress(OSError):
                if name.isdigit() and int(name) != self.pid and os.readlink(f"/proc/{name}/ns/pid") == own:
                    command = Path(f"/proc/{name}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    found[int(name)] = command
        return found

    def left(self) -> dict[str, object]:
        """Return what is left on this host: processes, shared memory, ports that somebody listens on."""
        table = Path(f"/proc/{self.pid}/net/tcp").read_text().splitlines()[1:]
        listening = [int(line.split()[1].split(":")[1], 16) for line in table if line.split()[3] == "0A"]
        shared = os.listdir(f"/proc/{self.pid}/root/dev/shm")
        found = {"processes": self.processes(), "ports": listening, "shared memory": shared}
        return {name: what for name, what in found.items() if what}

    def sent_bytes(self) -> int:
        """Return what has left this host by its wire [bytes]."""
        table = Path(f"/proc/{self.pid}/net/dev").read_text()
        return int(table.partition(f"{WIRE}:")[2].split()[8])

    def end(self) -> None:
        """End the host, with all that runs on it."""
        for pipe in (self._first.stdin, self._first.stdout):
            if pipe is not None:
                pipe.close()
        self._first.wait(timeout=30)


class Network:
    """Hosts on a switch."""

    def __init__(self, switch: Host, hosts: list[Host]) -> None:
        self._switch = switch
        self.hosts = hosts
        for index, host in enumerate(hosts):
            port = f"port{index}"
            self._switch.run("ip", "link", "add", port, "type", "veth", "peer", "name", WIRE, "netns", str(host.pid))
            self._switch.run("ip", "link", "set", port, "master", "switch", "up")
            host.run("ip", "addr", "add", f"{host.address}/24", "dev", WIRE)
            host.run("ip", "link", "set", WIRE, "up")

    def cut(self, index: int, how: str) -> None:
        """Cut a host off: its own interface goes "down", or the switch loses ("lose") all that comes from it and goes there.

        "loss" is no cut: a tenth of the packets of each direction is dropped, drawn at random.
        """
        if how == "down":
            self.hosts[index].run("ip", "link", "set", WIRE, "down")
        elif how == "loss":
            self._switch.run("tc", "qdisc", "add", "dev", f"port{index}", "clsact")
            for way in ("ingress", "egress"):
                self._switch.run(
                    *("tc", "filter", "add", "dev", f"port{index}", way, "bpf", "da", "bytecode", DROPPING)
                )
        else:
            self._switch.run("ip", "link", "set", f"port{index}", "nomaster")

    def mend(self, index: int) -> None:
        """Undo all cuts."""
        with contextlib.suppress(subprocess.CalledProcessError):  # none was there
            self._switch.run("tc", "qdisc", "del", "dev", f"port{index}", "clsact")
        self._switch.run("ip", "link", "set", f"port{index}", "master", "switch")
        self.hosts[index].run("ip", "link", "set", WIRE, "up")


@contextlib.contextmanager
def network(num_hosts: int = 2) -> Iterator[Network]:
    """Make hosts "host0", "host1", ... with addresses 10.77.0.1, 10.77.0.2, ..."""
    with tempfile.TemporaryDirectory(prefix="hosts-") as folder, contextlib.ExitStack() as stack:
        addresses = {f"host{index}": f"{SUBNET}.{index + 1}" for index in range(num_hosts)}
        made = []
        for name, address in [*addresses.items(), ("switch", "")]:
            # The last one calls itself 127.0.1.1, as Debian does: who asks it for its own address gets one of no use to others.
            own = {name: "127.0.1.1"} if name == f"host{num_hosts - 1}" else {}
            lines = [f"{where} {whose}" for whose, where in {"localhost": "127.0.0.1", **addresses, **own}.items()]
            names = Path(folder) / f"hosts-{name}"
            names.write_text("\n".join(lines) + "\n")
            made.append(Host(name, address, names, is_switch=not address))
            stack.callback(made[-1].end)
        yield Network(made[-1], made[:-1])
