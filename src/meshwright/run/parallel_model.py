"""The model under a plan, which `apply_plan` returns."""

from __future__ import annotations

import contextlib
import types
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from meshwright._torch_private import leave_to_interpreter
from meshwright._torch_texts import says_written_into_expanded
from meshwright.apply.data.flat_unit import WRITE_WHOLE
from meshwright.apply.engine import Engine
from meshwright.apply.recompute.checkpointing import Recompute
from meshwright.apply.recompute.repetition import unlike_saves_told
from meshwright.apply.shards.state_dicts import StateGuard
from meshwright.comm.ledger import Ledger
from meshwright.describe.batches import BatchSplitter
from meshwright.errors import ApplyError
from meshwright.ranks.world import World
from meshwright.run.building.paged_build import PagedBuild
from meshwright.run.checkpoints.background import BackgroundSave, close, let_go, look_for_step
from meshwright.run.gate import without_backward
from meshwright.run.losses.loss import Loss
from meshwright.run.own_loop import OwnLoop
from meshwright.run.put_back import set_mode, versioned, with_versions
from meshwright.run.result import StepResult
from meshwright.run.step import Stepper
from meshwright.run.uncopied import Uncopied
from meshwright.spec import Plan
from meshwright.trees import tensors_in

__all__: list[str] = []


def _memory_bytes(tensors: Iterable[torch.Tensor]) -> int:
    dense = [tensor for tensor in tensors if tensor.layout == torch.strided]
    return sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in dense}.values())


def _count_step(model: ParallelModel | None) -> None:
    if model is not None:
        model.num_steps += 1


class ParallelModel(Uncopied):
    """A model under a plan: it steps, evaluates and gives its state back as if it were on one device.

    Made by `apply_plan`. Everything here is called on every rank.
    """

    def __init__(
        self,
        plan: Plan,
        world: World,
        engine: Engine,
        stepper: Stepper,
        recompute: Recompute | None = None,
        *,
        state_guard: StateGuard | None = None,
        pages: PagedBuild | None = None,
        seed: int = 0,
    ) -> None:
        self._plan = plan
        self.seed = seed
        """Seed of the parameters and the first random numbers."""
        self.world = world
        """This process's place among the ranks."""
        self.engine = engine
        self.stepper = stepper
        self._recompute = recompute
        self._state_guard = state_guard
        self._pages = pages
        self._number = world.calls.num_models
        engine.switch.begin()
        self.saving: BackgroundSave | None = None
        """A save under way beside training."""
        self.last_saves: dict[str, int] = {}
        """Directory -> the step that was saved there last [count]; empty once the model is closed."""
        own = weakref.ref(self)
        stepper.gate.before_step = lambda: let_go(own())
        self._own_loop = OwnLoop(
            *(stepper, plan, self._number),
            wants_stop=world.stop_requested,
            on_phase=lambda phase: world.report_progress(0 if (model := own()) is None else model.num_steps, phase),
            on_update=lambda: _count_step(own()),
            num_steps=lambda: 0 if (model := own()) is None else model.num_steps,
        )
        self.num_steps = 0
        """Calls of `step`, and steps of the optimizer in an own loop, so far [count]."""

    @property
    def plan(self) -> Plan:
        """The plan that was applied; under tensor parallelism with what is cut, and why the rest is not, once that is known."""
        plan = self.engine.detail(self._plan)
        told = (*self.engine.batch_reasons, *self.stepper.rule.told)
        told += () if self.stepper.draws is None else self.stepper.draws.reasons
        return plan.replace(reasons=(*plan.reasons, *told)) if told else plan

    @property
    def module(self) -> nn.Module:
        """The user's own module."""
        return self.engine.module

    @property
    def optimizer(self) -> Any:
        """The optimizer over the module's parameters: a torch.optim.Optimizer, or what is like one; None where there is none."""
        return self.stepper.optimizer

    @property
    def splitter(self) -> BatchSplitter:
        """How batches are counted and cut."""
        return self.stepper.splitter

    @property
    def ledger(self) -> Ledger:
        """What this rank has exchanged."""
        return self.engine.group.ledger

    @property
    def dp_rank(self) -> int:
        """The share of a global batch that this rank is given, by its number; 0 under ``batch=whole``."""
        return self.engine.given_share

    @property
    def dp_size(self) -> int:
        """Shares of a global batch that ranks are given: the plan's dp, or 1 under ``batch=whole`` [count]."""
        return self.engine.num_given_shares

    @property
    def stop_requested(self) -> bool:
        """Whether any rank had been asked to stop when the last step began; equal on every rank."""
        return self.stepper.stop_requested

    def told(self, kind: str) -> contextlib.AbstractContextManager[None]:
        """Return a context out of which an exception is told to the ranks that would wait for this one."""
        leave_to_interpreter("meshwright")
        return self.world.calls.during(kind, self._number)

    def step(self, batch: Any) -> StepResult:
        """Take one optimizer step.

        Under `torch.autocast`, forward and loss are cast and nothing else is; all ranks are under the same, or none.
        Gradients stay readable until the next step begins: as ``parameter.grad`` where ranks hold whole ones, and by
        `full_gradients` under every plan.

        Args:
            batch: This rank's share of the global batch (see `split_batch`), or None where it has no sample: a mapping
                (keywords), or a pair ``(inputs, targets)``.

        Returns:
            Loss and gradient norm of the whole global batch, equal on every rank.

        Raises:
            NonFiniteError: A loss or gradient is NaN or Inf, on any rank; parameters are those of before the step.
            CorruptionError: Ranks hold or compute something else than they must.
            ApplyError: The model was changed behind the plan's back, the batch cannot be cut, or ranks that share layers were
                given different ones.
            UserCodeError: Code of the user's raised on another rank.
            LostPeerError: Another rank is gone.
            StorageError: A save in the background has failed, on any rank; this step is not taken, and may be taken again.
        """
        number = self.num_steps
        switch = self.engine.switch
        with self._recorded(), switch.plain(), self.told("step"), self.engine.at_work(), self.stepper.casts.taken_in():
            look_for_step(self)
            switch.moment.steps += 1
            self._number_draws(evaluates=False)
            with unlike_saves_told(self._plan.recompute), self.stepper.gate.expecting_gradients():
                result = self.stepper.step(
                    batch,
                    wants_stop=self.world.stop_requested(),
                    on_phase=lambda phase: self.world.report_progress(number, phase),
                )
        self.num_steps += 1
        return result

    def _recorded(self) -> contextlib.AbstractContextManager[object]:
        recorder = self.ledger.recorder
        if recorder is None:
            return contextlib.nullcontext()
        step = self.num_steps + 1
        return self.ledger.span("step", f"step {step}", {"step": step})

    def evaluate(self, batch: Any) -> dict[str, Any]:
        """Return ``{"loss", "weight", "num_samples", "num_tokens"}`` of a global batch, without training on it.

        The loss of several batches is the mean of their losses, weighted by "weight".

        The module is in eval mode meanwhile; no gradient is touched, and torch's generators are put back. Buffers that the model
        writes even so follow rank 0, as they do after a step.

        Args:
            batch: This rank's share, or None; as for `step`.
        """
        with self.engine.switch.plain(), self.told("evaluate"), self.stepper.casts.taken_in(), with_versions():
            self._number_draws(evaluates=True)
            self.stepper.sentinels.refuse_apart(self.stepper.refuse_early_change, in_turn=True)
            with self.engine.at_work():
                return self.stepper.evaluate(versioned(batch))

    def _number_draws(self, *, evaluates: bool) -> None:
        if (draws := self.stepper.draws) is not None:
            draws.num_evaluations = draws.num_evaluations + 1 if evaluates else 0
            draws.step = self.num_steps

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's outputs for these inputs, on this rank alone; "data_parallel" gathers its devices'.

        Under tensor parallelism the ranks that share layers call this together, with the same inputs; under ZeRO-2 and 3, and
        wherever a backward follows, all do.

        The outputs are for `backward`, which exchanges gradients; a plain ``loss.backward()`` is refused. Pipelines and
        "data_parallel" give outputs without a graph. Under `torch.no_grad` none has one.
        """
        given = (*self.parameters(), *tensors_in((args, kwargs)))  # a frozen model may lead to one that is trained
        is_trained = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given)
        engine = self.engine
        with engine.switch.plain(), self.told("forward"), self.stepper.casts.taken_in(), with_versions():
            args, kwargs = versioned((args, kwargs))
            has_ranks = self._own_loop.has_ranks
            if is_trained and engine.takes_own_loops and (has_ranks or self.stepper.draws is not None):
                return self._own_loop.forward(args, kwargs)
            if not is_trained or not (has_ranks or engine.num_replicas > 1):
                return self.stepper.forward_in_dtype(args, kwargs)
            with torch.no_grad():
                outputs = self.stepper.forward_in_dtype(args, kwargs)
        return without_backward(outputs, str(self._plan))

    def loss(self, batch: Any) -> Loss:
        """Return the loss of this rank's share by `loss_fn`, with its graph and what it counts, for `backward`.

        Args:
            batch: This rank's share, of at least one sample; as for `step`, without being cut into micro-batches.

        Raises:
            ConfigError: The share has no samples.
            ApplyError: The loss is not a mean over samples, or nothing can be cut as the plan wants it.
        """
        with self.engine.switch.plain(), self.told("forward"), self.stepper.casts.taken_in():
            return self._own_loop.loss(batch)

    def backward(
        self, loss: torch.Tensor | Loss, *, weight: float | torch.Tensor | None = None, retain_graph: bool = False
    ) -> float:
        """Add to the gradients what ``loss.backward()`` adds on one device with the global batch; every rank calls it.

        What follows reads whole gradients: `clip_grad_norm`, `full_gradients`, ``parameter.grad`` where ranks hold whole ones,
        and ``model.optimizer.step()``. Gradients stay until `zero_grad`, or the optimizer's, so several calls before a step add
        up. Where the loss comes from several models under plans, all of them get gradients, as in torch.

        Args:
            loss: A mean over this rank's share, a scalar computed from outputs of ``model(...)``; or
                ``meshwright.Loss(sum, weight)``.
            weight: What the mean is taken over on this rank, samples or valid labels [count]; 0 where the share is empty.
                Needed where ranks have different shares (dp > 1) and the loss is a mean.
            retain_graph: Whether another backward through this graph follows.

        Returns:
            The loss of the global batch, equal on every rank.

        Raises:
            ApplyError: The plan has no own loops (pp, data_parallel); ranks run different losses; the loss has no graph or no
                weight, trains parameters of no model under a plan, or comes from parameters that were updated since.
        """
        with self.engine.switch.plain(), self.told("backward"):
            look_for_step(self)
            with unlike_saves_told(self._plan.recompute):
                return self._own_loop.backward(loss, weight, retain_graph=retain_graph)

    def clip_grad_norm(self, max_norm: float) -> float:
        """Scale the whole model's gradient to a 2-norm of at most `max_norm`; every rank calls it after `backward`.

        It is torch.nn.utils.clip_grad_norm_ over all ranks' parts.

        Args:
            max_norm: The largest 2-norm that stays, above 0 [units of the gradient].

        Returns:
            The norm before, equal on every rank.

        Raises:
            ConfigError: `max_norm` is not above 0.
        """
        with self.engine.switch.plain(), self.told("gradients"):
            return self._own_loop.clip_grad_norm(max_norm)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients of an own loop, or set them to zero, as in torch."""
        with self.engine.switch.plain():
            if self.engine.is_prepared:  # else there are none
                self._own_loop.zero_grad(set_to_none=set_to_none)

    def full_state_dict(self) -> dict[str, Any]:
        """Return the plain model's state dict: its own FQNs, full CPU tensors, copies; on every rank."""
        module = self.module
        if type(module).__name__ == "OptimizedModule":  # torch.compile's wrapper is not the user's model
            module = module.get_submodule("_orig_mod")
        with self.whole_parameters():
            return {
                name: value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value
                for name, value in module.state_dict().items()
            }

    def full_gradients(self) -> dict[str, torch.Tensor | None]:
        """Return the last step's gradients as one device would have them, after clipping; every rank calls it.

        Returns:
            FQN -> the whole gradient, or None where the parameter has none. Valid until the next step begins.
        """
        with self.engine.switch.plain(), self.told("gradients"):
            self.engine.drop_cleared_gradients()
            return self.engine.full_gradients()

    @contextlib.contextmanager
    def whole_parameters(self) -> Iterator[None]:
        """Have every parameter of the module hold its whole value inside; every rank enters it.

        For reading, copying and writing: what is written inside, alike on every rank, stays. Gradients are not whole here: see
        `full_gradients`.
        """
        let_go(self)
        with self.told("whole"), self.engine.switch.plain():
            with (
                self.engine.whole_parameters(),
                self.engine.switch.whole(),
                contextlib.nullcontext() if self._state_guard is None else self._state_guard.whole(),
            ):
                yield
                self.stepper.sentinels.refuse_apart(is_whole=True)
            self.stepper.sentinels.take_whole_writes()

    def held_bytes(self) -> dict[str, int]:
        """Return the memory that this rank holds for "parameters", "gradients" and "optimizer" state, as it is now [bytes].

        Memory that several tensors share counts once. Gradients are there from `step` until the next one begins.
        """
        with self.engine.switch.plain():
            held = {
                kind: [tensor.detach() for tensor in tensors] for kind, tensors in self.engine.held_tensors().items()
            }
            entries = [] if self.optimizer is None else list(self.optimizer.state.values())
            state = [value for entry in entries for value in entry.values()]
        held["optimizer"] = [value for value in state if isinstance(value, torch.Tensor)]
        return {kind: _memory_bytes(tensors) for kind, tensors in held.items()}

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the module's parameters."""
        return self.module.parameters()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the module's (FQN, parameter) pairs."""
        return self.module.named_parameters()

    def train(self, mode: bool = True) -> ParallelModel:
        """Set training mode, or evaluation mode, as nn.Module.train does; return this model."""
        with self.engine.switch.plain():
            set_mode(self.engine, mode)
        return self

    def eval(self) -> ParallelModel:
        """Set evaluation mode, as nn.Module.eval does; return this model."""
        return self.train(mode=False)

    def close(self) -> None:
        """Release hooks and threads; the module is a plain one again. Nothing is exchanged.

        After ZeRO-3 its values are with the ranks that hold them, and it reads as NaN: take `full_state_dict` before.
        """
        close(self.saving)
        self.last_saves.clear()
        self._own_loop.close()
        self.engine.switch.close()
        self.stepper.close()
        if self._pages is not None:
            self._pages.close()
        if self._state_guard is not None:
            self._state_guard.close()
        self.engine.close()
        if self._recompute is not None:
            self._recompute.close()

    def __enter__(self) -> ParallelModel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        has_parts = self.engine.holds_parts
        self.close()
        if has_parts and isinstance(error, RuntimeError) and says_written_into_expanded(error):
            raise ApplyError(
                f"a script wrote into a parameter under the plan '{self.plan}', where a rank has only a part of its values",
                fix=WRITE_WHOLE,
            ) from error
