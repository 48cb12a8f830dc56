"""transformers' Trainer under a plan: each rank runs one process' loop on the whole batch, and takes its part of each forward.

Data, order, counts of tokens, schedules and steps are one process' by construction. What differs is `training_step` (a share, and
`model.backward`), the norm of the gradient, and what is saved. See ADR 0027.
"""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import torch

from meshwright.errors import ApplyError, ConfigError, MissingDependencyError
from meshwright.integrations import decisions, loss_parts, one_run, optimizer_file, sealed, share_streams, taken_over
from meshwright.integrations.one_process import (
    FirstProcess,
    be_one_process,
    seed_workers_alike,
    skipping_on_each_rank,
)
from meshwright.integrations.planned import PlannedModule, bare, count_samples, num_parameters, speak_as, tied_names
from meshwright.integrations.refusals import finite, refuse_arguments, refuse_generation, refuse_model, refuse_plan
from meshwright.integrations.same_batches import find_other_batches
from meshwright.integrations.trainer_files import TrainerFiles
from meshwright.ranks.join import join_world
from meshwright.run.applying import apply_plan
from meshwright.run.losses.loss import Loss
from meshwright.run.parallel_model import ParallelModel
from meshwright.spec import Plan

try:
    import transformers
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.utils.operations import convert_to_fp32
except ImportError as error:
    raise MissingDependencyError(
        f"this integration needs transformers and accelerate ({error})", fix="pip install 'meshwright[trainer]'"
    ) from error

__all__: list[str] = ["Trainer"]

_FIRST_LOOKS = 8
"""Batches after the first at which the loss of the whole is compared with those of parts [count]."""
_LOOK_EVERY = 100
"""Forwards between two later looks [count]."""
_HOOKS = (
    "_wrap_model",
    "_clip_grad_norm",
    "_get_grad_norm",
    "_save",
    "_save_optimizer_and_scheduler",
    "_save_rng_state",
)
_HOOKS += ("_load_from_checkpoint", "_load_best_model", "_load_optimizer_and_scheduler", "_save_checkpoint")
_HOOKS += ("_maybe_log_save_evaluate", "_determine_best_metric", "_get_output_dir")


class Trainer(TrainerFiles):
    """`transformers.Trainer` whose model runs under a plan, with one process' losses; every rank makes it, with the same data.

    The batch of the arguments, ``per_device_train_batch_size`` samples, is the whole batch, as in one process: ranks share it
    out. A class of your own that extends another Trainer puts this one first: ``class Mine(Trainer, Seq2SeqTrainer)``.

    Args:
        *args: As for `transformers.Trainer`.
        plan: A plan of dp, zero and tp, or its one-line form; None: dp over all ranks.
        **kwargs: As for `transformers.Trainer`.

    Raises:
        ConfigError: An argument or the plan is not supported; the message has one that is.
    """

    def __init__(self, *args: Any, plan: Plan | str | None = None, **kwargs: Any) -> None:
        missing = [name for name in _HOOKS if not hasattr(transformers.Trainer, name)]
        if missing:
            raise ConfigError(
                f"transformers {transformers.__version__} has no Trainer.{missing[0]}, which a plan needs",
                fix="pip install 'meshwright[trainer]', which has the versions that were tried",
            )
        self._world = join_world()
        given = Plan.parse(plan) if isinstance(plan, str) else plan
        self.plan: Plan = given or Plan(dp=self._world.world_size)
        self.parallel: ParallelModel | None = None
        """The model under the plan, once training has begun."""
        self._planned: PlannedModule | None = None
        self._loss_kind: loss_parts.Kind | None = None
        self._is_undecided = False
        self._num_forwards = self._num_looks = 0
        self._groups: list[list[str]] = []
        self._num_parameters = 0
        self._tied: dict[str, str] = {}
        refuse_plan(self.plan)
        super().__init__(*args, **kwargs)
        if isinstance(self.model, torch.nn.Module):
            taken_over.take(self.model, self)

    def give_up(self) -> None:
        """Leave the model to a later Trainer, whole."""
        self.parallel = self._planned = None

    # -- what the Trainer believes of its process -------------------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator, of one process."""
        refuse_arguments(self.args)
        refuse_generation(self.args, self.plan)
        _ = self.args.device  # makes accelerate's state
        be_one_process(self._world)
        super().create_accelerator_and_postprocess()
        be_one_process(self._world)
        self.args._n_gpu = min(self.args._n_gpu, 1)
        self.args.__dict__["_setup_devices"] = self._world.device
        unwrap = self.accelerator.unwrap_model
        self.accelerator.unwrap_model = lambda model, *args, **kwargs: unwrap(bare(model), *args, **kwargs)
        if self.args.bf16 and self.plan.precision != "bf16":
            self.plan = self.plan.replace(precision="bf16")

    # -- the model --------------------------------------------------------------------------------------------------------

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> Any:  # noqa: ARG002 - its signature
        """Lay the model over the ranks when training begins."""
        module = bare(model)
        if self.parallel is not None and self.parallel.module is module and self._planned is not None:
            return self._planned
        if not training:
            return model
        taken_over.hold(module, self)
        if self._has_ranks:
            decisions.refuse_other_arguments(self._world, self.args)
        if self.parallel is not None:
            self.parallel.close()
        refuse_model(module, self.plan)
        optimizer: Any = getattr(self.optimizer, "optimizer", self.optimizer)
        self._num_parameters = num_parameters(module)
        self._tied = tied_names(module)
        self._groups = optimizer_file.names_of_groups(optimizer, module)
        with share_streams.kept(self._world.device):
            # Draws are those of one process' loop, in which transformers itself draws by torch's generators.
            self.parallel = apply_plan(module, self.plan, optimizer=optimizer, seed=self.args.seed, rng="torch")
        speak_as(self.parallel, "trainer.parallel", "max_grad_norm= of TrainingArguments")
        # As accelerate does, so that a loss outside of the model is computed in float32.
        self._planned = PlannedModule(self.parallel, convert_to_fp32 if self.plan.precision == "bf16" else None)
        self._loss_kind = None
        # What accelerate would do to it, moving state between devices, belongs to the plan.
        self.optimizer = AcceleratedOptimizer(self.parallel.optimizer, device_placement=False)
        self.optimizer._is_accelerate_prepared = True  # pyright: ignore[reportAttributeAccessIssue]
        self.accelerator._optimizers.append(self.optimizer)
        return self._planned

    def _get_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """Return a loader that reads on every rank; of a dataset without length, accelerate lets its first process read."""
        loader: Any = super()._get_dataloader(*args, **kwargs)
        if self._has_ranks and hasattr(loader, "state"):
            loader.state = FirstProcess(loader.state)
        if self._has_ranks:
            seed_workers_alike(loader)
        return loader

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train, as `transformers.Trainer.train`; every rank calls it.

        Raises:
            CheckpointError: There is no whole checkpoint to resume from.
            DirectoryInUseError: Another run trains in `output_dir`.
        """
        with self._world.calls.during("trainer"), skipping_on_each_rank(), one_run.holding(self._world, self.args):
            found = sealed.choose(self._world, self.args.output_dir or "", resume_from_checkpoint)
            return super().train(found, *args, **kwargs)

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate, as `transformers.Trainer.evaluate`."""
        with self._world.calls.during("trainer"):
            return super().evaluate(*args, **kwargs)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Predict, as `transformers.Trainer.predict`."""
        with self._world.calls.during("trainer"):
            return super().predict(*args, **kwargs)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Log, evaluate and save where any rank is to; every rank calls it."""
        if self._has_ranks:
            decisions.follow_any(self._world, self.control)
        super()._maybe_log_save_evaluate(*args, **kwargs)
        if self._has_ranks:  # of what callbacks have asked for since
            decisions.follow_any(self._world, self.control)

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        """Return whether an evaluation was the best so far, the same on every rank."""
        if self._has_ranks:
            decisions.take_first(self._world, metrics)
        return super()._determine_best_metric(metrics, trial)

    # -- a step -----------------------------------------------------------------------------------------------------------

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> tuple[list[Any], Any]:
        """Return the batches of the next update, which are the same on all ranks.

        Raises:
            ApplyError: They are not.
        """
        self._num_forwards = 0
        batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        if self._has_ranks:
            other = find_other_batches(self._world, batches)
            if other is not None:
                raise ApplyError(
                    f"ranks 0 and {other} have other batches at step {self.state.global_step} (rule: each rank loads the whole "
                    "batch, and takes its part)",
                    fix="give every rank the same dataset in the same order; torch's, NumPy's and Python's generators are alike "
                    "on all ranks, in workers too",
                )
        return batches, num_items

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Run forward and backward of this rank's share, and return the loss of the whole batch."""
        parallel = self.parallel
        if parallel is None:
            return super().training_step(model, inputs, num_items_in_batch)
        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()  # pyright: ignore[reportOptionalMemberAccess]
        inputs = self._prepare_inputs(inputs)
        num_samples = 1 if parallel.dp_size == 1 else count_samples(parallel, inputs)
        if parallel.dp_size > 1:
            self._look_at_loss(model, inputs, num_samples, num_items_in_batch)
        share, weight = self._share_of(inputs, num_samples)
        with self._draws():
            with self.compute_loss_context_manager():
                given = copy.copy(share)  # whoever takes the labels out leaves those that are counted
                loss: Any = self.compute_loss(model, given, num_items_in_batch=num_items_in_batch)
            if not self._is_scaled(num_items_in_batch):
                loss = loss / self.current_gradient_accumulation_steps
            value = parallel.backward(self._weighed(loss, share, weight))
        return torch.tensor(value, device=self.args.device, dtype=loss.dtype)

    def _draws(self) -> contextlib.AbstractContextManager[None]:
        self._num_forwards += 1
        if self.parallel is None or not self._has_ranks:
            return contextlib.nullcontext()
        number = self.state.global_step * 65_536 + self._num_forwards % 65_536
        share = self.parallel.dp_rank
        return share_streams.of_share(self._world.device, seed=self.args.seed, forward=number, share=share)

    def _is_scaled(self, num_items_in_batch: Any) -> bool:
        told = getattr(self, "loss_is_scaled_for_ga", None)
        if told is not None:
            return bool(told)
        counts = self.model_accepts_loss_kwargs and num_items_in_batch is not None
        return counts or self.compute_loss_func is not None

    def _share_of(self, inputs: Any, num_samples: int) -> tuple[Any, float]:
        """Return this rank's samples, and how many; a rank without any repeats the first one, which counts nothing."""
        parallel = self.parallel
        if parallel is None or parallel.dp_size == 1:
            return inputs, float(num_samples)
        shares = parallel.splitter.cut(inputs, parallel.dp_size)
        if parallel.dp_rank < len(shares):
            share = shares[parallel.dp_rank]
            return share, float(parallel.splitter.count(share))
        return shares[0], 0.0

    def _weighed(self, loss: torch.Tensor, share: Any, num_samples: float) -> Loss:
        """Return the loss of this rank's share as a term of the whole batch's."""
        if self.parallel is None or self.parallel.dp_size == 1:
            return Loss(loss, 1.0)
        if not num_samples:
            return Loss(loss * 0.0, 1.0 / self.parallel.dp_size if self._loss_kind == "sum" else 0.0)
        if self._loss_kind == "sum":
            return Loss(loss, 1.0 / self.parallel.dp_size)
        weight = num_samples
        if self._loss_kind == "labels":
            weight = float(loss_parts.count_labels(share, shifts=self._loss_shifts_labels))
            if not weight:  # a mean over nothing
                return Loss(torch.nan_to_num(loss) * 0.0, 0.0)
        return Loss(loss * weight, weight)

    def _look_at_loss(self, model: Any, inputs: Any, num_samples: int, num_items_in_batch: Any) -> None:
        """Find what the loss of a batch is of its parts', or look now and then whether it is so still; every rank calls it."""

        def loss_of(batch: Any) -> torch.Tensor:
            loss: Any = self.compute_loss(model, dict(batch), num_items_in_batch=num_items_in_batch)
            return loss.detach()

        shifts, device = self._loss_shifts_labels, self._world.device
        if self._loss_kind is None or (
            self._is_undecided and loss_parts.tells_apart(inputs, num_samples, shifts=shifts)
        ):
            self._find_loss_kind(model, loss_of, inputs, num_samples, num_items_in_batch)
            self._num_looks = 0
            return
        self._num_looks += 1
        if self._num_looks <= _FIRST_LOOKS or self._num_looks % _LOOK_EVERY == 0:
            with torch.no_grad(), share_streams.kept(device):
                loss_parts.refuse_other_kind(
                    *(loss_of, inputs, num_samples), kind=self._loss_kind, shifts=shifts, model=bare(model), device=device,
                    drops=self.plan.tp > 1,
                )  # fmt: skip

    def _find_loss_kind(self, model: Any, loss_of: Any, inputs: Any, num_samples: int, num_items_in_batch: Any) -> None:
        is_scaled = self._is_scaled(num_items_in_batch)
        # Means by samples and by labels are one as long as samples have equally many.
        self._is_undecided = not loss_parts.tells_apart(inputs, num_samples, shifts=self._loss_shifts_labels)
        counts = bool(loss_parts.count_labels(inputs, shifts=self._loss_shifts_labels))
        expected: loss_parts.Kind = "sum" if is_scaled else "labels" if counts else "samples"
        shifts, device = self._loss_shifts_labels, self._world.device
        with torch.no_grad(), share_streams.kept(device):
            model.eval()
            try:
                kind = loss_parts.find_kind(loss_of, inputs, num_samples, expected=expected, shifts=shifts)
            finally:
                model.train()
            self._loss_kind = loss_parts.find_kind_in_training(
                *(loss_of, inputs, num_samples), kind=kind, shifts=shifts, model=bare(model), device=device,
                drops=self.plan.tp > 1,
            )  # fmt: skip

    def _clip_grad_norm(self, model: Any) -> Any:
        """Clip the whole model's gradient, and return its norm before."""
        return (
            self._norm_clipped_to(self.args.max_grad_norm)
            if self.parallel is not None
            else super()._clip_grad_norm(model)
        )

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        """Return the norm of the whole model's gradient."""
        if self.parallel is None:
            return super()._get_grad_norm(model, grad_norm)
        return self._norm_clipped_to(float("inf")) if grad_norm is None else grad_norm

    def _norm_clipped_to(self, max_norm: float) -> torch.Tensor | None:
        if self.parallel is None:
            return None
        return torch.tensor(finite(self.parallel.clip_grad_norm(max_norm), self.state.global_step), dtype=torch.float64)

    def floating_point_ops(self, inputs: Any) -> int:
        """Return the operations of one process, though a rank may hold fewer parameters."""
        count = super().floating_point_ops(inputs)
        now = num_parameters(self.model)
        return count if self.parallel is None or not now else count * self._num_parameters // now

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse a search whose trials one process chooses, where there are several.

        Raises:
            ConfigError: There are several ranks.
        """
        if self._has_ranks:
            raise ConfigError(
                "hyperparameter_search chooses trials in one process, and ranks would train different ones",
                fix="search in one process, or start one run for each trial",
            )
        return super().hyperparameter_search(*args, **kwargs)
