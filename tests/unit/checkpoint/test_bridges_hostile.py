"""Files of others that are damaged or made to harm: refused with their name, and nothing is run, followed or unpickled."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from meshwright.checkpoint.bridges.converting import convert
from meshwright.checkpoint.bridges.huggingface import INDEX, HuggingFaceWeights
from meshwright.checkpoint.bridges.safetensors_files import SafetensorsWeights
from meshwright.checkpoint.listing import inspect_checkpoint
from meshwright.checkpoint.tensor_files import memory_of
from meshwright.checkpoint.verification import verify_checkpoints
from meshwright.errors import CheckpointError, ConfigError, MeshwrightError
from unit.checkpoint.made import save_tensors


def raw_file(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8), **more: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets, **more}


HEADERS: dict[str, tuple[Any, bytes]] = {
    "an unknown type": ({"a": entry("F4")}, b"12345678"),
    "a type that is ours alone": ({"a": entry("C128", [], [0, 16])}, bytes(16)),
    "a type that is no text": ({"a": entry(["F32"])}, b"12345678"),
    "a wrong size": ({"a": entry(shape=[3])}, b"12345678"),
    "a negative size": ({"a": entry(shape=[-2])}, b"12345678"),
    "a size that is true": ({"a": entry(shape=[True, 2])}, b"12345678"),
    "a size with a fraction": ({"a": entry(shape=[2.0])}, b"12345678"),
    "sizes that overflow": ({"a": entry(shape=[2**40, 2**40, 0], offsets=[0, 0])}, b""),
    "a size of many digits": (
        b'{"a":{"dtype":"F32","shape":[1' + b"0" * 5000 + b'],"data_offsets":[0,8]}}',
        b"12345678",
    ),
    "offsets turned round": ({"a": entry(offsets=[8, 0])}, b"12345678"),
    "three offsets": ({"a": entry(offsets=[0, 4, 8])}, b"12345678"),
    "offsets past the end": ({"a": entry(offsets=[8, 16])}, b"12345678"),
    "overlapping tensors": ({"a": entry(), "b": entry(offsets=[4, 12])}, bytes(12)),
    "two names for one place": ({"a": entry(), "b": entry()}, bytes(8)),
    "a gap": ({"a": entry(), "b": entry(offsets=[12, 20])}, bytes(20)),
    "bytes behind the last": ({"a": entry()}, bytes(9)),
    "a missing field": ({"a": {"dtype": "F32", "shape": [2]}}, bytes(8)),
    "a field too many": ({"a": entry(code="x")}, bytes(8)),
    "an entry that is no object": ({"a": [1]}, b""),
    "a header that is no object": ([1], b""),
    "no JSON": (b"{", b""),
    "a name twice": (
        b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}',
        b"",
    ),
    "NaN": (b'{"a":{"dtype":"U8","shape":[NaN],"data_offsets":[0,0]}}', b""),
    "depth": (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", b""),
    "bytes that are no text": (b'{"\xff\xfe":1}', b""),
    "an empty name": ({"": entry()}, bytes(8)),
    "a long name": ({"n" * 5000: entry()}, bytes(8)),
    "many dims": ({"a": entry(shape=[1] * 65, offsets=[0, 4])}, bytes(4)),
    "metadata that is no texts": ({"__metadata__": {"a": 1}}, b""),
    "metadata that is no object": ({"__metadata__": "x"}, b""),
}


@pytest.mark.parametrize("header", HEADERS.values(), ids=HEADERS)
def test_headers_that_break_a_rule_are_refused_by_name(tmp_path: Path, header: tuple[Any, bytes]) -> None:
    path = raw_file(tmp_path / "a.safetensors", *header)
    with pytest.raises(CheckpointError, match=r"a\.safetensors") as caught:
        SafetensorsWeights(path)
    assert len(str(caught.value)) < 2000


@pytest.mark.parametrize("length", [0, 5, 2**31, 2**63, 2**64 - 1])
def test_lengths_of_headers_that_are_wrong_are_refused(tmp_path: Path, length: int) -> None:
    path = raw_file(tmp_path / "a.safetensors", {"a": entry()}, bytes(8), length)
    with pytest.raises(CheckpointError, match=r"a\.safetensors"):
        SafetensorsWeights(path)


def test_every_truncation_of_a_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"a": torch.arange(4.0), "b": torch.ones(3, dtype=torch.bool)}, path)
    data = path.read_bytes()
    SafetensorsWeights(path).close()
    for size in range(len(data)):
        path.write_bytes(data[:size])
        with pytest.raises(CheckpointError, match=r"a\.safetensors"):
            SafetensorsWeights(path)


def test_every_flipped_bit_of_a_header_is_refused_or_read(tmp_path: Path) -> None:
    # The format has no digest: a flip may make another name or type. It must not make another error, or numbers from elsewhere.
    path = tmp_path / "a.safetensors"
    save_file({"a": torch.arange(4.0), "b": torch.ones(3, dtype=torch.bool)}, path, metadata={"format": "pt"})
    data = path.read_bytes()
    length = 8 + int.from_bytes(data[:8], "little")
    refused = 0
    for bit in range(8 * length):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        try:
            with SafetensorsWeights(path) as weights:
                found = b"".join(memory_of(piece) for name in weights.tensors for piece in weights.pieces(name))
        except CheckpointError:
            refused += 1
        else:
            assert found == data[length:]
    assert refused > 4 * length


def test_a_file_that_is_cut_after_it_was_opened_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"a": torch.arange(4.0)}, path)
    with SafetensorsWeights(path) as weights:
        os.truncate(path, path.stat().st_size - 1)
        with pytest.raises(CheckpointError, match="it ends at"):
            list(weights.pieces("a"))


# -- directories ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """A sound directory of two shards, with a secret beside it."""
    (tmp_path / "hf").mkdir()
    save_file({"a": torch.ones(2)}, tmp_path / "hf" / "one.safetensors")
    save_file({"b": torch.ones(2)}, tmp_path / "hf" / "two.safetensors")
    save_file({"b": torch.zeros(2)}, tmp_path / "secret.safetensors")
    write_index(tmp_path / "hf", {"a": "one.safetensors", "b": "two.safetensors"})
    return tmp_path / "hf"


def write_index(path: Path, places: Any) -> None:
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))


def test_the_sound_directory_is_read(shards: Path) -> None:
    with HuggingFaceWeights(shards) as weights:
        assert list(weights.tensors) == ["a", "b"]


@pytest.mark.parametrize(
    "places",
    [
        {"a": "one.safetensors", "b": "../secret.safetensors"},
        {"a": "one.safetensors", "b": "/etc/x.safetensors"},
        {"a": "one.safetensors", "b": "sub/../two.safetensors"},
        {"a": "one.safetensors", "b": "two.safetensors\0.safetensors"},
        {"a": "one.safetensors", "b": "\x1b[2J.safetensors"},
        {"a": "one.safetensors", "b": f"{'n' * 300}.safetensors"},
        {"a": "one.safetensors", "b": "none.safetensors"},
        {"a": "one.safetensors", "b": "two.bin"},
        {"a": "one.safetensors", "b": ".."},
        {"a": "one.safetensors", "b": 2},
        {"a": "one.safetensors", "b": "one.safetensors"},
        {"a": "one.safetensors"} | {"c": "two.safetensors"},
        {"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"},
        {},
        ["one.safetensors"],
        None,
    ],
    ids=lambda places: (
        str(places)[-30:].encode("ascii", "backslashreplace").decode().replace("\x1b", "ESC").replace("\0", "NUL")
    ),
)
def test_an_index_that_lies_is_refused(shards: Path, places: Any) -> None:
    write_index(shards, places)
    with pytest.raises(CheckpointError, match="hf") as caught:
        HuggingFaceWeights(shards)
    assert str(caught.value).isprintable()  # nothing that steers a terminal


def test_a_tensor_that_is_in_two_shards_or_in_none_of_the_index_is_refused(shards: Path) -> None:
    save_file({"a": torch.zeros(2), "b": torch.ones(2)}, shards / "two.safetensors")
    with pytest.raises(CheckpointError, match=r"two\.safetensors holds 'a', and .*one\.safetensors does"):
        HuggingFaceWeights(shards)
    save_file({"b": torch.ones(2), "z": torch.ones(2)}, shards / "two.safetensors")
    with pytest.raises(CheckpointError, match=r"two\.safetensors holds 'z', .* says None"):
        HuggingFaceWeights(shards)


def test_two_sets_of_weights_are_refused(shards: Path) -> None:
    save_file({"a": torch.zeros(2)}, shards / "model.safetensors")
    with pytest.raises(CheckpointError, match="rule: one of them"):
        HuggingFaceWeights(shards)


def _replace(path: Path, make: Callable[[Path], Any]) -> None:
    path.unlink()
    make(path)


@pytest.mark.parametrize("name", ["two.safetensors", INDEX])
@pytest.mark.parametrize("kind", ["link", "link within", "pipe", "directory", "device"])
def test_links_and_what_is_no_file_are_not_opened(shards: Path, name: str, kind: str) -> None:
    makes: dict[str, Callable[[Path], Any]] = {
        "link": lambda path: path.symlink_to(shards.parent / "secret.safetensors"),
        "link within": lambda path: path.symlink_to("one.safetensors"),
        "pipe": os.mkfifo,
        "directory": Path.mkdir,
        "device": lambda path: path.symlink_to("/dev/zero"),
    }
    _replace(shards / name, makes[kind])
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")) as caught:
        HuggingFaceWeights(shards)
    assert "link" not in kind or "cp -rL" in (caught.value.fix or "")


def test_a_configuration_that_is_a_link_or_no_object_is_refused(shards: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.symlink_to("/etc/hostname")
    with pytest.raises(CheckpointError, match=r"config\.json is a symbolic link"):
        convert(shards, tmp_path / "out", target_kind="hf", config=tmp_path)
    _replace(config, lambda path: path.write_text("[1]"))
    with pytest.raises(CheckpointError, match=r"config\.json is no JSON object"):
        convert(shards, tmp_path / "out", target_kind="hf", config=config)
    config.unlink()
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        convert(shards, tmp_path / "out", target_kind="hf", config=tmp_path)
    assert not (tmp_path / "out").exists()


def test_a_name_that_headers_use_themselves_is_not_written(tmp_path: Path) -> None:
    save_tensors(tmp_path / "own", {"model/__metadata__": torch.ones(2)})
    with pytest.raises(CheckpointError, match="'__metadata__'"):
        convert(tmp_path / "own", tmp_path / "a.safetensors")


# -- what is run ----------------------------------------------------------------------------------------------------------

_events: list[tuple[str, tuple[Any, ...]]] | None = None
_WATCHED = (
    "open",
    "os.",
    "pickle.",
    "exec",
    "compile",
    "subprocess.",
    "import",
    "socket.",
    "ctypes.",
    "shutil.",
    "pty.",
    "code.",
)


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if _events is not None and event.startswith(_WATCHED):
        _events.append((event, args))


@pytest.fixture
def audited() -> Iterator[Callable[[Callable[[], Any]], list[tuple[str, tuple[Any, ...]]]]]:
    """Return the audit events of what is called; a hook cannot be taken away again, so it is silenced."""
    global _events
    sys.addaudithook(_hook)

    def run(work: Callable[[], Any]) -> list[tuple[str, tuple[Any, ...]]]:
        global _events
        _events = []
        try:
            work()
        except MeshwrightError:
            pass
        finally:
            found, _events = _events, None
        return found

    yield run
    _events = None


def test_nothing_is_unpickled_run_or_opened_outside(
    shards: Path, tmp_path: Path, audited: Callable[[Callable[[], Any]], list[tuple[str, tuple[Any, ...]]]]
) -> None:
    save_tensors(tmp_path / "own", {"model/a": torch.ones(2, 2)}, state={"loader": {"epoch": 1}})
    for name in ("warm", "out"):  # modules are imported by the first of them
        targets = [tmp_path / f"{name}{end}" for end in (".safetensors", "-hf", "-own", "-again")]
        events = audited(
            lambda made=targets: [
                inspect_checkpoint(tmp_path / "own"),
                verify_checkpoints(tmp_path / "own"),
                convert(tmp_path / "own", made[0], dtype="bfloat16"),
                convert(made[0], made[1], target_kind="hf"),
                convert(made[1], made[2]),
                convert(shards, made[3], step=3),
            ]
        )
        assert targets[-1].exists()
    kinds = {event for event, _ in events}
    assert {"open", "os.rename", "os.link"} <= kinds  # the hook hears
    assert not [
        event
        for event in events
        if event[0].startswith(("pickle.", "exec", "compile", "subprocess.", "import", "socket."))
    ]
    assert not {"os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "os.symlink"} & kinds
    places = [args[0] for event, args in events if event == "open"]
    assert [place for place in places if not str(place).startswith(str(tmp_path))] == []


def test_a_refused_index_opens_nothing_outside(
    shards: Path, tmp_path: Path, audited: Callable[[Callable[[], Any]], list[tuple[str, tuple[Any, ...]]]]
) -> None:
    write_index(shards, {"a": "one.safetensors", "b": "../secret.safetensors"})
    for _ in range(2):
        events = audited(lambda: convert(shards, tmp_path / "out"))
    opened = {str(args[0]) for event, args in events if event == "open"}
    assert opened == {str(shards / INDEX), str(shards / "one.safetensors")}
    assert not (tmp_path / "out").exists()


def test_a_pickle_by_another_name_is_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError, match=r"a\.safetensors"):
        convert(tmp_path / "a.safetensors", tmp_path / "own")
    torch.save({"a": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="no file of weights that is known"):
        convert(tmp_path / "pytorch_model.bin", tmp_path / "own")
    with pytest.raises(ConfigError, match="read, not written"):
        convert(tmp_path / "a.safetensors", tmp_path / "own", target_kind="dcp")
