"""DeepSpeed's JSON in pieces, for the tests of what becomes of it."""

import json
from pathlib import Path

from meshwright.plan.deepspeed.reader import Settings, read_deepspeed

EXAMPLE = Path(__file__).parents[2] / "data" / "ds_pipeline_zero3.json"
BATCH = {"train_micro_batch_size_per_gpu": 4}


def read(entries=None, *, devices=4, **settings):
    return read_deepspeed(
        {**BATCH, **(entries or {})}, name="ds.json", num_devices=devices, settings=Settings(**settings)
    )


def zero(stage=3, **entries):
    return {"zero_optimization": {"stage": stage, **entries}}


def optimizer(kind, **params):
    return {"optimizer": {"type": kind, "params": params}}


def scheduler(kind, **params):
    return {"scheduler": {"type": kind, "params": params}}


def row(resolution, key):
    (found,) = [row for row in resolution.rows if row.key == key]
    return found


def merge(entries, others):
    for key, value in others.items():
        both = isinstance(value, dict) and isinstance(entries.get(key), dict)
        entries[key] = merge(dict(entries[key]), value) if both else value
    return entries


def apply_fix(entries, devices, fix):
    """Do to the file, or to the command line, what a fix says."""
    entries = json.loads(json.dumps(entries))
    for part in fix.split("; "):
        if part.startswith("--devices "):
            devices = int(part.removeprefix("--devices "))
        elif part.startswith('leave out "'):
            *blocks, last = part.removeprefix('leave out "').removesuffix('"').split(".")
            block = entries
            for name in blocks:
                block = block[name]
            del block[last]
        else:
            merge(entries, json.loads(f"{{{part}}}"))
    return entries, devices
