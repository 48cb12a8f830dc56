"""Facts about this rank's part of a tensor whose other entries, or other terms, are on other ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable
from typing import Any, Literal, NoReturn, Self

from torch import Tensor

from meshwright.errors import ApplyError

__all__: list[str] = []

READ_WHOLE = "read it inside `with model.whole_parameters():`, which every rank enters"
CLIPS = "its norm is StepResult.grad_norm; max_grad_norm= of apply_plan clips, or model.clip_grad_norm(max_norm) in an own loop"
READ_GRADIENT = f"call model.full_gradients() on every rank after the step; {CLIPS}"
LINEAR_HOOK = (
    "in a hook, scale the gradient or set parts of it to zero; max_grad_norm= of apply_plan clips the whole gradient, and "
    "model.full_gradients() gives it after the step"
)
_NO_SCALER = (
    "leave torch.amp.GradScaler out: precision=bf16 in the plan, or torch.autocast in bfloat16, needs no scaled loss; float16 "
    "with a scaler runs under plain dp"
)
_SCALERS = ("_amp_foreach_non_finite_check_and_unscale_",)
_IN_STEP = (
    "compute it inside of a layer, which runs whole where shards do not do; put a penalty into the optimizer (weight_decay); "
    "or use a plan without {axis}"
)


class RunMoment:
    """The phase of a run, for facts and their errors; one for each model under a plan."""

    def __init__(self, plan: str = "") -> None:
        self.plan = plan
        self.where: Literal["between", "step", "hook"] = "between"
        """The user code that runs: between steps, in a forward or loss, or in a hook around the optimizer's step."""
        self.steps = 0
        """Steps that have begun, and backwards of an own loop [count]."""
        self.in_words_of: dict[str, str] = {}
        """How whoever has made the model calls what a fix names: a Trainer's user has no `model` of this library."""
        self.has_own_gradients = False
        """Whether an own loop has run a backward: gradients then live on until the script drops them."""


@dataclasses.dataclass(slots=True, eq=False, kw_only=True)
class ShardFacts:
    """Facts about a tensor of which this rank has a part.

    Args:
        name: Its name in errors: "parameter 'up.weight'".
        held: This rank's part of it, as the end of a sentence.
        moment: The phase of the run.
        values: "shard": some of the entries; "share": a term of a sum over ranks or micro-batches; "none": only NaN of the
            right shape; "whole": everything.
        key: Equal for tensors that hold the same entries of full tensors of one shape.
        is_cut: Whether entries are missing.
        axis: The setting of the plan that is the cause.
        elsewhere: If this rank holds nothing: the part that the holding ranks have between steps. They carry out a script's
            writes into "whole" values, and elementwise writes into a "shard"; with "none" nobody can. "" on a holding rank.
        gradient_is_elsewhere: Tells whether the gradient is now in other memory than `.grad`.
        read: A fix: how to read the whole tensor.
        write: A fix: how to write the whole tensor.
    """

    name: str
    held: str
    moment: RunMoment
    values: Literal["shard", "share", "none", "whole"]
    key: Hashable
    is_cut: bool = True
    axis: str = "tp"
    is_cut_inside: bool = False
    """Whether entries are missing inside of a step, too."""
    is_piece: bool = False
    """Whether it is the optimizer's memory, which never becomes whole."""
    elsewhere: Literal["", "whole", "shard", "none"] = ""
    gradient_is_elsewhere: Callable[[], bool] | None = None
    read: str = READ_WHOLE
    write: str = "write it inside `with model.whole_parameters():`, alike on every rank"
    saves_as_plain: bool = False
    """Whether it may be pickled as this rank's part: the loader checks the rank."""
    cleared_in: int = -1
    """The step after which a script has set the gradient to None."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a file has whole tensors

    def of_gradient(self) -> ShardFacts:
        """Return the facts about a gradient that is cut like this parameter."""
        return dataclasses.replace(
            self,
            name=f"the gradient of {self.name}",
            values="shard" if self.values == "whole" else self.values,
            read=READ_GRADIENT,
            write=READ_GRADIENT,
            elsewhere="",
        )

    @property
    def ignores_writes(self) -> bool:
        """Whether a script's writes are carried out by the ranks that have the values, so that this rank does nothing."""
        return self.elsewhere in ("whole", "shard")

    def of_absent_gradient(self) -> ShardFacts:
        """Return the facts about a gradient of which this rank has pieces in other memory."""
        held = f"the ranks have pieces of gradients alone, which are not in .grad ({self.axis})"
        found = dataclasses.replace(self.of_gradient(), held=held)
        found.values, found.is_cut = "none", True
        return found

    def refuse(self, what: str, *, writes: bool = False) -> NoReturn:
        """Raise an ApplyError that says why this rank cannot run an operation on the tensor."""
        if self.values == "share":
            fix = LINEAR_HOOK
        elif self.moment.where == "step" and self.read == READ_WHOLE:
            fix = _IN_STEP.format(axis=self.axis)
        else:
            fix = self.write if writes else self.read
        if what.startswith(_SCALERS):
            fix = _NO_SCALER
        for ours, theirs in self.moment.in_words_of.items():
            fix = fix.replace(ours, theirs)
        kind = "is not a linear function" if self.values == "share" and not self.is_cut else "needs the whole tensor"
        raise ApplyError(
            f"{what} of {self.name} {kind}: under the plan '{self.moment.plan}' {self.held}",
            fix=fix,
        )


def join_parts(
    inner: Iterable[tuple[Tensor, ShardFacts]], outer: Iterable[tuple[Tensor, ShardFacts]]
) -> list[tuple[Tensor, ShardFacts]]:
    """Merge the facts of two nested strategies: a tensor may be a shard that is sharded again."""
    found = {id(tensor): (tensor, facts) for tensor, facts in inner}
    for tensor, facts in outer:
        below = found.get(id(tensor))
        if below is not None:
            facts.values = facts.values if below[1].values == "whole" else below[1].values
            facts.gradient_is_elsewhere = below[1].gradient_is_elsewhere
        found[id(tensor)] = (tensor, facts)
    return list(found.values())
