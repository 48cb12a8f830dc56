"""`meshwright describe`: models by name, example batches, the table and the JSON file."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

import meshwright as mw
from meshwright.cli import app
from meshwright.train.model_names import find_model

SOURCE = """
import functools
import torch
from torch import nn

def build():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

def batch(batch_size=2):
    return (torch.zeros(batch_size, 8),)

def build_and_batch():
    return build, batch()

def model_and_batch():
    return build(), batch()

class WithBatch(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 10)

    def forward(self, ids):
        return self.head(self.table(ids))

    def example_batch(self, sequence=6):
        return (torch.zeros(2, sequence, dtype=torch.int64),)
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "described_models.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, "described_models", raising=False)
    return tmp_path


def run(*args: str):
    return CliRunner().invoke(app, ["describe", *args])


@pytest.mark.parametrize(
    "args",
    [
        ("described_models:build", "--batch", "described_models:batch"),
        ("described_models:build_and_batch",),
        ("described_models:model_and_batch",),
        ("described_models:build_and_batch", "--batch-size", "5"),
    ],
)
def test_a_callable_with_a_batch_is_described(here, args) -> None:
    done = run(*args, "--json", str(here / "spec.json"))
    assert done.exit_code == 0, done.output
    spec = mw.ModelSpec.from_json((here / "spec.json").read_text())
    assert [layer.forward_flops for layer in spec.layers] == [256.0, 0.0, 128.0]
    assert done.output.splitlines()[0] == "Sequential, for one sample, forward"
    assert done.output.splitlines()[-3].split()[:3] == ["total", "212", "848"]


@pytest.mark.parametrize(("asked", "length"), [((), 6), (("--sequence", "9"), 9)])
def test_a_models_own_batch_is_taken(here, asked, length: int) -> None:
    done = run("described_models:WithBatch", *asked, "--json", str(here / "spec.json"))
    assert done.exit_code == 0, done.output
    spec = json.loads((here / "spec.json").read_text())
    assert spec["sequence_length"] == length
    assert sum(layer["forward_flops"] for layer in spec["layers"]) == 2 * length * 4 * 10


def test_a_config_of_transformers_is_described(here) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = {"model_type": "llama", "vocab_size": 64, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, **sizes}
    (here / "config.json").write_text(json.dumps(config))
    done = run(str(here), "--sequence", "8")
    assert done.exit_code == 0, done.output
    assert "LlamaForCausalLM" in done.output
    assert "model.layers.0 .. 1 (2 equal)" in done.output


@pytest.mark.parametrize(
    ("text", "message", "fix"),
    [
        ("gpt3-175", "did you mean 'gpt3-175b'", "package.module:callable"),
        ("described_models:biuld", "did you mean 'build'", None),
        ("described_models:build", "names a model and no example batch", "--batch package.module:callable"),
        ("nowhere/config.json", "cannot be read", "name a config.json"),
    ],
)
def test_what_is_no_model_is_refused(here, text: str, message: str, fix: str | None) -> None:
    with pytest.raises(mw.ConfigError, match=message) as caught:
        find_model(text)
    assert fix is None or fix in caught.value.fix


def test_a_known_model_and_a_description_are_read(here) -> None:
    spec = find_model("gpt2", sequence=64)
    assert spec == mw.ModelSpec.transformer(
        name="gpt2", layers=12, hidden=768, heads=12, vocab=50257, sequence=64, tied=True
    )
    (here / "spec.json").write_text(spec.to_json())
    assert find_model("spec.json") == spec
    with pytest.raises(mw.ConfigError, match="only sizes"):
        find_model("gpt2", batch="described_models:batch")


def test_a_sequence_for_a_batch_without_one_is_refused(here) -> None:
    with pytest.raises(mw.ConfigError, match="no integer input of two dims"):
        find_model("described_models:build_and_batch", sequence=7)
