"""A small model, and a host whose costs are as measured, for tests of predictions."""

from __future__ import annotations

import meshwright as mw
from meshwright.hardware import ClusterSpec
from meshwright.spec import Prediction
from unit.plan.ideal import ideal_with

MODEL = mw.ModelSpec.transformer(layers=6, hidden=64, heads=4, vocab=128, sequence=32)
TRAIN = mw.TrainSpec(global_batch_size=8)


def host(**changes: object) -> ClusterSpec:
    device = mw.DeviceSpec(
        name="cpu", peak_flops_per_s={"fp32": 1e11, "bf16": 2e11}, memory_bytes_per_s=2e10, memory_bytes=8 * 2**30
    )
    link = mw.LinkSpec(name="between-ranks", bytes_per_s=4e9, latency_s=0.0)
    return ClusterSpec(name="host", device=device, devices_per_host=4, link=link, efficiency=ideal_with(**changes))


def predicted(line: str, **changes: object) -> Prediction:
    return mw.predict_plan(MODEL, host(**changes), TRAIN, mw.Plan.parse(line))
