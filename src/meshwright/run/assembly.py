"""Assembly of module, engine and optimizer from the user's arguments, and refusal of unsuitable ones."""

from __future__ import annotations

import collections
import contextlib
import random
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import nn

from meshwright.apply.data.distributed import DistributedEngine
from meshwright.apply.data.sharded import ShardedEngine
from meshwright.apply.data.sharding import REDUCE_BYTES, Sharding
from meshwright.apply.engine import Engine
from meshwright.apply.model_guard import refuse_shared_memory, refuse_unfinished, require_equal_on_ranks
from meshwright.apply.one_process.data_parallel import ReplicasEngine
from meshwright.apply.one_process.model_parallel import LayersEngine
from meshwright.apply.pipeline.engine import PipelineEngine
from meshwright.apply.tensor.engine import TensorEngine
from meshwright.comm.communicator import Communicator
from meshwright.describe.batches import BatchSplitter
from meshwright.errors import ApplyError
from meshwright.python_state import kept_python_state
from meshwright.ranks.groups import subgroup
from meshwright.ranks.world import World
from meshwright.run.building.paged_build import PagedBuild
from meshwright.run.options import read_devices
from meshwright.spec import Plan
from meshwright.traffic import WHOLE_BELOW_BYTES

__all__: list[str] = []

OptimizerFactory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


@runtime_checkable
class NamedOptimizerFactory(Protocol):
    """An optimizer factory that takes FQNs, for rules by name."""

    def build_named(self, named_parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        """Return the optimizer of these (FQN, parameter) pairs."""
        ...


def require_world(plan: Plan, world: World) -> None:
    """Raise ApplyError where the number of running ranks is not the plan's."""
    if plan.num_ranks == world.world_size:
        return
    if world.world_size == 1:
        raise ApplyError(
            f"the plan '{plan}' needs {plan.num_ranks} ranks, and this process runs alone",
            fix=f"start the function with meshwright.launch(fn, {plan.num_ranks}, ...), "
            f"or the script with torchrun --nproc-per-node {plan.num_ranks}",
        )
    raise ApplyError(
        f"the plan '{plan}' is for {plan.num_ranks} rank(s), and {world.world_size} are running",
        fix=f"start {plan.num_ranks} rank(s), or use a plan for {world.world_size}, 'dp={world.world_size}' for example",
    )


def separates(plan: Plan) -> bool:
    """Tell whether ranks have other memory than one device's model under a plan: shards, slices or stages of it."""
    return plan.tp > 1 or plan.pp > 1 or bool(plan.zero and plan.dp > 1)


def build_module(
    build_model: nn.Module | Callable[[], nn.Module], seed: int, plan: Plan, world: World, build: PagedBuild
) -> nn.Module:
    """Return the user's module, built under the seed if it is built here.

    Every rank draws the same numbers while it builds. Afterwards ranks with another share of the batch draw others, so
    that dropout differs; ranks that share a layer draw the same. Where the plan leaves a rank a part of the model, large
    tensors lie in the pages of `build`.

    Raises:
        ApplyError: The argument is not a module, or one that is already wrapped, unmaterialised or placed by another tool.
    """
    module: Any = build_model
    if not isinstance(build_model, nn.Module):
        torch.manual_seed(seed)
        pages = build.building() if plan.mode == "ranks" and separates(plan) else contextlib.nullcontext()
        with pages, _pythons_seeded(seed):
            module = build_model()
    if not isinstance(module, nn.Module):
        raise ApplyError(
            f"build_model must be an nn.Module or return one, it gave a {type(module).__name__}",
            fix="pass the model, or a function without arguments that builds it",
        )
    _refuse_wrapped(module)
    has_shares = plan.mode == "ranks" and plan.num_shares > 1
    share = plan.mesh.coordinate(world.rank).dp if has_shares else 0
    if has_shares:
        world.calls.meshes.append(plan.mesh)
    if share > 0:
        torch.manual_seed((seed + 0x9E3779B97F4A7C15 * share) % 2**63)
    return module


@contextlib.contextmanager
def _pythons_seeded(seed: int) -> Iterator[None]:
    """Start Python's and NumPy's generators alike on all ranks; a script's own numbers go on behind the context."""
    with kept_python_state():
        random.seed(seed)
        np.random.seed(seed % 2**32)
        yield


def _refuse_wrapped(module: nn.Module) -> None:
    for name, child in module.named_modules():
        if isinstance(child, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            raise ApplyError(
                f"the model is already parallel: '{name or 'the model itself'}' is a {type(child).__name__}",
                fix="pass the plain model (its .module)",
            )
    if getattr(module, "hf_device_map", None) is not None:
        raise ApplyError(
            "the model was spread over devices by another tool (it has an hf_device_map)",
            fix="load it without device_map, and use the plan 'model_parallel'",
        )
    on_meta = [name for name, tensor in _named_tensors(module) if tensor.is_meta]
    if on_meta:
        raise ApplyError(
            f"{len(on_meta)} tensors have no values (they are on the meta device), '{on_meta[0]}' for example",
            fix="build the model on a real device",
        )
    devices = {tensor.device.type for _, tensor in _named_tensors(module)}
    if len(devices) > 1:
        raise ApplyError(
            f"the model's tensors lie on several kinds of device: {sorted(devices)}",
            fix="build the whole model on one device; the plan places it",
        )


def _named_tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


def choose_devices(plan: Plan, devices: Sequence[torch.device | str] | None, own: torch.device) -> list[torch.device]:
    """Return the devices of this process: its `own`, or the plan's many for the one-process modes."""
    wanted = plan.num_devices if plan.num_ranks == 1 else 1
    if devices is not None:
        chosen = read_devices(devices)
        if len(chosen) != wanted:
            raise ApplyError(
                f"the plan '{plan}' takes {wanted} device(s) in this process, and devices= has {len(chosen)}",
                fix=f"pass {wanted} device(s), or change the plan",
            )
        return chosen
    if wanted == 1:
        return [own]
    if torch.cuda.is_available() and torch.cuda.device_count() >= wanted:
        return [torch.device("cuda", index) for index in range(wanted)]
    return [torch.device("cpu")] * wanted


def build_engine(
    module: nn.Module, plan: Plan, world: World, devices: list[torch.device], splitter: BatchSplitter
) -> Engine:
    """Return the engine of the plan's strategy, with the module on its devices and equal on all ranks."""
    refuse_unfinished(module, str(plan))
    calls = world.calls  # ranks whose earlier runs ended differently continue from one common number
    calls.num_models = require_equal_on_ranks(
        world.default_group, module, plan.to_json(), devices[0], number=calls.num_models + 1
    )
    if separates(plan) or plan.mode == "data_parallel":
        refuse_shared_memory(module, str(plan), ties_too=separates(plan))
    refuse_embeddings_that_count(module, plan)
    _refuse_sparse(module)
    engine = _engine_of(module, plan, world, devices, splitter)
    engine.takes_whole_batch = plan.batch == "whole"
    return engine


def _engine_of(
    module: nn.Module, plan: Plan, world: World, devices: list[torch.device], splitter: BatchSplitter
) -> Engine:
    if plan.mode == "model_parallel":
        return LayersEngine(module, world.default_group.over("dp"), devices, stages=dict(plan.stages))
    device = _place(module, plan, devices[0])
    if plan.mode == "data_parallel":
        return ReplicasEngine(module, world.default_group.over("dp"), devices, splitter=splitter)
    group = subgroup(world, plan.mesh.groups("dp"), "dp")
    if plan.pp > 1:
        return _pipeline_engine(module, plan, world, group, device)
    if plan.tp > 1:
        return _tensor_engine(module, plan, world, group, device)
    return data_engine(module, plan, world, group, device)


def refuse_embeddings_that_count(module: nn.Module, plan: Plan) -> None:
    """Raise ApplyError where an embedding counts or renormalises the ids of a batch that the plan cuts."""
    shares = plan.num_devices if plan.mode == "data_parallel" else plan.num_shares
    for name, child in module.named_modules():
        if not isinstance(child, (nn.Embedding, nn.EmbeddingBag)):
            continue
        if child.scale_grad_by_freq and (shares * plan.micro_batches > 1 or plan.micro_batch_size):
            raise ApplyError(
                f"embedding '{name}' divides gradients by how often an id is in the batch (scale_grad_by_freq), and the plan "
                f"'{plan}' cuts the batch into parts that would each count only their own ids",
                fix="use scale_grad_by_freq=False, or a plan that leaves the batch whole (batch=whole; tp, pp with "
                "micro_batches=1)",
            )
        cut = max(shares, plan.dp) * plan.micro_batches > 1 or plan.micro_batch_size is not None
        if child.max_norm is not None and (cut or plan.pp > 1):
            # Copies would drift apart, and other readers of the rows (a tied head) would see some before renormalisation.
            raise ApplyError(
                f"embedding '{name}' renormalises in place the rows that a batch looks up (max_norm={child.max_norm}), and "
                f"the plan '{plan}' shows each copy or micro-batch other rows",
                fix="renormalise all rows between steps instead (max_norm=None), or use a plan that leaves the batch whole "
                "(dp=1, pp=1, micro_batches=1)",
            )


def _refuse_sparse(module: nn.Module) -> None:
    """Raise ApplyError for tensors that have no entry for each place: they can be neither copied nor compared as others are."""
    sparse = next(((name, tensor) for name, tensor in _named_tensors(module) if tensor.layout != torch.strided), None)
    if sparse is not None:
        raise ApplyError(
            f"'{sparse[0]}' is a sparse tensor ({sparse[1].layout}), and every plan copies and compares the model's tensors "
            "entry by entry",
            fix="register it dense: register_buffer(name, tensor.to_dense())",
        )


def _place(module: nn.Module, plan: Plan, device: torch.device) -> torch.device:
    """Move the module to the device, unless its author has spread it over several; return where its batches go.

    Raises:
        ApplyError: It is spread, and the plan needs the whole model on one device.
    """
    spread = list(dict.fromkeys(tensor.device for _, tensor in _named_tensors(module)))
    if len(spread) <= 1:
        module.to(device)
        return device
    if plan.mode != "ranks" or plan.zero or plan.tp > 1 or plan.pp > 1:
        raise ApplyError(
            f"the model's author has spread it over {len(spread)} devices ({', '.join(map(str, spread))}), and the plan "
            f"'{plan}' needs the whole model on one",
            fix=f"use dp={plan.num_devices}, which leaves it where it is; or build it on one device: the plan spreads it",
        )
    return spread[0]  # its forward moves what it needs elsewhere


def _tensor_engine(
    module: nn.Module, plan: Plan, world: World, group: Communicator, device: torch.device
) -> TensorEngine:
    return TensorEngine(
        module,
        group,
        subgroup(world, plan.mesh.groups("tp"), "tp"),
        world.default_group,
        device,
        make_inner=lambda: data_engine(module, plan, world, group, device),
        zero=plan.zero if plan.dp > 1 else 0,
        wanted=plan.layouts,
        on_slices=plan.uses_sequence_parallel,
    )


def _pipeline_engine(module: nn.Module, plan: Plan, world: World, group: Communicator, device: torch.device) -> Engine:
    columns = plan.mesh.groups("pp")

    def make_group(places: Sequence[int]) -> Communicator:
        cut = [[column[place] for place in places] for column in columns]
        cut += [[rank] for column in columns for place, rank in enumerate(column) if place not in places]
        return subgroup(world, cut, "pp")

    return PipelineEngine(
        module,
        group,
        device,
        plan,
        pp_group=subgroup(world, columns, "pp"),
        everyone=world.default_group,
        make_inner=lambda: data_engine(module, plan, world, group, device),
        tensor=None if plan.tp == 1 else _tensor_engine(module, plan, world, group, device),
        make_group=make_group,
        make_channel=lambda number: subgroup(world, columns, "pp", number=1 + number),
        loss_group=subgroup(world, plan.mesh.groups("pp", "dp"), "dp"),
    )


def data_engine(module: nn.Module, plan: Plan, world: World, group: Communicator, device: torch.device) -> Engine:
    if plan.zero > 0 and plan.dp > 1:
        return ShardedEngine(module, group, device, _sharding(plan, world))
    if plan.dp > 1:
        return DistributedEngine(
            module, group, device, bucket_bytes=plan.bucket_bytes, overlap=plan.overlap, compress=plan.compress
        )
    return Engine(module, group, device)


def _sharding(plan: Plan, world: World) -> Sharding:
    """Return the shard and replica groups: `shard` neighbours on the dp axis hold one copy between them."""
    degree = plan.shard_degree
    groups = plan.mesh.groups("dp")
    neighbours = [group[first : first + degree] for group in groups for first in range(0, plan.dp, degree)]
    copies = [group[place::degree] for group in groups for place in range(degree)]
    return Sharding(
        zero=plan.zero,
        shard_group=subgroup(world, neighbours, "dp"),
        replica_group=subgroup(world, copies, "dp"),
        prefetches=plan.overlap,
        whole_below=WHOLE_BELOW_BYTES if plan.whole_below is None else plan.whole_below,
        offload=plan.offload == "optimizer",
        compress=plan.compress,
        per_step=plan.pp > 1,
        reduce_bytes=REDUCE_BYTES if plan.bucket_bytes is None else plan.bucket_bytes,
    )


def build_optimizer(
    optimizer: torch.optim.Optimizer | OptimizerFactory | NamedOptimizerFactory | None,
    module: nn.Module,
    *,
    may_fuse: bool = False,
) -> torch.optim.Optimizer | None:
    """Return an optimizer over the module's own parameters.

    Args:
        optimizer: A factory that takes the list of parameters; one with `build_named`; an optimizer that already
            holds this module's parameters; or None.
        module: The module.
        may_fuse: Whether a factory's Adam or AdamW, where it leaves the choice to torch, may use torch's fused kernels.

    Raises:
        ApplyError: The optimizer holds parameters that are not the module's, or is not an optimizer.
    """
    if optimizer is None:
        return None
    if next(module.parameters(), None) is None:
        raise ApplyError(
            f"{type(module).__name__} has no parameters, so that there is nothing to train (rule: one or more)",
            fix="leave optimizer= out to evaluate alone, or make nn.Parameter of what is to be trained",
        )
    if isinstance(optimizer, NamedOptimizerFactory):
        built: Any = optimizer.build_named(list(module.named_parameters()))
    elif isinstance(optimizer, torch.optim.Optimizer):
        built = optimizer
    elif callable(optimizer):
        built = optimizer(list(module.parameters()))
    else:
        built = optimizer
    if isinstance(built, torch.optim.LBFGS):
        raise ApplyError(
            "torch.optim.LBFGS computes the loss several times in a step (rule: a step has one forward and one backward)",
            fix="optimizer=functools.partial(torch.optim.AdamW, lr=3e-4)",
        )
    if not hasattr(built, "step") or not hasattr(built, "param_groups"):
        raise ApplyError(
            f"optimizer= must be or give a torch.optim.Optimizer, it is or gives {type(built).__name__}",
            fix="optimizer=functools.partial(torch.optim.AdamW, lr=3e-4)",
        )
    _complete(built)
    live = {id(parameter) for parameter in module.parameters()}
    held = [parameter for group in built.param_groups for parameter in group["params"]]
    strangers = [tuple(parameter.shape) for parameter in held if id(parameter) not in live]
    if strangers:
        raise ApplyError(
            f"{len(strangers)} of the optimizer's {len(held)} parameters do not belong to this model, one of shape "
            f"{strangers[0]} for example; stepping it would change nothing here",
            fix="pass a factory such as functools.partial(torch.optim.AdamW, lr=3e-4), or build the optimizer from this model; "
            "parameters of a loss belong into the module that apply_plan gets, which returns them beside its outputs",
        )
    if may_fuse and built is not optimizer:
        _fuse(built)
    return built


def _complete(optimizer: Any) -> None:
    """Give an optimizer what torch's constructor makes, where its class does not call that (Lookahead around another one)."""
    made = vars(torch.optim.SGD([torch.zeros(1)])) if isinstance(optimizer, torch.optim.Optimizer) else {"state": {}}
    for name, value in made.items():
        if not hasattr(optimizer, name):
            setattr(optimizer, name, type(value)() if name != "state" else collections.defaultdict(dict))
    step = type(optimizer).step
    if "_optimizer_step_pre_hooks" in made and not hasattr(step, "hooked"):
        # Of this object alone: other objects of the class have no tables of hooks, which torch's own wrapper asks for.
        optimizer.step = types.MethodType(torch.optim.Optimizer.profile_hook_step(step), optimizer)


def _fuse(optimizer: torch.optim.Optimizer) -> None:
    """Let Adam or AdamW update in one pass over memory; see docs/adr/0005-fused-adam.md."""
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW) or optimizer.state:
        return
    for group in optimizer.param_groups:
        leaves_it_to_torch = group["foreach"] is None and group["fused"] is None
        is_plain = not (group["capturable"] or group["differentiable"]) and not isinstance(group["lr"], torch.Tensor)
        fits = all(p.is_floating_point() and p.device.type in ("cpu", "cuda") for p in group["params"])
        if leaves_it_to_torch and is_plain and fits:
            group["fused"] = True
