"""Point-to-point transfers between the stages of one pipeline: tensors, gradients and notes."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from meshwright.apply.pipeline.notes import COUNT, FAILED, FRAME_BYTES, UNUSED, UNUSED_BYTES, Note, read_note
from meshwright.apply.pipeline.walking.stand_ins import Meta
from meshwright.comm.communicator import Communicator, Pending
from meshwright.comm.shm.transport_errors import WrongLengthError
from meshwright.errors import ApplyError

__all__: list[str] = []

_LIFE = 2**20
"""Tags of one life of a pipeline: what an error left behind is not taken for a message of the next [count]."""
_OTHER_WAY_FIX = (
    "let only the batch decide which layers run, the same on all ranks; pass an example_batch= to apply_plan that takes every "
    "branch; or use pp=1"
)


class OtherStageError(ApplyError):
    """Another stage has failed while this one waited for it."""


class Post:
    """Sends and receives for the stages of this rank.

    Each message has its own tag: the two stages, the micro-batch and the direction. So ranks need not agree on an order. A stage
    on the same rank gets the tensor itself.

    Args:
        group: The ranks of one pipeline.
        rank_of_stage: Stage -> the group's rank that holds it.
        num_stages: Stages [count].
        own: The stages of this rank.
    """

    def __init__(
        self, group: Communicator, rank_of_stage: Callable[[int], int], num_stages: int, own: tuple[int, ...]
    ) -> None:
        self.group = group
        self.life = 0
        """Number of this pipeline among those of its ranks, and of its failures: equal on all of them."""
        self.own = own
        self._rank_of = [rank_of_stage(stage) for stage in range(num_stages)]
        self._under_way: deque[tuple[Pending, Tensor]] = deque()
        self._notes: deque[tuple[Any, Tensor]] = deque()
        self._boxes: defaultdict[int, deque[Tensor | None]] = defaultdict(deque)
        self._is_under_way = False
        self._left_behind: list[Callable[[], bool]] = []

    def has_notes(self, device: torch.device) -> bool:
        """Tell whether notes are sent beside tensors: on a GPU the host would have to wait for each of them."""
        return device.type == "cpu" and self.group.size > 1

    def is_elsewhere(self, stage: int) -> bool:
        """Tell whether a stage is on another rank."""
        return self._rank_of[stage] != self.group.group_rank

    @property
    def num_stages(self) -> int:
        """Stages [count]."""
        return len(self._rank_of)

    def _tag(self, source: int, target: int, micro_batch: int, *, is_gradient: bool) -> int:
        num = len(self._rank_of)
        place = (((micro_batch * num) + source) * num + target) * 2 + is_gradient
        return (self.life % 1024) * _LIFE + place % _LIFE

    def send(self, tensor: Tensor, *, source: int, target: int, micro_batch: int, is_gradient: bool) -> None:
        """Start sending a tensor from a stage of this rank to another stage."""
        tag = self._tag(source, target, micro_batch, is_gradient=is_gradient)
        rank = self._rank_of[target]
        if rank == self.group.group_rank:
            self._boxes[tag].append(tensor if is_gradient else tensor.clone())  # the stage may write over it
            return
        tensor = tensor.resolve_conj().resolve_neg().contiguous()
        if tensor.numel():
            self._under_way.append((self.group.send(tensor, rank, tag), tensor))
        while self._under_way and self._under_way[0][0].is_done:
            self._under_way.popleft()

    def receive(self, meta: Meta, *, source: int, target: int, micro_batch: int) -> Tensor:
        """Return the next tensor that another stage sends to one of this rank's: contiguous, in memory of its own.

        Raises:
            OtherStageError: The other stage has failed.
            ApplyError: It has sent something else.
        """
        tensor = self._next(meta, source, target, micro_batch, is_gradient=False)
        if tensor is None:
            raise _unexpected(None, meta, source, target, micro_batch, is_gradient=False)
        return tensor

    def receive_gradient(self, meta: Meta, *, source: int, target: int, micro_batch: int) -> Tensor | None:
        """Return the gradient of a tensor that went to another stage; None where it did not contribute to the loss there.

        Raises:
            OtherStageError: The other stage has failed.
            ApplyError: It has sent something else.
        """
        return self._next(meta, source, target, micro_batch, is_gradient=True)

    def send_no_gradient(self, *, source: int, target: int, micro_batch: int, leaf: Tensor) -> None:
        """Tell the stage that sent a tensor that it has no gradient; what it was computed from may have none either."""
        if not self.is_elsewhere(target):
            self._boxes[self._tag(source, target, micro_batch, is_gradient=True)].append(None)
        elif leaf.numel() and self.has_notes(leaf.device):
            self.send_note(Note(UNUSED, 0), source=source, target=target, micro_batch=micro_batch, is_gradient=True)
        else:
            zeros = leaf.new_zeros(leaf.shape)
            self.send(zeros, source=source, target=target, micro_batch=micro_batch, is_gradient=True)

    def _next(self, meta: Meta, source: int, target: int, micro_batch: int, *, is_gradient: bool) -> Tensor | None:
        tag = self._tag(source, target, micro_batch, is_gradient=is_gradient)
        rank = self._rank_of[source]
        if rank == self.group.group_rank:
            return self._from_box(tag, meta, source, target, micro_batch, is_gradient=is_gradient)
        tensor = torch.empty(meta.shape, dtype=meta.dtype, device=meta.device)
        if not tensor.numel():
            return tensor
        try:
            note = self._receive(tensor, rank, tag)
        except WrongLengthError as error:
            if is_gradient and error.sent_bytes == UNUSED_BYTES:
                return None
            raise _unexpected(error, meta, source, target, micro_batch, is_gradient=is_gradient) from error
        if note is None:
            return tensor
        if is_gradient and note.kind == UNUSED:
            return None
        raise _unexpected(None, meta, source, target, micro_batch, is_gradient=is_gradient)

    def _from_box(
        self, tag: int, meta: Meta, source: int, target: int, micro_batch: int, *, is_gradient: bool
    ) -> Tensor | None:
        box = self._boxes[tag]
        if not box:
            raise _unexpected(None, meta, source, target, micro_batch, is_gradient=is_gradient)
        tensor = box.popleft()
        if tensor is not None and (tensor.shape != meta.shape or tensor.dtype != meta.dtype):
            came = f"shape {list(tensor.shape)}, {tensor.dtype}"
            raise _unexpected(came, meta, source, target, micro_batch, is_gradient=is_gradient)
        return tensor

    def _receive(self, tensor: Tensor, rank: int, tag: int) -> Note | None:
        """Fill a tensor, or return the note that came in its place.

        Gloo aborts the process when a message is larger than the buffer, so the buffer has room for a note.
        """
        if tensor.device.type != "cpu" or self.group.shares_memory or tensor.nbytes >= FRAME_BYTES:
            self.group.receive(tensor, rank, tag)
            # Shared memory has already refused a message whose length is not the tensor's.
            may_be_note = not self.group.shares_memory or tensor.nbytes in (FRAME_BYTES, UNUSED_BYTES)
            return read_note(tensor.view(-1).view(torch.uint8)) if may_be_note and tensor.device.type == "cpu" else None
        room = torch.zeros(FRAME_BYTES, dtype=torch.uint8)
        self.group.receive(room, rank, tag, num_bytes=tensor.nbytes)
        note = read_note(room)
        if note is None:
            tensor.view(-1).view(torch.uint8).copy_(room[: tensor.nbytes])
        return note

    # -- notes --------------------------------------------------------------------------------------------------

    def send_note(self, note: Note, *, source: int, target: int, micro_batch: int, is_gradient: bool = False) -> None:
        """Send a note to a stage on another rank, after earlier messages with the same tag. The ledger counts tensors only."""
        group = self.group.process_group
        if group is None:
            return
        tensor = note.to_tensor()
        tag = self._tag(source, target, micro_batch, is_gradient=is_gradient)
        self._notes.append((group.send([tensor], self._rank_of[target], tag), tensor))
        while self._notes and self._notes[0][0].is_completed():
            self._notes.popleft()

    def receive_note(self, *, source: int, target: int, micro_batch: int) -> Note | None:
        """Return the next note from a stage on another rank; None where a tensor came instead."""
        group = self.group.process_group
        if group is None:
            return None
        tensor = torch.empty(FRAME_BYTES, dtype=torch.uint8)
        tag = self._tag(source, target, micro_batch, is_gradient=False)
        try:
            self.group.run_waiting("receive", lambda: group.recv([tensor], self._rank_of[source], tag).wait())
        except WrongLengthError:
            return None
        note = read_note(tensor)
        if note is not None and note.kind == FAILED:
            raise OtherStageError(f"stage {source} has failed while stage {target} was waiting for it")
        return note

    def compare_counts(self, num_micro_batches: int, device: torch.device) -> None:
        """Tell the next rank of the pipeline how many micro-batches this one has, and compare with the one before.

        Raises:
            ApplyError: The numbers differ.
        """
        group, rank = self.group.process_group, self.group.group_rank
        if group is None or not self.has_notes(device):
            return
        tag = (self.life % 1024) * _LIFE + _LIFE - 1
        if rank + 1 < self.group.size:
            tensor = Note(COUNT, 0, num_micro_batches).to_tensor()
            self._notes.append((group.send([tensor], rank + 1, tag), tensor))
        if rank > 0:
            tensor = torch.empty(FRAME_BYTES, dtype=torch.uint8)
            self.group.run_waiting("receive", lambda: group.recv([tensor], rank - 1, tag).wait())
            note = read_note(tensor)
            if note is None or note.num_calls != num_micro_batches:
                theirs = "another number of" if note is None else note.num_calls
                raise ApplyError(
                    f"rank {self.group.ranks[rank - 1]} has {theirs} micro-batches and rank {self.group.ranks[rank]} has "
                    f"{num_micro_batches}: all ranks of a pipeline take the same share of a batch",
                    fix="give them the same batch: meshwright.split_batch(batch, model), or make_loader",
                )

    def fail(self, num_micro_batches: int, device: torch.device) -> None:
        """Tell all stages of other ranks, wherever they may wait for one of this rank, that it will not come."""
        if not self.has_notes(device):
            return
        for micro_batch in range(max(num_micro_batches, 1)):
            for source in self.own:
                for target in range(self.num_stages):
                    if self.is_elsewhere(target):
                        note = Note(FAILED, 0)
                        self.send_note(
                            note, source=source, target=target, micro_batch=micro_batch, is_gradient=target < source
                        )

    def finish_tensors(self) -> None:
        """Wait until all sent tensors have left."""
        while self._under_way:
            self._under_way.popleft()[0].wait()

    def finish(self) -> None:
        """Wait until everything sent has left."""
        self.finish_tensors()
        while self._notes:
            self._notes.popleft()[0].wait()
        self._is_under_way = False

    def begin(self) -> None:
        """Begin a step or a forward, on all ranks. If the one before did not finish, it has failed on all of them.

        Messages that it left under way then belong to an earlier life and are never received.
        """
        self.forget()
        self.life += self._is_under_way
        self._is_under_way = True

    def forget(self) -> None:
        """Drop the state of a step that ended in an error.

        Handles of sends under way are kept until they have left. Gloo cancels a message whose handle is dropped, and the stage
        that waits for it would not learn of the error.
        """
        self._left_behind += [lambda sent=sent: sent[0].is_done for sent in self._under_way]
        self._left_behind += [lambda sent=sent: sent[0].is_completed() for sent in self._notes]
        self._left_behind = [has_left for has_left in self._left_behind if not has_left()]
        self._under_way.clear()
        self._notes.clear()
        self._boxes.clear()


def _unexpected(
    came: WrongLengthError | str | None, meta: Meta, source: int, target: int, micro_batch: int, *, is_gradient: bool
) -> ApplyError:
    """Return the error for what came in place of a tensor; None is a note, or nothing."""
    what = "the gradient of a tensor" if is_gradient else "a tensor"
    if came is None or (isinstance(came, WrongLengthError) and came.sent_bytes == FRAME_BYTES):
        return OtherStageError(
            f"stage {target} needs {what} of shape {list(meta.shape)} from stage {source} in micro-batch {micro_batch}, and "
            f"stage {source} ended its forward without sending it, or failed (rule: all stages run the same forward)",
            fix=_OTHER_WAY_FIX,
        )
    return ApplyError(
        f"stage {target} waits for {what} of shape {list(meta.shape)}, {meta.dtype}, of stage {source} in micro-batch "
        f"{micro_batch}, and something else came ({came}): the stages took different paths through the forward",
        fix=_OTHER_WAY_FIX,
    )


class OtherWayError(ApplyError):
    """Stages took different paths through a forward. Other errors raised in it may be consequences of mismatched tensors."""


def other_way(stage: int, source: int, micro_batch: int, mine: str, theirs: str) -> OtherWayError:
    """Return the error for two stages whose forwards of one micro-batch differ."""
    return OtherWayError(
        f"stages {source} and {stage} took different paths through the forward of micro-batch {micro_batch}: stage {source} "
        f"called {theirs}, stage {stage} called {mine}; if these are equal, random numbers or the code between the layers "
        "differed (rule: all stages run the same forward)",
        fix=_OTHER_WAY_FIX,
    )
