"""Linear layers whose weight is sharded over the ranks of a group: by columns of the product, or by rows.

[Note: column and row] With the weight as torch stores it, [out, in], a column parallel layer holds rows of the tensor, and
a row parallel layer columns: the names come from y = x A with A = weight.T (Shoeybi et al. 2019, arXiv:1909.08053). Column
then row needs no exchange in between:

    x replicated  -> column ->  y[..., own features]  -> activation -> row -> sum over ranks
    x slice of the sequence: all-gather before column, reduce-scatter after row, which is sequence parallelism
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.comm.communicator import Communicator
from meshwright.comm.functional import (
    all_gather_along,
    copy_to_group,
    gather_from_group,
    reduce_from_group,
    reduce_scatter_along,
    scatter_to_group,
)
from meshwright.errors import ConfigError
from meshwright.layout import ShardLayout
from meshwright.nn.module import ShardedModule, check_sizes

__all__: list[str] = []


class _ParallelLinear(ShardedModule):
    """Common part of both layers: parameters, their first values, and their construction from a layer of one device."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        group: Communicator,
        sequence_parallel: bool,
        sequence_dim: int,
        transposed: bool,
    ) -> None:
        check_sizes(type(self).__name__, in_features=in_features, out_features=out_features)
        super().__init__(group=group, sequence_parallel=sequence_parallel, sequence_dim=sequence_dim)
        self.in_features = in_features
        self.out_features = out_features
        self.transposed = transposed

    def _make_parameters(self, bias: bool, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        """Register parameters of this rank's shapes, once their cut is known, and draw their values."""
        for name in ("weight", "bias"):
            shape = self.layout_of(name, self.group.group_rank).local_shape
            is_there = name == "weight" or bias
            parameter = nn.Parameter(torch.empty(shape, device=device, dtype=dtype)) if is_there else None
            self.register_parameter(name, parameter)
        if not self.weight.is_meta:  # there it would draw nothing, after a second of imports
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the first values: the full layer's, by torch's rule, of which this rank keeps its part.

        So they are those of one device, provided that all ranks have the same state of the random generator, and they
        leave it as one device would. The full layer is there for a moment.
        """
        device, dtype = self.weight.device, self.weight.dtype
        full = nn.Linear(self.in_features, self.out_features, self.bias is not None, device=device, dtype=dtype)
        state = full.state_dict()
        if self.transposed:
            state["weight"] = state["weight"].t()
        self.load_full_state_dict(state)

    @classmethod
    def from_linear(cls, linear: nn.Linear, *, group: Communicator, **options: Any) -> Self:
        """Return the layer made from one for a single device, which is left as it is.

        Args:
            linear: The full layer; its values, dtype, device, `requires_grad` and mode are kept.
            group: The ranks that share it.
            **options: Other arguments of the class.

        Raises:
            ConfigError: An option does not fit the layer.
        """
        full = {"weight": linear.weight, "bias": linear.bias}
        return cls._from_full(linear, full, transposed=False, group=group, **options)

    @classmethod
    def from_conv1d(cls, conv1d: nn.Module, *, group: Communicator, **options: Any) -> Self:
        """Return the layer made from Hugging Face's `Conv1D` (GPT-2's linear layer), which is left as it is.

        Its weight stays transposed, [in, out], so that its full shape is that of the checkpoint.

        Args:
            conv1d: A module with a `weight` [in, out] and a `bias` [out].
            group: The ranks that share it.
            **options: Other arguments of the class.

        Raises:
            ConfigError: The weight has not two dims, or an option does not fit.
        """
        weight, bias = conv1d.weight, getattr(conv1d, "bias", None)
        if not isinstance(weight, Tensor) or weight.dim() != 2:
            raise ConfigError(f"{type(conv1d).__name__} is not a Conv1D (rule: it has a weight [in, out])")
        return cls._from_full(conv1d, {"weight": weight, "bias": bias}, transposed=True, group=group, **options)

    @classmethod
    def _from_full(
        cls, source: nn.Module, full: dict[str, Any], *, transposed: bool, group: Communicator, **options: Any
    ) -> Self:
        weight = full["weight"]
        rows, columns = weight.shape
        in_features, out_features = (rows, columns) if transposed else (columns, rows)
        # On the meta device nothing is allocated or drawn; the real parts take the place of those parameters.
        options |= {"bias": full["bias"] is not None, "device": "meta", "dtype": weight.dtype}
        module = cls(in_features, out_features, group=group, transposed=transposed, **options)
        module.adopt_full(full)
        return module.train(source.training)

    def extra_repr(self) -> str:
        """Return the sizes of the full layer, and how many ranks share it, for `repr`."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"rank {self.group.group_rank} of {self.group.size}"
            + (", sequence_parallel=True" if self.sequence_parallel else "")
            + (", transposed=True" if self.transposed else "")
        )

    def _linear(self, tensor: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(tensor, self.weight.t() if self.transposed else self.weight, bias)


class ColumnParallelLinear(_ParallelLinear):
    """A linear layer of which every rank computes some output features.

    Input [..., in_features], the same on every rank; output [..., own features]. Forward exchanges nothing, backward
    all-reduces the gradient of the input. See [Note: column and row].

    Args:
        in_features: Size of the input's last dim [count].
        out_features: Size of the full output's last dim [count].
        bias: Whether there is one; it is cut as the weight is.
        group: The ranks that share the layer.
        groups: Sizes of the layers that are fused into this one, `(q, k, v)` or `(gate, up)`: each of them is cut, and
            the output has this rank's part of each, in that order. None is one layer.
        units: For each of the groups, the features that stay together on a rank: the size of an attention head, for
            example, or of all query heads that share a key. None is 1.
        gather_output: Whether every rank gets the full output; backward then takes its gradient to be the same on all.
        sequence_parallel: Whether the input is this rank's slice of the sequence; it is all-gathered, and backward is a
            reduce-scatter instead of an all-reduce.
        sequence_dim: The dim of the sequence in input and output.
        sequence_length: Length of the full sequence, needed where it cannot be divided evenly; slices are those of
            `even_sizes`. None: all slices are as long as this rank's. May be set again between calls.
        transposed: Whether the weight is stored as [in, out], as Hugging Face's Conv1D does.
        device: Where the parameters live.
        dtype: Their dtype.

    Raises:
        ConfigError: A size is below 1, or groups and units do not fit `out_features`.

    Sizes need not be divisible: the first ranks have one more, and a rank may have none (`layouts` says so).
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        group: Communicator,
        groups: Sequence[int] | None = None,
        units: Sequence[int] | None = None,
        gather_output: bool = False,
        sequence_parallel: bool = False,
        sequence_dim: int = -2,
        sequence_length: int | None = None,
        transposed: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            in_features,
            out_features,
            group=group,
            sequence_parallel=sequence_parallel,
            sequence_dim=sequence_dim,
            transposed=transposed,
        )
        self.groups = (out_features,) if groups is None else tuple(groups)
        self.units = None if units is None else tuple(units)
        self.gather_output = gather_output
        self.sequence_length = sequence_length
        self._make_parameters(bias, device, dtype)

    def layout_of(self, name: str, part: int) -> ShardLayout:
        """Return the layout of a parameter on one rank of the group: both are cut along the output features.

        Args:
            name: "weight" or "bias".
            part: The rank, counted in the group.
        """
        if name == "bias":
            return self._cut((self.out_features,), 0, part)
        if self.transposed:
            return self._cut((self.in_features, self.out_features), 1, part)
        return self._cut((self.out_features, self.in_features), 0, part)

    def _cut(self, shape: tuple[int, ...], dim: int, part: int) -> ShardLayout:
        return ShardLayout.cut(shape, dim, self.groups, self.group.size, part, units=self.units)

    def forward(self, input: Tensor) -> Tensor:
        """Compute this rank's features, or all of them where the output is gathered.

        Args:
            input: [..., in_features]; in sequence parallelism this rank's slice of the sequence.

        Returns:
            [..., own features], or [..., out_features].

        Raises:
            ConfigError: This rank's slice is not the one that `sequence_length` gives it.
        """
        if self.sequence_parallel:
            length = self.sequence_length
            if length is None:
                length = input.shape[self.sequence_dim] * self.group.size
            full = all_gather_along(input, self.group, dim=self.sequence_dim, sizes=self.shares(length))
        else:
            full = copy_to_group(input, self.group)
        output = self._linear(full, self.bias)
        return self._gathered(output) if self.gather_output else output

    def _gathered(self, output: Tensor) -> Tensor:
        """Return all features: those of every rank, brought from the order of the ranks into that of the groups."""
        sizes: list[list[int]] = []
        for size, unit in zip(self.groups, self.units or (1,) * len(self.groups), strict=True):
            sizes.append([unit * share for share in self.shares(size // unit)])
        by_rank = list(zip(*sizes, strict=True))
        full = gather_from_group(output, self.group, dim=-1, sizes=[sum(shares) for shares in by_rank])
        if len(self.groups) == 1 or self.group.size == 1:
            return full
        pieces = full.split([share for shares in by_rank for share in shares], -1)
        num_groups = len(self.groups)
        return torch.cat([piece for index in range(num_groups) for piece in pieces[index::num_groups]], -1)


class RowParallelLinear(_ParallelLinear):
    """A linear layer of which every rank has some input features, so that the ranks' outputs are terms of a sum.

    Input [..., own features], as a column parallel layer leaves it; output [..., out_features] on every rank, after one
    all-reduce. Backward exchanges nothing. The bias is added once, after the sum; every rank has all of it, and the same
    gradient. See [Note: column and row].

    Args:
        in_features: Size of the full input's last dim [count].
        out_features: Size of the output's last dim [count].
        bias: Whether there is one.
        group: The ranks that share the layer.
        unit: Input features that stay together on a rank: the size of an attention head, for example.
        input_is_parallel: Whether the input has this rank's features only. If not it is the full input, the same on every
            rank, which is cut here; backward then gathers its gradient.
        sequence_parallel: Whether the output is this rank's slice of the sequence, by a reduce-scatter instead of an
            all-reduce; slices are those of `even_sizes`.
        sequence_dim: The dim of the sequence in input and output.
        transposed: Whether the weight is stored as [in, out], as Hugging Face's Conv1D does.
        device: Where the parameters live.
        dtype: Their dtype.

    Raises:
        ConfigError: A size is below 1, or `in_features` is no multiple of the unit.

    Sizes need not be divisible: the first ranks have one more, and a rank may have none (`layouts` says so).
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        group: Communicator,
        unit: int = 1,
        input_is_parallel: bool = True,
        sequence_parallel: bool = False,
        sequence_dim: int = -2,
        transposed: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            in_features,
            out_features,
            group=group,
            sequence_parallel=sequence_parallel,
            sequence_dim=sequence_dim,
            transposed=transposed,
        )
        self.unit = unit
        self.input_is_parallel = input_is_parallel
        self._make_parameters(bias, device, dtype)

    def layout_of(self, name: str, part: int) -> ShardLayout:
        """Return the layout of a parameter on one rank of the group: the weight is cut along the input features.

        Args:
            name: "weight" or "bias".
            part: The rank, counted in the group.
        """
        if name == "bias":
            return ShardLayout.whole((self.out_features,))
        shape, dim = (self.out_features, self.in_features), 1
        if self.transposed:
            shape, dim = (self.in_features, self.out_features), 0
        return ShardLayout.cut(shape, dim, (self.in_features,), self.group.size, part, units=(self.unit,))

    def forward(self, input: Tensor) -> Tensor:
        """Compute this rank's term and add up those of all ranks.

        Args:
            input: [..., own features], or [..., in_features] where the input is not parallel.

        Returns:
            [..., out_features]; in sequence parallelism this rank's slice of the sequence.
        """
        if self.group.size == 1:
            return self._linear(input, self.bias)
        if not self.input_is_parallel:
            sizes = [self.unit * share for share in self.shares(self.in_features // self.unit)]
            input = scatter_to_group(input, self.group, dim=-1, sizes=sizes)
        if not self.sequence_parallel:
            total = reduce_from_group(self._linear(input, None), self.group)
            return total if self.bias is None else total + self.bias.to(total.dtype)
        # Each rank adds the bias to its slice only, so the bias' gradient would lack the other slices. A zero that depends
        # on the bias goes into the term instead: its gradient is summed over the sequence that backward gathers anyway.
        zero = None if self.bias is None else self.bias - self.bias.detach()
        term = self._linear(input, zero)
        sizes = self.shares(term.shape[self.sequence_dim])
        own = reduce_scatter_along(term, self.group, dim=self.sequence_dim, sizes=sizes)
        return own if self.bias is None else own + self.bias.detach().to(own.dtype)
