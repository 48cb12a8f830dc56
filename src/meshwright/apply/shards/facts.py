"""What a rank has of a tensor whose other entries, or whose other terms, are with other ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable
from typing import Any, Literal, NoReturn, Self

from torch import Tensor

from meshwright.errors import ApplyError

__all__: list[str] = []

READ_WHOLE = "read it inside `with model.whole_parameters():`, which every rank enters"
READ_GRADIENT = (
    "call model.full_gradients() on every rank after the step; its norm is StepResult.grad_norm, and max_grad_norm= of "
    "apply_plan clips"
)
LINEAR_HOOK = (
    "in a hook, scale the gradient or set parts of it to zero; max_grad_norm= of apply_plan clips the whole gradient, and "
    "model.full_gradients() gives it after the step"
)
_IN_STEP = (
    "compute it inside of a layer, which runs whole where shards do not do; put a penalty into the optimizer (weight_decay); "
    "or use a plan without {axis}"
)


class RunMoment:
    """Where a run is, for facts and their errors; one for a model under a plan."""

    def __init__(self, plan: str = "") -> None:
        self.plan = plan
        self.where: Literal["between", "step", "hook"] = "between"
        """Which code of the user's runs: between steps, in a forward or loss, or in a hook around the optimizer's step."""
        self.steps = 0
        """Steps that have begun [count]."""


@dataclasses.dataclass(slots=True, eq=False, kw_only=True)
class ShardFacts:
    """What is known of a tensor of which this rank has a part.

    Args:
        name: What it is: "parameter 'up.weight'".
        held: What this rank has of it, as the end of a sentence.
        moment: Where the run is.
        values: "shard": some of the entries; "share": a term of a sum over ranks or micro-batches; "none": nothing, what is
            there are NaN of the right shape; "whole": everything.
        key: Equal for tensors that hold the same entries of full tensors of one shape.
        is_cut: Whether entries are missing.
        axis: The part of the plan that is to blame.
        elsewhere: What the ranks have that hold it between steps, where this one holds nothing: what a script writes into "whole"
            values, or number by number into a "shard", is theirs to do; "none" of them can. "" where this rank is one of them.
        gradient_is_elsewhere: Whether other memory than `.grad` holds the gradient now.
        read: A way to read it that works.
        write: A way to write it that works.
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
    """Whether it is memory of the optimizer, which never becomes whole."""
    elsewhere: Literal["", "whole", "shard", "none"] = ""
    gradient_is_elsewhere: Callable[[], bool] | None = None
    read: str = READ_WHOLE
    write: str = "write it inside `with model.whole_parameters():`, alike on every rank"
    saves_as_plain: bool = False
    """Whether it may be pickled, as this rank's part: what reads it back asks whose it is."""
    cleared_in: int = -1
    """The step after which a script has set the gradient to None."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a file has whole tensors

    def of_gradient(self) -> ShardFacts:
        """Return what is known of a gradient that lies beside this parameter."""
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
        """Whether the ranks that have the values do what a script does to it, so that here nothing is to do."""
        return self.elsewhere in ("whole", "shard")

    def of_absent_gradient(self) -> ShardFacts:
        """Return what is known of a gradient that this rank has pieces of, in other memory."""
        held = f"the ranks have pieces of gradients alone, which are not in .grad ({self.axis})"
        found = dataclasses.replace(self.of_gradient(), held=held)
        found.values, found.is_cut = "none", True
        return found

    def refuse(self, what: str, *, writes: bool = False) -> NoReturn:
        """Raise the ApplyError that says why this rank cannot do something with the tensor."""
        if self.values == "share":
            fix = LINEAR_HOOK
        elif self.moment.where == "step" and self.read == READ_WHOLE:
            fix = _IN_STEP.format(axis=self.axis)
        else:
            fix = self.write if writes else self.read
        kind = "is not a linear function" if self.values == "share" and not self.is_cut else "needs the whole tensor"
        raise ApplyError(
            f"{what} of {self.name} {kind}: under the plan '{self.moment.plan}' {self.held}",
            fix=fix,
        )


def join_parts(
    inner: Iterable[tuple[Tensor, ShardFacts]], outer: Iterable[tuple[Tensor, ShardFacts]]
) -> list[tuple[Tensor, ShardFacts]]:
    """Return what two strategies hold, one around the other: a tensor may be a shard that is sharded again."""
    found = {id(tensor): (tensor, facts) for tensor, facts in inner}
    for tensor, facts in outer:
        below = found.get(id(tensor))
        if below is not None:
            facts.values = facts.values if below[1].values == "whole" else below[1].values
            facts.gradient_is_elsewhere = below[1].gradient_is_elsewhere
        found[id(tensor)] = (tensor, facts)
    return list(found.values())
