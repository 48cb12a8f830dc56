"""The error of a step that some ranks cannot take, on every rank."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.errors import ApplyError

__all__: list[str] = []


def raise_first(reasons: Sequence[str | None], own: ApplyError | None, ranks: Sequence[int]) -> None:
    """Raise this rank's error, or one that names the first rank that has told a reason; none where no rank has.

    Args:
        reasons: Why each rank cannot go on, in the order of `ranks`.
        own: This rank's own error.
        ranks: The ranks' numbers in the world.
    """
    if own is not None:
        raise own
    found = next(((rank, reason) for rank, reason in zip(ranks, reasons, strict=True) if reason is not None), None)
    if found is not None:
        raise ApplyError(
            f"rank {found[0]} cannot take this step: {found[1]}",
            fix="change the model before apply_plan, on every rank",
        )
