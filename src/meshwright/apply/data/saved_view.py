"""The position of a tensor in a unit's memory, which autograd saves in place of the values."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

__all__: list[str] = []


@dataclasses.dataclass(frozen=True, slots=True)
class SavedView:
    """A view of a unit's flat memory, without the memory.

    Code may read a parameter as another dtype (`view_as_complex`, `view_as_real`, `view(dtype)`), and torch conjugates and
    negates by a bit of the view, so that shape and strides alone name other numbers.
    """

    index: int
    """The unit."""
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    """From the start of the storage, in entries of the dtype."""
    dtype: torch.dtype
    is_conj: bool
    is_neg: bool

    @classmethod
    def of(cls, tensor: Tensor, index: int) -> SavedView:
        """Return the position of a tensor in the memory of a unit."""
        place = tensor.shape, tensor.stride(), int(tensor.storage_offset())
        return cls(index, *place, tensor.dtype, tensor.is_conj(), tensor.is_neg())

    def in_memory(self, flat: Tensor) -> Tensor:
        """Return the view of the unit's flat tensor, which has been gathered anew."""
        if flat.dtype == self.dtype:
            view = flat.as_strided(self.shape, self.stride, self.offset)
        else:
            with torch.no_grad():
                view = flat.new_empty(0, dtype=self.dtype)
                view.set_(flat.untyped_storage(), self.offset, self.shape, self.stride)
        view = view.conj() if self.is_conj else view
        return view.neg() if self.is_neg else view
