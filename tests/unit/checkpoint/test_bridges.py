"""Bridges: what goes through them comes back with the same bits, in one tensor's memory, and is whole or not there."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, load_model, save_file, save_model

import meshwright as mw
from meshwright.checkpoint import durable
from meshwright.checkpoint.bridges import drafts, own_format
from meshwright.checkpoint.bridges.converting import convert
from meshwright.checkpoint.bridges.huggingface import HuggingFaceWeights, split_into_shards
from meshwright.checkpoint.bridges.kinds import kind_of_source
from meshwright.checkpoint.bridges.safetensors_files import FORMAT_DTYPES
from meshwright.checkpoint.manifest import ITEM_BYTES, Manifest, StoredPart, TensorEntry
from meshwright.checkpoint.open_checkpoint import OpenCheckpoint
from meshwright.checkpoint.store import Store
from meshwright.checkpoint.tensor_files import TensorFile
from meshwright.errors import CheckpointError, ConfigError, StorageError
from meshwright.layout import ShardLayout
from unit.checkpoint.made import same_bits, save_tensors


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


def tensors_of(step: Path) -> dict[str, torch.Tensor]:
    with OpenCheckpoint(step) as snapshot:
        snapshot.check()
        return {name: snapshot.read(name) for name in [*snapshot.manifest.tensors, *snapshot.manifest.aliases]}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in found if not same_bits(found[name], expected[name])] == []


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


def a_model() -> torch.nn.Module:
    torch.manual_seed(3)
    layers = torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Flatten(), torch.nn.Linear(144, 5)
    return torch.nn.Sequential(*layers).to(memory_format=torch.channels_last)


def test_a_saved_run_is_exported_and_weights_of_others_are_loaded(tmp_path: Path) -> None:
    def loss_fn(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(outputs, batch[1])

    def applied() -> Any:
        return mw.apply_plan(a_model(), mw.Plan.parse("single"), loss_fn=loss_fn, optimizer=torch.optim.AdamW)

    model = applied()
    model.step((torch.randn(6, 3, 8, 8), torch.arange(6) % 5))
    mw.save_checkpoint(model, tmp_path / "run", step=1)
    convert(tmp_path / "run", tmp_path / "a.safetensors")
    expected = model.full_state_dict()
    assert_same(load_file(tmp_path / "a.safetensors"), expected)
    plain = a_model()
    plain.load_state_dict(load_file(tmp_path / "a.safetensors"), strict=True)
    convert(tmp_path / "a.safetensors", tmp_path / "weights", step=20)
    other = applied()
    with pytest.raises(CheckpointError, match="no optimizer's state"):
        mw.load_checkpoint(other, tmp_path / "weights")
    assert mw.load_checkpoint(other, tmp_path / "weights", with_optimizer=False) == 20
    assert_same(other.full_state_dict(), expected)


# -- tied weights ---------------------------------------------------------------------------------------------------------


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(6, 4)
        self.head = torch.nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight


def test_tied_names_stay_tied_through_files_of_others(tmp_path: Path) -> None:
    model = Tied()
    save_tensors(
        tmp_path / "own",
        {"model/embed.weight": model.embed.weight.detach()},
        aliases={"model/head.weight": "model/embed.weight"},
    )
    convert(tmp_path / "own", tmp_path / "a.safetensors")
    assert list(load_file(tmp_path / "a.safetensors")) == ["embed.weight"]
    other = Tied()
    assert load_model(other, tmp_path / "a.safetensors") == (set(), [])
    assert torch.equal(other.head.weight, model.embed.weight)
    convert(tmp_path / "a.safetensors", tmp_path / "back")
    assert torch.equal(tensors_of(tmp_path / "back" / "step-00000000")["model/head.weight"], model.head.weight)
    save_model(model, str(tmp_path / "theirs.safetensors"))
    convert(tmp_path / "theirs.safetensors", tmp_path / "imported")
    assert tensors_of(tmp_path / "imported" / "step-00000000").keys() == {"model/embed.weight", "model/head.weight"}
    convert(tmp_path / "own", tmp_path / "copies.safetensors", copies_of_tied=True)
    model.load_state_dict(load_file(tmp_path / "copies.safetensors"), strict=True)


def test_weights_that_are_tied_and_stored_twice_are_kept_once_on_request(tmp_path: Path) -> None:
    model = Tied()
    save_file({name: value.clone() for name, value in model.state_dict().items()}, tmp_path / "twice.safetensors")
    convert(tmp_path / "twice.safetensors", tmp_path / "own", tied=["head.weight=embed.weight"])
    with OpenCheckpoint(tmp_path / "own" / "step-00000000") as snapshot:
        assert snapshot.manifest.aliases == {"model/head.weight": "model/embed.weight"}
        assert list(snapshot.manifest.tensors) == ["model/embed.weight"]
    for pair in ("head.weight=embed", "head.weight=head.weight", "head.weight"):
        with pytest.raises(ConfigError, match="is no tensor of its own"):
            convert(tmp_path / "twice.safetensors", tmp_path / "other", tied=[pair])
    changed = model.embed.weight.detach().clone()
    changed[5, 3] += 1
    save_file({"embed.weight": model.embed.weight.detach(), "head.weight": changed}, tmp_path / "differ.safetensors")
    with pytest.raises(CheckpointError, match="the two differ"):
        convert(tmp_path / "differ.safetensors", tmp_path / "other", tied=["head.weight=embed.weight"])
    assert not (tmp_path / "other").exists()


def test_ties_that_the_configuration_denies_are_not_left_out(tmp_path: Path) -> None:
    save_tensors(tmp_path / "own", {"model/e": torch.ones(2, 2)}, aliases={"model/h": "model/e"})
    config = tmp_path / "config.json"
    config.write_text('{"tie_word_embeddings": false}')
    with pytest.raises(CheckpointError, match="'h' is tied to 'e'") as caught:
        convert(tmp_path / "own", tmp_path / "hf", config=config)
    assert caught.value.fix == "--copies-of-tied"
    convert(tmp_path / "own", tmp_path / "hf", config=config, copies_of_tied=True)
    assert load_file(tmp_path / "hf" / "model.safetensors").keys() == {"e", "h"}


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


def llama(tied: bool) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        tie_word_embeddings=tied,
    )
    return transformers.LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_llama_goes_through_a_checkpoint_and_computes_the_same(tmp_path: Path, tied: bool) -> None:
    model = llama(tied)
    model.save_pretrained(tmp_path / "theirs", max_shard_size="8KB")
    assert (tmp_path / "theirs" / "model.safetensors.index.json").exists()
    assert kind_of_source(tmp_path / "theirs") == "hf"
    convert(tmp_path / "theirs", tmp_path / "own")
    convert(tmp_path / "own", tmp_path / "ours", max_shard_size="8KB", config=tmp_path / "theirs")
    assert len(list((tmp_path / "ours").glob("model-0*-of-0*.safetensors"))) > 2
    again = type(model).from_pretrained(tmp_path / "ours").eval()
    tokens = torch.arange(20).reshape(2, 10)
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, model(tokens).logits)


def test_a_tied_llama_of_ours_is_exported_as_transformers_expects(tmp_path: Path) -> None:
    model = llama(tied=True)
    weights = {f"model/{name}": value.detach() for name, value in model.named_parameters()}  # a tied one once
    save_tensors(tmp_path / "own", weights, aliases={"model/lm_head.weight": "model/model.embed_tokens.weight"})
    model.config.save_pretrained(tmp_path)
    convert(tmp_path / "own", tmp_path / "hf", target_kind="hf", config=tmp_path / "config.json", dtype="float32")
    again, said = type(model).from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(said[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert again.lm_head.weight is again.model.embed_tokens.weight
    tokens = torch.arange(20).reshape(2, 10)
    with torch.no_grad():
        assert torch.equal(again.eval()(tokens).logits, model(tokens).logits)


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


# -- whole or not there ---------------------------------------------------------------------------------------------------


@pytest.fixture
def sources(tmp_path: Path) -> dict[str, Path]:
    save_tensors(tmp_path / "own", {"model/a": torch.ones(4, 4), "model/b": torch.ones(3)})
    convert(tmp_path / "own", tmp_path / "in.safetensors")
    return {"own": tmp_path / "own", "file": tmp_path / "in.safetensors"}


TARGETS = [("own", "out.safetensors"), ("own", "hf"), ("file", "steps"), ("file", "step-00000005")]


@pytest.mark.parametrize(("source", "name"), TARGETS)
def test_what_exists_is_not_written_over(tmp_path: Path, sources: dict[str, Path], source: str, name: str) -> None:
    target = tmp_path / name
    for make in (lambda: target.write_text("mine"), target.mkdir, lambda: target.symlink_to("nowhere")):
        make()
        with pytest.raises(ConfigError, match="exists"):
            convert(sources[source], target)
        if target.is_dir():
            target.rmdir()
        else:
            assert target.is_symlink() or target.read_text() == "mine"
            target.unlink()


def _file_operations(work: Callable[[], Any], monkeypatch: pytest.MonkeyPatch, stop_at: int) -> int:
    """Do work that loses its disk at the n-th operation; return how many there were."""
    count = 0
    with monkeypatch.context() as patch:
        for name in ("write", "fsync", "rename", "link"):
            original = getattr(os, name)

            def operation(*args: Any, _original: Callable[..., Any] = original, **kwargs: Any) -> Any:
                nonlocal count
                count += 1
                if count == stop_at:
                    raise OSError(28, "No space left on device")
                return _original(*args, **kwargs)

            patch.setattr(durable.os, name, operation)
        work()
    return count


@pytest.mark.parametrize(("source", "name"), TARGETS)
def test_a_disk_that_fails_at_any_operation_leaves_nothing_half(
    tmp_path: Path, sources: dict[str, Path], source: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "there"
    place.mkdir()
    total = _file_operations(lambda: convert(sources[source], place / name), monkeypatch, 0)
    assert total >= 4
    shutil.rmtree(place)
    place.mkdir()
    for number in range(1, total + 1):
        with pytest.raises(StorageError):
            _file_operations(lambda: convert(sources[source], place / name), monkeypatch, number)
        if (place / name).exists():  # the name was given, its durability failed
            assert number == total
        else:
            assert list(place.iterdir()) == []


def test_a_file_that_appears_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    target = tmp_path / "a"
    with pytest.raises(ConfigError, match="exists"), drafts.draft_of(target) as draft:  # noqa: PT012 - the end raises
        draft.write_text("ours")
        target.write_text("theirs")
    assert target.read_text() == "theirs"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_file_system_without_links_gets_a_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*_: Any, **__: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(drafts.os, "link", no_links)
    with drafts.draft_of(tmp_path / "a") as draft:
        draft.write_text("ours")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_source_that_gives_less_than_it_says_is_not_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def short(self: Any, name: str) -> Iterator[torch.Tensor]:
        yield self._snapshot.read(f"model/{name}")[:1]

    save_tensors(tmp_path / "own", {"model/a": torch.ones(4, 4)})
    monkeypatch.setattr(own_format.CheckpointWeights, "pieces", short)
    with pytest.raises(CheckpointError, match="'a' ended 48 bytes before"):
        convert(tmp_path / "own", tmp_path / "a.safetensors")
    assert not (tmp_path / "a.safetensors").exists()


# -- options --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "target", "options", "said"),
    [
        ("own", "copy", {"target_kind": "meshwright"}, "would be a copy"),
        ("own", "a.safetensors", {"config": Path("x")}, "--config goes with a Hugging Face"),
        ("file", "b", {"copies_of_tied": True}, "goes with files of others"),
        ("file", "hf", {"target_kind": "hf", "step": 3}, "none is read or written"),
        ("file", "step-00000005", {"step": 3}, "differ"),
        ("file", "step-5", {}, "no name of a new step"),
        ("file", "step-00000005.2", {}, "no name of a new step"),
        ("file", "step-000000005", {}, "no name of a new step"),
        ("file", "b", {"prefix": "x"}, "--prefix goes with sources of kind dcp"),
        ("own", "hf", {"max_shard_size": "much"}, "not a valid size"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    tmp_path: Path, sources: dict[str, Path], source: str, target: str, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        convert(sources[source], tmp_path / target, **options)
    assert not (tmp_path / target).exists()


def test_kinds_are_recognised_and_what_is_none_is_refused(tmp_path: Path, sources: dict[str, Path]) -> None:
    assert kind_of_source(sources["own"]) == kind_of_source(sources["own"] / "step-00000001") == "meshwright"
    assert kind_of_source(sources["file"]) == "safetensors"
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="no file of weights that is known"):
        kind_of_source(tmp_path / "model.bin")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="holds no weights of a kind"):
        kind_of_source(tmp_path / "empty")
    (sources["own"] / "model.safetensors").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="could be meshwright and hf"):
        kind_of_source(sources["own"])
    with pytest.raises(StorageError, match="No such file"):
        kind_of_source(tmp_path / "nothing")
