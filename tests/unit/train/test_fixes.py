"""Every error about a plan's line or a configuration has a fix; where it can be typed, it works."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import pytest
from tests.unit.train.test_config import MINIMAL, USER_MODEL

import meshwright
from meshwright.errors import ConfigError
from meshwright.spec import Plan
from meshwright.train.config.load import load_config

SOURCE = Path(meshwright.__file__).parent
WHAT_PEOPLE_TYPE = (
    "cli.py",
    "cli_plan.py",
    "cli_errors.py",
    "cli_checkpoint.py",
    "values.py",
    "units.py",
    "spec/plan.py",
    "spec/plan_text.py",
    "train/config",
)


def raised(path: Path) -> list[ast.Call]:
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    return [call for call in calls if ast.unparse(call.func) in ("ConfigError", "MissingDependencyError")]


@pytest.mark.parametrize("place", WHAT_PEOPLE_TYPE)
def test_no_error_about_what_people_type_is_without_a_fix(place: str) -> None:
    files = [SOURCE / place] if place.endswith(".py") else sorted((SOURCE / place).glob("*.py"))
    without = [
        f"{path}:{call.lineno}"
        for path in files
        for call in raised(path)
        if all(keyword.arg != "fix" or ast.unparse(keyword.value) == "None" for keyword in call.keywords)
    ]
    assert not without


@pytest.mark.parametrize(
    ("line", "fixed"),
    [
        ("dp=two", "dp=2"),
        ("tpp=2", "tp=2"),
        ("dp=1.5", "dp=2"),
        ("dp=", "dp=2"),
        ("zero=x,dp=2", "zero=1,dp=2"),
        ("dp=2,zzz=3", "dp=2"),
        ("dpp=two,tp=2,tp=4", "dp=2,tp=2"),
        ("ddp=2,dp=2", "dp=2"),
        ("dp=2,", "dp=2"),
        ("dp=2,,tp=2", "dp=2,tp=2"),
        ("dp=2,2", "dp=2"),
        ("zero1 dp=2", "zero1,dp=2"),
        ("dp=2,distributed", "distributed,dp=2"),
        ("distribute,tp=2", "distributed,tp=2"),
        ("fsdp=4", "dp=4,zero=3"),
        ("tp16,zero=1", "tp=16,zero=1"),
        ("overlap=of", "overlap=off"),
        ("bucket_bytes=big", "bucket_bytes=25MiB"),
        ("dp=2 tp=2 zero=x", "dp=2,tp=2,zero=1"),
    ],
)
def test_the_fix_of_a_plan_is_the_line_that_was_meant(line: str, fixed: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Plan.parse(line)
    assert caught.value.fix == f"write '{fixed}'"
    assert Plan.parse(fixed)


@pytest.mark.parametrize(
    "line",
    [
        "",
        ",",
        "=",
        "zzz",
        "=2",
        "pp=2,schedule=1f1",
        "precision=fp16",
        "recompute=some",
        "shard=0",
        "dp=99999999999999999999",
    ],
)
def test_lines_beyond_repair_have_a_fix_too(line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Plan.parse(line)
    assert caught.value.fix


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "user_model.py").write_text(USER_MODEL)
    (tmp_path / "c.toml").write_text(MINIMAL)
    return tmp_path


@pytest.mark.parametrize(
    ("wrong", "fix"),
    [
        ("train.batch=3", "write 'train.global_batch_size'"),
        ("train.stpes=3", "write 'train.steps'"),
        ("train.lr=3", "write 'optimizer.lr'"),
        ("train.zzz=3", "leave out 'train.zzz'"),
        ("trian.steps=3", "write 'train'"),
        ("notes.x=1", "leave out --set notes.x=1"),
        ("train.steps=many", "--set train.steps=100"),
        ("train.steps='5'", "--set train.steps=5"),
        ("train.steps=0", "--set train.steps=1"),
        ("train.eval_batches=-1", "--set train.eval_batches=0"),
        ("train.timeout_s=1e10", "--set train.timeout_s=604800"),
        ("train.precision=fp64", "--set train.precision=fp32"),
        ("train.non_finite=ignore", "--set train.non_finite=stop"),
        ("checkpoint.on_error=wran", "--set checkpoint.on_error=warn"),
        ("optimizer.lr=nan", "--set optimizer.lr=3e-4"),
        ("optimizer.betas=[1]", "leave out 'optimizer.betas'"),
        ("optimizer.betas=3", "leave out 'optimizer.betas'"),
        ("optimizer.name=3", "leave out 'optimizer.name'"),
        ("optimizer.param_groups=[3]", "leave out 'optimizer.param_groups'"),
        ("optimizer.param_groups=[{patterns=[]}]", "leave out 'optimizer.param_groups'"),
        ("train.loss=3", "leave out 'train.loss'"),
        ("train.directory=3", "leave out 'train.directory'"),
        ("train.name=3", "--set 'train.name=\"3\"'"),
        ("train.log=['cvs']", "--set 'train.log=[\"csv\"]'"),
        ("data.source=7", "--set data.source=python-stdlib"),
        ("data.eval_fraction=1", "leave out 'data.eval_fraction'"),
        ("checkpoint.best=1", "leave out 'checkpoint.best'"),
        ("optimizer.betas=[0.9, 1.0]", "--set optimizer.betas=[0.9,0.999]"),
        ("optimizer.momentum=0.9", "leave out optimizer.momentum"),
        ("optimizer.name=adam", "--set optimizer.name=adamw, or one's own as package.module:callable"),
        ("data.source=digit", "--set data.source=digits, or one's own as package.module:callable"),
        ("data.source=python", "--set data.source=python-stdlib, or one's own as package.module:callable"),
        ("data.kwargs={a=1}", "leave out data.kwargs"),
        ("train.loss=mes", "--set train.loss=mse, or one's own as package.module:callable"),
        ("train.loss=user_model:my_los", "write 'user_model:my_loss'"),
        ("train.loss=user_model:needs", "define it as needs(outputs, batch)"),
        ("model.target=user_model:biuld", "write 'user_model:build'"),
        ("model.target=user_model:needs", "--set model.kwargs.width=VALUE"),
        ("model.kwargs.witdh=2", "write 'width'"),
        ("model.kwargs.zzz=2", "leave out 'zzz'"),
        ("train.eval_every=5", None),
    ],
)
def test_the_fix_of_a_configuration(folder: Path, wrong: str, fix: str | None) -> None:
    if fix is None:
        assert load_config(folder / "c.toml", [wrong])
        return
    with pytest.raises(ConfigError) as caught:
        load_config(folder / "c.toml", [wrong])
    assert caught.value.fix == fix
    key, _, value = wrong.partition("=")
    if (typed := re.match(r"--set (\S+?),? ?(?:or .*)?$", fix)) is not None:
        setting = shlex.split(typed[1])[0].replace("VALUE", "3")
        overrides = [setting] if setting.startswith(f"{key}=") else [wrong, setting]
    elif fix.startswith("write 'train.") or fix.startswith("write 'optimizer."):
        overrides = [f"{fix.removeprefix('write ').strip(chr(39))}={value}"]
    elif fix.startswith("write '") and ":" in fix:
        overrides = [f"{key}={fix.removeprefix('write ').strip(chr(39))}"]
    else:
        overrides = []
    assert load_config(folder / "c.toml", overrides)


def test_the_fix_of_a_file_in_another_encoding(folder: Path) -> None:
    text = "# \xe9t\xe9\n" + (folder / "c.toml").read_text()
    (folder / "c.toml").write_bytes(text.encode("latin1"))
    with pytest.raises(ConfigError, match="not UTF-8 text") as caught:
        load_config(folder / "c.toml")
    assert str(caught.value.fix).startswith("save c.toml as UTF-8")
    for encoding in ("utf-8", "utf-8-sig"):
        (folder / "c.toml").write_text(text, encoding=encoding)
        assert load_config(folder / "c.toml")


def test_missing_keys_are_given_as_they_are_typed(folder: Path) -> None:
    (folder / "c.toml").write_text(
        '[model]\ntarget = "user_model:build"\n[data]\nsource = "python-stdlib"\n[train]\nsteps = 2\n'
    )
    with pytest.raises(ConfigError) as caught:
        load_config(folder / "c.toml")
    assert caught.value.fix == "--set optimizer.lr=3e-4; --set train.global_batch_size=32"
    assert load_config(folder / "c.toml", [part.removeprefix("--set ") for part in caught.value.fix.split("; ")])
