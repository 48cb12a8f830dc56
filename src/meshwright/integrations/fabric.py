"""Lightning Fabric under a plan: a strategy whose `setup` applies the plan, and whose loaders give each rank its share.

The script's loop stays. Two things are one process' only because they are said: a loader's batch is the whole one, and
``fabric.backward(loss, weight=n)`` tells what a rank's mean counts, since shares may be unequal. Ranks draw data alike, so that
they shuffle alike, and loaders compare their batches; what a forward draws is apart for each share.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from meshwright.apply.norm import values_of
from meshwright.describe.batches import count_samples, split_samples
from meshwright.errors import ApplyError, ConfigError, MissingDependencyError, StorageError
from meshwright.integrations import share_streams
from meshwright.integrations.planned import speak_as
from meshwright.integrations.refusals import refuse_model, refuse_plan
from meshwright.integrations.same_batches import find_other_batches
from meshwright.ranks.join import join_world
from meshwright.ranks.world import World
from meshwright.run.applying import apply_plan
from meshwright.run.loss_graph import graph_of
from meshwright.run.parallel_model import ParallelModel
from meshwright.spec import Plan

try:
    from lightning_fabric.strategies.single_device import SingleDeviceStrategy
except ImportError as error:
    raise MissingDependencyError(
        f"this integration needs lightning-fabric ({error})", fix="pip install 'meshwright[fabric]'"
    ) from error

__all__: list[str] = ["PlanStrategy"]


class PlanStrategy(SingleDeviceStrategy):
    """Strategy of Lightning Fabric: ``Fabric(strategy=PlanStrategy("dp=2,zero=3"), devices=1)`` on every rank.

    Ranks are started by torchrun or `meshwright.launch`, not by `Fabric.launch`. A model and its optimizer are set up together;
    several models may be, each once, and in the same order on all ranks.

    Args:
        plan: A plan of dp, zero and tp, or its one-line form.
        seed: Seeds what a forward draws, apart for each share.

    Raises:
        ConfigError: The plan has no loops of one's own.
    """

    def __init__(self, plan: Plan | str, *, seed: int = 0) -> None:
        self.plan = Plan.parse(plan) if isinstance(plan, str) else plan
        refuse_plan(self.plan)
        self._seed = seed
        self._world = join_world()
        super().__init__(self._world.device)  # of one device: Fabric starts no processes for it
        self.parallel: ParallelModel | None = None
        """The first model under the plan, once it is set up."""
        self._models: list[ParallelModel] = []
        self._optimizers: list[Any] = []
        """Optimizers under the plan, as the script made them and as `setup` gave them back."""
        self.global_rank, self.local_rank = self._world.rank, self._world.local_rank
        self.world_size = self._world.world_size
        self._sizes = [0] * self.plan.num_shares
        """Rows of each share of the last batch that a loader has given [count]."""

    @property
    def is_global_zero(self) -> bool:
        """Whether this rank writes and logs."""
        return self._world.rank == 0

    # -- setting up -------------------------------------------------------------------------------------------------------

    def module_to_device(self, module: nn.Module) -> None:
        """Leave the module where it is: the plan moves it."""

    def setup_module_and_optimizers(self, module: nn.Module, optimizers: list[Any], scheduler: Any = None) -> Any:
        """Apply the plan.

        Raises:
            ConfigError: The model has several optimizers, or was set up before.
        """
        if len(optimizers) > 1 or self.parallel_of(module) is not None:
            raise ConfigError(
                f"a model was set up with {len(optimizers)} optimizers, or for the second time (rule: a plan has a model and one "
                "optimizer)",
                fix="one optimizer with param_groups, in one call: fabric.setup(model, optimizer)",
            )
        refuse_model(module, self.plan)
        with share_streams.kept(self._world.device):
            given = optimizers[0] if optimizers else None
            # Draws are those of one process' loop, in which Fabric itself draws by torch's generators.
            parallel = apply_plan(module, self.plan, optimizer=given, seed=self._seed, rng="torch")
        speak_as(parallel, "fabric.strategy.parallel", "fabric.clip_gradients(model, optimizer, max_norm=...)")
        # Models that draw in forwards of one number draw apart.
        forward = _Forward(parallel, self._world.device, self._seed + 1_000_003 * len(self._models))
        self._models.append(parallel)
        self._optimizers += [given, parallel.optimizer] if optimizers else []
        self.parallel = self._models[0]
        return forward, [parallel.optimizer] if optimizers else [], scheduler

    def parallel_of(self, module: nn.Module) -> ParallelModel | None:
        """Return the model under the plan that a module of the script was set up as, or None."""
        held = module.parallel if isinstance(module, _Forward) else None  # Fabric unwraps to what `setup` gave it
        return held or next((model for model in self._models if model.module is module), None)

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Apply the plan without an optimizer."""
        return self.setup_module_and_optimizers(module, [])[0]

    def setup_optimizer(self, optimizer: Any) -> Any:  # noqa: ARG002 - Fabric's signature
        """Refuse an optimizer that comes after the model.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(
            "a plan shares the optimizer's state out together with the model", fix="fabric.setup(model, optimizer)"
        )

    def process_dataloader(self, dataloader: Any) -> Any:
        """Return the loader, whose batches are cut to this rank's share; a share may have no rows.

        Its iteration raises ApplyError where ranks have other batches; all ranks iterate together.
        """
        place = self.plan.mesh.coordinate(self._world.rank).dp
        return dataloader if self.world_size == 1 else _Shares(dataloader, place, self._sizes, self._world)

    # -- a step -----------------------------------------------------------------------------------------------------------

    def backward(self, tensor: Any, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """Add the gradient of the whole batch's mean; ``fabric.backward(loss, weight=n)``.

        Raises:
            ApplyError: The weight is missing, and ranks have shares.
        """
        del module, args
        if getattr(self.precision, "scaler", None) is not None:
            raise ConfigError(
                "precision='16-mixed' scales losses against overflow, which plans do not", fix="'bf16-mixed'"
            )
        self._source_of(tensor).backward(tensor, **kwargs)

    def _source_of(self, loss: Any) -> ParallelModel:
        """Return the first model that a loss comes from, the same on all ranks."""
        first = self._planned()
        if len(self._models) == 1 or not isinstance(loss, torch.Tensor):
            return first
        loops = [mark.loop() for mark in graph_of([loss]).marks]
        return next((model for model in self._models if model.stepper.gate.own in loops), first)

    def clip_gradients_norm(
        self, module: Any, optimizer: Any, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = True
    ) -> torch.Tensor:
        """Clip the whole model's gradient; return its 2-norm before."""
        del optimizer, error_if_nonfinite
        if norm_type != 2.0:
            raise ConfigError(f"norm_type={norm_type} (rule: plans clip by the 2-norm)", fix="norm_type=2.0")
        model = self.parallel_of(module) or self._planned()
        return torch.tensor(model.clip_grad_norm(float(max_norm)), dtype=torch.float64)

    def clip_gradients_value(self, module: Any, optimizer: Any, clip_val: float) -> None:  # noqa: ARG002 - its signature
        """Clip each entry of the whole model's gradient, on the rank that has it."""
        model = self.parallel_of(module) or self._planned()
        if model.stepper.gate.own is not None:
            model.stepper.gate.own.note_clip(f"clip_gradients(clip_val={float(clip_val)})")
        for holder in model.engine.gradient_holders():
            if holder.grad is not None:
                values_of(holder.grad).clamp_(-float(clip_val), float(clip_val))

    def _planned(self) -> ParallelModel:
        if self.parallel is None:
            raise ConfigError("no model was set up", fix="model, optimizer = fabric.setup(model, optimizer)")
        return self.parallel

    # -- exchanges --------------------------------------------------------------------------------------------------------

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """Return [shares, ...]: the tensor of each share of the batch, without gradients; all have one shape."""
        del group
        if sync_grads:
            raise ConfigError("sync_grads=True", fix="mw.gather_batch(tensor, fabric.strategy.parallel)")
        engine = self._planned().engine
        found, has_shares = engine.group, engine.num_shares > 1
        shapes = found.all_gather_json(list(tensor.shape), device=tensor.device) if has_shares else []
        if any(shape != shapes[0] for shape in shapes):
            raise ApplyError(
                f"fabric.all_gather was given tensors of shapes {shapes} by the shares of the batch (rule: all have one shape)",
                fix="mw.gather_batch(tensor, fabric.strategy.parallel), which joins shares of unequal size along dim 0",
            )
        return torch.stack(found.all_gather(tensor.detach())) if has_shares else tensor.detach()[None]

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return the sum over the shares of the batch, or their mean where they have equally many rows, or equal values.

        Raises:
            ApplyError: The mean of shares that have other numbers of rows, which is not one process' mean.
        """
        if not isinstance(tensor, torch.Tensor):
            return tensor
        gathered = self.all_gather(tensor, group)
        if "sum" in str(reduce_op).lower():
            return gathered.sum(0)
        if len(set(self._sizes)) > 1 and not bool((gathered == gathered[0]).all()):
            raise ApplyError(
                f"fabric.all_reduce was asked for the mean over shares that have {self._sizes} rows of the last batch, and other "
                "values: one process' mean weighs each row alike",
                fix="fabric.all_reduce(value * n, reduce_op='sum') / fabric.all_reduce(n, reduce_op='sum'), with n = "
                "torch.tensor(float(rows of this rank)), and 0 in place of value * n where there are none",
            )
        return gathered.mean(0)

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks."""
        del name
        if self.world_size > 1:
            self._world.default_group.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return one rank's object on all."""
        held = [obj]
        if self.world_size > 1:
            self.barrier()  # it has a limit of time, and torch's call waits on for a rank that is stopped
            dist.broadcast_object_list(held, src)
        return held[0]

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether all ranks say so, or any."""
        told = self._world.default_group.all_gather_json(bool(decision)) if self.world_size > 1 else [decision]
        return min(told) if all else max(told)

    # -- files ------------------------------------------------------------------------------------------------------------

    def save_checkpoint(
        self, path: Any, state: dict[str, Any], storage_options: Any = None, filter: Any = None
    ) -> None:
        """Save a file by rank 0; every rank calls it.

        Raises:
            StorageError: On every rank, so that a script which goes on does so on all: rank 0 could not write the file.
        """
        converted = self._convert_stateful_objects_in_state(state, filter=filter or {})
        failure: OSError | RuntimeError | None = None
        try:
            if self.is_global_zero:
                self.checkpoint_io.save_checkpoint(converted, path, storage_options=storage_options)
        except (OSError, RuntimeError) as error:  # torch's writer of files raises the latter
            failure = error
        told = f"{type(failure).__name__}: {failure}" if failure is not None else None
        told = self._world.default_group.all_gather_json(told)[0] if self.world_size > 1 else told
        if told is not None:
            raise StorageError(
                f"fabric.save could not write {path}: {told}",
                fix="make room, or save into a folder that can be written",
            ) from failure

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Return the whole model's state dict, on every rank; of a module without a plan its own."""
        model = self.parallel_of(module)
        return super().get_module_state_dict(module) if model is None else model.full_state_dict()

    def load_module_state_dict(self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Load a whole model's state dict; every rank calls it."""
        model = self.parallel_of(module)
        if model is None:
            module.load_state_dict(state_dict, strict=strict)
            return
        with model.whole_parameters():
            model.module.load_state_dict(state_dict, strict=strict)

    def get_optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the optimizer's state where every rank has it whole; of one without a plan its own.

        Raises:
            ConfigError: Ranks have parts of it.
        """
        is_planned = any(optimizer is held for held in self._optimizers)
        if is_planned and ((self.plan.zero and self.plan.dp > 1) or self.plan.tp > 1):
            raise ConfigError(
                f"fabric.save() was given an optimizer of which ranks have parts under the plan '{self.plan}'",
                fix="mw.save_checkpoint(fabric.strategy.parallel, directory, step=n), which loads under every plan",
            )
        return super().get_optimizer_state(optimizer)


class _Forward(nn.Module):
    """The module that Fabric calls; what its forward draws belongs to the seed, the number of the forward and the share."""

    def __init__(self, parallel: ParallelModel, device: torch.device, seed: int) -> None:
        super().__init__()
        self._held = [parallel]  # of which nn.Module makes no child
        self._device, self._seed, self._num_forwards = device, seed, 0

    @property
    def parallel(self) -> ParallelModel:
        """The model under the plan."""
        return self._held[0]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        parallel = self._held[0]
        if parallel.world.world_size == 1:
            return parallel(*args, **kwargs)
        self._num_forwards += 1
        with share_streams.of_share(self._device, seed=self._seed, forward=self._num_forwards, share=parallel.dp_rank):
            return parallel(*args, **kwargs)

    def train(self, mode: bool = True) -> _Forward:
        self._held[0].train(mode)
        return super().train(mode)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._held[0].zero_grad(set_to_none)


class _Shares:
    """A loader whose batches are one share of the given loader's, which are the same on all ranks."""

    def __init__(self, loader: Any, place: int, sizes: list[int], world: World) -> None:
        self.__dict__.update(vars(loader))
        self._loader, self._place, self._sizes, self._world = loader, place, sizes, world

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        batches, number = iter(self._loader), 0
        while self._has_next(found := list(itertools.islice(batches, 1)), number):
            number += 1
            batch = found[0]
            if len(self._sizes) == 1:
                yield batch
                continue
            small, more = divmod(count_samples(batch), len(self._sizes))
            self._sizes[:] = [small + (place < more) for place in range(len(self._sizes))]
            yield split_samples(batch, list(self._sizes))[self._place]

    def _has_next(self, found: list[Any], number: int) -> bool:
        """Return whether there is a batch; raise ApplyError where ranks have other ones, or another number of them."""
        other = find_other_batches(self._world, found)
        if other is not None:
            raise ApplyError(
                f"a loader's batch {number} is another one on rank {other} than on rank 0 (rule: each rank loads the whole "
                "batch, and takes its part)",
                fix="give every rank the same dataset in the same order: fabric.seed_everything(0) on each, or "
                "DataLoader(..., generator=torch.Generator().manual_seed(0))",
            )
        return bool(found)
