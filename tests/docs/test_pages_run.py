"""What pages of the site show is run: scripts and commands print what their page says, and files are the files."""

from __future__ import annotations

import contextlib
import importlib
import io
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from tests.docs.here import run_here

from meshwright.compare.comparison import Comparison
from meshwright.ranks.environment import choose_transport, read_place

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "docs"))
make_pages = importlib.import_module("make_pages")

BLOCKS = [block for page in make_pages.pages() for block in make_pages.blocks_of(page)]


def of_kind(*kinds: str) -> list[object]:
    chosen = [block for block in BLOCKS if block.kind in kinds]
    return [pytest.param(block, id=f"{block.page.stem}-{block.what.rpartition('/')[2]}") for block in chosen]


def run_script(path: Path, folder: Path) -> str:
    """Return what a script's main function prints in this process. Its ranks are forked from the pool's templates."""
    out = io.StringIO()
    name = path.relative_to(ROOT / "examples").with_suffix("").as_posix().replace("/", ".")
    with pytest.MonkeyPatch.context() as patch, contextlib.chdir(folder), contextlib.redirect_stdout(out):
        patch.setenv("OMP_NUM_THREADS", "1")  # of the templates
        patch.syspath_prepend(str(path.parent))  # a script's own folder is on its path
        sys.modules.pop("mine", None)  # a reader's module, which several folders have
        importlib.import_module(name).main()
        sys.modules.pop("mine", None)
    return out.getvalue()


def test_pages_show_what_is_here() -> None:
    assert len(BLOCKS) >= 30
    shown = {path for block in BLOCKS if block.kind in ("file", "diff") for path in block.what.split()}
    folders = ("tutorials", "howto", "quickstart")
    files = {path for folder in folders for path in (ROOT / "examples" / folder).rglob("*") if path.is_file()}
    scripts = {path.relative_to(ROOT).as_posix() for path in files if "__pycache__" not in path.parts}
    assert scripts == {what for what in shown if what.split("/")[1] in folders}


@pytest.mark.parametrize("block", of_kind("file", "diff"))
def test_a_file_is_shown_as_it_is(block) -> None:
    assert block.shown == make_pages.still_of(block), "run python docs/make_pages.py"


@pytest.mark.usefixtures("templates")
@pytest.mark.parametrize("block", of_kind("output"))
def test_a_script_prints_what_is_shown(block, tmp_path: Path) -> None:
    assert make_pages.difference(block.shown, block.wanted(run_script(ROOT / block.what, tmp_path))) == ""


@pytest.mark.usefixtures("templates")
@pytest.mark.parametrize("block", of_kind("command"))
def test_a_command_prints_what_is_shown(block, tmp_path: Path) -> None:
    folder = tmp_path / "here"
    shutil.copytree(ROOT / block.folder, folder, ignore=shutil.ignore_patterns("__pycache__"))
    program, *words = shlex.split(block.what)
    assert program == "meshwright"
    sys.modules.pop("mine", None)  # of another test's folder
    code, out, error = run_here(words, folder)
    sys.modules.pop("mine", None)
    assert code == 0, error
    assert make_pages.difference(block.shown, block.wanted(out)) == ""


def test_the_batch_script_is_sound_and_its_command_is_understood(tmp_path: Path) -> None:
    script = ROOT / "examples" / "howto" / "train.sbatch"
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=10)
    (line,) = [line for line in script.read_text().splitlines() if line.startswith("srun ")]
    assert_understood(line.partition(" meshwright ")[2].split(), tmp_path)


def test_the_manifests_variables_are_a_ranks_place(tmp_path: Path) -> None:
    service, job = yaml.safe_load_all((ROOT / "examples" / "howto" / "job.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    given = {entry["name"]: entry.get("value", "2") for entry in container["env"]}  # the index is the pod's
    place = read_place(given)
    assert (place.rank, place.world_size, place.address) == (2, job["spec"]["completions"], ("mine-0.mine", 29500))
    assert f"{job['metadata']['name']}-0.{pod['subdomain']}" == given["MASTER_ADDR"]
    assert service["metadata"]["name"] == pod["subdomain"]
    assert choose_transport(given) == "gloo"
    program, *words = container["command"]
    assert program == "meshwright"
    assert_understood(words, tmp_path)


def assert_understood(words: list[str], folder: Path) -> None:
    """Check a command by one wrong key, which stops it where everything else of the line has been read."""
    shutil.copytree(ROOT / "examples" / "quickstart", folder, dirs_exist_ok=True)
    sys.modules.pop("mine", None)
    code, _, error = run_here([*words, "--set", "train.stepps=3"], folder)
    sys.modules.pop("mine", None)
    assert (code, "did you mean 'steps'" in error) == (2, True), error


def test_a_difference_is_found() -> None:
    assert make_pages.difference("loss 1.2345, rank 0\n", "loss 1.2346, rank 0\n") == ""
    assert make_pages.difference("loss 1.2345\n", "loss 1.3345\n") != ""
    assert make_pages.difference("loss 1.2345\n", "lost 1.2345\n") != ""
    assert make_pages.difference("a\n", "a\nb\n") != ""
    assert make_pages.mask("2.5 ms, 302 MiB, 25,117 samples/s, 12 samples") == "# ms, # MiB, # samples/s, 12 samples"


def test_the_comparisons_picture_is_what_its_result_gives() -> None:
    sys.path.append(str(ROOT / "benchmarks" / "report"))
    pictures = importlib.import_module("pictures")
    sys.path.pop()
    compared = Comparison.from_json((ROOT / "benchmarks" / "report" / "results" / "plans.json").read_text())
    assert pictures.comparison(compared) == (ROOT / "docs" / "comparison.svg").read_text()


def test_the_extra_and_the_lock_file_agree() -> None:
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["docs"]
    assert set(extra) <= set((ROOT / "docs" / "requirements.lock").read_text().split())
