"""DeepSpeed's batch rule: train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x dp."""

from __future__ import annotations

import dataclasses

from meshwright.errors import ConfigError
from meshwright.plan.deepspeed.check import fragment
from meshwright.plan.deepspeed.draft import Draft

__all__: list[str] = []

TRAIN, MICRO, ACCUMULATION = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
    """The three numbers; None where one follows from the others.

    Args:
        train: Samples of one step, over all ranks [samples].
        micro: Samples of one forward pass of one dp rank [samples].
        accumulation: Forward passes of one step on each dp rank [count].
    """

    train: int | None = None
    micro: int | None = None
    accumulation: int | None = None

    @property
    def dp(self) -> int | None:
        """The data-parallel degree that three given numbers leave; None where it is not whole [count]."""
        if self.train is None or self.micro is None or self.accumulation is None:
            return None
        dp, rest = divmod(self.train, self.micro * self.accumulation)
        return dp if dp and not rest else None

    def fits(self, dp: int) -> bool:
        """Tell whether the rule can hold for this many data-parallel ranks."""
        try:
            self.complete(dp)
        except ConfigError:
            return False
        return True

    def complete(self, dp: int) -> Batch:
        """Return all three numbers, as DeepSpeed derives them: the missing ones by whole division.

        Args:
            dp: Data-parallel ranks [count].

        Raises:
            ConfigError: The numbers contradict each other or do not divide, or there are none. The fix sets train_batch_size.

        Source:
            deepspeed 0.19.8, `DeepSpeedConfig._set_batch_related_parameters` and `_batch_assertion`.

        >>> Batch(train=256, micro=16).complete(dp=2)
        Batch(train=256, micro=16, accumulation=8)
        """
        train, micro, accumulation = self.train, self.micro, self.accumulation
        if train is None:
            if micro is None:
                raise ConfigError(
                    f'neither "{TRAIN}" nor "{MICRO}" is given (rule: at least one of them)', fix=fragment(TRAIN, dp)
                )
            accumulation = accumulation or 1
            train = micro * accumulation * dp
        elif micro is None:
            accumulation = accumulation or 1
            micro = train // dp // accumulation
        elif accumulation is None:
            accumulation = train // micro // dp
        if min(train, micro, accumulation) < 1 or train != micro * accumulation * dp:
            micro, accumulation = max(micro, 1), max(accumulation, 1)
            product = micro * accumulation * dp
            raise ConfigError(
                f'"{TRAIN}" is {train}, and micro-batch x accumulation x dp is {micro} x {accumulation} x {dp} = {product} '
                "(rule: they are equal)",
                fix=fragment(TRAIN, product),
            )
        return Batch(train, micro, accumulation)


def read_batch(draft: Draft) -> Batch:
    """Return the numbers that are given: "auto" takes the configuration's, and so does a file that says nothing of it."""
    train, micro, accumulation = (draft.get(key) for key in (TRAIN, MICRO, ACCUMULATION))
    settings = draft.settings
    if accumulation is None and draft.is_auto(ACCUMULATION):
        accumulation = settings.micro_batches
    if train is None and (micro is None or draft.is_auto(TRAIN)):
        train = settings.global_batch_size
    return Batch(train, micro, accumulation)


def take_batch(draft: Draft, given: Batch, dp: int) -> None:
    """Put the batch into the plan and the configuration, for this many data-parallel ranks."""
    try:
        batch = given.complete(dp)
    except ConfigError as error:
        draft.problems.add(error.message, fix=error.fix)
        return
    draft.plan |= {"micro_batches": batch.accumulation, "micro_batch_size": batch.micro}
    draft.change("train", global_batch_size=batch.train)
    if draft.settings.micro_batches is not None:
        draft.change("train", micro_batches=batch.accumulation)
    product = f"{MICRO} x {ACCUMULATION} x dp = {batch.micro} x {batch.accumulation} x {dp}"
    draft.row(TRAIN, f"train.global_batch_size={batch.train}", _why(draft, TRAIN, given.train, product))
    rest = f"{TRAIN} / ({ACCUMULATION} x dp) = {batch.train} / ({batch.accumulation} x {dp})"
    draft.row(MICRO, f"micro_batch_size={batch.micro}", _why(draft, MICRO, given.micro, rest))
    rest = f"{TRAIN} / ({MICRO} x dp) = {batch.train} / ({batch.micro} x {dp})"
    if given.train is None or given.micro is None:
        rest = "DeepSpeed's default"
    draft.row(ACCUMULATION, f"micro_batches={batch.accumulation}", _why(draft, ACCUMULATION, given.accumulation, rest))


def _why(draft: Draft, key: str, known: int | None, derived: str) -> str:
    if draft.get(key) is not None:
        return f"given; {derived}" if key == TRAIN else "given"
    setting = {TRAIN: "train.global_batch_size", ACCUMULATION: "train.micro_batches"}.get(key)
    word = "auto" if draft.is_auto(key) else "not given"
    return f"{word}: {setting} of the configuration" if known is not None else f"{word}: {derived}"
