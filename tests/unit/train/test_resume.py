"""train/resume.py: what a run keeps when it is continued is listed where it differs, and the fix puts it back."""

import json
import re
import shlex

import pytest

from meshwright.errors import ConfigError
from meshwright.train.config.load import load_config
from meshwright.train.config.types import TrainConfig
from meshwright.train.resume import as_it_began, fixed_settings, refuse_changes

CONFIG = """
model = { target = "user_model:build", kwargs = { heads = 2 } }
data = { source = "python-stdlib" }
optimizer = { lr = 0.1 }
train = { steps = 2, global_batch_size = 8, plan = "single" }
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "user_model.py").write_text("def build(heads=1):\n    return None\n")
    (tmp_path / "c.toml").write_text(CONFIG)
    return tmp_path


def settings(folder, *overrides, **options):
    """Return them as a manifest gives them back."""
    return json.loads(json.dumps(fixed_settings(load_config(folder / "c.toml", overrides, **options))))


@pytest.mark.parametrize(
    "override",
    [
        *(
            "train.steps=9",
            "train.max_seconds=3",
            "train.max_restarts=2",
            "train.name=other",
            "train.directory=elsewhere",
        ),
        *("train.print_every=3", "train.eval_every=3", "train.eval_batches=3", "train.sentinel_every=3"),
        *("train.non_finite=skip", "train.on_finding=warn", "train.micro_batches=2", "train.precision=bf16"),
        *("data.num_workers=2", "data.prefetch=5", "checkpoint.keep=1", "checkpoint.every_steps=4"),
        "model.pretrained=.",
    ],
)
def test_what_leaves_the_numbers_alone_may_change(folder, override):
    refuse_changes(settings(folder), settings(folder, override), "it")


# `--resume` after `--trace 3-4 --profiler` was refused, with a fix that is none: a profiler wants traced steps.
def test_a_profiler_may_be_left_out(folder):
    refuse_changes(settings(folder, "train.trace=1", "train.profiler=true"), settings(folder), "it")


def test_a_run_of_a_former_release_goes_on_with_the_generators_that_it_began_with(folder):
    # They drew by torch, wrote nothing of it, and the default is another one now.
    saved = {name: value for name, value in settings(folder).items() if name != "train.rng"}
    config = load_config(folder / "c.toml", ["train.steps=9"])
    assert config.train.rng == "global"
    assert as_it_began(config, saved).train.rng == "torch"
    refuse_changes(saved, fixed_settings(as_it_began(config, saved)), "it")
    assert as_it_began(config, settings(folder)).train.rng == "global"


@pytest.mark.parametrize("plan", ["dp=2", "tp=2,dp=2", "pp=2,micro_batches=4", "zero3,dp=4"])
def test_the_plan_may_change(folder, plan):
    refuse_changes(settings(folder), settings(folder, plan=plan), "it")


@pytest.mark.parametrize(
    "override",
    [
        *("train.seed=3", "train.global_batch_size=16", "train.loss=mse", "train.max_grad_norm=2.0"),
        *("model.kwargs.heads=4", "optimizer.lr=0.2", "optimizer.weight_decay=0.1", "schedule.kind=cosine"),
        *("schedule.warmup_steps=1", "data.sequence_length=64", "data.shuffle=false", "data.drop_last=true"),
        *("data.sample_rng=true", "data.max_bytes=90000", "optimizer.name=sgd"),
    ],
)
def test_what_decides_the_numbers_may_not_change(folder, override):
    before, after = settings(folder), settings(folder, override)
    with pytest.raises(ConfigError) as caught:
        refuse_changes(before, after, "step-00000002")
    name, _, value = override.partition("=")
    listed = name if not name.startswith("model.kwargs") else "model.kwargs"
    assert f"\n  {listed}: " in caught.value.message
    assert value in caught.value.message
    assert "step-00000002" in caught.value.message
    assert caught.value.fix.startswith("put them back")
    back = re.match(r"put them back: (.*), or", caught.value.fix)
    if back is not None:
        assert settings(folder, override, *shlex.split(back[1])[1::2]) == before
    else:
        assert name in ("model.kwargs.heads", "train.max_grad_norm", "data.sample_rng")


def test_every_difference_is_listed(folder):
    with pytest.raises(ConfigError) as caught:
        refuse_changes(settings(folder), settings(folder, "train.seed=3", "optimizer.lr=0.5", "train.steps=7"), "it")
    assert re.findall(r"\n  ([\w.]+): (.*) in the checkpoint, (.*) now", caught.value.message) == [
        ("optimizer.lr", "0.1", "0.5"),
        ("train.seed", "0", "3"),
    ]


def test_a_setting_that_one_side_does_not_have_is_a_difference(folder):
    before = settings(folder)
    with pytest.raises(ConfigError, match=r"train\.warp: \(not set\) in the checkpoint, 9 now"):
        refuse_changes(before, before | {"train.warp": 9}, "it")
    with pytest.raises(ConfigError, match=r"train\.warp: 9 in the checkpoint, \(not set\) now"):
        refuse_changes(before | {"train.warp": 9}, before, "it")


def test_a_hugging_face_file_counts_with_its_contents(folder):
    pytest.importorskip("transformers")
    (folder / "config.json").write_text('{"num_attention_heads": 4}')
    before = settings(folder, "model.target=hf:config.json", "model.kwargs={}")
    (folder / "config.json").write_text('{"num_attention_heads": 8}')
    with pytest.raises(ConfigError, match=r'"num_attention_heads": 4.* in the checkpoint, .*"num_attention_heads": 8'):
        refuse_changes(before, settings(folder, "model.target=hf:config.json", "model.kwargs={}"), "it")


def test_every_section_is_asked_about():
    assert set(TrainConfig.model_fields) == {
        *("model", "data", "optimizer", "schedule", "train", "checkpoint"),
        *("base_directory", "plan", "notes", "plan_rows"),
    }, "a new section: does it decide numbers? then it belongs into train/resume.py"
