"""Build of the shared-memory extension, once for each torch, Python, compiler and kind of processor.

torch has no stable binary interface for backends, so a binary fits one torch version, and a wheel would need one for each. The
extension is built where it is used, in half a minute on two cores, and kept in a private cache directory.

    python -m meshwright.comm.shm.build     builds it now rather than with the first run
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from meshwright.host import private_cache_directory, usable_cores
from meshwright.kept_files import keep_file, read_kept_file

__all__: list[str] = []

_LOG = logging.getLogger("meshwright")
_SOURCES = Path(__file__).parent / "csrc"
_MODULE = "_meshwright_shm"
_DEADLINE_S = 300.0
_FAILURE_HOLDS_S = 60.0
_FAILURE_HOLDS_IN_RANKS_S = 180.0
"""Longer: a rank that compiles again, where its launching process has not, is killed at the end of its start timeout [s]."""
_SEALED = "sha256"
"""How a kept binary says that it is whole."""
_NAP_S = 0.05
_MOST_UNITS = 4
# No fused multiply-add, which would round differently from processor to processor; signed integers wrap as torch's do.
FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fwrapv", "-std=c++20", "-fPIC", "-fvisibility=hidden")


class BuildError(Exception):
    """The extension cannot be built or loaded here; the text says why."""


def load_extension() -> ModuleType:
    """Return the extension module, building it first if the cache has none.

    Raises:
        BuildError: This platform is not supported, there is no compiler, or it failed.
    """
    if _MODULE in sys.modules:
        return sys.modules[_MODULE]
    path = build_extension(failure_holds_s=_FAILURE_HOLDS_IN_RANKS_S)
    spec = importlib.util.spec_from_file_location(_MODULE, path)
    if spec is None or spec.loader is None:
        raise BuildError(f"{path} cannot be loaded")
    try:
        module = importlib.util.module_from_spec(spec)  # which loads it
        spec.loader.exec_module(module)
    except (ImportError, OSError) as error:
        raise BuildError(f"{path} cannot be loaded: {error}") from error
    sys.modules[_MODULE] = module
    return module


def loaded_extension() -> ModuleType | None:
    """Return the extension module if this process has loaded it."""
    return sys.modules.get(_MODULE)


def build_extension(*, failure_holds_s: float = _FAILURE_HOLDS_S) -> Path:
    """Return the path of the extension, building it if the cache has none.

    If the cache has it, torch is not imported and no process is started. Of several processes one builds and the others wait.

    A file that is not as it was written is built anew: loading one that was cut would end the process with SIGBUS.

    Args:
        failure_holds_s: How long nobody tries again after a failed attempt [s].

    Raises:
        BuildError: As `load_extension`; also where the cache cannot be read or written.
    """
    refuse_platform()
    try:
        torch_folder = _find_torch()
        directory = cache_directory()
        target = directory / f"{_MODULE}-{_key(torch_folder)}.so"
        if is_sound(target):
            return target
        with held_lock(directory / "build.lock"):
            if not is_sound(target):
                _build(torch_folder, target, failure_holds_s)
    except OSError as error:
        raise BuildError(f"{error.filename or 'the cache directory'} cannot be used: {error.strerror}") from error
    return target


def _build(torch_folder: Path, target: Path, failure_holds_s: float) -> None:
    _refuse_known_failure(target, failure_holds_s)
    try:
        _compile(torch_folder, target)
    except BuildError as error:
        with contextlib.suppress(OSError):
            keep_file(_failure_of(target), str(error).encode())
        raise


def is_sound(target: Path) -> bool:
    """Tell whether the extension is there as it was built; say so once where it is there in another way."""
    try:
        read_kept_file(target)
    except FileNotFoundError:
        return False
    except OSError as error:
        _LOG.warning("%s is not used: %s", target, error.strerror)
        return False
    return True


def _failure_of(target: Path) -> Path:
    return target.with_suffix(".failed")


def _refuse_known_failure(target: Path, holds_s: float) -> None:
    """Raise the error of a failed attempt of just now, so that the other ranks do not each wait for a compiler."""
    failure = _failure_of(target)
    with contextlib.suppress(OSError):
        # A mark from the future, after the clock was set back, holds no longer than one of now.
        if abs(time.time() - failure.stat().st_mtime) < holds_s:
            raise BuildError(read_kept_file(failure).decode(errors="replace"))
        failure.unlink()


def refuse_platform() -> None:
    """Raise on a platform whose memory model, or whose kernel calls, are not known to be suitable."""
    if not sys.platform.startswith("linux"):
        raise BuildError(f"it needs Linux (futex, memfd, pidfd), this is {sys.platform}")
    if platform.machine() not in ("x86_64", "aarch64"):
        raise BuildError(f"it is written for x86_64 and aarch64, this is {platform.machine()}")
    if not hasattr(os, "memfd_create") or not hasattr(os, "pidfd_open"):
        raise BuildError("this Python was built without memfd_create or pidfd_open")


def find_compiler() -> list[str]:
    """Return the compiler's command, which $CXX may give with arguments ("ccache g++")."""
    try:
        chosen = shlex.split(os.environ.get("CXX", ""))
    except ValueError as error:
        raise BuildError(f"CXX is {os.environ['CXX'][:100]!r}, which is not a command: {error}") from None
    for command in (chosen, ["c++"], ["g++"], ["clang++"]):
        if command and (found := shutil.which(command[0])):
            return [found, *command[1:]]
    raise BuildError("no C++ compiler was found (tried $CXX, c++, g++, clang++)")


def _find_torch() -> Path:
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        raise BuildError("torch is not installed")
    return Path(found.origin).parent


def cache_directory() -> Path:
    """Return the cache directory: its files are loaded as code."""
    try:
        return private_cache_directory()
    except OSError as error:
        raise BuildError(f"the cache directory {error.filename} cannot be used: {error.strerror}") from error


def _key(torch_folder: Path) -> str:
    digest = hashlib.sha256()
    for source in sorted(_SOURCES.iterdir()):
        digest.update(source.name.encode())
        digest.update(source.read_bytes())
    digest.update((torch_folder / "version.py").read_bytes())
    # A binary outlives its compiler, which is therefore not part of the key; the processor is, because of -march=native.
    digest.update(repr((_SEALED, FLAGS, sysconfig.get_config_var("SOABI"), describe_processor())).encode())
    return digest.hexdigest()[:20]


def describe_processor() -> str:
    """Return a description of the processor, on which the compiler's -march=native may depend."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return " ".join(sorted(line.split(":", 1)[1].split()))
    return platform.processor()


@contextlib.contextmanager
def held_lock(path: Path) -> Iterator[None]:
    """Hold the lock, which ends with its holder, however that ends; wait as long as a build may take."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + 2 * _DEADLINE_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise BuildError(f"another process has held {path} for {2 * _DEADLINE_S:g} s") from None
                time.sleep(_NAP_S)
        yield
    finally:
        os.close(descriptor)


def _compile(torch_folder: Path, target: Path) -> None:
    compiler = find_compiler()
    include = sysconfig.get_paths()["include"]
    if not Path(include, "Python.h").exists():
        raise BuildError(f"Python's headers are not installed ({include}/Python.h)")
    includes = (torch_folder / "include", torch_folder / "include/torch/csrc/api/include", include)
    version = (torch_folder / "version.py").read_text().split("__version__ = ")[-1].split()[0].strip("'")
    _LOG.warning(
        "compiling the shared-memory transport for torch %s; this is done once and takes a minute or two on free cores",
        version,
    )
    for left in target.parent.glob("build-*"):
        shutil.rmtree(left, ignore_errors=True)  # from a killed build: the builder holds the lock
    common = [
        *compiler,
        *FLAGS,
        f"-I{_SOURCES}",
        f"-DMESHWRIGHT_MODULE={_MODULE}",
        *(f"-isystem{folder}" for folder in includes),
    ]
    with tempfile.TemporaryDirectory(prefix="build-", dir=target.parent) as scratch:
        units = _write_units(Path(scratch))
        objects = [str(unit.with_suffix(".o")) for unit in units]
        run_all([[*common, "-c", str(unit), "-o", made] for unit, made in zip(units, objects, strict=True)])
        libraries = [f"-L{torch_folder / 'lib'}", "-ltorch_python", "-ltorch_cpu", "-lc10"]
        made = str(Path(scratch, target.name))
        run_all([[*compiler, "-shared", "-o", made, *objects, *libraries]])
        keep_file(target, Path(made).read_bytes())


def _write_units(scratch: Path) -> list[Path]:
    """Write what is compiled, a unit for each core: torch's headers take longer to read than all sources to compile."""
    sources = sorted(_SOURCES.glob("*.cpp"), key=lambda source: source.stat().st_size, reverse=True)
    units = [scratch / f"unit{index}.cpp" for index in range(min(_MOST_UNITS, usable_cores()))]
    for unit, its in zip(units, (sources[index :: len(units)] for index in range(len(units))), strict=True):
        unit.write_text("".join(f'#include "{source.name}"\n' for source in its))
    return units


def run_all(commands: list[list[str]]) -> None:
    """Run compilers in parallel, and end all of them where one fails."""
    running: list[subprocess.Popen[str]] = []
    try:
        for command in commands:
            running.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True))
        for process in running:
            _, errors = process.communicate(timeout=_DEADLINE_S)
            if process.returncode != 0:
                lines = [line for line in errors.splitlines() if "error" in line] or errors.splitlines() or ["?"]
                raise BuildError(f"{os.path.basename(process.args[0])} failed: {lines[0]}")  # type: ignore[index]
    except OSError as error:
        raise BuildError(f"the compiler cannot be run: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"the compiler did not end within {_DEADLINE_S:g} s") from error
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
            process.wait()
            if process.stderr is not None:
                process.stderr.close()


if __name__ == "__main__":
    try:
        sys.stdout.write(f"{build_extension()}\n")
    except BuildError as error:
        sys.exit(f"the shared-memory transport cannot be built, ranks will use gloo: {error}")
