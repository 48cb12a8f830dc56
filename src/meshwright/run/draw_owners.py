"""Samples of drawn elements, by what these have influence on: of draws whose samples no dim holds in their order.

Outputs of some samples are weighed with gradients by what was drawn. Two passes for each bit of a sample's number tell the sample
of each element, however many there are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from meshwright.apply.randomness.forward_draws import DrawNote
from meshwright.apply.randomness.sample_blocks import NO_OWNER, find_blocks
from meshwright.apply.randomness.sample_dims import Call, SiteDims, find_dims
from meshwright.run.losses.trial_forward import TrialForward, TrialOutcome

__all__: list[str] = []

_SEVERAL = -2
"""The owner of an element that several samples are influenced by."""

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

    Args:
        run: Runs (batch, place of its first sample) with known dims; with gradients where there are ``factors``.
        share: The whole.
        placed: Its parts.
        known: Dims, by call.
    """
    (whole,), pieces = (yield from run([(share, 0)], known)), (yield from run(placed, known))
    found = list[dict[Call, SiteDims]]()
    for dims in output_dims(whole, pieces):
        tried = yield from run([(share, 0), *placed], known, factors=[1.0] * (1 + len(placed)), output_dims=dims)
        by_owners = {} if any(one.outcome.error for one in tried) else dims_by_owners(known, tried[0], tried[1:])
        if by_owners and by_owners not in found:
            found.append(by_owners)
    return found


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


def _by_sample(tensor: Tensor, dims: SiteDims, num_samples: int) -> Tensor:
    """Return a sum of each sample's entries (samples,), weighed so that none stands for another."""
    weights = torch.arange(tensor.numel(), dtype=tensor.dtype, device=tensor.device).mul_(0.7).cos_()
    rows = (tensor * weights.view(tensor.shape)).movedim(dims.dim or 0, 0).flatten(1).sum(1)
    return rows.view(-1, num_samples).sum(0) if dims.is_minor else rows.view(num_samples, -1).sum(1)


def _agrees(owners: Tensor, dims: SiteDims, num_samples: int) -> bool:
    """Tell whether elements with an owner are of the sample that dims say."""
    if dims.blocks is not None or dims.loop or dims.dim is None or owners.shape[dims.dim] % num_samples:
        return False
    each = owners.shape[dims.dim] // num_samples
    places = torch.arange(owners.shape[dims.dim], device=owners.device)
    samples = places % num_samples if dims.is_minor else places // each
    said = samples.view([-1] + [1] * (owners.dim() - dims.dim - 1))
    return bool(((owners == said) | (owners == NO_OWNER)).all())


def _blocks(owners: Tensor, depth: int) -> Tensor:
    """Return the owner of each block of the leading dims."""
    flat = owners.flatten(depth) if depth < owners.dim() else owners[..., None]
    most = flat.amax(-1)
    least = torch.where(flat == NO_OWNER, most[..., None], flat).amin(-1)
    return torch.where(least == most, most, _SEVERAL)
