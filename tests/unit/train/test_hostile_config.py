"""train/config: values that no configuration can mean are refused by name, quickly."""

import importlib
import json
import os
import sys

import pytest

from meshwright import cli
from meshwright.errors import ConfigError
from meshwright.train.config.imports import add_to_path, check_callable, import_callable
from meshwright.train.config.load import load_config
from meshwright.train.config.types import TrainConfig

PLAIN = """
[model]
target = "mlp:build_mlp"
[data]
source = "python-stdlib"
[optimizer]
lr = 0.1
[train]
steps = 2
global_batch_size = 8
plan = "single"
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "mlp.py").write_text("def build_mlp(**kwargs): ...\n")
    path = tmp_path / "run.toml"
    path.write_text(PLAIN)
    return path


@pytest.mark.parametrize(
    ("addition", "what"),
    [
        ("a" + ".a" * 20_000 + " = 1", "a key of more than 32 parts"),
        ("b = " + "[" * 600 + "]" * 600, "nested too deep"),
        ("b = " + "9" * 5000, "5000 digits"),
        ("seed = 100000000000000000000000000", "'train.seed'"),
        ("eval_every = 100000000000000000000", "'train.eval_every'"),
        ('directory = "\\u0000"', "'train.directory' = '\\\\x00' has the control character"),
        ('directory = "a\\u001b[31m"', "has the control character '\\\\x1b'"),
    ],
)
def test_a_file_is_refused(file, addition, what):
    file.write_text(PLAIN + addition + "\n")
    with pytest.raises(ConfigError, match=what):
        load_config(file)


@pytest.mark.parametrize(
    ("override", "what"),
    [
        ("data.num_workers=100000", "less than or equal to 1024"),
        ("data.prefetch=1000000000000", "less than or equal to 4096"),
        ("train.global_batch_size=100000000000000000000", "train.global_batch_size"),
        ("data.sequence_length=100000000000000000000", "data.sequence_length"),
        ("train.name=\udcff", "half of a surrogate pair"),
        ("da\udcffta.source=3", "half of a surrogate pair"),
        ("model.kwargs.day=2020-01-01", "is a date or a time"),
        ("a" + ".a" * 20_000 + "=1", "parts with dots"),
        ("train.plan=dp=1" + "0" * 30, "must be a whole number"),
        ("train.plan=" + "x" * 5000 + ".json", "File name too long"),
    ],
)
def test_an_override_is_refused(file, override, what):
    with pytest.raises(ConfigError, match=what):
        load_config(file, [override])


def test_dots_and_brackets_inside_of_strings_and_comments_are_no_keys(file):
    dots = "a." * 50
    file.write_text(PLAIN + f'# {dots}\n[model.kwargs]\na = "{dots}"\nb = \'{dots}\'\nc = """\n{dots}"""\n')
    assert load_config(file).model.kwargs == {"a": dots, "b": dots, "c": dots}


def test_arguments_that_are_not_finite_reach_the_ranks_as_they_are(file):
    config = load_config(file, ["model.kwargs.limit=inf"])
    assert TrainConfig.model_validate_json(config.model_dump_json()).model.kwargs == {"limit": float("inf")}


@pytest.mark.parametrize("value", ["9" * 400, "1" + "0" * 30, "1e300"])
@pytest.mark.parametrize("key", ["train_batch_size", "gradient_clipping"])
def test_a_deepspeed_file_with_absurd_numbers_is_refused(file, key, value):
    entries = {"train_batch_size": "8", key: value}
    (file.parent / "ds.json").write_text("{" + ", ".join(f'"{name}": {text}' for name, text in entries.items()) + "}")
    if (key, value) == ("gradient_clipping", "1e300"):  # large, and a number
        assert load_config(file, plan="ds.json", devices=1).train.max_grad_norm == 1e300
        return
    with pytest.raises(ConfigError, match=r"digits|whole number"):
        load_config(file, plan="ds.json", devices=1)


@pytest.mark.parametrize("plan", ["ds.json", "distributed", "dp=2"])
def test_a_number_of_devices_that_python_cannot_print_is_refused(file, plan):
    (file.parent / "ds.json").write_text('{"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2}')
    with pytest.raises(ConfigError, match=r"--devices has \d+ bits"):
        load_config(file, plan=plan, devices=10**4299)


def test_a_pipe_and_a_device_in_place_of_files_are_refused(file):
    os.mkfifo(file.parent / "pipe.json")
    with pytest.raises(ConfigError, match="it is a pipe"):
        load_config(file, plan="pipe.json")
    with pytest.raises(ConfigError, match="it is a device"):
        load_config("/dev/zero")


def test_what_the_command_line_says_is_shown_without_control_characters(file, monkeypatch, capsys):
    name = file.parent / "odd\u202ename.json"
    name.write_text(json.dumps({"format": "\x1b]0;x\x07\x1b[31m"}))
    monkeypatch.setattr("sys.argv", ["meshwright", "plan", "gpt2", "--cluster", str(name), "--global-batch", "8"])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 2
    assert not any(ord(character) < 32 and character != "\n" for character in capsys.readouterr().err)
    monkeypatch.setattr("sys.argv", ["meshwright", "\x1b[31m"])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 2
    assert r"'\x1b'" in capsys.readouterr().err


class TestImports:
    def test_the_folder_comes_last(self, tmp_path, monkeypatch):
        monkeypatch.setattr("sys.path", ["/first", "/last"])
        add_to_path([str(tmp_path), "/first"])
        assert sys.path == ["/first", "/last", str(tmp_path)]

    def test_what_is_named_is_taken_from_the_folder_and_nothing_else_is(self, tmp_path, monkeypatch):
        monkeypatch.setattr("sys.path", list(sys.path))
        # Names that the standard library has too; `colorsys` is what an import finds there.
        (tmp_path / "colorsys.py").write_text("raise RuntimeError('run though nobody named it')\n")
        (tmp_path / "this_model.py").write_text("import colorsys\ndef build(): return colorsys.__file__\n")
        (tmp_path / "tabnanny.py").write_text("def build(): return 'the folder'\n")
        check_callable("tabnanny:build", key="model.target", roots=[str(tmp_path)], keywords={})
        assert str(tmp_path) not in import_callable("this_model:build", [str(tmp_path)])()
        assert import_callable("tabnanny:build", [str(tmp_path)])() == "the folder"

    def test_a_name_that_is_taken_is_refused(self, tmp_path, monkeypatch):
        monkeypatch.setattr("sys.path", list(sys.path))
        (tmp_path / "decimal.py").write_text("def build(): ...\n")
        importlib.import_module("decimal")
        with pytest.raises(ConfigError, match="has the name of one that is loaded already"):
            import_callable("decimal:build", [str(tmp_path)])
