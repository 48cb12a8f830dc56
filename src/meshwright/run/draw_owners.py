"""Samples of drawn elements, by what these have influence on: of draws whose samples no dim holds in their order.

Outputs of some samples are weighed with gradients by what was drawn. Two passes for each bit of a sample's number tell the sample
of each element, however many there are.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from meshwright.apply.randomness.forward_draws import DrawNote
from meshwright.apply.randomness.names import draw_called
from meshwright.apply.randomness.sample_blocks import NO_OWNER, find_blocks, unseen_blocks
from meshwright.apply.randomness.sample_dims import Call, SiteDims, find_dims
from meshwright.run.losses.trial_forward import TrialForward, TrialOutcome

__all__: list[str] = []

_SEVERAL = -2
"""The owner of an element that several samples are influenced by."""
_CHANCES = (0, *range(3, 10))
"""The sets of random numbers by which owners are looked for: one may hide a row behind a maximum, or behind a mask."""

OutputDims = Sequence[SiteDims | None]
"""Of each output, the dim that holds the samples; None: no dim does."""


class Probed(Protocol):
    """A forward whose draws were probed."""

    num_samples: int
    outputs: list[Tensor]
    notes: dict[Call, DrawNote]
    owners: dict[Call, Tensor]
    outcome: TrialOutcome


def output_dims(whole: Probed, pieces: Sequence[Probed]) -> list[OutputDims]:
    """Return the dims of outputs that hold the samples, with each order of samples that lie beside other entries in one."""
    found = list[SiteDims | None]()
    for place, tensor in enumerate(whole.outputs):
        shapes = [(one.num_samples, tuple(one.outputs[place].shape)) for one in pieces if place < len(one.outputs)]
        own = find_dims([(whole.num_samples, tuple(tensor.shape)), *shapes])
        found.append(None if own is None or own.dim is None or not tensor.is_floating_point() else own)
    turned = [own and dataclasses.replace(own, is_minor=own.is_merged) for own in found]
    return [found, turned] if turned != found else [found]


Run = Callable[..., Generator[list[TrialForward], list[TrialOutcome], Sequence[Probed]]]


def find_by_owners(
    run: Run, share: Any, placed: Sequence[tuple[Any, int]], known: Mapping[Call, SiteDims]
) -> Generator[list[TrialForward], list[TrialOutcome], list[dict[Call, SiteDims]]]:
    """Return the dims of calls by what they have influence on, for each order of samples that outputs may have.

    Owners that one set of random numbers does not show are those that others show.

    Args:
        run: Runs (batch, place of its first sample) with known dims; with gradients where there are ``factors``.
        share: The whole.
        placed: Its parts.
        known: Dims, by call.
    """
    (whole,), pieces = (yield from run([(share, 0)], known)), (yield from run(placed, known))
    found = list[dict[Call, SiteDims]]()
    for dims in output_dims(whole, pieces):
        owned, by_owners = list[Probed](), dict[Call, SiteDims]()
        for chance in _CHANCES:
            factors = [1.0] * (1 + len(placed))
            tried = yield from run([(share, 0), *placed], known, chance, factors=factors, output_dims=dims)
            if any(one.outcome.error for one in tried):
                break
            hidden = _num_hidden(owned)
            owned = _filled(owned, tried)
            by_owners = dims_by_owners(known, owned[0], owned[1:])
            if _shows_all({**known, **by_owners}, owned[0]) or _num_hidden(owned) == hidden:
                break
        if by_owners and by_owners not in found:
            found.append(by_owners)
    return found


def find_hidden(
    run: Run, share: Any, proven: Sequence[Probed], dims: Mapping[Call, SiteDims], *, probes: bool
) -> Generator[list[TrialForward], list[TrialOutcome], list[str]]:
    """Return, for people, the calls some of whose rows are of no known sample, and may have influence on outputs even so.

    They are hidden by numbers, as a mask of the first batch, or a buffer of zeros. NaNs in them show that. NaNs in one sample's
    rows that reach outputs of others show that these may not be its own.

    Args:
        run: As for `find_by_owners`.
        share: The whole.
        proven: What it and then its parts have given with these dims.
        dims: Dims, by call.
        probes: Whether gradients may be taken.
    """
    merged = {call: own for call, own in dims.items() if own.has_merged_rows}
    if not merged and not any(own.blocks for own in dims.values()):
        return []
    whole, *pieces = proven
    count, hidden = whole.num_samples, list[Call]()
    unseen = {call: unseen_blocks(own.blocks, count) for call, own in dims.items() if own.blocks}
    marked = {call: mask for call, mask in unseen.items() if mask is not None}
    if marked:
        (other,) = yield from run([(share, 0)], dims, marked=marked)
        if not _spares_others(whole, other, [None] * len(whole.outputs)):
            hidden += marked
    rows = {
        call: _samples_of_rows(whole.notes[call].shape, merged[call], count) for call in merged if call in whole.notes
    }
    if not rows or not probes:
        return [*map(draw_called, hidden)]
    (other,) = yield from run([(share, 0)], dims, marked={call: own == count - 1 for call, own in rows.items()})
    kinds = output_dims(whole, pieces)
    if any(_spares_others(whole, other, kind) for kind in kinds):
        return [*map(draw_called, hidden)]
    (seen,) = yield from run([(share, 0)], dims, factors=[1.0], output_dims=kinds[0])
    for call, own in rows.items():
        owners = seen.owners.get(call)
        if owners is not None and bool((_blocks(owners, own.dim()) == NO_OWNER).any()):
            hidden.append(call)
    return [*map(draw_called, hidden)]


def _samples_of_rows(shape: Sequence[int], dims: SiteDims, num_samples: int) -> Tensor:
    """Return the sample of each row of the dims up to the one that holds the samples."""
    dim = dims.dim or 0
    places = torch.arange(shape[dim])
    samples = places % num_samples if dims.is_minor else places // max(1, shape[dim] // num_samples)
    return samples.expand(*shape[: dim + 1])


def _of_all(rows: Tensor, like: Tensor) -> Tensor:
    """Return what is known of the rows of a tensor in a form that its elements broadcast with."""
    return rows.to(like.device).view(*rows.shape, *[1] * (like.dim() - rows.dim()))


def zeros_in(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters with zeros that may hide something; a bias, which is added, hides nothing."""
    own = [parameter for name, parameter in module.named_parameters() if not name.endswith("bias")]
    held = [p for p in own if type(p.data) is Tensor and p.is_floating_point() and not p.is_meta]
    return [p for p in held if bool((p.data == 0).any())]


@contextlib.contextmanager
def zeros_moved(module: nn.Module) -> Iterator[None]:
    """Put other numbers in place of a model's parameters that are zero inside the context.

    Zeros hide what a layer's first steps do not let through, such as LayerScale and the last layer of a residual branch.
    """
    before = [(parameter, parameter.data) for parameter in zeros_in(module)]
    for parameter, held in before:
        numbers = torch.arange(held.numel(), dtype=held.dtype, device=held.device).mul_(0.7).cos_().mul_(0.1)
        parameter.data = torch.where(held == 0, numbers.view(held.shape), held)
    try:
        yield
    finally:
        for parameter, held in before:
            parameter.data = held


def owners_of(
    outputs: Sequence[Tensor], dims: OutputDims, probes: Mapping[Call, Tensor], num_samples: int
) -> dict[Call, Tensor]:
    """Return the sample that each drawn element has influence on, by call.

    Args:
        outputs: Of the forward, with their graph.
        dims: Of these.
        probes: Of what was drawn.
        num_samples: Of the forward [count].
    """
    terms = [
        _by_sample(tensor, own, num_samples)
        for tensor, own in zip(outputs, dims, strict=False)
        if own is not None and tensor.requires_grad
    ]
    if not terms or not probes:
        return {}
    total, wanted = torch.stack(terms).sum(0), list(probes.values())
    owners = [torch.zeros(probe.shape, dtype=torch.int64, device=probe.device) for probe in wanted]
    has_any = [torch.zeros_like(own, dtype=torch.bool) for own in owners]
    for bit in range(max(1, (num_samples - 1).bit_length())):
        seen = list[list[Tensor]]()
        for value in (0, 1):
            chosen = [sample for sample in range(num_samples) if sample >> bit & 1 == value]
            slopes = torch.autograd.grad(total[chosen].sum(), wanted, retain_graph=True, allow_unused=True)
            seen.append(
                [
                    torch.zeros_like(own) if slope is None else slope != 0
                    for slope, own in zip(slopes, has_any, strict=True)
                ]
            )
        for own, some, without, within in zip(owners, has_any, *seen, strict=True):
            some |= without | within
            own.masked_fill_(without & within, _SEVERAL)
            own.add_(torch.where(within & (own >= 0), 1 << bit, 0))
    return {call: own.masked_fill_(~some, NO_OWNER) for call, own, some in zip(probes, owners, has_any, strict=True)}


def dims_by_owners(known: Mapping[Call, SiteDims], whole: Probed, pieces: Sequence[Probed]) -> dict[Call, SiteDims]:
    """Return the dims of calls whose elements belong to other samples than known dims say.

    Args:
        known: Dims, by call.
        whole: The whole batch.
        pieces: Its parts.
    """
    found: dict[Call, SiteDims] = {}
    for call, owners in whole.owners.items():
        own, note = known.get(call), whole.notes[call]
        if not bool((owners >= 0).any()) or (own is not None and _agrees(owners, own, whole.num_samples)):
            continue
        seen = [
            (whole.num_samples, owners),
            *((one.num_samples, one.owners[call]) for one in pieces if call in one.owners),
        ]
        depth = next((n for n in range(1, owners.dim() + 1) if not bool((_blocks(owners, n) == _SEVERAL).any())), None)
        if depth is None or len(seen) <= len(pieces) or any(one.dim() != owners.dim() for _, one in seen):
            continue
        blocks = find_blocks([(count, _blocks(one, depth)) for count, one in seen])
        if blocks is not None:
            given = {"num_dims": owners.dim(), "inner": tuple(owners.shape[1:]), "kind": note.kind, "site": note.site}
            found[call] = SiteDims(0, is_merged=True, blocks=blocks, **given)
    return found


def _filled(before: Sequence[Probed], tried: Sequence[Probed]) -> Sequence[Probed]:
    """Return runs whose elements without an owner have those of others."""
    for one, other in zip(before, tried, strict=False):
        for call, owners in other.owners.items():
            own = one.owners.setdefault(call, owners)
            one.notes.setdefault(call, other.notes[call])
            if own.shape == owners.shape:
                apart = (own != owners) & (own != NO_OWNER) & (owners != NO_OWNER)
                own.copy_(torch.where(own == NO_OWNER, owners, own).masked_fill_(apart, _SEVERAL))
    return before or tried


def _num_hidden(runs: Sequence[Probed]) -> int:
    """Return how many rows of what calls have drawn have no owner; -1 where nothing has run."""
    rows = [(own == NO_OWNER).flatten(1).all(1) for one in runs for own in one.owners.values() if own.dim() > 1]
    return sum(int(own.sum()) for own in rows) if runs else -1


def _shows_all(dims: Mapping[Call, SiteDims], whole: Probed) -> bool:
    """Tell whether elements of all calls have an owner where dims say one."""
    for call, owners in whole.owners.items():
        own = dims.get(call)
        if own is None:
            return False
        if own.blocks is None and not _agrees(owners, own, whole.num_samples):
            return False
        if own.blocks is not None and unseen_blocks(own.blocks, whole.num_samples) is not None:
            return False
    return True


def _spares_others(whole: Probed, other: Probed, dims: OutputDims) -> bool:
    """Tell whether NaNs in rows of the last sample have reached its outputs alone; where these have no dims, none at all."""
    if other.outcome.error is not None or len(whole.outputs) != len(other.outputs):
        return False
    for before, after, own in zip(whole.outputs, other.outputs, dims, strict=True):
        lost = after.isnan() & ~before.isnan()
        if own is not None:
            last = _samples_of_rows(lost.shape, own, whole.num_samples) == whole.num_samples - 1
            lost = lost & ~_of_all(last, lost)
        elif before.dim() == 0 and any(one is not None for one in dims):
            continue  # a mean over samples
        if bool(lost.any()):
            return False
    return True


def _by_sample(tensor: Tensor, dims: SiteDims, num_samples: int) -> Tensor:
    """Return a sum of each sample's entries (samples,), weighed so that none stands for another."""
    weights = torch.arange(tensor.numel(), dtype=tensor.dtype, device=tensor.device).mul_(0.7).cos_()
    rows = (tensor * weights.view(tensor.shape)).movedim(dims.dim or 0, 0).flatten(1).sum(1)
    return rows.view(-1, num_samples).sum(0) if dims.is_minor else rows.view(num_samples, -1).sum(1)


def _agrees(owners: Tensor, dims: SiteDims, num_samples: int) -> bool:
    """Tell whether elements with an owner are of the sample that dims say."""
    if dims.blocks is not None or dims.loop or dims.dim is None or owners.shape[dims.dim] % num_samples:
        return False
    said = _of_all(_samples_of_rows(owners.shape, dims, num_samples), owners)
    return bool(((owners == said) | (owners == NO_OWNER)).all())


def _blocks(owners: Tensor, depth: int) -> Tensor:
    """Return the owner of each block of the leading dims."""
    flat = owners.flatten(depth) if depth < owners.dim() else owners[..., None]
    most = flat.amax(-1)
    least = torch.where(flat == NO_OWNER, most[..., None], flat).amin(-1)
    return torch.where(least == most, most, _SEVERAL)
