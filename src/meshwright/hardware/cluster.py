"""Machines as the planner knows them: one kind of device, a number of them in each host, and two kinds of links."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Final

from meshwright.errors import ConfigError, did_you_mean
from meshwright.hardware.efficiency import Efficiency
from meshwright.spec.model import Autocast
from meshwright.units import format_bandwidth, format_bytes
from meshwright.values import FrozenMap, Problems, Value

__all__: list[str] = []

HOST_DEVICE: Final = "cpu"
"""Name of a device, as a probe gives it, whose memory is the host's."""

DTYPES: Final = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "fp4")


MOST_DEVICES: Final = 1 << 20
"""Of a cluster: plans are counted by the divisors of this number, and no cluster comes near it [count]."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec(Value):
    """One device: a GPU, or a rank's share of a CPU.

    Args:
        name: What to call it, such as "h100-sxm".
        memory_bytes: Its memory [bytes].
        memory_bytes_per_s: How fast it reads that memory; None where nobody knows [bytes/s].
        peak_flops_per_s: dtype -> dense peak, without structured sparsity [FLOP/s].
        sources: Field, or field and dtype -> where the number is from: a document and its date, or "measured".

    Raises:
        ConfigError: A number is not positive, or a dtype unknown.
    """

    FORMAT: ClassVar[str] = "device"

    name: str
    memory_bytes: int
    memory_bytes_per_s: float | None = None
    peak_flops_per_s: Mapping[str, float] = dataclasses.field(default_factory=FrozenMap[float])
    sources: Mapping[str, str] = dataclasses.field(default_factory=FrozenMap[str], compare=False)

    def __post_init__(self) -> None:
        self._check_types()
        problems = Problems(f"device '{self.name}'")
        problems.require(self.memory_bytes >= 1, f"memory_bytes={self.memory_bytes} (rule: it is positive)")
        rate = self.memory_bytes_per_s
        problems.require(rate is None or rate > 0, f"memory_bytes_per_s={rate} (rule: it is positive)")
        for dtype, peak in self.peak_flops_per_s.items():
            known = f"{did_you_mean(dtype, DTYPES)}; known: {', '.join(DTYPES)}"
            problems.require(dtype in DTYPES, f"unknown dtype '{dtype}'{known}")
            problems.require(peak > 0, f"peak_flops_per_s['{dtype}']={peak} (rule: it is positive)")
        problems.check()

    def __str__(self) -> str:
        return f"{self.name}, {format_bytes(self.memory_bytes)}"

    def peak(self, dtype: str) -> float:
        """Return the dense peak for a dtype [FLOP/s].

        Raises:
            ConfigError: It is not known for this device.
        """
        if dtype not in self.peak_flops_per_s:
            known = ", ".join(self.peak_flops_per_s) or "none"
            raise ConfigError(f"device '{self.name}': the peak for {dtype} is not known; known: {known}")
        return self.peak_flops_per_s[dtype]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LinkSpec(Value):
    """A link of one device to others.

    Args:
        name: What to call it, such as "nvlink4".
        bytes_per_s: What one device can send, one direction [bytes/s].
        latency_s: Fixed cost of one message; None where nobody measured it [s].
        sources: Field -> where the number is from: a document and its date, or "measured".

    Raises:
        ConfigError: A number is not positive.
    """

    FORMAT: ClassVar[str] = "link"

    name: str
    bytes_per_s: float
    latency_s: float | None = None
    sources: Mapping[str, str] = dataclasses.field(default_factory=FrozenMap[str], compare=False)

    def __post_init__(self) -> None:
        self._check_types()
        problems = Problems(f"link '{self.name}'")
        problems.require(self.bytes_per_s > 0, f"bytes_per_s={self.bytes_per_s} (rule: it is positive)")
        latency = self.latency_s
        problems.require(latency is None or latency >= 0, f"latency_s={latency} (rule: it is not negative)")
        problems.check()

    def __str__(self) -> str:
        return f"{self.name}, {format_bandwidth(self.bytes_per_s)} one way"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec(Value):
    """Hosts with the same devices, or taken for such.

    Args:
        name: What to call it, such as "2x8xh100-sxm".
        device: The device.
        devices_per_host: Devices in one host [count].
        num_hosts: Hosts [count].
        link: What connects devices of one host; None where nothing does or nobody knows.
        network: What connects a device to other hosts; needed with more than one.
        efficiency: Shares of the device's peaks that were measured here; None means those of the table of known devices.
        made_of: The kinds of hosts, where there are several; the other numbers are then the smallest of all of them.
        taken_by_others: Of the cores that measured this cluster, what other programs took meanwhile [share].
        turn_s: What a fixed piece of the interpreter's work took on a rank, on all ranks at once; 0: not known [s].
        copied_bytes_per_s: What one process of this host copied of its memory before the measurement; 0: not known [bytes/s].

    Raises:
        ConfigError: A count is below 1, there are more than 1,048,576 devices, or several hosts and no network.
    """

    FORMAT: ClassVar[str] = "cluster"

    name: str
    device: DeviceSpec
    devices_per_host: int
    num_hosts: int = 1
    link: LinkSpec | None = None
    network: LinkSpec | None = None
    efficiency: Efficiency | None = None
    made_of: tuple[str, ...] = ()
    taken_by_others: float = 0.0
    copied_bytes_per_s: float = 0.0
    turn_s: float = 0.0

    def __post_init__(self) -> None:
        self._check_types()
        problems = Problems(f"cluster '{self.name}'")
        for name in ("devices_per_host", "num_hosts"):
            number = getattr(self, name)
            problems.require(number >= 1, f"{name}={number} (rule: it is at least 1)", fix=f"{name}=1")
        problems.require(
            self.num_devices <= MOST_DEVICES,
            f"{self.num_hosts} hosts of {self.devices_per_host} devices (rule: at most {MOST_DEVICES} devices in all)",
            fix=f"num_hosts={max(1, MOST_DEVICES // max(1, self.devices_per_host))}",
        )
        problems.require(
            0 <= self.taken_by_others <= 1, f"taken_by_others={self.taken_by_others} (rule: it is between 0 and 1)"
        )
        problems.require(
            self.copied_bytes_per_s >= 0, f"copied_bytes_per_s={self.copied_bytes_per_s} (rule: it is not negative)"
        )
        problems.require(self.turn_s >= 0, f"turn_s={self.turn_s} (rule: it is not negative)")
        problems.require(
            self.num_hosts <= 1 or self.network is not None,
            f"{self.num_hosts} hosts and no network (rule: several hosts need one)",
            fix="give it a LinkSpec as network",
        )
        problems.check()

    def __str__(self) -> str:
        if self.made_of:
            return f"{self.name}: {self.num_devices} devices, taken for {self.device} each"
        return f"{self.name}: {self.num_hosts} x {self.devices_per_host} x {self.device}"

    def autocast(self, precision: str) -> Autocast:
        """Return under which autocast a model computes here that is trained in a precision: what it is to be described under."""
        if precision != "bf16":
            return "none"
        return "cpu" if self.device.name == HOST_DEVICE else "cuda"

    @property
    def num_devices(self) -> int:
        """Devices over all hosts [count]."""
        return self.num_hosts * self.devices_per_host
