"""Parameters that a trial forward writes, and their restoration."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from meshwright._torch_private import without_dispatch_modes, without_function_modes
from meshwright.apply.state.attributes import SMALL_BYTES
from meshwright.apply.state.buffers import holds_values
from meshwright.errors import ApplyError

__all__: list[str] = []

_BITS = 8


class KeptParameters:
    """The parameters of a module at one moment: small ones with their values, large ones with a sum of their bits.

    Versions alone cannot show a write: `.data` leaves them unchanged.

    Args:
        module: The module.
        only: Ids of those to keep; None for all.
    """

    def __init__(self, module: nn.Module, only: Collection[int] | None = None) -> None:
        wanted = [(name, p) for name, p in _named(module) if only is None or id(p) in only]
        self._held = [(name, parameter) for name, parameter in wanted if _is_plain(parameter)]
        self._data = [parameter.data for _, parameter in self._held]
        self._values = [parameter.detach().clone() if is_kept(parameter) else None for _, parameter in self._held]
        self._sums = self._read_sums()

    def _read_sums(self) -> list[int]:
        large = [p for (_, p), value in zip(self._held, self._values, strict=True) if value is None]
        sums = [_as_bits(p).sum(dtype=torch.int64).cpu() if _is_plain(p) else torch.tensor(0) for p in large]
        return torch.stack(sums).tolist() if sums else []

    def restore(self) -> list[tuple[str, Tensor]]:
        """Restore the small parameters, and return (FQN, the written value) of all that were written."""
        written: list[tuple[str, Tensor]] = []
        sums = iter(zip(self._read_sums(), self._sums, strict=True))
        for (name, parameter), data, value in zip(self._held, self._data, self._values, strict=True):
            if value is None:
                now, before = next(sums)
                is_written = now != before
            else:
                is_written = _is_plain(parameter) and not torch.equal(_as_bits(parameter), _as_bits(value))
            if is_written and _is_plain(parameter):
                written.append((name, parameter.detach().clone()))
                if parameter.data_ptr() != data.data_ptr():  # `.data =` has put it elsewhere
                    parameter.data = data
                if value is not None:
                    parameter.data.copy_(value)
        return written

    def restore_all(self) -> None:
        """Restore all parameters that were written.

        Raises:
            ApplyError: A parameter was written that is too large to keep a copy of.
        """
        for name, value in self.restore():
            if not is_kept(value):
                raise ApplyError(
                    f"the model's forward wrote into its parameter '{name}' in a trial run, and its {value.numel()} values are "
                    "too many to be restored",
                    fix="run one forward before apply_plan, if the model initialises itself by its first batch; or write to it "
                    "outside of forward",
                )


def parameter_digests(module: nn.Module) -> list[tuple[str, str]]:
    """Return (FQN, digest of its values) of each small parameter with values here."""
    with without_function_modes(), without_dispatch_modes():  # what is read here is not the model's
        held = [(name, p) for name, p in _named(module) if is_kept(p) and _is_plain(p) and p.numel()]
        return [(name, _digest(_as_bits(p))) for name, p in held]


def _named(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return what `named_parameters` gives; an engine that watches look-ups of parameters is not told of these."""
    found: dict[int, tuple[str, nn.Parameter]] = {}
    for path, owner in module.named_modules():
        for name, parameter in dict.items(owner._parameters):
            if parameter is not None:
                found.setdefault(id(parameter), (f"{path}.{name}" if path else name, parameter))
    return list(found.values())


def _digest(bits: Tensor) -> str:
    held: Any = bits.cpu().numpy()
    return hashlib.blake2b(held, digest_size=8).hexdigest()


def is_kept(value: Tensor) -> bool:
    """Tell whether a parameter of this size can be restored."""
    return value.nbytes <= SMALL_BYTES


def _is_plain(parameter: Tensor) -> bool:
    return parameter.layout == torch.strided and not parameter.is_meta and holds_values(parameter)


def _as_bits(tensor: Tensor) -> Tensor:
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    return flat.view(torch.int64 if tensor.nbytes % _BITS == 0 else torch.uint8)
