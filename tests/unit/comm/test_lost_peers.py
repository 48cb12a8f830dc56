"""communicator.is_lost_peer: by class where the transport is ours, by torch's own words where it has no class."""

from __future__ import annotations

import pytest

from meshwright.comm.communicator import is_lost_peer
from meshwright.comm.shm.transport_errors import DisagreementError, PeerGoneError, WrongLengthError
from meshwright.errors import ConfigError, LostPeerError

_IN_A_CALLBACK = f"Got the following error when running the callback: {PeerGoneError.__name__}: in other words"


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (PeerGoneError("in other words"), True),
        (LostPeerError("in other words"), True),
        (RuntimeError(_IN_A_CALLBACK), True),
        (RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:1"), True),
        (RuntimeError("Application timeout caused pair closure"), True),  # the second wait of a rank beyond a cut wire
        (RuntimeError("all_reduce over shared memory: rank 1 is gone"), False),  # our words say nothing
        (DisagreementError("timed out after a read error"), False),
        (WrongLengthError("socket closed", 3), False),
        (ConfigError("connection closed by peer"), False),
        (OSError("broken pipe"), False),
    ],
)
def test_a_lost_peer_is_known_by_class_or_by_the_words_of_torch(error: Exception, is_one: bool) -> None:
    assert is_lost_peer(error) is is_one
