"""Point-to-point transfers between the stages of one pipeline: tensors, gradients and notes."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshwright.apply.finding import Finding
from meshwright.apply.pipeline.channels import open_channels
from meshwright.apply.pipeline.notes import (
    COUNT,
    DIGEST,
    FAILED,
    FRAME_BYTES,
    UNUSED,
    UNUSED_BYTES,
    Note,
    digest_of,
    read_note,
)
from meshwright.apply.pipeline.walking.stand_ins import Meta
from meshwright.comm.communicator import Communicator, Pending
from meshwright.comm.shm.transport_errors import WrongLengthError
from meshwright.comm.spans import WAIT
from meshwright.errors import ApplyError

__all__: list[str] = []

_LIFE = 2**17
"""Tags of one life of a pipeline: what an error left behind is not taken for a message of the next [count]."""
_NUM_LIVES = 2**31 // _LIFE
"""Lives until tags come again [count]."""
_OTHER_WAY_FIX = (
    "let only the batch decide which layers run, the same on all ranks; pass an example_batch= to apply_plan that takes every "
    "branch; set PYTHONHASHSEED=0 for all ranks where code goes through a set of texts, whose order each process draws; or use "
    "pp=1"
)


class OtherStageError(ApplyError):
    """Another stage has failed while this one waited for it."""

    is_told = True


class Route(NamedTuple):
    """Way of a message from stage to stage."""

    source: int
    target: int
    micro_batch: int
    is_gradient: bool = False
    """Whether it is the gradient of a tensor that went the other way."""


class Post:
    """Sends and receives for the stages of this rank.

    Each message has its own tag, made of its route. So ranks need not agree on an order; on GPUs, each way has a channel instead.
    A stage on the same rank gets the tensor itself.

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
        self._channels: dict[tuple[int, int], Communicator] = {}
        self._under_way: deque[tuple[Pending, Tensor]] = deque()
        self._notes: deque[tuple[Any, Tensor]] = deque()
        self._boxes: defaultdict[int, deque[Tensor | None]] = defaultdict(deque)
        self._is_under_way = False
        self._left_behind: list[Callable[[], bool]] = []

    def open(self, device: torch.device, make_channel: Callable[[int], Communicator]) -> None:
        """Open what tensors on this device go through; every rank of the world calls it, before the first message."""
        if self.needs_channels(device):
            self._channels = open_channels(self._rank_of, self.group.group_rank, device, make_channel)

    def needs_channels(self, device: torch.device) -> bool:
        """Tell whether tags do not keep messages apart."""
        return device.type == "cuda" and self.group.size > 1

    def _way(self, route: Route) -> Communicator:
        return self._channels.get((route.source, route.target), self.group)

    def has_notes(self, device: torch.device) -> bool:
        """Tell whether notes are sent beside tensors: on a GPU the host would have to wait for each of them."""
        return device.type == "cpu" and self.group.size > 1

    def is_elsewhere(self, stage: int) -> bool:
        """Tell whether a stage is on another rank."""
        return self._rank_of[stage] != self.group.group_rank

    def _tag(self, route: Route) -> int:
        num = len(self._rank_of)
        place = (((route.micro_batch * num) + route.source) * num + route.target) * 2 + route.is_gradient
        return (self.life % _NUM_LIVES) * _LIFE + place % _LIFE

    def send(self, tensor: Tensor, route: Route) -> None:
        """Start sending a tensor from a stage of this rank to another stage."""
        tag = self._tag(route)
        rank = self._rank_of[route.target]
        if rank == self.group.group_rank:
            self._boxes[tag].append(tensor if route.is_gradient else tensor.clone())  # the stage may write over it
            return
        tensor = tensor.resolve_conj().resolve_neg().contiguous()
        if tensor.numel():
            self._under_way.append((self._way(route).send(tensor, rank, tag), tensor))
        while self._under_way and self._under_way[0][0].is_done:
            self._under_way.popleft()

    def receive(self, meta: Meta, route: Route) -> Tensor:
        """Return the next tensor that another stage sends to one of this rank's: contiguous, in memory of its own.

        Raises:
            OtherStageError: The other stage has failed.
            ApplyError: It has sent something else.
        """
        tensor = self.receive_if_used(meta, route)
        if tensor is None:
            raise _unexpected(None, meta, route)
        return tensor

    def send_no_gradient(self, leaf: Tensor, route: Route) -> None:
        """Tell the stage that sent a tensor that it has no gradient; what it was computed from may have none either."""
        if not self.is_elsewhere(route.target):
            self._boxes[self._tag(route)].append(None)
        elif leaf.numel() and self.has_notes(leaf.device):
            self.send_note(Note(UNUSED, 0), route)
        else:
            self.send(leaf.new_zeros(leaf.shape), route)

    def receive_if_used(self, meta: Meta, route: Route) -> Tensor | None:
        """Return the next tensor as `receive`; None for the gradient of one that did not contribute to the loss there.

        Raises:
            OtherStageError: The other stage has failed.
            ApplyError: It has sent something else.
        """
        tag = self._tag(route)
        rank = self._rank_of[route.source]
        if rank == self.group.group_rank:
            return self._from_box(tag, meta, route)
        tensor = torch.empty(meta.shape, dtype=meta.dtype, device=meta.device)
        if not tensor.numel():
            return tensor
        try:
            note = self._receive(tensor, rank, tag, self._way(route))
        except WrongLengthError as error:
            if route.is_gradient and error.sent_bytes == UNUSED_BYTES:
                return None
            raise _unexpected(error, meta, route) from error
        if note is None:
            return tensor
        if route.is_gradient and note.kind == UNUSED:
            return None
        raise _unexpected(None, meta, route)

    def _from_box(self, tag: int, meta: Meta, route: Route) -> Tensor | None:
        box = self._boxes[tag]
        if not box:
            raise _unexpected(None, meta, route)
        tensor = box.popleft()
        if tensor is not None and (tensor.shape != meta.shape or tensor.dtype != meta.dtype):
            raise _unexpected(f"shape {list(tensor.shape)}, {tensor.dtype}", meta, route)
        return tensor

    def _receive(self, tensor: Tensor, rank: int, tag: int, group: Communicator) -> Note | None:
        """Fill a tensor, or return the note that came in its place.

        Gloo aborts the process when a message is larger than the buffer, so the buffer has room for a note.
        """
        if tensor.device.type != "cpu" or self.group.shares_memory or tensor.nbytes >= FRAME_BYTES:
            group.receive(tensor, rank, tag)
            # Shared memory has already refused a message whose length is not the tensor's.
            may_be_note = not self.group.shares_memory or tensor.nbytes in (FRAME_BYTES, UNUSED_BYTES)
            return read_note(tensor.view(-1).view(torch.uint8)) if may_be_note and tensor.device.type == "cpu" else None
        room = torch.zeros(FRAME_BYTES, dtype=torch.uint8)
        group.receive(room, rank, tag, num_bytes=tensor.nbytes)
        note = read_note(room)
        if note is None:
            tensor.view(-1).view(torch.uint8).copy_(room[: tensor.nbytes])
        return note

    # -- notes --------------------------------------------------------------------------------------------------

    def send_note(self, note: Note, route: Route) -> None:
        """Send a note to a stage on another rank, after earlier messages with the same tag. The ledger counts tensors only."""
        group = self.group.process_group
        if group is None:
            return
        tensor = note.to_tensor()
        self._notes.append((group.send([tensor], self._rank_of[route.target], self._tag(route)), tensor))
        while self._notes and self._notes[0][0].is_completed():
            self._notes.popleft()

    def receive_note(self, route: Route) -> Note | None:
        """Return the next note from a stage on another rank; None where a tensor came instead."""
        group = self.group.process_group
        if group is None:
            return None
        tensor = torch.empty(FRAME_BYTES, dtype=torch.uint8)
        rank, tag = self._rank_of[route.source], self._tag(route)
        try:
            self.group.run_waiting("receive", lambda: group.recv([tensor], rank, tag).wait(), self._note_details(rank))
        except WrongLengthError:
            return None
        note = read_note(tensor)
        if note is not None and note.kind == FAILED:
            raise OtherStageError(f"stage {route.source} has failed while stage {route.target} was waiting for it")
        return note

    def _note_details(self, rank: int | None = None) -> tuple[Any, ...] | None:
        details = self.group.span_details(FRAME_BYTES, rank)
        return None if details is None else (*details, "note")

    def compare_counts(self, num_micro_batches: int, device: torch.device) -> None:
        """Tell the next rank of the pipeline how many micro-batches this one has, and compare with the one before.

        Raises:
            ApplyError: The numbers differ.
        """
        group, rank = self.group.process_group, self.group.group_rank
        if group is None or not self.has_notes(device):
            return
        tag = (self.life % _NUM_LIVES) * _LIFE + _LIFE - 1
        if rank + 1 < self.group.size:
            tensor = Note(COUNT, 0, num_micro_batches).to_tensor()
            self._notes.append((group.send([tensor], rank + 1, tag), tensor))
        if rank > 0:
            tensor = torch.empty(FRAME_BYTES, dtype=torch.uint8)
            details = self._note_details(rank - 1)
            self.group.run_waiting("receive", lambda: group.recv([tensor], rank - 1, tag).wait(), details)
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
                for target in filter(self.is_elsewhere, range(len(self._rank_of))):
                    self.send_note(Note(FAILED, 0), Route(source, target, micro_batch, is_gradient=target < source))

    def finish_tensors(self) -> None:
        """Wait until all sent tensors have left."""
        while self._under_way:
            self._under_way.popleft()[0].wait()

    def finish(self) -> None:
        """Wait until everything sent has left."""
        self.finish_tensors()
        if self._notes:
            with self.group.ledger.span(WAIT, "send", self._note_details()):
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


class Mail:
    """Transfers of one stage in one micro-batch's forward.

    Args:
        post: The way to the other stages.
        stage: The stage.
        micro_batch: The micro-batch.
        findings: Where digests show that something else came than was sent; None where they are not compared.
    """

    __slots__ = ("_findings", "_micro_batch", "_post", "_stage")

    def __init__(self, post: Post, stage: int, micro_batch: int, findings: list[Finding] | None) -> None:
        self._post = post
        self._stage = stage
        self._micro_batch = micro_batch
        self._findings = findings

    def send(self, tensor: Tensor, stage: int) -> None:
        """Send a tensor to another stage."""
        route = Route(self._stage, stage, self._micro_batch)
        self._post.send(tensor, route)
        if self._findings is not None and self._post.is_elsewhere(stage):
            self._post.send_note(Note(DIGEST, digest_of(tensor)), route)

    def receive(self, meta: Meta, stage: int) -> Tensor:
        """Return the next tensor from another stage."""
        route = Route(stage, self._stage, self._micro_batch)
        tensor = self._post.receive(meta, route)
        if self._findings is not None and self._post.is_elsewhere(stage):
            note = self._post.receive_note(route)
            if tensor.numel() and (note is None or note.digest != digest_of(tensor)):
                text = (
                    f"bytes of a tensor of shape {list(tensor.shape)} that stage {stage} sent in micro-batch "
                    f"{self._micro_batch}, by a digest, with what stage {self._stage} has received"
                )
                self._findings.append(
                    Finding(part=boundary_name(self._stage), difference=1.0, tolerance=0.0, text=text)
                )
        return tensor

    def flush(self) -> None:
        """Wait until sent tensors have left and may be written over."""
        self._post.finish_tensors()


def boundary_name(stage: int) -> str:
    """Return the name of a stage's inputs from other stages, as a part that can be inspected."""
    return f"boundary of stage {stage}"


def _unexpected(came: WrongLengthError | str | None, meta: Meta, route: Route) -> ApplyError:
    """Return the error for what came in place of a tensor; None is a note, or nothing."""
    source, target, micro_batch, is_gradient = route
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
