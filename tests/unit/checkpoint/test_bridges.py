"""Bridges: what goes through them comes back with the same bits, in one tensor's memory."""

from __future__ import annotations

import itertools
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from meshwright.checkpoint.bridges.converting import convert
from meshwright.checkpoint.bridges.huggingface import HuggingFaceWeights, split_into_shards
from meshwright.checkpoint.bridges.safetensors_files import FORMAT_DTYPES
from meshwright.checkpoint.manifest import ITEM_BYTES, Manifest, StoredPart, TensorEntry
from meshwright.checkpoint.open_checkpoint import OpenCheckpoint
from meshwright.checkpoint.store import Store
from meshwright.checkpoint.tensor_files import TensorFile
from meshwright.errors import CheckpointError, ConfigError
from meshwright.layout import ShardLayout
from unit.checkpoint.made import assert_same, save_tensors, tensors_of


def bits(dtype: str, *shape: int) -> torch.Tensor:
    """Return a tensor of any bits, those of NaN and -0.0 included."""
    source = torch.Generator().manual_seed(len(dtype) + sum(shape))
    size = ITEM_BYTES[dtype] * torch.Size(shape).numel()
    raw = torch.randint(0, 2 if dtype == "bool" else 256, (size,), dtype=torch.uint8, generator=source)
    return raw.view(getattr(torch, dtype)).reshape(shape)


EVERYTHING = {
    f"{dtype}.{len(shape)}": bits(dtype, *shape)
    for dtype in FORMAT_DTYPES.values()
    for shape in ((5, 7), (3,), (), (0, 2))
}


def own(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"model/{name}": tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    "way", [["a.safetensors"], ["hf"], ["hf", "b.safetensors"], ["a.safetensors", "hf"]], ids="-".join
)
def test_every_type_comes_back_with_the_same_bits(tmp_path: Path, way: list[str]) -> None:
    save_tensors(tmp_path / "own", own(EVERYTHING))
    places = [tmp_path / name for name in ("own", *way, "back")]
    for source, target in itertools.pairwise(places):
        kind = "hf" if target.name == "hf" else None
        assert convert(source, target, target_kind=kind, max_shard_size="100") == 0
    assert_same(tensors_of(tmp_path / "back" / "step-00000000"), own(EVERYTHING))


def test_the_library_reads_what_is_written_and_is_read(tmp_path: Path) -> None:
    save_tensors(tmp_path / "own", own(EVERYTHING))
    convert(tmp_path / "own", tmp_path / "a.safetensors")
    assert_same(load_file(tmp_path / "a.safetensors"), EVERYTHING)
    save_file(EVERYTHING, tmp_path / "theirs.safetensors", metadata={"format": "pt", "note": "mine"})
    convert(tmp_path / "theirs.safetensors", tmp_path / "back", step=4)
    assert_same(tensors_of(tmp_path / "back" / "step-00000004"), own(EVERYTHING))


def test_a_type_that_the_format_lacks_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    save_tensors(tmp_path / "own", {"model/w": bits("complex128", 3, 4)})
    for name in ("a.safetensors", "hf"):
        with pytest.raises(CheckpointError, match="'w' has type complex128"):
            convert(tmp_path / "own", tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["own"]


def test_a_step_or_the_newest_sound_one_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (1, 2, 3):
        save_tensors(tmp_path / "run" / "checkpoints", {"model/w": torch.full((4, 4), float(step))}, step=step)
    damaged = tmp_path / "run" / "checkpoints" / "step-00000003" / "rank-00001.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\x01")
    convert(tmp_path / "run", tmp_path / "newest.safetensors")
    assert load_file(tmp_path / "newest.safetensors")["w"][0, 0] == 2
    assert "step-00000003 is skipped" in capsys.readouterr().err
    convert(tmp_path / "run", tmp_path / "first.safetensors", step=1)
    assert load_file(tmp_path / "first.safetensors")["w"][0, 0] == 1
    with pytest.raises(CheckpointError, match="damaged in bytes"):
        convert(tmp_path / "run", tmp_path / "third.safetensors", step=3)
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 9 .* steps 3, 2, 1"):
        convert(tmp_path / "run", tmp_path / "ninth.safetensors", step=9)


def test_what_is_no_weight_is_left_out_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_tensors(tmp_path / "own", {"model/w": torch.ones(2), "optimizer/w/m": torch.ones(2)})
    convert(tmp_path / "own", tmp_path / "a.safetensors")
    assert list(load_file(tmp_path / "a.safetensors")) == ["w"]
    assert "no weight of the model: 1 of optimizer/" in capsys.readouterr().err
    save_tensors(tmp_path / "none", {"optimizer/w/m": torch.ones(2)})
    with pytest.raises(CheckpointError, match="no tensor of a model"):
        convert(tmp_path / "none", tmp_path / "b.safetensors")


def test_dims_that_are_stored_in_another_order_come_out_in_their_own(tmp_path: Path) -> None:
    full = torch.arange(24.0).reshape(2, 3, 4)
    draft = Store(tmp_path / "own").begin(1)
    file = TensorFile([("model/w", full.permute(1, 2, 0).contiguous())])
    written = draft.write("rank-00000.safetensors", file)
    parts = (StoredPart(0, file.offsets[0], ShardLayout(shape=(3, 4, 2))),)
    entry = TensorEntry("float32", (3, 4, 2), parts, order=(1, 2, 0))
    draft.commit(Manifest(step=1, epoch=1, plan="single", files=(written,), tensors={"model/w": entry}))
    convert(tmp_path / "own", tmp_path / "a.safetensors")
    assert_same(load_file(tmp_path / "a.safetensors"), {"w": full})


# -- types ----------------------------------------------------------------------------------------------------------------


def test_floats_are_cast_as_torch_casts_and_the_rest_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    full = {
        "a": torch.randn(9, 5),
        "b": torch.randn(7, dtype=torch.float64),
        "c": torch.arange(3),
        "d": torch.tensor(float("inf")),
    }
    save_tensors(tmp_path / "own", own(full))
    convert(tmp_path / "own", tmp_path / "a.safetensors", dtype="bfloat16")
    expected = {
        name: tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor for name, tensor in full.items()
    }
    assert_same(load_file(tmp_path / "a.safetensors"), expected)
    assert "keep their type: 1 of int64" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="rule: one of float16, bfloat16"):
        convert(tmp_path / "own", tmp_path / "b.safetensors", dtype="int8")


def test_an_overflow_is_refused_not_written_as_inf(tmp_path: Path) -> None:
    save_tensors(tmp_path / "own", {"model/w": torch.tensor([1.0, -70000.0, float("inf")])})
    with pytest.raises(CheckpointError, match="'w' has 1 entries that float16 cannot hold, 70000 for example"):
        convert(tmp_path / "own", tmp_path / "a.safetensors", dtype="float16")
    assert [path.name for path in tmp_path.iterdir()] == ["own"]


# -- transformers ---------------------------------------------------------------------------------------------------------
def test_a_part_of_a_tensor_is_read_from_shards(tmp_path: Path) -> None:
    full = {"a": torch.randn(6, 8), "b": torch.randn(5)}
    save_tensors(tmp_path / "own", own(full))
    convert(tmp_path / "own", tmp_path / "hf", max_shard_size="64")
    with HuggingFaceWeights(tmp_path / "hf") as weights:
        wanted = ShardLayout(shape=(6, 8), dim=1, ranges=((5, 7), (0, 2)), flat=(3, 20))
        assert torch.equal(weights.read("a", wanted), full["a"][:, [5, 6, 0, 1]].reshape(-1)[3:20])
        assert torch.equal(weights.read("b"), full["b"])
        with pytest.raises(CheckpointError, match="no tensor 'c'"):
            weights.read("c")
        with pytest.raises(CheckpointError, match=r"shape \[5\] in"):
            weights.read("b", ShardLayout(shape=(6,)))


@pytest.mark.parametrize("most", [1, 6, 10, 100])
def test_shards_are_split_as_the_hub_splits_them(most: int) -> None:
    hub = pytest.importorskip("huggingface_hub")
    sizes = {f"t{number}": size for number, size in enumerate([6, 6, 2, 6, 2, 2, 1, 9, 1, 30, 4])}
    theirs = hub.split_state_dict_into_shards_factory(
        sizes, get_storage_size=lambda size: size, filename_pattern="model{suffix}", max_shard_size=most
    )
    assert split_into_shards(sizes, most) == list(theirs.filename_to_tensors.values())


def test_a_shard_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="a shard of 0 bytes"):
        split_into_shards({"a": 1}, 0)


def test_a_configuration_of_another_type_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_tensors(tmp_path / "own", {"model/w": torch.ones(2)})
    (tmp_path / "config.json").write_text('{"dtype": "float32"}')
    convert(tmp_path / "own", tmp_path / "hf", dtype="bfloat16", config=tmp_path)
    assert "says dtype 'float32', the weights are bfloat16" in capsys.readouterr().err
    assert json.loads((tmp_path / "hf" / "config.json").read_bytes()) == {"dtype": "float32"}


# -- memory ---------------------------------------------------------------------------------------------------------------


def test_one_tensor_is_in_memory_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tensors(tmp_path / "own", {f"model/{number}": torch.full((64, 1024), float(number)) for number in range(12)})
    alive: list[int] = []
    read = OpenCheckpoint.read
    refs: list[Any] = []

    def counted(self: OpenCheckpoint, name: str, wanted: Any = None) -> torch.Tensor:
        alive.append(sum(ref() is not None for ref in refs))
        tensor = read(self, name, wanted)
        refs.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(OpenCheckpoint, "read", counted)
    convert(tmp_path / "own", tmp_path / "hf", max_shard_size="600KB", dtype="bfloat16")
    assert len(alive) == 12
    assert max(alive) == 0
