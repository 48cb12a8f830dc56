"""Shares of a global batch: which of the data-parallel ranks' samples a rank takes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from meshwright.comm.communicator import Communicator

__all__: list[str] = []


class BatchShares:
    """What ranks take of each global batch: a share for each data-parallel rank, or all samples on every one."""

    group: Communicator
    """The data-parallel ranks, which exchange gradients however the batch is shared out."""

    takes_whole_batch = False
    """Whether each data-parallel rank takes all samples (``batch=whole``)."""

    joins_shares = ""
    """Why ranks join the shares that they are given to whole batches (``batch=auto``), for people; empty where they do not."""

    joins_micro_batches = ""
    """Why a pipeline takes each batch as one micro-batch (``batch=auto``), for people; empty where it does not."""

    is_at_work = False
    """Whether a step or an evaluation is under way: ranks that join shares have all samples there, and theirs alone elsewhere."""

    copies = 1
    """Ranks that have the same share of the batch, since they share each layer [count]."""

    @property
    def num_shares(self) -> int:
        """Shares of a global batch [count]."""
        return 1 if self.takes_whole_batch else self.group.size

    @property
    def share(self) -> int:
        """This rank's share, by its number."""
        return 0 if self.takes_whole_batch else self.group.group_rank

    @property
    def num_given_shares(self) -> int:
        """Shares of a global batch that ranks are given, and join where they take it whole even so [count]."""
        return self.group.size if self.joins_shares else self.num_shares

    @property
    def given_share(self) -> int:
        """The share that this rank is given, by its number."""
        return self.group.group_rank if self.joins_shares else self.share

    @property
    def has_whole_batch(self) -> bool:
        """Whether this rank has all samples of a batch where code of the user's runs now."""
        return self.num_shares == 1 and (self.is_at_work or not self.joins_shares)

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """Run a step, an evaluation, or the look at a first batch inside the context."""
        self.is_at_work = True
        try:
            yield
        finally:
            self.is_at_work = False

    @property
    def batch_reasons(self) -> tuple[str, ...]:
        """What is to be known of it, for people."""
        is_asked = self.takes_whole_batch and not self.joins_shares
        return (self._tell_whole(" (batch=whole)"),) if is_asked else self.joined_reasons

    @property
    def joined_reasons(self) -> tuple[str, ...]:
        """What is to be known of shares and micro-batches that the first batch has joined, for people."""
        reasons = (f"{self._tell_whole('')}, since {self.joins_shares}",) if self.joins_shares else ()
        if not self.joins_micro_batches:
            return reasons
        told = (
            "batch: the pipeline takes each batch as one micro-batch: its stages work one after the other, and hold all "
            f"activations of a batch, since {self.joins_micro_batches}"
        )
        return (*reasons, told)

    def _tell_whole(self, word: str) -> str:
        return (
            f"batch: each of the {self.group.size} dp ranks computes all samples of a batch{word}: ZeRO saves memory, "
            "and dp saves no time"
        )

    @property
    def readers(self) -> int:
        """Ranks that take each sample, over those that share each layer and those that take the whole batch [count]."""
        return self.copies * self.repeats

    @property
    def repeats(self) -> int:
        """Ranks of the group that compute the same gradients, which are added up all the same [count]."""
        return self.group.size // self.num_shares
