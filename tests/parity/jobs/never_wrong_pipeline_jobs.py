"""Models and training scripts of the tests of what pipelines never get wrong; functions that ranks import."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tests.parity.harness import nothing_runs_whole
from tests.parity.jobs import never_wrong_pipeline_caches as caches
from tests.parity.jobs.never_wrong_pipeline_branches import (
    Balanced,
    CountedDraws,
    DrawsInside,
    LateMixing,
    Signs,
    fewer_blocks,
    mixes_later,
    seed_python,
)
from tests.parity.jobs.never_wrong_pipeline_kinds import (
    KINDS,
    GrowsTable,
    KeepsNumber,
    MarksFar,
    ReturnsHalf,
    ReturnsKind,
    WritesNumber,
    far_batch,
)
from tests.parity.jobs.never_wrong_pipeline_later import WAYS, ReadByLayer, WritesLater
from tests.parity.jobs.never_wrong_pipeline_reads import (
    DeepCache,
    FirstReads,
    Installs,
    InstallsIdly,
    ReadsInside,
    ReadsTheLast,
    Replaces,
    ReplacesWithItsOwn,
    SharedTable,
    SharedVector,
    SizedGrid,
    Unchanged,
    WritesParts,
    replaced_when_built,
)
from tests.parity.jobs.never_wrong_pipeline_slopes import InnerStep, Penalty, Slopes
from tests.parity.jobs.never_wrong_pipeline_states import (
    Activations,
    Auxiliary,
    Collects,
    HandsOn,
    Identity,
    InPlaceCnn,
    Memory,
    SentThenWritten,
    Skips,
    Stack,
    StaleView,
    Unpadded,
    Written,
    freeze_last,
    freeze_own_weights,
    gradual,
    lengths_batch,
    masked_batch,
    mean_over_samples,
    plain_batch,
    square,
    squares,
    switch_everywhere,
    with_aux,
)
from tests.parity.jobs.never_wrong_pipeline_told import (
    BehindThreshold,
    CountedSizes,
    GivesBack,
    RegisteredReads,
    SetsGlobal,
    SetsNumber,
    SizedLast,
    SizedResults,
    TellsNumbers,
)
from tests.parity.jobs.never_wrong_pipeline_ways import (
    AsksDtype,
    Captured,
    ChosenRows,
    Conjugated,
    CountsTwice,
    Detached,
    Hooked,
    LateDrop,
    LateMean,
    Leaks,
    OtherPaths,
    OwnState,
    Patched,
    PythonChance,
    RaisesWhenTried,
    RunsInBackward,
    SharedExperts,
    compiled_block,
    reads_inside,
    ways_batch,
)
from torch import Tensor, nn

import meshwright as mw
from meshwright.run.losses import settle

MICRO_BATCHES = 2


@dataclasses.dataclass(frozen=True)
class Script:
    """A model and what is done with it; `before` and `evaluates` run in front of each step."""

    build: Callable[[], nn.Module]
    batch: Callable[[int], Any] = plain_batch
    loss: Callable[[Any, Any], Any] | None = square
    before: Callable[[int, nn.Module], None] = lambda step, module: None
    evaluates: tuple[int, ...] = ()
    steps: int = 3
    attributes: tuple[str, ...] = ()
    dtype: torch.dtype = torch.float64


@dataclasses.dataclass
class Record:
    """What a run gave, by step."""

    losses: list[float]
    evaluations: list[float]
    gradients: list[dict[str, Tensor | None]]
    state: dict[str, Tensor]
    attributes: list[Any]


def build_of(script: Script) -> nn.Module:
    module = script.build()
    return module if any(p.is_complex() for p in module.parameters()) else module.to(script.dtype)


def run_planned(name: str, plan: str) -> Record:
    """Train under a plan, on every rank."""
    script = SCRIPTS[name]
    model = mw.apply_plan(
        lambda: build_of(script),
        f"{plan},micro_batches={MICRO_BATCHES}{',batch=split' * (script.loss is squares)}",
        loss_fn=script.loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        rng="torch",  # as the plain loop beside it, whose generators go on
    )
    record = Record([], [], [], {}, [])
    with model:
        for step in range(script.steps):
            script.before(step, model.module)
            if step in script.evaluates:
                record.evaluations.append(model.evaluate(mw.split_batch(script.batch(50 + step), model))["loss"])
            record.losses.append(model.step(mw.split_batch(script.batch(step), model)).loss)
            record.gradients.append(
                {name: None if g is None else g.detach().clone() for name, g in model.full_gradients().items()}
            )
        record.state = {name: value.clone() for name, value in model.full_state_dict().items()}
        record.attributes = [_attribute(model.module, path) for path in script.attributes]
    return record


def run_cut(name: str, plan: str) -> Record:
    """Train under a plan with tensor parallelism, on every rank; no call of a part that is cut may run whole."""
    with nothing_runs_whole():
        return run_planned(name, plan)


def run_large(name: str, plan: str) -> Record:
    """Train a model that counts as too large for a rank to hold it whole."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(settle, "_MOST_BYTES", 0)
        return run_planned(name, plan)


def _attribute(module: Any, path: str) -> Any:
    for name in path.split("."):
        module = getattr(module, name)
    return module


def run_plain(name: str, num_shares: int = 1) -> Record:
    """Train in a plain loop on the same micro-batches."""
    script = SCRIPTS[name]
    torch.manual_seed(0)
    module = build_of(script)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    record = Record([], [], [], {}, [])
    for step in range(script.steps):
        script.before(step, module)
        if step in script.evaluates:
            module.eval()
            with torch.no_grad():
                record.evaluations.append(_losses(script, module, script.batch(50 + step), num_shares, trains=False))
            module.train()
        optimizer.zero_grad(set_to_none=True)
        record.losses.append(_losses(script, module, script.batch(step), num_shares, trains=True))
        record.gradients.append(
            {name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}
        )
        optimizer.step()
    record.state = {name: value.clone() for name, value in module.state_dict().items()}
    record.attributes = [_attribute(module, path) for path in script.attributes]
    return record


def _losses(script: Script, module: nn.Module, batch: Any, num_shares: int, *, trains: bool) -> float:
    count = _num_samples(batch)
    total = 0.0
    for piece in _cut(batch, count, MICRO_BATCHES * num_shares):
        outputs = _call(module, piece)
        loss = outputs.loss if script.loss is None else script.loss(outputs, piece)
        loss = loss.sum / loss.weight if isinstance(loss, mw.Loss) else loss
        share = loss * (_num_samples(piece) / count)
        if trains and share.requires_grad:
            share.backward()
        total += float(share.detach())
    return total


def _num_samples(batch: Any) -> int:
    first = next(iter(batch.values())) if isinstance(batch, dict) else batch[0]
    return len(first[0] if isinstance(first, tuple) else first)


def _cut(batch: Any, count: int, parts: int) -> Sequence[Any]:
    sizes = [count // parts + (index < count % parts) for index in range(parts)]
    pieces = []
    start = 0
    for size in sizes:
        part = slice(start, start + size)
        start += size
        if isinstance(batch, dict):
            pieces.append({key: value[part] for key, value in batch.items()})
        else:
            inputs = tuple(t[part] for t in batch[0]) if isinstance(batch[0], tuple) else batch[0][part]
            pieces.append((inputs, batch[1][part]))
    return [piece for piece in pieces if _num_samples(piece)]


def _call(module: nn.Module, batch: Any) -> Any:
    if isinstance(batch, dict):
        return module(**batch)
    return module(*batch[0]) if isinstance(batch[0], tuple) else module(batch[0])


def apply_script(build: Callable[[], nn.Module], loss: Callable[[Any, Any], Any] = square, plan: str = "pp=2") -> Any:
    """Apply a plan to a model in float64."""
    return mw.apply_plan(
        lambda: build().double(),
        f"{plan},micro_batches={MICRO_BATCHES}",
        loss_fn=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )


def own_rank() -> int:
    world = mw.current_world()
    return 0 if world is None else world.rank


def run_chance(plan: str, kind: str) -> list[float]:
    """Return the losses of steps in which layers are left out."""
    model = apply_script(PythonChance if kind == "python" else LateDrop, plan=plan)
    with model:
        random.seed(own_rank())
        return [model.step(plain_batch(step)).loss for step in range(4)]


def run_late_chance(plan: str) -> list[float]:
    with apply_script(LateDrop, plan=plan) as model:
        found = [model.evaluate(plain_batch(9))["loss"]]
        return found + [model.step(plain_batch(step)).loss for step in range(4)]


REFUSED = {
    "replaces_with_its_own": "makes the parameter 'first.weight'",
    "stale_view": "writes into a tensor and then uses another one",
    "other_ways": "its own stage or from an earlier one",
    "penalty": "gradient penalty",
    "inner_step": "other parameters than its own",
    "late_mean": "its own stage or from an earlier one",
    "leaks": "has made inside",
    "reads_the_last": "reads values between its layers",
    "sets_number": "changes 'number' of 'counts', which the code between layers uses as well",
    "sets_global": "layer 'finds' changes FOUND, which the code between layers uses as well",
    "sized_last": "a size or number that 'trims' returns",
    "compiled": "is compiled",
    "late_mixing": "mixes the samples",
    "signs": "a parameter that other stages hold",
    "counted_draws": "random numbers or the code between",
    "runs_in_backward": "is called inside of _InBackward.apply()",
    "writes_number": "in what layers return or write",
    "keeps_number": "in what layers return or write",
    "returns_half": "in what layers return or write",
    "marks_far": "in what layers return or write",
    "shown_tables": "took different paths",
    "grows_table": "in what layers return or write",
    **{f"writes_{way}_later": "has changed the buffer 'level' of 'writes'" for way in ("copy", "data", "new")},
    **{f"writes_{way}_later": "in what layers return or write" for way in ("late", "count", "late_count")},
    "read_by_layer": "layer 'reads', on another stage, uses it",
    "returns_enum_late": "in what layers return or write",
    "returns_partial_late": "in what layers return or write",
}
"""Scripts that a pipeline cannot run, and words of the message."""

SCRIPTS: dict[str, Script] = {
    "chosen_rows": Script(ChosenRows),
    **{f"returns_{kind}": Script(functools.partial(ReturnsKind, kind), far_batch) for kind in KINDS},
    **{f"writes_{way}_later": Script(functools.partial(WritesLater, way), far_batch) for way in WAYS},
    "read_by_layer": Script(ReadByLayer, far_batch),
    "returns_enum_late": Script(lambda: ReturnsKind("enum", is_late=True), far_batch),
    "returns_partial_late": Script(lambda: ReturnsKind("partial", is_late=True), far_batch),
    "writes_number": Script(WritesNumber, far_batch),
    "marks_far": Script(MarksFar, far_batch),
    "grows_table": Script(GrowsTable, far_batch),
    "returns_half": Script(ReturnsHalf, far_batch),
    "keeps_number": Script(KeepsNumber, far_batch),
    "runs_in_backward": Script(RunsInBackward),
    "first_reads": Script(FirstReads, evaluates=(1,)),
    "counted_sizes": Script(CountedSizes, evaluates=(1,)),
    "sized_results": Script(SizedResults, evaluates=(1,)),
    "sized_grid": Script(SizedGrid, evaluates=(1,)),
    "gives_back": Script(GivesBack, evaluates=(1,)),
    "tells_numbers": Script(TellsNumbers, evaluates=(1,)),
    "behind_threshold": Script(BehindThreshold, evaluates=(1,), steps=4),
    "sized_last": Script(SizedLast),
    "sets_number": Script(SetsNumber),
    "sets_global": Script(SetsGlobal),
    "registered_reads": Script(RegisteredReads, evaluates=(1,)),
    "reads_the_last": Script(ReadsTheLast),
    "reads_inside": Script(ReadsInside, evaluates=(1,)),
    "writes_parts": Script(WritesParts, evaluates=(1,)),
    "shared_vector": Script(SharedVector),
    "deep_cache": Script(DeepCache, evaluates=(1,)),
    "unchanged": Script(Unchanged, evaluates=(1,)),
    "replaces": Script(Replaces, attributes=("kind", "calls")),
    "replaces_with_its_own": Script(ReplacesWithItsOwn),
    "replaced_when_built": Script(replaced_when_built, attributes=("kind",)),
    "installs": Script(Installs),
    "installs_idly": Script(InstallsIdly),
    "shared_table": Script(SharedTable, evaluates=(1,)),
    "unpadded": Script(Unpadded, lengths_batch, mean_over_samples, steps=4),
    "gradual": Script(Stack, before=gradual, evaluates=(1,), steps=4),
    "switched": Script(Stack, before=switch_everywhere, steps=4),
    "frozen_stage": Script(Stack, before=freeze_last),
    "switched_by_name": Script(Stack, before=freeze_own_weights),
    "auxiliary": Script(Auxiliary, loss=with_aux, evaluates=(1,)),
    "unused_results": Script(Balanced, before=fewer_blocks, steps=4),
    "draws_inside": Script(DrawsInside, before=seed_python, evaluates=(0, 2), steps=5),
    "counted_draws": Script(CountedDraws, before=seed_python, steps=4),
    "signs": Script(Signs),
    "late_mixing": Script(LateMixing, before=mixes_later, steps=4),
    "cached": Script(caches.Cached, caches.growing_batch, evaluates=(1,)),
    "own_tables": Script(caches.OwnTables, caches.varying_batch, evaluates=(1, 2), steps=5),
    "shown_tables": Script(caches.ShownTables, caches.growing_batch),
    "collects": Script(Collects, loss=with_aux, evaluates=(1,)),
    "hands_on": Script(HandsOn, loss=with_aux, evaluates=(1,)),
    "over_own_results": Script(caches.OverOwnResults, caches.growing_batch),
    "sums_up": Script(caches.SumsUp, evaluates=(1,)),
    "memory": Script(Memory, steps=4),
    "resnet_group": Script(lambda: InPlaceCnn("group"), evaluates=(1,)),
    "resnet_batch": Script(lambda: InPlaceCnn("batch"), evaluates=(1,)),
    "activations": Script(Activations),
    "written": Script(Written),
    "skips": Script(Skips),
    "sent_then_written": Script(SentThenWritten),
    "stale_view": Script(StaleView),
    "identity": Script(Identity, masked_batch, evaluates=(1,)),
    "own_state": Script(lambda: OwnState(reads_later=False), loss=squares, evaluates=(1,), attributes=("calls",)),
    "own_state_read_later": Script(lambda: OwnState(reads_later=True), loss=squares, evaluates=(1,)),
    "raises_when_tried": Script(RaisesWhenTried, evaluates=(1, 3), steps=4, attributes=("calls", "log")),
    "shared_experts": Script(SharedExperts, evaluates=(1, 2), attributes=("calls",)),
    "counts_twice": Script(CountsTwice),
    "other_ways": Script(OtherPaths, ways_batch, steps=5),
    "asks_dtype": Script(AsksDtype),
    "detached": Script(Detached, loss=reads_inside),
    "patched": Script(Patched),
    "hooked": Script(Hooked, evaluates=(1,)),
    "captured": Script(Captured, evaluates=(1,)),
    "conjugated": Script(Conjugated),
    "penalty": Script(Penalty),
    "slopes": Script(Slopes),
    "inner_step": Script(InnerStep),
    "late_mean": Script(LateMean),
    "leaks": Script(Leaks),
    "compiled": Script(compiled_block),
}
