"""The wheel: built from a copy of the sources, installed into an environment of its own, run in an empty folder."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path

import pytest

import meshwright
from meshwright.comm.shm.build import BuildError, build_extension

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(240)]

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("src", "pyproject.toml", "README.md", "LICENSE")
SCRIPT = """
import functools, sys, torch, meshwright as mw

def build_model():
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))

def loss_fn(outputs, batch):
    return torch.nn.functional.cross_entropy(outputs, batch[1])

def train(inputs, targets):
    model = mw.apply_plan(build_model, "dp=2", loss_fn=loss_fn, optimizer=functools.partial(torch.optim.SGD, lr=0.5))
    losses = [model.step(mw.split_batch((inputs, targets), model)).loss for _ in range(20)]
    return losses, mw.__file__, torch.distributed.get_backend()

if __name__ == "__main__":
    inputs = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
    (losses, place, backend), other = mw.launch(train, 2, inputs, (inputs[:, 0] > 0).long())
    assert other == (losses, place, backend) and losses[-1] < 0.5 * losses[0], (losses, other)
    print(place, backend)
"""


def build_requires() -> str | None:
    """Return why a wheel cannot be built here, or None."""
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    for requirement in needed:
        name, _, least = requirement.partition(">=")
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return f"{name} is not installed"
        if int(found.split(".")[0]) < int(least):
            return f"{name} is {found}, {requirement} is needed"
    if importlib.util.find_spec("pip") is None:
        return "pip is not installed"
    return None


def run(command: list[str | Path], folder: Path, timeout_s: float = 100, **variables: str) -> str:
    """Return what a command prints, without this checkout on its path."""
    hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "MESHWRIGHT_TRANSPORT")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=folder,
        env=environment | {"OMP_NUM_THREADS": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"} | variables,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    reason = build_requires()
    if reason is not None:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("wheel")
    sources = folder / "sources"  # setuptools leaves folders beside what it builds
    sources.mkdir()
    for part in PARTS:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, sources / part, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        else:
            shutil.copy(ROOT / part, sources / part)
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--wheel-dir", folder]
    run([sys.executable, "-m", "pip", "wheel", *options, sources], folder)
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def scripts(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of an environment's commands: Meshwright from the wheel, torch and the rest from this environment."""
    place = tmp_path_factory.mktemp("environment")
    venv.create(place, with_pip=False)
    python = place / "bin" / "python"
    library = Path(run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], place).strip())
    # A folder that a .pth file names is searched last, and its own .pth files, such as an editable install's, are not read.
    (library / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", "--quiet"]
    run([*install, "--force-reinstall", wheel], place)
    return python.parent


def test_the_wheel_has_the_version(wheel: Path, scripts: Path, tmp_path: Path) -> None:
    version = meshwright.__version__
    assert wheel.name == f"meshwright-{version}-py3-none-any.whl"
    assert run([scripts / "meshwright", "--version"], tmp_path) == f"meshwright {version}\n"
    told = "import importlib.metadata; print(importlib.metadata.version('meshwright'))"
    assert run([scripts / "python", "-c", told], tmp_path) == f"{version}\n"


def test_the_wheel_has_every_file_of_the_sources(scripts: Path, tmp_path: Path) -> None:
    found = run([scripts / "python", "-c", "import meshwright; print(meshwright.__file__)"], tmp_path).strip()
    installed = Path(found).parent
    assert scripts.parent in installed.parents
    ours = ROOT / "src" / "meshwright"
    wanted = {path.relative_to(ours) for path in ours.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert {path.relative_to(installed) for path in installed.rglob("*") if "__pycache__" not in path.parts} >= wanted


def test_two_ranks_train_from_the_wheel_in_an_empty_folder(scripts: Path, tmp_path: Path) -> None:
    try:
        binary = build_extension()  # the same sources have the same binary: one that is there is not compiled again
    except BuildError:
        binary = None
    (tmp_path / "mine.py").write_text(SCRIPT)
    place, backend = run([scripts / "python", "mine.py"], tmp_path).split()
    assert scripts.parent in Path(place).parents
    assert backend == ("gloo" if binary is None else "shm")
    if binary is not None:
        command = [scripts / "python", "-m", "meshwright.comm.shm.build"]
        assert run(command, tmp_path).strip() == str(binary)
    assert [path.name for path in tmp_path.iterdir() if path.name != "__pycache__"] == ["mine.py"]
