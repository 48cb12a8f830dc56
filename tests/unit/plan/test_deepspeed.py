"""plan/deepspeed*.py: the text of a DeepSpeed configuration, its example, its batch, and a row for every key."""

import json

import pytest
from tests.unit.plan.deepspeed_files import BATCH, EXAMPLE, read, row, zero

from meshwright.errors import ConfigError
from meshwright.plan.deepspeed.keys import BLOCKS, KEYS, REFUSED_IF_ENABLED
from meshwright.plan.deepspeed.reader import Resolution, Settings, parse_text, read_deepspeed

# -- the text ---------------------------------------------------------------------------------------------------------


def test_comments_and_trailing_commas_pass():
    text = """\ufeff{
      // a line   # with another
      "a": [1, 2,], /* over
      lines, with "quotes" and , } */
      "b": "// no comment, # neither, /* nor */ ,]",  # the end
      "c": {"d": "\\",}",},
    }"""
    assert parse_text(text, "ds.json") == {
        "a": [1, 2],
        "b": "// no comment, # neither, /* nor */ ,]",
        "c": {"d": '",}'},
    }


@pytest.mark.parametrize("text", ['{"a": 1, "a": 2}', '{"b": {"a": 1, /* */ "a": 1}}'])
def test_a_key_given_twice_is_an_error(text):
    with pytest.raises(ConfigError, match=r'ds\.json: "a" is given twice'):
        parse_text(text, "ds.json")


def test_an_error_of_the_text_has_its_place():
    with pytest.raises(ConfigError, match="line 3, column 3"):
        parse_text('{ # one\n  "a": 1,\n  b: 2\n}', "ds.json")
    for text in ("[1]", "", "{'a': 1}", "[" * 100_000):
        with pytest.raises(ConfigError, match=r"ds\.json"):
            parse_text(text, "ds.json")


# -- the example of the issue -----------------------------------------------------------------------------------------


def test_a_bucket_of_zero_2_in_a_pipeline_has_nothing_to_size():
    entries = {"train_batch_size": 8, "pipeline": {"stages": 2}, **zero(2, reduce_bucket_size=5e6)}
    resolution = read_deepspeed(entries, num_devices=4)
    assert (resolution.plan.pp, resolution.plan.bucket_bytes) == (2, None)
    assert "at the end of the step" in row(resolution, "zero_optimization.reduce_bucket_size").why


@pytest.mark.parametrize(
    ("devices", "degrees", "batch"),
    [(1, (1, 1), 128), (2, (1, 2), 128), (3, (1, 3), 128), (4, (2, 2), 256), (8, (4, 2), 512), (7, (7, 1), 896)],
)
def test_the_example_of_the_issue(devices, degrees, batch):
    entries = parse_text(EXAMPLE.read_text(), EXAMPLE.name)
    resolution = read_deepspeed(entries, num_devices=devices, settings=Settings(hidden_size=128))
    plan = resolution.plan
    assert (plan.dp, plan.pp) == degrees
    assert (plan.zero, plan.micro_batches, plan.micro_batch_size) == (3, 8, 16)
    assert (plan.recompute, plan.overlap, plan.whole_below) == ("full", True, 10 * 128 * 4)
    assert dict(resolution.changes["train"]) == {"global_batch_size": batch, "print_every": 100, "max_grad_norm": 1.0}
    told = {row.key for row in resolution.rows}
    assert {f"zero_optimization.{key}" for key in entries["zero_optimization"]} <= told
    assert {f"pipeline.{key}" for key in entries["pipeline"]} <= told
    assert row(resolution, "zero_optimization.reduce_bucket_size").resolved.startswith("16,384 elements")
    assert row(resolution, "zero_optimization.stage3_prefetch_bucket_size").resolved.startswith("14,745 elements")
    for key in entries["pipeline"]:
        assert row(resolution, f"pipeline.{key}").why.startswith("warning: DeepSpeed ignores this key here")
    refused = "DeepSpeed refuses ZeRO-3 with a pipeline" in row(resolution, "zero_optimization.stage").why
    assert refused == (plan.pp > 1)


def test_without_a_width_auto_is_deepspeeds_default():
    entries = parse_text(EXAMPLE.read_text(), EXAMPLE.name)
    resolution = read_deepspeed(entries, num_devices=2)
    for name, elements in (
        ("reduce_bucket_size", "500,000,000"),
        ("stage3_prefetch_bucket_size", "50,000,000"),
        ("stage3_param_persistence_threshold", "100,000"),
    ):
        found = row(resolution, f"zero_optimization.{name}")
        assert f"{elements} elements" in found.resolved
        assert "auto: DeepSpeed's default, since the model names no hidden_size" in found.why
    assert resolution.plan.whole_below == 400_000


def test_a_resolution_survives_json():
    resolution = read(parse_text(EXAMPLE.read_text(), "x"))
    assert Resolution.from_json(resolution.to_json()) == resolution


# -- the batch --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "devices", "expected"),
    [
        ((256, 16, 8), 2, (256, 16, 8)),
        ((256, 16, None), 2, (256, 16, 8)),
        ((256, None, 8), 2, (256, 16, 8)),
        ((None, 16, 8), 2, (256, 16, 8)),
        ((256, None, None), 2, (256, 128, 1)),
        ((None, 16, None), 2, (32, 16, 1)),
    ],
)
def test_two_numbers_of_the_batch_give_the_third(given, devices, expected):
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    entries = {key: value for key, value in zip(keys, given, strict=True) if value is not None}
    resolution = read_deepspeed(entries, num_devices=devices)
    plan = resolution.plan
    found = (resolution.changes["train"]["global_batch_size"], plan.micro_batch_size, plan.micro_batches)
    assert found == expected
    assert [row(resolution, key).given == "-" for key in keys] == [value is None for value in given]


def test_three_numbers_and_no_devices_say_how_many():
    entries = {
        "train_batch_size": 96,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 8,
        "pipeline": {},
    }
    assert str(read_deepspeed(entries, available=8).plan).startswith("dp=3,pp=2,")
    assert str(read_deepspeed(entries, available=2).plan).startswith("dp=3,micro_batches")
    # Six devices leave two for each of the three ranks, by the same numbers.
    plan = read_deepspeed(entries, num_devices=6).plan
    assert (plan.dp, plan.pp) == (3, 2)
    del entries["pipeline"]
    assert read_deepspeed(entries, available=8).plan.num_devices == 3


def test_free_devices_are_used_as_far_as_the_batch_divides():
    assert read_deepspeed({"train_batch_size": 32}, available=3).plan.dp == 2
    assert read_deepspeed({"train_batch_size": 32, "gradient_accumulation_steps": 16}, available=8).plan.dp == 2


def test_auto_and_nothing_take_the_configurations_batch():
    auto = dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto")
    for entries in (auto, {"gradient_accumulation_steps": "auto"}):
        plan = read_deepspeed(entries, num_devices=2, settings=Settings(global_batch_size=64, micro_batches=4)).plan
        assert (plan.micro_batch_size, plan.micro_batches) == (8, 4)
    # What the file says beats the configuration.
    resolution = read_deepspeed(BATCH, num_devices=2, settings=Settings(global_batch_size=64))
    assert resolution.changes["train"]["global_batch_size"] == 8
    with pytest.raises(ConfigError, match='neither "train_batch_size" nor "train_micro_batch_size_per_gpu"'):
        read_deepspeed({"gradient_accumulation_steps": 2}, num_devices=2)


# -- every key ----------------------------------------------------------------------------------------------------------


def sample(key):
    """A value that a key may have: its default, or something of its kind."""
    known = KEYS[key]
    samples = {
        "positive": 1,
        "count": 1,
        "whole": -1,
        "number": 1.0,
        "switch": False,
        "text": "fp32",
        "list": [],
        "any": 1,
    }
    special = {
        "optimizer.type": "AdamW",
        "scheduler.type": "WarmupLR",
        "train_micro_batch_size_per_gpu": 4,
        "train_batch_size": 16,
    }
    if key in special:
        return special[key]
    return known.default if known.default is not None else samples[known.kind]


def nested(key, value):
    for name in reversed(key.split(".")):
        value = {name: value}
    return value


@pytest.mark.parametrize("key", [key for key in KEYS if not (KEYS[key].only and KEYS[key].default is None)])
def test_every_key_has_its_row(key):
    resolution = read(nested(key, sample(key)))
    found = row(resolution, key)
    assert found.given == json.dumps(sample(key))
    assert found.resolved
    assert len(found.why) > 3
    if key not in ("optimizer.type", "scheduler.type", "train_micro_batch_size_per_gpu"):
        assert row(read(nested(key, "auto")), key).given == '"auto"'


def test_a_key_is_one_of_three():
    assert not set(KEYS) & set(BLOCKS)
    for key, known in KEYS.items():
        assert not (known.hint and known.only), key


def test_comments_as_keys_are_named():
    assert row(read({"_comment": "mine"}), "_comment").why == "a comment"


@pytest.mark.parametrize("name", [*REFUSED_IF_ENABLED])
def test_what_is_switched_off_passes(name):
    assert row(read({name: {"enabled": False, "more": 3}}), name).why == "switched off"
