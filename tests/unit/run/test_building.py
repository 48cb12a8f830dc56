"""Models built in pages of a file: memory that leaves and comes back, values, forks, disks without room; pretrained weights."""

from __future__ import annotations

import copy
import gc
import json
import os
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from meshwright.errors import CheckpointError, ConfigError
from meshwright.run.building import paged_build, pages
from meshwright.run.building.paged_build import PagedBuild
from meshwright.run.building.pages import Pages
from meshwright.run.building.pretrained import load_pretrained

pytestmark = pytest.mark.usefixtures("everything_in_pages")
needs_linux = pytest.mark.skipif(pages.find_directory() is None, reason="no directory on a disk for pages")


class Model(nn.Module):
    """What people do while they build: ties, padding rows, orthogonal matrices, copies, reads of values, buffers, strides."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8, padding_idx=3)
        rates = [rate.item() for rate in torch.linspace(0, 0.1, 3)]
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=rates[1], batch_first=True), 2
        )
        self.normed: Any = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        self.conv: Any = cast("Any", nn.Conv2d(4, 4, 3)).to(memory_format=torch.channels_last)
        self.register_buffer("mask", torch.triu(torch.full((8, 8), float("-inf")), 1))
        self.scale = nn.Parameter(torch.randn(8, 4).t())
        self.copied = copy.deepcopy(self.conv)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight
        nn.init.orthogonal_(self.normed.parametrizations.weight.original1)
        nn.init.trunc_normal_(self.conv.weight, std=0.02)
        with torch.no_grad():
            self.embedding.weight[5] *= 3
            self.conv.bias.copy_(torch.arange(4.0))


def build(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return Model()


def build_paged() -> tuple[nn.Module, PagedBuild]:
    made = PagedBuild()
    with made.building():
        model = build()
    return model, made


def assert_equal(mine: nn.Module, other: nn.Module) -> None:
    left, right = mine.state_dict(), other.state_dict()
    assert left.keys() == right.keys()
    for name, value in right.items():
        assert torch.equal(left[name], value), name
        assert left[name].stride() == value.stride(), name


@needs_linux
def test_a_model_in_pages_is_the_one_in_memory_bit_for_bit() -> None:
    plain = build()
    state = torch.get_rng_state()
    model, made = build_paged()
    assert torch.equal(torch.get_rng_state(), state)
    assert made.num_bytes > 0
    assert_equal(model, plain)
    assert model.get_parameter("head.weight") is model.get_parameter("embedding.weight")
    assert [p._version for p in model.parameters()] == [p._version for p in plain.parameters()]
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    made.finish()
    assert made.num_bytes == 0
    assert_equal(model, plain)
    assert [parameter.data_ptr() for parameter in model.parameters()] == addresses
    with torch.no_grad():
        model.get_parameter("scale").fill_(2.0)
    assert bool((model.get_parameter("scale") == 2).all())


@needs_linux
def test_views_and_arrays_keep_their_memory() -> None:
    made = PagedBuild()
    with made.building():
        whole = torch.zeros(4, 6)
        view, array = whole[1:3], whole.numpy()
        joined = torch.cat([whole, whole])
        alias = joined.view(-1)
    made.finish()
    view.fill_(7.0)
    alias[0] = 5.0
    assert whole[1:3].eq(7).all()
    assert array[1, 0] == 7
    assert joined[0, 0] == 5


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@needs_linux
def test_pages_leave_memory_and_give_their_room_back() -> None:
    size = 2**26
    found = Pages(str(pages.find_directory()))
    tensor = torch.empty(0, dtype=torch.uint8).set_(found.allocate(size))
    tensor.fill_(3)
    full = resident_bytes()
    found.release()
    assert resident_bytes() < full - size // 2
    assert bool((tensor == 3).all())
    on_disk = os.fstat(found._file.fileno()).st_blocks * 512
    del tensor
    gc.collect()
    assert os.fstat(found._file.fileno()).st_blocks * 512 <= on_disk - size
    assert found.num_bytes == 0


@needs_linux
@pytest.mark.parametrize("writer", ["child", "parent"])
def test_a_forked_process_has_copies(writer: str) -> None:
    found = Pages(str(pages.find_directory()))
    tensor = torch.empty(0, dtype=torch.uint8).set_(found.allocate(8192))
    tensor.fill_(3)
    ready, release = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        status = 1
        try:
            if writer == "child":
                tensor.fill_(4)
                found.release()
                status = int(not bool((tensor == 4).all()))
                del tensor
                gc.collect()
            else:
                os.read(release[0], 1)
                status = int(not bool((tensor == 3).all()))
        finally:
            os._exit(status)
    if writer == "parent":
        found.bring_in()  # gives room back only where nobody else may read it
        os.write(release[1], b"x")
    _, status = os.waitpid(child, 0)
    for end in (*ready, *release):
        os.close(end)
    assert os.waitstatus_to_exitcode(status) == 0
    assert bool((tensor == 3).all())


def test_without_a_disk_the_model_is_built_in_memory_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_build, "find_directory", lambda: None)
    with pytest.warns(UserWarning, match="built in memory, whole on every rank"):
        model, made = build_paged()
    assert made.num_bytes == 0
    assert_equal(model, build())


@needs_linux
def test_a_full_disk_leaves_the_rest_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    room = [4096 * 3]

    real = os.posix_fallocate

    def allocate(descriptor: int, start: int, size: int) -> None:
        room[0] -= size
        if room[0] < 0:
            raise OSError(28, "No space left on device")
        real(descriptor, start, size)

    monkeypatch.setattr(os, "posix_fallocate", allocate)
    made = PagedBuild()
    with pytest.warns(UserWarning, match="No space left on device.*set TMPDIR"), made.building():
        values = [torch.full((1024,), float(number)) for number in range(5)]
    assert made.num_bytes == 3 * 4096
    assert [value.unique().item() for value in values] == [0, 1, 2, 3, 4]


class Tied(nn.Module):
    """A language model's shape: a base with a prefix, a tied head."""

    steps: Tensor

    base_model_prefix = "model"

    def __init__(self) -> None:
        super().__init__()
        self.model: Any = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4))
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.model[0].weight
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))


def weights_of(model: nn.Module, *left_out: str) -> dict[str, Tensor]:
    named = model.state_dict()
    return {name: value.clone() for name, value in named.items() if name not in left_out}


def save(directory: Path, weights: dict[str, Tensor]) -> Path:
    directory.mkdir(exist_ok=True)
    save_file(weights, directory / "model.safetensors")
    return directory


def test_pretrained_weights_fill_tied_and_cast_tensors(tmp_path: Path) -> None:
    torch.manual_seed(1)
    source = Tied()
    source.steps.fill_(7)
    weights = weights_of(source, "head.weight")
    save(tmp_path / "a", {name: v.bfloat16() if v.is_floating_point() else v for name, v in weights.items()})
    model = Tied()
    load_pretrained(model, tmp_path / "a")
    assert torch.equal(model.head.weight, source.head.weight.bfloat16().float())
    assert model.head.weight is model.model[0].weight
    assert model.steps == 7


@pytest.mark.parametrize("direction", ["with", "without"])
def test_names_may_have_the_prefix_of_the_base_model_or_lack_it(tmp_path: Path, direction: str) -> None:
    torch.manual_seed(1)
    source = Tied()
    inner = {name.removeprefix("model."): value for name, value in weights_of(source, "head.weight").items()}
    if direction == "without":
        model: nn.Module = Tied()
        load_pretrained(model, save(tmp_path / "a", inner))
        assert_equal(model, source)
        return
    base = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4))
    base.base_model_prefix = "model"  # type: ignore[assignment]
    load_pretrained(base, save(tmp_path / "a", weights_of(source, "head.weight", "steps")))
    assert_equal(base, source.model)


def test_weights_of_another_model_are_refused_and_nothing_is_written(tmp_path: Path) -> None:
    model = Tied()
    before = copy.deepcopy(model)
    weights = weights_of(Tied(), "head.weight", "model.1.bias")
    weights["model.1.weight"] = torch.zeros(4, 3)
    weights["other"] = torch.zeros(2)
    with pytest.raises(CheckpointError) as caught:
        load_pretrained(model, save(tmp_path / "a", weights))
    text = str(caught.value)
    assert "3 tensors differ" in text
    for part in ("missing: model.1.bias", "unexpected: other", "model.1.weight: [4, 3] there, the model has [4, 4]"):
        assert part in text
    assert_equal(model, before)


@pytest.mark.parametrize(
    ("files", "words"),
    [(None, "there is no directory"), ([], "has no weights"), (["pytorch_model.bin"], "pickles and run code")],
)
def test_a_directory_without_safetensors_is_refused(tmp_path: Path, files: list[str] | None, words: str) -> None:
    directory = tmp_path / "a"
    if files is not None:
        directory.mkdir()
        for name in files:
            (directory / name).write_bytes(b"x")
    with pytest.raises(ConfigError, match=words) as caught:
        load_pretrained(Tied(), directory)
    assert caught.value.fix


def test_shards_with_an_index_are_read(tmp_path: Path) -> None:
    torch.manual_seed(1)
    source = Tied()
    weights = weights_of(source, "head.weight")
    names = sorted(weights)
    places = {}
    for number, part in enumerate((names[:1], names[1:]), start=1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: weights[name] for name in part}, tmp_path / file)
        places |= dict.fromkeys(part, file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    model = Tied()
    load_pretrained(model, tmp_path)
    assert_equal(model, source)
