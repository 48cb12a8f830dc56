"""Manifests: what they hold comes back, and what a hostile one says is refused before a file of it is opened."""

from __future__ import annotations

import json
from typing import Any

import pytest

from meshwright.checkpoint.blocks import digest_of
from meshwright.checkpoint.manifest import FileEntry, Manifest, StoredPart, TensorEntry
from meshwright.errors import CheckpointError
from meshwright.layout import ShardLayout

_FILE = FileEntry("rank-00000.safetensors", 1000, bytes(16))
_WHOLE = TensorEntry("float32", (3, 4), (StoredPart(0, 64, ShardLayout(shape=(3, 4))),))


def signed(body: str) -> bytes:
    """Return a manifest's file with this body and its right digest: what somebody with intent would write."""
    data = body.encode()
    return b'{"digest":"' + digest_of(data).hex().encode() + b'","manifest":' + data + b"}\n"


def changed(**fields: Any) -> bytes:
    manifest = Manifest(step=1, epoch=1, plan="dp=2", files=(_FILE,), tensors={"model/w": _WHOLE})
    body = json.loads(manifest.to_bytes())["manifest"]
    return signed(json.dumps(body | fields))


def test_it_comes_back_and_is_json() -> None:
    cut = tuple(
        StoredPart(0, offset, ShardLayout(shape=(3, 4), dim=1, ranges=ranges, flat=flat))
        for offset, ranges, flat in [(128, ((2, 4), (0, 1)), None), (200, ((1, 2),), (0, 2)), (300, ((1, 2),), (2, 3))]
    )
    tensors = {"model/w": _WHOLE, "model/cut": TensorEntry("bfloat16", (3, 4), cut)}
    manifest = Manifest(
        step=7,
        epoch=2,
        plan="pp=2",
        files=(_FILE,),
        tensors=tensors,
        aliases={"model/v": "model/w"},
        state={"x": [1.5]},
    )
    data = manifest.to_bytes()
    assert Manifest.from_bytes(data, "here") == manifest
    assert json.loads(data)["manifest"]["step"] == 7


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"version": 2}, "version 2, this program reads version 1"),
        ({"format": "torch"}, "no checkpoint's"),
        ({"more": 1}, r"fields differ: \['more'\]"),
        ({"step": -1}, "step is -1"),
        ({"step": True}, "step is True"),
        ({"step": 1 << 63}, "step is 9223372036854775808"),
        ({"step": 1.0}, "step is 1.0"),
        ({"tensors": []}, "'tensors' is no dict"),
        ({"files": [["../w.safetensors", 1000, "0" * 32]]}, "no file's name"),
        ({"files": [["/etc/passwd", 1000, "0" * 32]]}, "no file's name"),
        ({"files": [["a\0.safetensors", 1000, "0" * 32]]}, "no file's name"),
        ({"files": [["a.safetensors", 1000, "0" * 32]] * 2}, "named twice"),
        ({"files": [["a.safetensors", 1000, "xyz"]]}, "digest of a.safetensors"),
        ({"files": [["a.safetensors", 90, "0" * 32]]}, "ends at 112 in a.safetensors, which has 90"),
        ({"tensors": {"w": ["pickle", [3], [[0, 64]]]}}, "type 'pickle'"),
        ({"tensors": {"w": ["float32", [-3], [[0, 64]]]}}, "a size of 'w' is -3"),
        ({"tensors": {"w": ["float32", [1 << 40, 1 << 40], [[0, 64]]]}}, "entries"),
        ({"tensors": {"w": ["float32", [1 << 61, 1 << 61, 0], [[0, 64]]]}}, "entries"),
        ({"tensors": {"v": ["float32", [1], [[0, 64]]], "w": ["float32", [True], [[0, 68]]]}}, "a size of 'w' is True"),
        ({"tensors": {"v": ["float32", [1], [[0, 64]]], "w": ["float32", [1.0], [[0, 68]]]}}, "a size of 'w' is 1.0"),
        ({"tensors": {"w": ["complex128", [1 << 57], [[0, (1 << 62)]]]}}, "ends at"),
        ({"tensors": {"w": ["float32", [3], [[0, 64]]]}, "files": []}, "the file of a part of 'w' is 0"),
        ({"tensors": {"w": ["float32", [3], [[1, 64]]]}}, "the file of a part of .w. is 1"),
        ({"tensors": {"w": ["float32", [3], [[0, -8]]]}}, "an offset of 'w' is -8"),
        ({"tensors": {"w": ["float32", [3], [[0, 0]]]}}, "lie in its header"),
        ({"tensors": {"w": ["float32", [3], []]}}, "no parts"),
        ({"tensors": {"w": ["float32", [3], [[0, 64]]], "v": ["float32", [3], [[0, 72]]]}}, "two parts overlap"),
        ({"tensors": {"w": ["float32", [4], [[0, 64, 0, [[0, 2]], None]]]}}, "held by nobody"),
        ({"tensors": {"w": ["float32", [4], [[0, 64, 0, [[0, 9]], None]]]}}, "do not make a whole"),
        ({"tensors": {"w": ["float32", [4], [[0, 64, 0, [[0, "x"]], None]]]}}, "a place in 'w'"),
        ({"tensors": {"w": ["float32", [4], [[0, 64, 0, 5, None]]]}}, "no pairs"),
        ({"tensors": {"w" * 5000: ["float32", [4], [[0, 64]]]}}, "too long"),
        ({"aliases": {"v": "u"}}, "which is not stored"),
        ({"aliases": {"model/w": "model/w"}}, "it is stored itself"),
    ],
)
def test_what_breaks_a_rule_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words) as caught:
        Manifest.from_bytes(changed(**fields), "place")
    assert caught.value.message.startswith("place is refused")


@pytest.mark.parametrize(
    "body",
    [
        "[" * 100_000,
        '{"a":1,"a":2}',
        '{"step":NaN}',
        '{"step":Infinity}',
        "1" * 10_000,
        "",
        "\ud83d".encode(errors="replace").decode(),
    ],
    ids=["deep", "twice", "nan", "infinity", "long", "nothing", "text"],
)
def test_what_is_no_json_is_refused(body: str) -> None:
    with pytest.raises(CheckpointError, match="place is"):
        Manifest.from_bytes(signed(body), "place")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {1, 2}, b"x"])
def test_a_state_that_json_has_no_word_for_is_refused_where_it_stands(value: Any) -> None:
    state = {"extra": {"schedule": [1, {"best": value}]}}
    manifest = Manifest(step=1, epoch=1, plan="dp=2", files=(_FILE,), tensors={"model/w": _WHOLE}, state=state)
    with pytest.raises(CheckpointError, match=r"state\['extra'\]\['schedule'\]\[1\]\['best'\]"):
        manifest.to_bytes()


def test_many_tensors_are_read() -> None:
    entry = "float32", (4, 4)
    tensors = {
        f"model/layers.{n}.weight": TensorEntry(*entry, (StoredPart(0, 64 + 64 * n, ShardLayout(shape=(4, 4))),))
        for n in range(10_000)
    }
    file = FileEntry("rank-00000.safetensors", 64 + 64 * 10_000, bytes(16))
    manifest = Manifest(step=1, epoch=1, plan="single", files=(file,), tensors=tensors)
    assert len(Manifest.from_bytes(manifest.to_bytes(), "here").tensors) == 10_000
