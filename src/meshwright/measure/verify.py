"""Proof that a plan computes what one plain process computes: both run side by side, and every parameter is compared."""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
import struct
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from meshwright.apply.modules.synced_norms import BATCH_NORMS
from meshwright.describe.batches import model_inputs, refuse_strange_entries
from meshwright.errors import ConfigError, some_of
from meshwright.measure.noise import largest_moves
from meshwright.measure.oracle import (
    ModuleOutputs,
    StepRecord,
    model_to_dtype,
    oracle_steps,
    to_dtype,
    whole_batch_loss,
)
from meshwright.measure.outputs import RankOutputs, first_difference
from meshwright.measure.parity import ParityReport
from meshwright.measure.plain_draws import PlainDraws
from meshwright.measure.recording import StepOptions, default_dtype, plan_steps
from meshwright.measure.resolution import LowerPrecision, find_lower_precision, measure_resolution
from meshwright.measure.verdict import judge
from meshwright.ranks.join import device_of_rank
from meshwright.ranks.launch import QUICK_STOP_S, launch
from meshwright.ranks.world import current_world
from meshwright.run.assembly import choose_devices
from meshwright.spec import Plan
from meshwright.trees import map_tensors

__all__: list[str] = []

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_DIGEST_LENGTH = 16
"""Hexadecimal digits of a digest: 64 bits [count]."""
_Reasons = tuple[list[str], list[str]]
_BOUNDS = {torch.float64: 1e-11, torch.float32: 1e-5}


def verify_plan(
    build_model: nn.Module | Callable[[], nn.Module],
    plan: Plan | str,
    batches: Sequence[Any],
    loss_fn: Callable[[Any, Any], Any] | None = None,
    *,
    num_steps: int = 3,
    dtype: torch.dtype = torch.float64,
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
    seed: int = 0,
    max_grad_norm: float | None = None,
    bound: float | None = None,
    devices: Sequence[Any] | None = None,
    rng: Literal["torch", "global"] = "global",
) -> ParityReport:
    """Train under a plan and in one plain process, and compare losses, gradients and parameters.

    The plan's ranks are started on this host; inside ranks that were started already (`launch`, torchrun), all of them call
    this together and each returns the same report. Gradients are compared before the optimizer, which is plain SGD by
    default: Adam hides a constant factor. Both sides draw the same random numbers. Where draws have no known place (the notes
    say why) and the comparison fails, it is made again with dropout switched off on both sides, as with rng="torch".

    Args:
        build_model: A module or a callable that returns one; for a plan with several ranks it has to be importable.
        plan: The plan to verify, or its line.
        batches: Global batches; step i uses batch i, starting over at the end.
        loss_fn: As for `apply_plan`.
        num_steps: Optimizer steps [count].
        dtype: What both sides compute in. In float64 a wrong scale and a rounding cannot be mistaken for each other.
        optimizer: Factory from parameters to an optimizer; None: SGD with a learning rate of 0.1.
        seed: Seed of the model's initialisation.
        max_grad_norm: Clip the gradients to this global 2-norm; None: do not clip.
        bound: Largest relative difference that counts as equal; None: 1e-11 in float64, 1e-5 in float32.
        devices: For the plans of one process: the devices to use.
        rng: As for `apply_plan`.

    Returns:
        The report; `report.equal` is the verdict.

    Raises:
        ConfigError: No batches or steps, no bound known for this dtype, the plan's line cannot be read, or it has another size
            than the running world.
        ApplyError: A batch has entries that the model's forward does not take.
    """
    if isinstance(plan, str):
        plan = Plan.parse(plan)
    if not batches:
        raise ConfigError("verify needs at least one batch", fix="pass batches=[batch]")
    if num_steps < 1:
        raise ConfigError(f"num_steps={num_steps} (rule: at least 1)", fix="pass num_steps=3")
    if bound is None:
        if dtype not in _BOUNDS:
            raise ConfigError(
                f"no bound is known for {dtype}: it is 1e-11 for float64, 1e-5 for float32", fix="pass bound="
            )
        bound = _BOUNDS[dtype]
    options = StepOptions(num_steps=num_steps, optimizer=optimizer, seed=seed, max_grad_norm=max_grad_norm, dtype=dtype)
    job = _PlanJob(
        build=PreparedModel(build_model, dtype, draws=rng == "global"),
        plan=plan,
        batches=_copies(batches),
        loss_fn=loss_fn,
        options=options,
        devices=devices,
        rng=rng,
    )
    with torch.random.fork_rng(_devices_with_draws()):  # the caller's own draws go on as if nothing had run
        report, apart = _run_both(job, batches, bound)
        if report.equal or not apart:
            return report
        build = PreparedModel(build_model, dtype)
        job = dataclasses.replace(job, build=build, batches=_copies(batches), rng="torch")
        report, _ = _run_both(job, batches, bound)
        return dataclasses.replace(report, notes=(*apart, *report.notes))


def _run_both(job: _PlanJob, batches: Sequence[Any], bound: float) -> tuple[ParityReport, list[str]]:
    """Return the report, and why draws of the plan have no place in the global batch."""
    build, loss_fn, dtype = job.build, job.loss_fn, job.build.dtype
    with default_dtype(dtype):
        notes, lower = _explain(build, job.plan, dtype, _copies(batches[:1])[0], loss_fn)
    records, digests, outputs, (of_loss, of_draws) = _run_job(job)
    unequal_ranks = tuple(rank for rank, digest in enumerate(digests) if digest != digests[0])
    with default_dtype(dtype):
        settings = {name: value for name, value in vars(job.options).items() if name != "before_step"}
        if job.rng == "global":
            settings["around"] = PlainDraws(job.options.seed, loss_fn)
        settings["device"] = _device_of(job.plan, job.devices)
        reference = oracle_steps(build, _copies(batches), loss_fn, **settings)
        resolution = measure_resolution(build, batches, loss_fn, reference, bound=bound, found=lower, **settings)
        moves = functools.partial(largest_moves, build, batches, loss_fn, reference, **settings)
        report = judge(records, reference, resolution, plan=str(job.plan), dtype=dtype, moves=moves)
    notes += (*of_loss, *of_draws, *([resolution.note] if resolution.note else []))
    report = dataclasses.replace(
        report,
        equal=report.equal and not unequal_ranks,
        unequal_ranks=unequal_ranks,
        first_unequal=_first_unequal(digests),
        notes=notes,
    )
    found = None if report.equal else first_difference(outputs, reference[0].outputs, max(bound, resolution.loss))
    if found is not None:
        report = dataclasses.replace(report, first_module=found[0], first_module_difference=found[1])
    return report, of_draws


def _copies(batches: Sequence[Any]) -> list[Any]:
    """Return the batches with tensors of their own, since a model may write over its inputs."""
    return [map_tensors(batch, _copied) for batch in batches]


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _devices_with_draws() -> list[int]:
    return [torch.cuda.current_device()] if torch.cuda.is_initialized() else []


def _device_of(plan: Plan, devices: Sequence[Any] | None) -> torch.device:
    """Return where the plan computes, so that the plain process does as well."""
    world = current_world()
    own = device_of_rank(0, plan.num_ranks) if world is None else world.device
    return choose_devices(plan, devices, own)[0]


class PreparedModel:
    """Builds the model in a given dtype, with dropout off unless it `draws`; importable, so that it can be sent to ranks."""

    def __init__(
        self, build_model: nn.Module | Callable[[], nn.Module], dtype: torch.dtype, *, draws: bool = False
    ) -> None:
        self.build_model = build_model
        self.dtype = dtype
        self.draws = draws
        self._known: weakref.ref[nn.Module] | None = None

    def build(self) -> nn.Module:
        """Return the user's own module; where a callable gives that one again, it is copied from then on."""
        model = self.build_model if isinstance(self.build_model, nn.Module) else self.build_model()
        self._known = weakref.ref(model)
        return model

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_known": None}

    def __call__(self) -> nn.Module:
        model = self.build_model if isinstance(self.build_model, nn.Module) else self.build_model()
        if model is self.build_model or (self._known is not None and model is self._known()):
            model = copy.deepcopy(model)  # one run must not train the other's model, nor the user's
        if not self.draws:
            turn_off_dropout(model)
        return model_to_dtype(model, self.dtype)


def turn_off_dropout(model: nn.Module) -> list[str]:
    """Set every dropout probability of a model to 0: Dropout modules, and attributes that say dropout.

    Returns:
        The FQNs of the modules that had one above 0.
    """
    found = []
    for name, module in model.named_modules():
        words = [word for word in vars(module) if "dropout" in word]
        if isinstance(module, _DROPOUTS):
            words.append("p")
        active = [word for word in words if isinstance(vars(module)[word], float) and vars(module)[word] > 0]
        for word in active:
            setattr(module, word, 0.0)
        if active:
            found.append(name or type(module).__name__)
    return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class _PlanJob:
    """The job under the plan; importable, so that it can be sent to ranks."""

    build: PreparedModel
    plan: Plan
    batches: list[Any]
    loss_fn: Any
    options: StepOptions
    devices: Sequence[Any] | None
    rng: Literal["torch", "global"]

    def run(self) -> tuple[list[StepRecord], _Reasons]:
        """Return the steps, and the plan's reasons about the loss and about draws."""
        reasons: _Reasons = [], []
        with default_dtype(self.build.dtype):
            records = plan_steps(
                self.build,
                self.plan,
                self.batches,
                self.loss_fn,
                options=self.options,
                devices=self.devices,
                with_outputs=True,
                loss_reasons=reasons[0],
                draw_reasons=reasons[1],
                sentinel_every=0,  # the report shall name what they would stop at
                rng=self.rng,
            )
        return records, reasons


def _run_job(job: _PlanJob) -> tuple[list[StepRecord], list[dict[str, str]], list[RankOutputs], _Reasons]:
    """Return the records of rank 0, or of this rank; each rank's digests and module outputs; and the plan's reasons."""
    world = current_world()
    world_size = 1 if world is None else world.world_size
    if job.plan.num_ranks == world_size == 1:
        records, reasons = job.run()
        return records, [{}], [_rank_outputs(job, 0, records[0].outputs)], reasons
    if world is None or world_size == 1:
        results = launch(_rank_result, job.plan.num_ranks, job, stop_grace_s=QUICK_STOP_S)
        records, digests = results[0][0], [digest for _, digest, _, _ in results]
        outputs, reasons = [modules for _, _, modules, _ in results], _union([found for *_, found in results])
    elif world_size == job.plan.num_ranks:
        records, reasons = job.run()
        digests = world.default_group.all_gather_json(_digests(records))
        reasons = _union(world.default_group.all_gather_json(reasons))  # all ranks go on alike
        told = {name: dataclasses.astuple(numbers) for name, numbers in records[0].outputs.items()}
        outputs = [
            {name: ModuleOutputs(*numbers) for name, numbers in each.items()}
            for each in world.default_group.all_gather_json(told)
        ]
    else:
        raise ConfigError(
            f"the plan {job.plan} has {job.plan.num_ranks} ranks, this job has {world_size}: they have to be the same",
            fix=f"start {job.plan.num_ranks} ranks, or verify outside of the job",
        )
    return records, digests, [_rank_outputs(job, rank, modules) for rank, modules in enumerate(outputs)], reasons


def _union(of_ranks: Sequence[Sequence[Sequence[str]]]) -> _Reasons:
    loss, draws = (
        list(dict.fromkeys(reason for found in kind for reason in found)) for kind in zip(*of_ranks, strict=True)
    )
    return loss, draws


def _rank_outputs(job: _PlanJob, rank: int, modules: Mapping[str, ModuleOutputs]) -> RankOutputs:
    tp_rank = job.plan.mesh.coordinate(rank).tp if job.plan.mode == "ranks" else 0
    return RankOutputs(tp_rank=tp_rank, modules=modules)


def _rank_result(
    job: _PlanJob,
) -> tuple[list[StepRecord] | None, dict[str, str], Mapping[str, ModuleOutputs], _Reasons]:
    # One rank's tensors are sent to the parent; digests of the others show whether they have the same bits.
    records, reasons = job.run()
    world = current_world()
    return (records if world is None or world.rank == 0 else None), _digests(records), records[0].outputs, reasons


def _digests(records: Sequence[StepRecord]) -> dict[str, str]:
    """Return a digest of everything that must be the same bits on all ranks, by what it is, in the order of the steps."""
    found: dict[str, str] = {}
    for step, record in enumerate(records):
        numbers = struct.pack("<dd?", record.loss, record.grad_norm, record.skipped)
        found[f"step {step}, loss or norm"] = hashlib.sha256(numbers).hexdigest()[:_DIGEST_LENGTH]
        for kind in ("gradients", "parameters", "buffers"):
            word = {"gradients": "gradient of", "parameters": "value of", "buffers": "buffer"}[kind]
            for name, tensor in getattr(record, kind).items():
                found[f"step {step}, {word} {name}"] = _digest(tensor)
    return found


def _digest(tensor: Tensor | None) -> str:
    if tensor is None:
        return ""
    dense = tensor.to_dense() if tensor.layout != torch.strided else tensor
    dense = dense.resolve_conj().resolve_neg().contiguous()
    found: Any = hashlib.sha256()
    found.update(dense.reshape(-1).view(torch.uint8).numpy())
    return found.hexdigest()[:_DIGEST_LENGTH]


def _first_unequal(digests: Sequence[Mapping[str, str]]) -> str | None:
    """Return the first difference between rank 0 and another rank."""
    own = digests[0]
    for other in digests[1:]:
        names = [*own, *(name for name in other if name not in own)]
        for name in names:
            if own.get(name) != other.get(name):
                return name
    return None


def _explain(
    build: PreparedModel, plan: Plan, dtype: torch.dtype, batch: Any, loss_fn: Any
) -> tuple[tuple[str, ...], LowerPrecision]:
    model = copy.deepcopy(build.build())
    notes = []
    dropped = turn_off_dropout(model)
    if dropped and not build.draws:
        notes.append(
            f"dropout is switched off here ({some_of(dropped, 3)}): in training every rank draws its own mask, so runs with"
            " dropout agree in distribution, not number by number"
        )
    batch_norms = [name for name, m in model.named_modules() if isinstance(m, BATCH_NORMS)]
    if batch_norms:
        notes.append(
            f"batch normalisation ({some_of(batch_norms, 3)}): each rank normalises its own micro-batch and the running"
            " statistics follow rank 0, so equality with one device is not to be expected (apply_plan's sync_batch_norm=True"
            " normalises over all ranks' samples)"
        )
    draws, lower = _try_forward(model_to_dtype(model, dtype), to_dtype(batch, dtype), loss_fn, dtype)
    if draws and not build.draws:
        notes.append(
            "the model or its loss draws random numbers in forward that could not be switched off: every rank draws its own"
        )
    if plan.precision != "fp32":
        notes.append(
            f"the plan trains in {plan.precision}, which changes numbers; this compares both sides in {dtype}"
            if dtype == torch.float64
            else f"the plan computes in {plan.precision}, one process in {dtype}: differences are to be expected"
        )
    if plan.compress != "none":
        notes.append(
            f"the plan compresses gradients ({plan.compress}), which changes numbers: "
            "equality with one device is not to be expected"
        )
    return tuple(notes), lower


def _try_forward(model: nn.Module, batch: Any, loss_fn: Any, dtype: torch.dtype) -> tuple[bool, LowerPrecision]:
    """Tell whether a forward draws random numbers, and which operations compute in less than `dtype`."""
    before = torch.get_rng_state()
    try:
        with torch.no_grad():
            lower = find_lower_precision(lambda: whole_batch_loss(model, batch, loss_fn), dtype)
        return not torch.equal(before, torch.get_rng_state()), lower
    except TypeError as error:
        refuse_strange_entries(model, model_inputs(batch)[1], error)
        raise
    finally:
        torch.set_rng_state(before)
