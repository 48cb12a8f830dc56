"""First look: one rank runs the first batch on trial, and tells the others the result."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from meshwright.apply.state.buffers import BufferSnapshot
from meshwright.apply.state.kept_parameters import KeptParameters
from meshwright.apply.state.random_states import kept_random_states
from meshwright.comm.communicator import Communicator
from meshwright.errors import ApplyError, MeshwrightError, UserCodeError

__all__: list[str] = []

Run = Callable[[nn.Module], Any]


class FirstRun:
    """Runs a module and its loss on a few samples, and returns its outputs.

    Args:
        run: (module, samples) -> outputs. It may not write into the samples.
        take: Returns the samples, and how many times as many the micro-batch has. It is called for a look alone: the user's own
            code may cut the batch, and raise on one rank.
        repeat: Makes two samples of a single one; returns None where there are more.
        whole: All samples of the micro-batch.
    """

    def __init__(
        self,
        run: Callable[[nn.Module, Any], Any],
        take: Callable[[], tuple[Any, int]],
        repeat: Callable[[Any], Any | None],
        whole: Any,
    ) -> None:
        self._run = run
        self._take = take
        self._repeat = repeat
        self._whole = whole
        self.pieces = 1
        """How many times as many samples the micro-batch has as the last run took [count]."""
        self.evaluates = False
        """Whether the model's first call is an evaluation: what its code then keeps may go by the mode."""

    def __call__(self, module: nn.Module) -> Any:
        few, self.pieces = self._take()
        return self._run(module, few)

    def on_two(self) -> Run | None:
        """Return the run on two samples where this one has a single sample, with which BatchNorm cannot train."""
        two = self._repeat(self._take()[0])
        return None if two is None else lambda module: self._run(module, two)

    def on_all(self, module: nn.Module) -> Any:
        """Run on all samples: labels may have been cut to the longest sample of them, which the few may lack."""
        return self._run(module, self._whole)


def on_all_samples(run: Run) -> Run:
    """Return what runs a module on all samples of a micro-batch, where `run` takes a few of them."""
    return run.on_all if isinstance(run, FirstRun) else run


def begins_in_eval_mode(run: Run) -> bool:
    """Tell whether one process would run the model's first forward in eval mode."""
    return isinstance(run, FirstRun) and run.evaluates


def tell_everyone(
    group: Communicator, device: torch.device, module: nn.Module, run: Run | None, look: Callable[[Run], Any]
) -> Any:
    """Return, on every rank, the JSON value that `look` gave on the first rank that has a sample.

    Args:
        group: All ranks; each calls this.
        device: The device of the exchange.
        module: The model; state that its code keeps outside is restored.
        run: Runs the model and its loss on a small batch; None where this rank has no sample.
        look: Inspects the model with it, and returns a JSON value.

    Raises:
        ApplyError: No rank has a sample, or the plan cannot be applied, with the same words on every rank.
        UserCodeError: Another rank looked, and the user's code raised there.
        Exception: On that rank, the code's own exception.
    """
    able = group.all_gather_json(run is not None, device=device)
    if True not in able:
        raise ApplyError("no rank has a sample, so that the model's data flow cannot be seen", fix="pass a batch")
    first = able.index(True)
    told: Any = None
    failure: Exception | None = None
    if group.group_rank == first and run is not None:
        try:
            with kept_random_states([device], module=module), _kept_tensors(module):
                told = {"seen": _look_or_look_again(run, look)}
        except MeshwrightError as error:
            failure, told = error, {"refused": error.message, "fix": error.fix}
        except Exception as error:  # noqa: BLE001 - the user's forward or loss: every rank must hear of it
            failure, told = error, {"raised": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
    answer = group.all_gather_json(told, device=device)[first]
    if failure is not None:
        raise failure
    if "refused" in answer:
        raise ApplyError(answer["refused"], fix=answer["fix"])
    if "raised" in answer:
        raise UserCodeError(
            f"rank {first} ran the model's first batch and raised {answer['raised']}\n\n{answer['traceback'].rstrip()}",
            rank=first,
            traceback_text=answer["traceback"],
        )
    return answer["seen"]


def _look_or_look_again(run: Run, look: Callable[[Run], Any]) -> Any:
    """Return what `look` gives; where the user's code raises with a few samples, what it gives with two or with all of them."""
    try:
        return look(run)
    except MeshwrightError:
        raise
    except Exception:
        if not isinstance(run, FirstRun):
            raise
    with contextlib.suppress(Exception):
        if (two := run.on_two()) is not None:
            return look(two)
    # What it raises now is what a step would raise.
    return look(run.on_all)


@contextlib.contextmanager
def _kept_tensors(module: nn.Module) -> Iterator[None]:
    """Restore, after the context, buffers and parameters that a forward writes: the other ranks do not run it.

    A look runs copies of modules, which share the parameters' memory. User code may also reach the module itself, for example
    through a patched forward.

    Raises:
        ApplyError: A forward has written a parameter that is too large to keep a copy of.
    """
    gradients = [(parameter, parameter.grad) for parameter in module.parameters()]
    parameters, buffers = KeptParameters(module), BufferSnapshot(module)
    try:
        yield
    finally:
        buffers.restore()
        for parameter, gradient in gradients:
            parameter.grad = gradient
        parameters.restore_all()
