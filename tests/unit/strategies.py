"""Hypothesis strategies for the vocabulary's values; a new field gets its values here."""

from __future__ import annotations

from hypothesis import strategies as st

from meshwright.hardware import ClusterSpec, DeviceSpec, LinkSpec
from meshwright.mesh import MeshSpec
from meshwright.spec import (
    LayerSpec,
    Measurement,
    MemoryBreakdown,
    ModelSpec,
    Plan,
    Prediction,
    RunRecord,
    TimeBreakdown,
    TrainSpec,
)
from meshwright.spec.layer import LayerBond, SharedParameter

SMALL = st.integers(1, 4)
NAMES = st.text("abcdefgh_.0123", min_size=1, max_size=8)
SIZES = st.integers(0, 2**50)
SECONDS = st.floats(0, 1e6)
RATES = st.floats(1.0, 1e18)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=5,
)


def meshes() -> st.SearchStrategy[MeshSpec]:
    return st.builds(MeshSpec, pp=SMALL, dp=SMALL, cp=SMALL, tp=SMALL)


@st.composite
def plans(draw: st.DrawFn, *, details: bool = False) -> Plan:
    mode = draw(st.sampled_from(["ranks", "ranks", "ranks", "data_parallel", "model_parallel"]))
    fields = {
        "mode": mode,
        "micro_batches": draw(st.integers(1, 16)),
        "recompute": draw(st.sampled_from(["none", "selective", "full"])),
        "precision": draw(st.sampled_from(["fp32", "bf16"])),
        "overlap": draw(st.booleans()),
        "micro_batch_size": draw(st.none() | SMALL),
        "bucket_bytes": draw(st.none() | st.integers(1, 2**40) | st.integers(1, 64).map(lambda n: n << 20)),
    }
    if mode == "ranks":
        dp, tp, pp = draw(SMALL) * draw(SMALL), draw(SMALL), draw(SMALL)
        zero = draw(st.integers(0, 3))
        schedule = draw(st.sampled_from(["gpipe", "1f1b", "interleaved", "zb-h1", "zbv"])) if pp > 1 else "1f1b"
        fields |= {"dp": dp, "tp": tp, "pp": pp, "cp": draw(SMALL), "zero": zero, "schedule": schedule}
        fields["batch"] = draw(st.sampled_from(["split", "whole"]))
        fields["compress"] = draw(st.sampled_from(["none", "bf16", "int8", "int4", "powersgd"]))
        if zero:
            fields["shard"] = draw(st.none() | st.sampled_from([n for n in range(1, dp + 1) if dp % n == 0]))
        if schedule == "interleaved":
            fields["virtual"] = draw(st.integers(2, 4))
        fields["sequence_parallel"] = draw(st.sampled_from([None, False, True] if tp > 1 else [None, False]))
    elif mode == "data_parallel":
        fields["dp"] = draw(SMALL)
    else:
        fields["pp"] = draw(SMALL)
    plan = Plan(**fields)
    if details:
        plan = plan.replace(
            layouts=draw(st.dictionaries(NAMES, NAMES, max_size=3)),
            stages=draw(st.dictionaries(NAMES, st.integers(0, plan.num_stages - 1), max_size=3)),
            reasons=draw(st.lists(st.text(max_size=8), max_size=2)),
            prediction=draw(st.none() | predictions()),
        )
    return plan


def predictions() -> st.SearchStrategy[Prediction]:
    return st.builds(
        Prediction,
        time=st.builds(TimeBreakdown, forward_s=SECONDS, backward_s=SECONDS, bubble_s=SECONDS, exposed_comm_s=SECONDS),
        memory=st.builds(MemoryBreakdown, parameters_bytes=SIZES, activations_bytes=SIZES),
        sent_bytes=st.dictionaries(st.sampled_from(["dp", "tp", "pp"]), SIZES),
        mfu=st.none() | st.floats(0, 1),
    )


@st.composite
def models(draw: st.DrawFn) -> ModelSpec:
    names = draw(st.lists(NAMES, min_size=1, max_size=4, unique=True))
    layers = [
        LayerSpec(
            name=name,
            num_params=draw(st.integers(8, 2**40)),
            params_bytes=draw(st.integers(32, 2**42)),
            forward_flops=draw(st.floats(0, 1e18)),
            output_bytes=draw(SIZES),
            activation_bytes=draw(SIZES),
        )
        for name in names
    ]
    shared = []
    if draw(st.booleans()):
        holders = draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
        shared = [SharedParameter(names=("a.w", "b.w"), layers=tuple(holders), num_params=8, params_bytes=32)]
    kinds = st.sampled_from(["always", "tensor", "around"])
    bond = st.builds(LayerBond, first=st.sampled_from(names), last=st.sampled_from(names), when=kinds)
    optional = st.none() | st.integers(1, 2**20)
    return ModelSpec(
        name=draw(st.text(max_size=5)),
        layers=tuple(layers),
        shared=tuple(shared),
        bonds=tuple(draw(st.lists(bond, max_size=2))),
        sequence_length=draw(optional),
        num_heads=draw(optional),
        vocab_size=draw(optional),
    )


def trainings() -> st.SearchStrategy[TrainSpec]:
    return st.builds(
        TrainSpec,
        global_batch_size=st.integers(1, 2**20),
        sequence_length=st.none() | st.integers(1, 2**20),
        optimizer=st.sampled_from(["adamw", "adam", "momentum", "sgd"]),
        precision=st.sampled_from(["fp32", "bf16"]),
    )


def records() -> st.SearchStrategy[RunRecord]:
    data = st.dictionaries(NAMES, PLAIN, max_size=3)
    measurement = st.builds(
        Measurement,
        step_seconds=st.lists(SECONDS, max_size=4),
        num_samples=SIZES,
        num_tokens=SIZES,
        peak_memory_bytes=st.none() | SIZES,
        loss=st.none() | st.floats(-1e9, 1e9),
    )
    return st.builds(
        RunRecord,
        plan=plans(details=True),
        config=data,
        prediction=st.none() | predictions(),
        measurement=st.none() | measurement,
        environment=data,
    )


def clusters() -> st.SearchStrategy[ClusterSpec]:
    peaks = st.dictionaries(st.sampled_from(["fp32", "bf16", "fp8"]), RATES)
    device = st.builds(
        DeviceSpec,
        name=NAMES,
        memory_bytes=st.integers(1, 2**45),
        memory_bytes_per_s=st.none() | RATES,
        peak_flops_per_s=peaks,
        sources=st.dictionaries(NAMES, NAMES, max_size=2),
    )
    link = st.builds(LinkSpec, name=NAMES, bytes_per_s=RATES, latency_s=st.none() | SECONDS)
    return st.builds(
        ClusterSpec,
        name=NAMES,
        device=device,
        devices_per_host=SMALL,
        num_hosts=SMALL,
        link=st.none() | link,
        network=link,
    )
