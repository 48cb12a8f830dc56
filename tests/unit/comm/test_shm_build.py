"""What compiles the shared-memory transport: its cache, its compiler, and what it refuses."""

from __future__ import annotations

import errno
import os
import platform
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshwright import host
from meshwright.comm.shm import build
from meshwright.comm.shm.build import BuildError, build_extension, load_extension
from meshwright.kept_files import keep_file, read_kept_file


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "cache"
    monkeypatch.setenv(host.CACHE_VARIABLE, str(directory))
    return directory


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[str]]]:
    """What would be run; each command "makes" what it is to make."""
    run: list[list[str]] = []

    def pretend(commands: list[list[str]]) -> None:
        run.extend(commands)
        for command in commands:
            Path(command[command.index("-o") + 1]).write_text("no binary")

    monkeypatch.setattr(build, "run_all", pretend)
    monkeypatch.setenv("CXX", "true")  # is there, wherever there is a shell
    return run


def test_it_is_built_once(cache: Path, commands: list[list[str]]) -> None:
    path = build_extension()
    assert path.parent == cache
    assert cache.stat().st_mode & 0o777 == 0o700
    assert len(commands) == min(4, host.usable_cores()) + 1
    assert build_extension() == path
    assert sorted(each.name for each in cache.iterdir()) == sorted([path.name, "build.lock"])
    commands.clear()
    assert build_extension() == path
    assert commands == []


@pytest.mark.parametrize("cores", [1, 3, 64])
def test_each_source_is_in_one_unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cores: int) -> None:
    monkeypatch.setattr(build, "usable_cores", lambda: cores)
    units = build._write_units(tmp_path)
    assert len(units) == min(4, cores)
    lines = [line for unit in units for line in unit.read_text().splitlines()]
    assert sorted(lines) == sorted(f'#include "{source.name}"' for source in build._SOURCES.glob("*.cpp"))


def test_a_binary_outlives_its_compiler(
    cache: Path, commands: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = build_extension()
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setenv("CXX", "")
    assert build_extension() == path
    path.unlink()
    with pytest.raises(BuildError, match=r"no C\+\+ compiler was found"):
        build_extension()


def test_a_compiler_with_arguments(cache: Path, commands: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "true 'an argument' -B/x")
    build_extension()
    assert all(command[1:3] == ["an argument", "-B/x"] for command in commands)
    assert all(Path(command[0]).name == "true" for command in commands)


def test_what_a_killed_build_has_left_goes_with_the_next(cache: Path, commands: list[list[str]]) -> None:
    (cache / "build-x").mkdir(parents=True)
    (cache / "build-x" / "work.o").write_text("half")
    cache.chmod(0o700)
    path = build_extension()
    assert sorted(each.name for each in cache.iterdir()) == sorted([path.name, "build.lock"])


@pytest.mark.parametrize("what", ["sources", "flags", "processor"])
def test_what_the_binary_depends_on(
    cache: Path, commands: list[list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, what: str
) -> None:
    path = build_extension()
    if what == "sources":
        other = tmp_path / "csrc"
        other.mkdir()
        for source in build._SOURCES.iterdir():
            (other / source.name).write_bytes(source.read_bytes() + b"\n")
        monkeypatch.setattr(build, "_SOURCES", other)
    elif what == "flags":
        monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-g"))
    else:
        monkeypatch.setattr(build, "describe_processor", lambda: "another")
    assert build_extension() != path


def test_a_binary_that_cannot_be_loaded(
    cache: Path, commands: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, build._MODULE, raising=False)
    with pytest.raises(BuildError, match="cannot be loaded"):
        load_extension()
    assert build._MODULE not in sys.modules


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_a_cache_that_others_can_write_to_is_refused(cache: Path, mode: int) -> None:
    cache.mkdir()
    cache.chmod(mode)
    with pytest.raises(BuildError, match="can be written by, another user"):
        build_extension()


def test_a_cache_of_another_user_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(BuildError, match="belongs to"):
        build_extension()


def test_a_cache_that_cannot_be_made(cache: Path) -> None:
    cache.write_text("a file")
    with pytest.raises(BuildError, match="cannot be used: File exists"):
        build_extension()


def test_a_platform_that_is_not_supported(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as changed:
        changed.setattr(sys, "platform", "darwin")
        with pytest.raises(BuildError, match="it needs Linux"):
            build_extension()
    with monkeypatch.context() as changed:
        changed.setattr(platform, "machine", lambda: "riscv64")
        with pytest.raises(BuildError, match="this is riscv64"):
            build_extension()
    with monkeypatch.context() as changed:
        changed.delattr(os, "pidfd_open")
        with pytest.raises(BuildError, match="pidfd_open"):
            build_extension()
    assert not cache.exists()


def test_the_first_error_of_the_compiler_is_told(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "broken"
    compiler.write_text("#!/bin/sh\necho 'a warning' >&2\necho 'x.h:1: error: no such thing' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(BuildError, match=r"broken failed: x\.h:1: error: no such thing"):
        build_extension()
    assert not list(cache.glob("build-*")), "objects of the failed build were left"
    # The other ranks of the same start do not each wait for the same failure; a later start tries again.
    monkeypatch.setattr(build, "run_all", lambda commands: pytest.fail("it was tried again at once"))
    with pytest.raises(BuildError, match=r"broken failed: x\.h:1: error: no such thing"):
        build_extension()
    (failure,) = cache.glob("*.failed")
    os.utime(failure, (0, 0))
    monkeypatch.setattr(build, "_compile", lambda folder, target: keep_file(target, b"made"))
    assert read_kept_file(build_extension()) == b"made"


@pytest.mark.parametrize("damage", ["cut", "empty", "flipped", "link", "writable", "pipe"])
def test_a_damaged_binary_is_built_anew(cache: Path, commands: list[list[str]], damage: str) -> None:
    path = build_extension()
    whole = path.read_bytes()
    elsewhere = cache / "elsewhere"
    if damage == "cut":
        path.write_bytes(whole[: len(whole) // 2])
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "flipped":
        path.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    elif damage == "link":
        path.rename(elsewhere)
        path.symlink_to(elsewhere)
    elif damage == "writable":
        path.chmod(0o666)
    else:
        path.unlink()
        os.mkfifo(path)
    commands.clear()
    assert build_extension() == path
    assert commands, "it was not built anew"
    assert path.read_bytes() == whole
    assert not path.is_symlink()


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_a_cache_that_fails_is_a_build_error(
    cache: Path, commands: list[list[str]], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    plain = os.open

    def failing(path: str, flags: int, *args: int, **options: int) -> int:
        if str(path).startswith(str(cache)) and flags & os.O_CREAT:
            raise OSError(number, os.strerror(number), str(path))
        return plain(path, flags, *args, **options)

    monkeypatch.setattr(os, "open", failing)
    with pytest.raises(BuildError, match=r"build\.lock cannot be used: "):
        build_extension()


def test_a_planted_lock_is_not_followed(cache: Path, commands: list[list[str]], tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    cache.mkdir(mode=0o700)
    (cache / "build.lock").symlink_to(victim)
    with pytest.raises(BuildError, match=r"build\.lock cannot be used"):
        build_extension()
    assert victim.read_text() == "mine"


def test_a_compiler_that_is_no_command_is_a_build_error(
    cache: Path, commands: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "g++ 'half")
    with pytest.raises(BuildError, match="CXX is"):
        build_extension()


def failed_build() -> tuple[Path, Path]:
    """Return where the extension would lie, and the mark of an attempt that has failed just now."""
    path = build_extension()
    path.unlink()
    failure = path.with_suffix(".failed")
    keep_file(failure, b"no compiler")
    return path, failure


def test_a_failure_from_the_future_holds_no_longer(
    cache: Path, commands: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, failure = failed_build()
    with pytest.raises(BuildError, match="no compiler"):
        build_extension()
    os.utime(failure, (2**31, 2**31))
    assert build_extension() == path


def test_ranks_do_not_try_again_where_their_launching_process_has_not(
    cache: Path, commands: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, failure = failed_build()
    made = time.time() - 61  # the launching process looked a moment before
    os.utime(failure, (made, made))
    monkeypatch.delitem(sys.modules, build._MODULE, raising=False)
    with pytest.raises(BuildError, match="no compiler"):
        build.load_extension()
    assert build_extension() == path
