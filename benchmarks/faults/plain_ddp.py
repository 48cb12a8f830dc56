"""A plain program of torch's DDP, to be harmed as `meshwright train` is: what does torchrun alone take until its end?

Its folder's runs/run/events.jsonl has a line for each step, as a run of ours has.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
from tests.faults.hosts import WIRE
from tests.faults.jobs.harmed import build_plain, data
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    """Train for ever."""
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(build_plain())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    samples = data()
    folder = Path("runs/run")
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "events.jsonl").open("a" if rank else "w", buffering=1) as events:
        for step in range(10**9):
            mine = [(step * world_size + rank) * 4 % len(samples) + index for index in range(4)]
            inputs = torch.stack([samples[index % len(samples)][0] for index in mine])
            targets = torch.stack([samples[index % len(samples)][1] for index in mine])
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            if rank == 0:
                events.write('{"event": "step"}\n')


if __name__ == "__main__":
    is_one_host = os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"]
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if is_one_host else WIRE
    main()
