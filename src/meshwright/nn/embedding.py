"""Embedding whose table is sharded along the vocabulary."""

from __future__ import annotations

from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.comm.communicator import Communicator
from meshwright.comm.functional import reduce_from_group, reduce_scatter_along
from meshwright.errors import ConfigError
from meshwright.layout import ShardLayout
from meshwright.nn.module import ShardedModule, check_indices, check_sizes

__all__: list[str] = []


class VocabParallelEmbedding(ShardedModule):
    """An embedding of which every rank holds some tokens' vectors.

    Input: token ids [...], the same on every rank; output [..., embedding_dim] on every rank, after one all-reduce.
    Backward exchanges nothing.

    Args:
        num_embeddings: Tokens of the full vocabulary [count]; it need not be divisible, the first ranks have one more.
        embedding_dim: Size of a vector [count].
        padding_idx: A token whose vector gets no gradient, and is zero at first; counted from the end if negative.
        group: The ranks that share the table.
        sequence_parallel: Whether the output is this rank's slice of the sequence, by a reduce-scatter instead of an
            all-reduce; slices are those of `even_sizes`.
        sequence_dim: The dim of the sequence in the output.
        device: The table's device.
        dtype: Its dtype.

    Raises:
        ConfigError: A size is below 1, or `padding_idx` is outside the vocabulary.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        group: Communicator,
        sequence_parallel: bool = False,
        sequence_dim: int = -2,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_sizes(type(self).__name__, num_embeddings=num_embeddings, embedding_dim=embedding_dim)
        super().__init__(group=group, sequence_parallel=sequence_parallel, sequence_dim=sequence_dim)
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise ConfigError(
                f"padding_idx={padding_idx} of {num_embeddings} tokens "
                f"(rule: -{num_embeddings} <= padding_idx < {num_embeddings})",
                fix="padding_idx=None",
            )
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.padding_idx = None if padding_idx is None else padding_idx % num_embeddings
        shape = self.layout_of("weight", group.group_rank).local_shape
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        if not self.weight.is_meta:  # there it would draw nothing, after a second of imports
            self.reset_parameters()

    @classmethod
    def from_embedding(
        cls,
        embedding: nn.Embedding,
        *,
        group: Communicator,
        sequence_parallel: bool = False,
        sequence_dim: int = -2,
    ) -> Self:
        """Return the module made from one for a single device, which is left as it is.

        Args:
            embedding: The full table; its values, dtype, device, `requires_grad` and mode are kept.
            group: The ranks that share it.
            sequence_parallel: As in the class.
            sequence_dim: As in the class.

        Raises:
            ConfigError: The embedding renormalises its vectors, scales gradients by frequency, or has sparse gradients.
        """
        for name, plain in (("max_norm", None), ("scale_grad_by_freq", False), ("sparse", False)):
            value = getattr(embedding, name)
            if value != plain:
                raise ConfigError(
                    f"an embedding with {name}={value} cannot be cut along its vocabulary (rule: {name}={plain})",
                    fix=f"nn.Embedding(..., {name}={plain})",
                )
        module = cls(
            embedding.num_embeddings,
            embedding.embedding_dim,
            embedding.padding_idx,
            group=group,
            sequence_parallel=sequence_parallel,
            sequence_dim=sequence_dim,
            device="meta",
            dtype=embedding.weight.dtype,
        )
        module.adopt_full({"weight": embedding.weight})
        return module.train(embedding.training)

    def reset_parameters(self) -> None:
        """Draw the first values: the full table's, by torch's rule, of which this rank keeps its part.

        So they are those of one device, provided that all ranks have the same state of the random generator, and they
        leave it as one device would. The full table is there for a moment.
        """
        full = nn.Embedding(
            self.num_embeddings,
            self.embedding_dim,
            self.padding_idx,
            device=self.weight.device,
            dtype=self.weight.dtype,
        )
        self.load_full_state_dict({"weight": full.weight})

    def layout_of(self, name: str, part: int) -> ShardLayout:  # noqa: ARG002 - there is only one
        """Return the layout of the table on one rank of the group.

        Args:
            name: "weight".
            part: The rank, counted in the group.
        """
        shape = (self.num_embeddings, self.embedding_dim)
        return ShardLayout.cut(shape, 0, (self.num_embeddings,), self.group.size, part)

    def extra_repr(self) -> str:
        """Return the sizes of the full table, and how many ranks share it, for `repr`."""
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        sequence = ", sequence_parallel=True" if self.sequence_parallel else ""
        ranks = f", rank {self.group.group_rank} of {self.group.size}"
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}{ranks}{sequence}"

    def forward(self, input: Tensor) -> Tensor:
        """Look up the vectors of tokens.

        Args:
            input: Token ids [...], whole numbers, 0 <= id < num_embeddings.

        Returns:
            [..., embedding_dim]; in sequence parallelism this rank's slice of the sequence.

        Raises:
            ConfigError: An id is outside the vocabulary (on the CPU; on a GPU the device's own check finds it).
        """
        if self.group.size == 1:
            return F.embedding(input, self.weight, self.padding_idx)
        check_indices(input, self.num_embeddings, "token id")
        found = self._own_vectors(input)
        if not self.sequence_parallel:
            return reduce_from_group(found, self.group)
        sizes = self.shares(found.shape[self.sequence_dim])
        return reduce_scatter_along(found, self.group, dim=self.sequence_dim, sizes=sizes)

    def _own_vectors(self, ids: Tensor) -> Tensor:
        """Return the vectors of this rank's tokens, and zeros without a gradient for those of other ranks."""
        start = sum(self.shares(self.num_embeddings)[: self.group.group_rank])
        num_own = self.weight.shape[0]
        if not num_own:
            # The empty sum ties the zeros to the table, so that autograd reaches it as on the other ranks.
            return self.weight.new_zeros((*ids.shape, self.embedding_dim)) + self.weight.sum()
        is_own = (ids >= start) & (ids < start + num_own)
        is_known = (ids >= 0) & (ids < self.num_embeddings)
        own = torch.where(is_own, ids - start, torch.where(is_known, 0, -1))  # a GPU refuses -1
        padding = None
        if self.padding_idx is not None and start <= self.padding_idx < start + num_own:
            padding = self.padding_idx - start
        return F.embedding(own, self.weight, padding).masked_fill(~is_own.unsqueeze(-1), 0.0)
