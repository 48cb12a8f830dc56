"""`meshwright checkpoint`: what the commands show, and the codes that they leave with."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from meshwright import cli
from meshwright.checkpoint import durable, verification
from meshwright.checkpoint.store import Store
from unit.checkpoint.made import save_tensors

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command as the entry point does; it returns (exit code, standard output, standard error)."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["meshwright", "checkpoint", *map(str, arguments)])
        with pytest.raises(SystemExit) as left:
            cli.main()
        out, err = capsys.readouterr()
        assert isinstance(left.value.code, int | None)
        return left.value.code or 0, out, err

    return run


@pytest.fixture
def place(tmp_path: Path) -> Path:
    full = {
        **{f"model/layers.{number}.weight": torch.ones(6, 4) for number in range(30)},
        "optimizer/layers.0.weight/exp_avg": torch.ones(6, 4, dtype=torch.float64),
    }
    aliases = {"model/head.weight": "model/layers.0.weight"}
    for step in (3, 12):
        state = {"loader": {"epoch": 1, "samples": 64 * step}, "random": {"rank-0": "x"}}
        save_tensors(tmp_path / "checkpoints", full, step=step, aliases=aliases, state=state)
    return tmp_path / "checkpoints"


def test_help_names_every_command() -> None:
    text = CliRunner().invoke(cli.app, ["checkpoint", "--help"]).output
    for command in ("inspect", "verify", "convert", "export"):
        assert command in text
    assert "checkpoint" in CliRunner().invoke(cli.app, ["--help"]).output


# -- inspect --------------------------------------------------------------------------------------------------------------


def test_inspect_shows_the_newest_step(run: Run, place: Path) -> None:
    code, out, err = run("inspect", place)
    assert (code, err) == (0, "")
    lines = [re.sub(" +", " ", line) for line in out.splitlines()]
    assert f"checkpoint {place}/step-00000012" in lines
    assert "older step-00000003" in lines
    assert "step 12" in lines
    assert "plan tp=2" in lines
    assert "tensors 31, 3 KiB" in lines
    assert " model/ 30, 2.812 KiB" in lines
    assert " optimizer/ 1, 192 B" in lines
    assert "tied names model/head.weight = model/layers.0.weight" in lines
    assert "state loader: epoch, samples; random: rank-0" in lines
    assert "model/layers.0.weight float32 [6, 4] 2" in lines
    assert "... 11 more tensors (--all shows them)" in lines
    assert "exp_avg" not in out
    everything = run("inspect", place, "--all")[1]
    assert "optimizer/layers.0.weight/exp_avg" in everything
    assert "more tensors" not in everything


def test_inspect_of_a_step_or_of_a_run(run: Run, place: Path) -> None:
    assert "step-00000003\n" in run("inspect", place.parent, "--step", 3)[1]
    assert "step-00000003\n" in run("inspect", place / "step-00000003")[1]
    code, _, err = run("inspect", place, "--step", 4)
    assert code == 14
    assert "it has steps 12, 3\nfix: --step 12" in err


def test_inspect_writes_json(run: Run, place: Path, tmp_path: Path) -> None:
    assert run("inspect", place, "--json", tmp_path / "out.json")[0] == 0
    found = json.loads((tmp_path / "out.json").read_text())
    assert (found["step"], found["plan"], len(found["tensors"])) == (12, "tp=2", 31)
    assert found["state"]["loader"]["samples"] == 768
    assert found["aliases"] == {"model/head.weight": "model/layers.0.weight"}
    weight = found["tensors"][0]
    assert (weight["name"], weight["dtype"], weight["shape"]) == ("model/layers.0.weight", "float32", [6, 4])
    assert [part["ranges"] for part in weight["parts"]] == [[[0, 2]], [[2, 4]]]
    assert run("inspect", place, "--json", tmp_path / "none" / "out.json")[0] == 13


def test_inspect_reads_the_manifest_alone_and_says_what_is_missing(run: Run, place: Path) -> None:
    step = place / "step-00000012"
    for file in step.glob("rank-00000*"):
        file.unlink()
    (step / "rank-00001.safetensors").write_bytes(b"short")
    code, out, _ = run("inspect", step)
    assert code == 0
    assert re.search(r"rank-00000\.safetensors +\S+ \S+  MISSING", out)
    assert re.search(r"rank-00001\.safetensors +\S+ \S+  DAMAGED: 5 bytes", out)


def test_names_cannot_steer_the_terminal(run: Run, tmp_path: Path) -> None:
    save_tensors(tmp_path / "own", {"model/\x1b[31mred\n": torch.ones(1)}, state={"\x1b[2J": 1})
    for arguments in (["inspect", tmp_path / "own"], ["convert", tmp_path / "own", tmp_path / "a.safetensors"]):
        code, out, err = run(*arguments)
        assert code == 0
        assert "\x1b" not in out + err


def test_what_holds_no_checkpoint(run: Run, tmp_path: Path) -> None:
    for command in ("inspect", "verify"):
        assert run(command, tmp_path)[0] == 14
        code, _, err = run(command, tmp_path / "nothing")
        assert code == 13
        assert "No such file" in err


# -- verify ---------------------------------------------------------------------------------------------------------------


def test_verify_names_each_file(run: Run, place: Path) -> None:
    code, out, _ = run("verify", place)
    assert code == 0
    assert out.count("sound  ") == 6
    assert f"{place}/step-00000003/rank-00001.safetensors" in out
    assert out.endswith("2 checkpoints, 6 files: all sound\n")
    assert run("verify", place, "--step", 3)[1].endswith("1 checkpoint, 3 files: all sound\n")


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("name", "damage", "said"),
    [
        ("rank-00001.safetensors", flip, "is damaged in bytes 0 to"),
        ("rank-00001.safetensors", lambda path: os.truncate(path, 9), "it has 9 bytes, the manifest says"),
        ("rank-00001.safetensors", Path.unlink, "No such file"),
        (
            "rank-00001.safetensors",
            lambda path: (path.unlink(), path.symlink_to("rank-00000.safetensors")),
            "cannot read",
        ),
        ("rank-00001.safetensors", lambda path: (path.unlink(), os.mkfifo(path)), "no regular file"),
        ("rank-00001.safetensors.blocks", flip, "does not have the digest"),
        ("rank-00001.safetensors.blocks", Path.unlink, "No such file"),
        ("manifest.json", flip, "its contents do not have the digest"),
    ],
    ids=["flip", "cut", "gone", "link", "pipe", "table flip", "table gone", "manifest"],
)
def test_verify_finds_damage_and_goes_on(
    run: Run, place: Path, name: str, damage: Callable[[Path], object], said: str
) -> None:
    damage(place / "step-00000012" / name)
    code, out, _ = run("verify", place)
    assert code == 14
    lines = out.splitlines()
    assert [line for line in lines if line.startswith("damaged") and said in line and "step-00000012" in line]
    assert len([line for line in lines if line.startswith("sound") and "step-00000003" in line]) == 3
    assert lines[-1].endswith("1 damaged or unreadable")


def test_a_step_under_the_name_of_another_is_damage(run: Run, place: Path, tmp_path: Path) -> None:
    (place / "step-00000012").rename(place / "step-00000013")
    for arguments in (["inspect", place], ["convert", place, tmp_path / "x", "--step", 13]):
        code, _, err = run(*arguments)
        assert code == 14
        assert "is of step-00000012, its directory has another name" in err
    code, out, _ = run("verify", place)
    assert code == 14
    assert "step-00000012, its directory has another name" in out
    (place / "step-00000013").rename(tmp_path / "a_copy")  # alone it may have any name
    assert run("verify", tmp_path / "a_copy")[0] == 0


def test_verify_beside_a_run_that_deletes_old_checkpoints(
    run: Run, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It was damage, with exit code 14.
    read = verification.read_small_file

    def read_late(path: Path, most: int) -> bytes:
        if path.parent.name == "step-00000012":
            save_tensors(place, {"w": torch.ones(2)}, step=13)
            Store(place).retain(1)
        return read(path, most)

    monkeypatch.setattr(verification, "read_small_file", read_late)
    code, out, _ = run("verify", place)
    assert code == 0
    assert re.sub(r" +", " ", out) == (
        f"gone {place}/step-00000012 it was deleted meanwhile\ngone {place}/step-00000003 it was deleted meanwhile\n"
        "0 checkpoints, 0 files: all sound\n"
    )


def test_verify_tells_a_disk_that_fails_from_damage(run: Run, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = os.preadv
    failing = os.stat(place / "step-00000012" / "rank-00001.safetensors").st_ino

    def preadv(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if os.fstat(descriptor).st_ino == failing:
            raise OSError(5, "Input/output error")
        return read(descriptor, buffers, offset)

    monkeypatch.setattr(durable.os, "preadv", preadv)
    code, out, _ = run("verify", place)
    assert code == 13
    assert re.search(r"unreadable  .*rank-00001\.safetensors  cannot read .*Input/output error", out)
    flip(place / "step-00000003" / "rank-00000.safetensors")
    assert run("verify", place)[0] == 14


# -- convert and export ---------------------------------------------------------------------------------------------------


def test_export_and_convert(run: Run, place: Path, tmp_path: Path) -> None:
    code, out, err = run(
        "export", place, tmp_path / "hf", "--format", "hf", "--dtype", "bfloat16", "--max-shard-size", "1kB"
    )
    assert code == 0
    assert out == f"meshwright {place}/step-00000012 -> hf {tmp_path}/hf: 30 tensors, 1.406 KiB\n"
    assert "names of tied weights, left out (--copies-of-tied writes them): head.weight" in err
    assert sorted(path.name for path in (tmp_path / "hf").iterdir()) == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]
    code, out, _ = run("convert", tmp_path / "hf", tmp_path / "back", "--step", 7)
    assert (code, out) == (0, f"hf {tmp_path}/hf -> meshwright {tmp_path}/back/step-00000007: 30 tensors, 1.406 KiB\n")
    assert run("verify", tmp_path / "back")[0] == 0
    assert (
        run("export", place, tmp_path / "a.safetensors", "--format", "safetensors", "--copies-of-tied", "--step", 3)[0]
        == 0
    )
    assert len(load_file(tmp_path / "a.safetensors")) == 31
    code, _, err = run("convert", place, tmp_path / "a.safetensors")
    assert code == 2
    assert "ConfigError" in err
    assert "exists (rule: nothing is written over)" in err


def test_usage_errors(run: Run, place: Path, tmp_path: Path) -> None:
    assert run("export", place, tmp_path / "x")[0] == 2
    assert run("export", place, tmp_path / "x", "--format", "gguf")[0] == 2
    assert run("convert", place)[0] == 2
    assert run("convert", tmp_path / "nothing", tmp_path / "x")[0] == 13
    flip(place / "step-00000012" / "rank-00000.safetensors")
    code, _, err = run("convert", place / "step-00000012", tmp_path / "x")
    assert code == 14
    assert "rank-00000.safetensors is damaged" in err
    assert not (tmp_path / "x").exists()
