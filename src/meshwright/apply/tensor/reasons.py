"""Reasons that a plan gives for its layout: how much is cut, what is whole, and why."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from meshwright.apply.tensor.part import Part
from meshwright.apply.tensor.tensor_layout import TensorLayout
from meshwright.errors import some_of

__all__: list[str] = []


def reasons_of(layout: TensorLayout, sizes: Mapping[str, int], num_ranks: int, parts: Iterable[Part]) -> list[str]:
    """Return the lines of a plan's reasons.

    Args:
        layout: The layout.
        sizes: FQN -> entries of the full parameter [count].
        num_ranks: Ranks that share each layer [count].
        parts: The cut parts; their guards know which calls ran whole.
    """
    total, cuts = max(1, sum(sizes.values())), layout.cuts
    cut = sum(size for name, size in sizes.items() if name in cuts)
    on_slices = sum(len(chain.layers) for chain in layout.chains)
    lines = [f"tp={num_ranks} cuts {cut / total:.1%} of {total} parameters, in {len(layout.regions)} regions"]
    if on_slices:
        lines.append(f"{on_slices} layers run on slices of the sequence between their regions")
    stored = [name for name, (region, _) in cuts.items() if region.is_stored and name in sizes]
    if stored:
        share = sum(sizes[name] for name in stored) / total
        lines.append(
            f"kept in parts, and put together for each use, {share:.1%} of the parameters: {some_of(stored, 4)}"
        )
    for what, held in (("whole", layout.whole), ("cut layer by layer, with an exchange each", layout.alone)):
        by_reason: dict[str, list[str]] = {}
        for name, reason in held.items():
            by_reason.setdefault(reason, []).append(name)
        for reason, names in by_reason.items():
            share = sum(sizes.get(name, 0) for name in names) / total
            lines.append(f"{what}, {share:.1%} of the parameters: {some_of(names, 4)}: {reason}")
    for part in parts:
        for reason in part.guard.reasons if part.guard is not None else ():
            lines.append(f"'{part.name}' runs whole for calls that are not proven: {reason}")
    return lines
