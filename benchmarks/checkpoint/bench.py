"""Time a durable save and a checked load on two ranks, beside torch's distributed checkpoint (DCP) and beside plain writes.

python benchmarks/checkpoint/bench.py --directory DIR --out FILE
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from meshwright.checkpoint.manifest import Manifest, StoredPart, TensorEntry
from meshwright.checkpoint.open_checkpoint import OpenCheckpoint
from meshwright.checkpoint.store import SaveUnderWay, Store
from meshwright.checkpoint.tensor_files import TensorFile
from meshwright.layout import ShardLayout, even_ranges

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from surroundings import environment  # noqa: E402

ROWS, COLUMNS = 2048, 2048
WORLD = 2


def told(value: Any) -> Any:
    """Return the first rank's value."""
    box = [value]
    dist.broadcast_object_list(box, 0)
    return box[0]


def gathered(value: Any) -> list[Any]:
    """Return all ranks' values."""
    boxes: list[Any] = [None] * WORLD
    dist.all_gather_object(boxes, value)
    return boxes


class Rank:
    """One rank with its half of the state: rows of each tensor."""

    def __init__(self, rank: int, num_tensors: int) -> None:
        self.rank = rank
        source = torch.Generator().manual_seed(rank)
        self.layouts = [
            ShardLayout(shape=(ROWS, COLUMNS), dim=0, ranges=(share,)) for share in even_ranges(ROWS, WORLD)
        ]
        self.named = {
            f"model/layers.{number}.weight": torch.randn(ROWS // WORLD, COLUMNS, generator=source)
            for number in range(num_tensors)
        }
        mesh = init_device_mesh("cpu", (WORLD,))
        self.theirs = {name: DTensor.from_local(each, mesh, [Shard(0)]) for name, each in self.named.items()}
        self.empty = {name: torch.zeros_like(each) for name, each in self.named.items()}
        self.empty_theirs = {name: DTensor.from_local(each, mesh, [Shard(0)]) for name, each in self.empty.items()}

    # -- saves: each returns when the state would survive a power cut ------------------------------------------------------

    def save_ours(self, directory: Path) -> None:
        draft = Store(directory).begin(1) if not self.rank else None
        path, epoch = told(draft and (draft.path, draft.epoch))
        file = TensorFile(list(self.named.items()))
        written = SaveUnderWay(path, 1, epoch).write(f"rank-{self.rank:05d}.safetensors", file)
        told_of = gathered((written, file.offsets))
        if draft is not None:
            tensors = {
                name: TensorEntry(
                    "float32",
                    (ROWS, COLUMNS),
                    tuple(
                        StoredPart(rank, offsets[place], self.layouts[rank])
                        for rank, (_, offsets) in enumerate(told_of)
                    ),
                )
                for place, name in enumerate(self.named)
            }
            files = tuple(written for written, _ in told_of)
            draft.commit(Manifest(step=1, epoch=epoch, plan="dp=2", files=files, tensors=tensors))
        dist.barrier()

    def save_dcp(self, directory: Path) -> None:
        dcp.save(self.theirs, checkpoint_id=directory / "dcp", no_dist=False)
        if not self.rank:  # its files are synced by its default; their names are not
            for path in (directory / "dcp", directory):
                sync(path, os.O_DIRECTORY)
        dist.barrier()

    def save_plain(self, directory: Path) -> None:
        if not self.rank:
            directory.mkdir()
        dist.barrier()
        descriptor = os.open(directory / str(self.rank), os.O_WRONLY | os.O_CREAT, 0o644)
        for tensor in self.named.values():
            rest = memoryview(tensor.reshape(-1).view(torch.uint8).numpy())
            while rest:
                rest = rest[os.write(descriptor, rest) :]
        os.fsync(descriptor)
        os.close(descriptor)
        dist.barrier()
        if not self.rank:
            sync(directory, os.O_DIRECTORY)
        dist.barrier()

    # -- loads --------------------------------------------------------------------------------------------------------------

    def load_ours(self, directory: Path) -> None:
        with OpenCheckpoint(Store(directory).saved()[0].path) as snapshot:
            snapshot.check(self.rank, WORLD)
            gathered(True)
            for name, tensor in self.empty.items():
                tensor.copy_(snapshot.read(name, self.layouts[self.rank]))
        dist.barrier()

    def load_dcp(self, directory: Path) -> None:
        dcp.load(self.empty_theirs, checkpoint_id=directory / "dcp")
        dist.barrier()

    def check_loaded(self) -> None:
        for name, tensor in self.empty.items():
            if not torch.equal(tensor, self.named[name]):
                raise AssertionError(f"{name} was not loaded")
            tensor.zero_()


def sync(path: Path, flags: int = 0) -> None:
    descriptor = os.open(path, os.O_RDONLY | flags)
    os.fsync(descriptor)
    os.close(descriptor)


def timed(work: Callable[[Path], None], directory: Path) -> float:
    dist.barrier()
    began = time.perf_counter()
    work(directory)
    return time.perf_counter() - began


def be_rank(rank: int, options: argparse.Namespace, root: Path, port: int, results: Any) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, WORLD, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    own = Rank(rank, options.mib * 2**20 // (ROWS * COLUMNS * 4))
    saves = {"ours": own.save_ours, "dcp": own.save_dcp, "plain": own.save_plain}
    loads = {"ours": own.load_ours, "dcp": own.load_dcp}
    samples: list[dict[str, float]] = []
    source = random.Random(0)
    for _ in range(options.rounds):
        sample: dict[str, float] = {}
        order = source.sample(list(saves), len(saves))
        for name in order:
            sample[f"save {name}"] = timed(saves[name], root / name)
        for name in source.sample(list(loads), len(loads)):
            if options.cold and not rank:
                for path in (root / name).rglob("*"):
                    if path.is_file():
                        descriptor = os.open(path, os.O_RDONLY)
                        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                        os.close(descriptor)
            sample[f"load {name}"] = timed(loads[name], root / name)
            own.check_loaded()
        samples.append(sample)
        dist.barrier()
        if not rank:
            for name in saves:
                shutil.rmtree(root / name)
            os.sync()
            print({name: round(seconds, 3) for name, seconds in sample.items()}, flush=True)
        dist.barrier()
    if not rank:
        results.put(samples)
    dist.destroy_process_group()


def ratios(samples: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Return medians and quartiles of ours over theirs, round by round."""
    found = {}
    for ours, theirs in (("save ours", "save dcp"), ("save ours", "save plain"), ("load ours", "load dcp")):
        values = [sample[ours] / sample[theirs] for sample in samples]
        low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
        found[f"{ours} / {theirs}"] = {"median": round(middle, 3), "quartiles": [round(low, 3), round(high, 3)]}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=1024, help="the state, of both ranks together")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--cold", action="store_true", help="drop the files from memory before each load")
    parser.add_argument("--directory", type=Path, help="on the disk that is measured")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        master = dist.TCPStore("127.0.0.1", 0, WORLD, is_master=True, wait_for_workers=False)
        context = mp.get_context("spawn")
        results = context.SimpleQueue()
        ranks = mp.spawn(be_rank, (options, Path(directory), master.port, results), nprocs=WORLD, join=False)
        while not ranks.join():
            pass
        samples = results.get()
    report = {
        "environment": environment(),
        "mib": options.mib,
        "cold": options.cold,
        "seconds": {name: statistics.median(sample[name] for sample in samples) for name in samples[0]},
        "ratios": ratios(samples),
        "samples": samples,
    }
    print(json.dumps({key: report[key] for key in ("seconds", "ratios")}, indent=1))
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
