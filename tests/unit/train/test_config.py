"""train/config/types.py, checks.py, imports.py: every mistake is found in the launching process, and named."""

import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.errors import ConfigError, MissingDependencyError
from meshwright.spec import Plan
from meshwright.train.config import checks, targets
from meshwright.train.config.imports import check_callable
from meshwright.train.config.load import load_config
from meshwright.train.config.types import TrainConfig

EXAMPLES = Path(__file__).parents[3] / "examples"

MINIMAL = """
[model]
target = "user_model:build"

[data]
source = "python-stdlib"

[optimizer]
lr = 0.1

[train]
steps = 2
global_batch_size = 8
"""

USER_MODEL = """
import torch  # never imported by the checks


def build(width: int = 3, *, depth=1):
    return None


def needs(width):
    return None


def anything(**kwargs):
    return None


try:
    from fast import kernel
except ImportError:
    kernel = None

def my_loss(outputs, batch):
    return None
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "user_model.py").write_text(USER_MODEL)
    (tmp_path / "c.toml").write_text(MINIMAL)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def load(folder, *overrides, **kwargs):
    return load_config(folder / "c.toml", overrides, **kwargs)


def plan_of(config):
    return str(config.plan)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.stem)
def test_examples_are_valid(path):
    config = load_config(path)
    assert config.run_name == path.stem
    assert TrainConfig.model_validate_json(config.model_dump_json()) == config


def test_overrides_replace_values(folder):
    config = load(folder, "train.steps=7", "model.kwargs.width=4", "train.name=plain words", "schedule.kind='cosine'")
    assert (config.train.steps, config.model.kwargs, config.train.name) == (7, {"width": 4}, "plain words")
    assert config.schedule.kind == "cosine"


def test_config_is_frozen(folder):
    with pytest.raises(ValueError, match="frozen"):
        load(folder).train.steps = 3


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.stpes=3", ["unknown key 'train.stpes'", "did you mean 'steps'"]),
        ("train.checkpoint_every=3", ["did you mean 'checkpoint.every_steps'?"]),
        ("train.save_every=3", ["did you mean 'checkpoint.every_steps'?"]),
        ("optimizer.learning_rate=3", ["did you mean 'optimizer.lr'?"]),
        ("train.zero=3", ["it belongs to a plan", "put 'zero=3' into train.plan"]),
        ("trian.steps=3", ["unknown key 'trian'", "did you mean 'train'"]),
        ("steps=3", ["names no section", "fix: --set train.steps=3"]),
        ("plan.tp=2", ["'plan' is not a section", "train.plan="]),
        ("notes.x=1", ["'notes' is not a section"]),
        ("train.steps", ["section.key=value"]),
        ("train.steps=many", ["'train.steps' = 'many'", "integer"]),
        ("train.steps=1.5", ["'train.steps' = 1.5", "integer"]),
        ("train.steps=true", ["'train.steps' = True", "integer"]),
        ("train.steps=0", ["'train.steps' = 0", "greater than or equal to 1"]),
        ("optimizer.lr=nan", ["'optimizer.lr'", "finite"]),
        ("train.non_finite=ignore", ["'train.non_finite'", "'stop' or 'skip'"]),
        ("train.plan=dp=2,tq=2", ["unknown key 'tq'"]),
        ("train.plan=distribted", ["did you mean 'distributed'"]),
        ("train.plan=nowhere.json", ["nowhere.json", "cannot be read"]),
        ("train.precision=fp64", ["'train.precision'", "fp32"]),
        ("train.name=../up", ["train.name", "one path component"]),
        ("train.name=a/b", ["train.name", "one path component"]),
        ("train.name=..", ["train.name", "one path component"]),
        ("train.loss=huber", ["train.loss = 'huber'", "cross_entropy"]),
        ("train.loss=user_model:my_los", ["did you mean 'my_loss'"]),
        ("train.loss=user_model:needs", ["called with 2 arguments, it takes 1"]),
        ("model.target=user_model", ["package.module:callable"]),
        ("model.target=user_modle:build", ["did you mean 'user_model'"]),
        ("model.target=user_model:biuld", ["did you mean 'build'"]),
        ("model.target=user_model:needs", ["needs() needs width"]),
        ("model.kwargs.witdh=2", ["takes no argument 'witdh'", "did you mean 'width'"]),
        ("model.target=hf:missing/config.json", ["there is no file"]),
        ("model.target=xml.dmo:parse", ["'xml' has no module 'dmo'", "did you mean 'dom'"]),
        ("data.source=files", ["needs data.files"]),
        ("data.files=['x']", ['data.source = "files"']),
        ("data.kwargs={a=1}", ["data.kwargs"]),
        ("optimizer.name=adam", ["known: adamw, sgd"]),
        ("optimizer.momentum=0.9", ["momentum is sgd's"]),
        ("optimizer.betas=[0.9, 1.0]", ["0 <= beta < 1"]),
        ("optimizer.param_groups=[{patern=['a']}]", ["optimizer.param_groups.0.patern", "did you mean 'patterns'"]),
        ("train.eval_batches=-1", ["train.eval_batches"]),
        ("train.max_restarts=-1", ["train.max_restarts"]),
        ("checkpoint.every_step=3", ["unknown key 'checkpoint.every_step'", "did you mean 'every_steps'"]),
        ("checkpoints.keep=3", ["unknown key 'checkpoints'", "did you mean 'checkpoint'"]),
        ("checkpoint.keep=-1", ["'checkpoint.keep' = -1"]),
        ("checkpoint.every_minutes=inf", ["'checkpoint.every_minutes'", "finite"]),
        ("train.timeout_s=1e10", ["'train.timeout_s'", "604800"]),
        ("checkpoint.on_error=ignore", ["'checkpoint.on_error'", "'stop' or 'warn'"]),
        ("checkpoint.best=true", ["train.eval_every = 0", "fix: --set train.eval_every=100"]),
    ],
)
def test_each_mistake_is_one_clear_error(folder, override, words):
    with pytest.raises(ConfigError) as caught:
        load(folder, override)
    for word in words:
        assert word in str(caught.value)


def test_a_mistake_in_the_file_is_named_with_its_line(folder):
    (folder / "c.toml").write_text(MINIMAL.replace("steps = 2", "stepz = 2"))
    with pytest.raises(
        ConfigError, match=r"c\.toml:12: unknown key 'train\.stepz' \(did you mean 'steps'\?\)"
    ) as caught:
        load(folder)
    assert "'train.steps' is missing" in str(caught.value)


def test_broken_toml_names_the_line(folder):
    (folder / "c.toml").write_text("[train]\nsteps = = 3\n")
    with pytest.raises(ConfigError, match=r"not valid TOML.*line 2"):
        load(folder)


@pytest.mark.parametrize("text", ["train = 3\n", "", "plan_json = '{}'\n", "[plan]\ndp = 2\n", "[[train]]\nsteps=1\n"])
def test_odd_files_are_config_errors(folder, text):
    (folder / "c.toml").write_text(text)
    with pytest.raises(ConfigError):
        load(folder)


def test_missing_file(folder):
    with pytest.raises(ConfigError, match=r"no configuration file .*d\.toml"):
        load_config(folder / "d.toml")


@pytest.mark.parametrize(
    ("written", "fix"), [("mine.tml", "use {}/mine.toml"), ("other", "pass the path of a TOML file")]
)
def test_the_fix_of_a_missing_file_is_a_file(folder, written, fix):
    (folder / "mine.toml").write_text(MINIMAL)
    with pytest.raises(ConfigError) as caught:
        load_config(folder / written)
    assert caught.value.fix == fix.format(folder)


def test_a_value_cannot_smuggle_in_keys(folder):
    with pytest.raises(ConfigError, match=r"'train\.steps' = '1\\nseed"):
        load(folder, "train.steps=1\nseed = 3")


def test_syntax_error_in_the_users_module(folder):
    (folder / "user_model.py").write_text("def build(:\n")
    with pytest.raises(ConfigError, match=r"syntax error in .*user_model\.py, line 1"):
        load(folder)


def test_finding_a_callable_imports_nothing(folder):
    (folder / "loud.py").write_text("raise RuntimeError('imported')\ndef build(): ...\n")
    (folder / "pack").mkdir()
    (folder / "pack" / "__init__.py").write_text("raise RuntimeError('imported')")
    (folder / "pack" / "inner.py").write_text("if True:\n    def build(): ...\n")
    check_callable("loud:build", key="k", roots=[str(folder)])
    check_callable("pack.inner:build", key="k", roots=[str(folder)])
    check_callable("user_model:kernel", key="k", roots=[str(folder)])
    check_callable("user_model:anything", key="k", roots=[str(folder)], keywords={"a": 1})


def test_a_class_is_called_with_what_its_constructor_takes(folder):
    (folder / "classes.py").write_text(
        "class Net(Base):\n    def __init__(self, width=3): ...\n"
        "class Bare(Base): ...\n"
        "class Open:\n    def __init__(*args, **kwargs): ...\n"
        "class Made(metaclass=Any):\n    def __init__(self): ...\n"
        "@dataclass\nclass Fields:\n    def __init__(self): ...\n"
        "class Loss:\n    def __init__(self, outputs, batch): ...\n"
    )

    def check(name, **kwargs):
        check_callable(f"classes:{name}", key="k", roots=[str(folder)], keywords=kwargs)

    check("Net", width=2)
    for unknown in ("Bare", "Open", "Made", "Fields"):
        check(unknown, anything=1)
    with pytest.raises(
        ConfigError,
        match=r"Net\(\) takes no argument 'witdh' \(did you mean 'width'\?\); it takes width\nfix: write 'width'$",
    ):
        check("Net", witdh=2)
    with pytest.raises(ConfigError, match="no argument 'self'"):
        check("Net", self=2)
    with pytest.raises(ConfigError, match="Loss\\(\\) needs outputs, batch"):
        check("Loss")
    check_callable("classes:Loss", key="k", roots=[str(folder)], positional=2, keywords={})


def test_a_data_source_that_knows_no_splits_is_told_of_them(folder):
    (folder / "user_data.py").write_text("class Data:\n    def __init__(self, size=1): ...\n")
    with pytest.raises(ConfigError, match=r"no argument 'split'.*rule: called with split='train', with split='eval'"):
        load(folder, "data.source=user_data:Data", "train.loss=mse")


# -- plans ------------------------------------------------------------------------------------------------------------


def test_plan_on_the_command_line_ignores_the_files_devices(folder):
    config = load(folder, "train.devices=4", "train.plan=distributed")
    assert plan_of(config) == "dp=4"
    assert plan_of(load(folder, "train.devices=4", plan="dp=2")) == "dp=2"
    assert plan_of(load(folder, "train.devices=4", plan="single")) == "single"
    assert plan_of(load(folder, "train.devices=4", plan="data_parallel")) == "mode=data_parallel,dp=4"


def test_plan_and_devices_that_disagree_are_refused(folder):
    with pytest.raises(ConfigError, match="uses 2 devices, but 4 are given"):
        load(folder, plan="dp=2", devices=4)
    with pytest.raises(ConfigError, match="uses 2 devices, but 4 are given"):
        load(folder, "train.plan=dp=2", "train.devices=4")


def test_auto_is_left_to_the_planner_and_data_parallel_until_then(folder, monkeypatch):
    monkeypatch.setattr(checks, "visible_devices", lambda: (4, "core"))
    config = load(folder, plan="auto")
    assert plan_of(config) == "dp=4"
    assert config.plan_is_auto
    assert not load(folder, plan="dp=4").plan_is_auto
    # No more ranks than there are samples for.
    assert plan_of(load(folder, "train.global_batch_size=3", plan="auto")) == "dp=3"


def test_more_devices_than_cores_is_a_warning(folder, monkeypatch):
    monkeypatch.setattr(checks, "visible_devices", lambda: (2, "core"))
    config = load(folder, plan="dp=8")
    assert config.notes[0].startswith("warning: the plan 'dp=8' uses 8 devices, there are 2 cores")
    assert load(folder, plan="dp=2").notes == ()


def test_a_warm_up_longer_than_the_run_is_a_warning(folder):
    assert "warmup_steps = 3 with train.steps = 2" in load(folder, "schedule.warmup_steps=3", plan="single").notes[0]
    assert load(folder, "schedule.warmup_steps=2", plan="single").notes == ()


def test_checkpoints_by_default_and_the_fix_of_best(folder):
    checkpoint = load(folder).checkpoint
    assert (checkpoint.every_steps, checkpoint.every_minutes, checkpoint.keep) == (0, 0.0, 3)
    assert (checkpoint.at_end, checkpoint.best, checkpoint.on_error) == (True, False, "stop")
    assert checkpoint.is_on
    assert not load(folder, "checkpoint.at_end=false").checkpoint.is_on
    assert load(folder, "checkpoint.every_minutes=2").checkpoint.every_minutes == 2.0
    assert load(folder, "checkpoint.best=true", "train.eval_every=100").checkpoint.best
    assert str(load(folder, "train.name=a").checkpoint_directory) == "runs/a/checkpoints"


def test_restarts_without_checkpoints_are_a_warning(folder):
    (note,) = load(folder, "train.max_restarts=2", plan="single").notes
    assert note.startswith("warning: train.max_restarts = 2 without checkpoint.every_steps")
    for setting in ("checkpoint.every_steps=2", "checkpoint.every_minutes=1"):
        assert load(folder, "train.max_restarts=2", setting, plan="single").notes == ()


def test_batch_smaller_than_the_plan_and_its_fix(folder):
    with pytest.raises(
        ConfigError,
        match=r"train\.global_batch_size = 8 under the plan 'dp=4,micro_batches=3'.*dp x micro_batches = 4 x 3 = 12",
    ) as caught:
        load(folder, plan="dp=4,micro_batches=3")
    fix = caught.value.fix.removeprefix("--set ")
    assert load(folder, fix, plan="dp=4,micro_batches=3").train.global_batch_size == 12


def test_micro_batches_and_precision_join_the_plan(folder):
    assert plan_of(load(folder, "train.micro_batches=4", "train.precision=bf16", plan="dp=2")) == (
        "dp=2,micro_batches=4,precision=bf16"
    )
    with pytest.raises(ConfigError, match=r"train\.micro_batches = 4, but train\.plan says micro_batches=2"):
        load(folder, "train.micro_batches=4", plan="dp=2,micro_batches=2")


def test_plan_from_a_json_file(folder):
    (folder / "p.json").write_text(Plan.parse("dp=2,micro_batches=2").to_json())
    assert plan_of(load(folder, plan="p.json")) == "dp=2,micro_batches=2"


# -- data -------------------------------------------------------------------------------------------------------------


def test_text_files_are_looked_at(folder):
    with pytest.raises(ConfigError, match="no file matches"):
        load(folder, "data.source=files", "data.files=['*.text']")
    (folder / "a.text").write_bytes(b"x" * 100)
    with pytest.raises(ConfigError, match="1 files hold 100 bytes"):
        load(folder, "data.source=files", "data.files=['*.text']")
    (folder / "a.text").write_bytes(b"x" * 1290)
    assert load(folder, "data.source=files", "data.files=['*.text']").data.files == ("*.text",)


def test_missing_package_has_the_line_that_installs_it(folder, monkeypatch):
    monkeypatch.setattr(targets.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'meshwright\[digits\]'"):
        load(folder, "data.source=digits")


def test_loss_of_a_callable_source_has_to_be_named(folder):
    (folder / "user_data.py").write_text("def make(split, size=1): ...\n")
    with pytest.raises(ConfigError, match="cannot know the loss"):
        load(folder, "data.source=user_data:make")
    assert load(folder, "data.source=user_data:make", "train.loss=mse").train.loss == "mse"
    with pytest.raises(ConfigError, match="takes no argument 'sizes'"):
        load(folder, "data.source=user_data:make", "data.kwargs.sizes=2", "train.loss=mse")


def test_configuration_is_read_without_torch(folder):
    code = (
        "import sys; from meshwright.train.config.load import load_config; import meshwright.train.launcher, meshwright.cli\n"
        "load_config('c.toml'); sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, timeout=60, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
