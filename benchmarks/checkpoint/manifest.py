"""Time the opening and checking of a checkpoint of 100,000 tensors, by processor time.

python benchmarks/checkpoint/manifest.py --out FILE
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from meshwright.checkpoint.blocks import digest_of
from meshwright.checkpoint.manifest import FileEntry, Manifest, StoredPart, TensorEntry, table_bytes
from meshwright.checkpoint.open_checkpoint import MANIFEST_FILE, TABLE_SUFFIX, OpenCheckpoint
from meshwright.layout import ShardLayout

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from surroundings import environment  # noqa: E402

SHAPE = (4, 4)
CUTS = {
    "whole": [ShardLayout(shape=SHAPE)],
    "by rows": [ShardLayout(shape=SHAPE, dim=0, ranges=(part,)) for part in ((0, 2), (2, 4))],
    "flattened": [ShardLayout(shape=SHAPE, flat=part) for part in ((0, 7), (7, 16))],
}


def manifest_of(layouts: list[ShardLayout], num_tensors: int) -> Manifest:
    """Return a manifest of tensors that are all cut alike, each part in its own rank's file."""
    tensors = {
        f"model/layers.{number // 10}.block.{number % 10}.weight": TensorEntry(
            "float32", SHAPE, tuple(StoredPart(rank, 64 + 64 * number, each) for rank, each in enumerate(layouts))
        )
        for number in range(num_tensors)
    }
    files = []
    for rank in range(len(layouts)):
        empty = FileEntry(f"rank-{rank:05d}.safetensors", 64 + 64 * num_tensors, b"")
        files.append(empty._replace(table_digest=digest_of(bytes(table_bytes(empty)))))
    return Manifest(step=1, epoch=1, plan="dp=2", files=tuple(files), tensors=tensors)


def timed(work: Callable[[], object], rounds: int) -> dict[str, float]:
    """Return medians of processor and wall time [s]."""
    samples = []
    for _ in range(rounds):
        cpu, wall = time.process_time(), time.perf_counter()
        work()
        samples.append((time.process_time() - cpu, time.perf_counter() - wall))
    return {
        "cpu_s": round(statistics.median(cpu for cpu, _ in samples), 3),
        "wall_s": round(statistics.median(wall for _, wall in samples), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tensors", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=CUTS, help="tensors that are cut like this alone")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found = {}
    for name, layouts in CUTS.items():
        if options.only not in (None, name):
            continue
        manifest = manifest_of(layouts, options.tensors)
        data = manifest.to_bytes()
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory)
            (path / MANIFEST_FILE).write_bytes(data)
            for file in manifest.files:
                with (path / file.name).open("wb") as sparse:
                    sparse.truncate(file.num_bytes)
                (path / f"{file.name}{TABLE_SUFFIX}").write_bytes(bytes(table_bytes(file)))
            found[name] = {
                "bytes": len(data),
                "manifest": timed(lambda data=data: Manifest.from_bytes(data, "here"), options.rounds),
                "checkpoint": timed(lambda path=path: OpenCheckpoint(path).close(), options.rounds),
            }
        print(name, found[name], flush=True)
    report = {"environment": environment(), "tensors": options.tensors, "rounds": options.rounds, "found": found}
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
