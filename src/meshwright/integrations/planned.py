"""The model under a plan as other people's loops see it: called, switched and zeroed like a module, read like the user's own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from meshwright.apply.shards.facts import CLIPS
from meshwright.errors import ApplyError
from meshwright.run.parallel_model import ParallelModel

__all__: list[str] = []


class PlannedModule:
    """Calls of a wrapped module, handed to the model under a plan; every other attribute is the user's module's.

    Args:
        parallel: What `apply_plan` returned.
        converted: Applied to what a call returns; None: nothing is.
    """

    def __init__(self, parallel: ParallelModel, converted: Callable[[Any], Any] | None = None) -> None:
        self.parallel = parallel
        self._converted = converted

    @property
    def module(self) -> nn.Module:
        """The user's own module."""
        return self.parallel.module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        outputs = self.parallel(*args, **kwargs)
        return outputs if self._converted is None else self._converted(outputs)

    def train(self, mode: bool = True) -> PlannedModule:
        """Set training mode, or evaluation mode; return this object."""
        self.parallel.train(mode)
        return self

    def eval(self) -> PlannedModule:
        """Set evaluation mode; return this object."""
        return self.train(mode=False)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, or set them to zero."""
        self.parallel.zero_grad(set_to_none)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["parallel"].module, name)


def speak_as(parallel: ParallelModel, name: str, clips: str) -> None:
    """Have fixes of errors name the model under the plan, and what clips, as the user of a loop reaches them.

    Args:
        parallel: What `apply_plan` returned.
        name: An expression for it, `trainer.parallel` for example.
        clips: What clips the gradient there.
    """
    words = parallel.engine.switch.moment.in_words_of
    words |= {CLIPS: f"{clips} clips", "max_grad_norm= of apply_plan": clips, "model.": f"{name}."}


def count_samples(parallel: ParallelModel, batch: Any) -> int:
    """Return the samples of a batch that a loop has collated [count].

    Raises:
        ApplyError: Its tensors have no common number of them.
    """
    try:
        return parallel.splitter.count(batch)
    except ApplyError as error:
        raise ApplyError(
            error.message,
            fix="have the collator give each tensor one row for each sample (position_ids too), or use a plan with batch=whole "
            "or dp=1, whose ranks take the whole batch",
        ) from None


def bare(model: Any) -> Any:
    """Return the user's own module."""
    return model.module if isinstance(model, PlannedModule) else model


@contextlib.contextmanager
def kept_config(model: Any) -> Iterator[None]:
    """Undo what saving writes into a model's configuration, on the one rank that saves: its forward may read it."""
    config = getattr(model, "config", None)
    before = dict(vars(config)) if config is not None else {}
    try:
        yield
    finally:
        if config is not None:
            vars(config).clear()
            vars(config).update(before)


def num_parameters(model: Any) -> int:
    """Return the parameters that a model of transformers counts operations by; 0 of any other [count]."""
    return model.num_parameters(exclude_embeddings=True) if hasattr(model, "num_parameters") else 0


def tied_names(model: nn.Module) -> dict[str, str]:
    """Return the further names of parameters -> their first name."""
    first: dict[int, str] = {}
    named = model.named_parameters(remove_duplicate=False)
    return {name: other for name, value in named if (other := first.setdefault(id(value), name)) != name}
