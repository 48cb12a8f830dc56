"""Pages under programs that fork, raise, collect and resize while they build; each test has been seen to fail."""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from safetensors.torch import save_file
from torch import Tensor, nn

from meshwright.errors import CheckpointError
from meshwright.run.building import pages
from meshwright.run.building.paged_build import PagedBuild
from meshwright.run.building.pretrained import load_pretrained

pytestmark = [
    pytest.mark.skipif(pages.find_directory() is None, reason="no directory on a disk for pages"),
    pytest.mark.usefixtures("everything_in_pages"),
]


class Child:
    """A process that is forked off and begins when it is told to; its exit status tells whether `check` was true."""

    def __init__(self, check: Callable[[], bool]) -> None:
        self._begin, self._tell_begin = os.pipe()
        self._ready, tell_ready = os.pipe()
        self._pid = os.fork()
        if not self._pid:
            status = 1
            try:
                status = int(not self._work(check, tell_ready))
            finally:
                os._exit(status)
        os.close(tell_ready)

    def _work(self, check: Callable[[], bool], tell_ready: int) -> bool:
        os.close(self._tell_begin)
        os.read(self._begin, 1)
        is_right = check()
        os.write(tell_ready, b"x")
        return is_right

    def begin(self) -> None:
        os.write(self._tell_begin, b"x")
        os.read(self._ready, 1)

    def succeeded(self) -> bool:
        _, status = os.waitpid(self._pid, 0)
        for end in (self._begin, self._tell_begin, self._ready):
            os.close(end)
        return os.waitstatus_to_exitcode(status) == 0


def test_a_process_that_is_forked_off_in_mid_build_makes_tensors_of_its_own() -> None:
    made = PagedBuild()
    with made.building():
        before = torch.full((4096,), 1.0)
        child = Child(lambda: bool((torch.full((4096,), 7.0) == 7).all() and (before == 1).all()))
        after = torch.full((4096,), 2.0)
        child.begin()
    assert child.succeeded()
    assert bool((after == 2).all())
    made.finish()
    assert bool((after == 2).all())
    assert bool((before == 1).all())


def test_a_forked_process_keeps_what_its_parent_overwrites() -> None:
    made = PagedBuild()
    with made.building():
        value = torch.full((4096,), 1.0)
    child = Child(lambda: bool((value == 1).all()))
    value.fill_(3.0)
    child.begin()
    assert child.succeeded()
    made.finish()
    assert bool((value == 3).all())


class Cycle:
    """Garbage that only the collector finds."""

    def __init__(self) -> None:
        self.own = self
        self.tensor = torch.full((4096,), 1.0)


def test_a_collection_in_the_middle_frees_no_block_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    made = PagedBuild()
    gc.disable()
    try:
        with made.building():
            cycles = [Cycle(), Cycle()]
            kept = torch.full((4096,), 2.0)
        del cycles
        advise = pages._advise

        def collecting(*arguments: Any) -> None:
            gc.collect()
            advise(*arguments)

        monkeypatch.setattr(pages, "_advise", collecting)
        made.finish()
    finally:
        gc.enable()
    assert bool((kept == 2).all())


def test_ctrl_c_loses_no_value(monkeypatch: pytest.MonkeyPatch) -> None:
    made = PagedBuild()
    with made.building():
        value = torch.arange(4096.0)
    libc = pages._libc()

    class Interrupted:
        """The C library, with Ctrl-C where a block would come into plain memory."""

        def __getattr__(self, name: str) -> Any:
            if name == "mremap":
                raise KeyboardInterrupt
            return getattr(libc, name)

    monkeypatch.setattr(pages, "_LIBC", Interrupted())
    with pytest.raises(KeyboardInterrupt):
        made.finish()
    monkeypatch.setattr(pages, "_LIBC", libc)
    assert torch.equal(value, torch.arange(4096.0))


def resized() -> list[Tensor]:
    value, out = torch.randn(10), torch.randn(2)
    value.resize_(20)[10:] = 1.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of an `out` that has entries
        torch.cat([value, value], out=out)
    return [value, out]


def nested() -> list[Tensor]:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1).eval()
    padding = torch.tensor([[False, False, True], [False, False, False]])
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # torch's, of nested tensors
        return [encoder(torch.randn(2, 3, 8), src_key_padding_mask=padding)]


def forward_mode() -> list[Tensor]:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.randn(4), torch.randn(4)) * torch.randn(4)
        return [value.clone() for value in forward_ad.unpack_dual(dual) if value is not None]


def filled() -> list[Tensor]:
    torch.use_deterministic_algorithms(True)
    try:
        return [torch.empty(10).isnan()]
    finally:
        torch.use_deterministic_algorithms(False)


def kept_by_the_operation() -> list[Tensor]:
    library = torch.library.Library("meshwright_test", "DEF")
    library.define("get() -> Tensor")
    kept = torch.zeros(10)
    library.impl("get", lambda: kept[:5], "CompositeExplicitAutograd")
    torch.ops.meshwright_test.get().fill_(3.0)
    library._destroy()
    return [kept]


@pytest.mark.parametrize("program", [resized, nested, forward_mode, filled, kept_by_the_operation])
def test_a_program_gives_the_same_in_pages(program: Callable[[], list[Tensor]]) -> None:
    torch.manual_seed(0)
    expected = program()
    torch.manual_seed(0)
    made = PagedBuild()
    with made.building():
        found = program()
    made.finish()
    assert len(found) == len(expected)
    assert all(torch.equal(mine, other) for mine, other in zip(found, expected, strict=True))


def test_a_finished_build_keeps_no_file_open_while_a_tensor_lives() -> None:
    made = PagedBuild()
    with made.building():
        value = torch.full((4096,), 1.0)
    file = made._pages._file  # type: ignore[union-attr]
    made.finish()
    assert file.closed
    assert bool((value == 1).all())
    del value
    gc.collect()


class Twins(nn.Module):
    """Two parts of one name, one of them inside the base model."""

    base_model_prefix = "model"

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.ModuleDict({"head": nn.Linear(2, 2, bias=False)})
        self.head = nn.Linear(2, 2, bias=False)


def test_one_pretrained_tensor_never_fills_two(tmp_path: Path) -> None:
    save_file({"head.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"missing: model\.head\.weight"):
        load_pretrained(Twins(), tmp_path)


@pytest.mark.parametrize("value", [1.0, 2.0])
def test_a_tied_parameter_with_two_pretrained_values_is_refused(tmp_path: Path, value: float) -> None:
    first, second = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    second.weight = first.weight
    model = nn.Sequential(first, second)
    before = first.weight.clone()
    weights = {"0.weight": torch.ones(2, 2), "1.weight": torch.full((2, 2), value)}
    save_file(weights, tmp_path / "model.safetensors")
    if value == 1:
        load_pretrained(model, tmp_path)
        assert bool((first.weight == 1).all())
        return
    with pytest.raises(CheckpointError, match=r"0\.weight and 1\.weight: two values"):
        load_pretrained(model, tmp_path)
    assert torch.equal(first.weight, before)
