"""Where and with what a benchmark was run; its JSON keeps it beside the figures."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def environment() -> dict[str, Any]:
    """Return date, commit, versions, processor, cores and load, as JSON takes them."""
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent, check=False, timeout=30
    )
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit.stdout.strip(),
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
        "kernel": platform.release(),
        "libc": " ".join(platform.libc_ver()),
        "transparent_hugepage": _HUGE_PAGES.read_text().strip() if _HUGE_PAGES.exists() else "",
        "cpu": models[0].partition(":")[2].strip() if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg(),
    }
