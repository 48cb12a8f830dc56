"""The examples: the models are what their pages say, learn, and know nothing of parallelism."""

import ast
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from gpt import GPTConfig, build_gpt
from lstm import build_lstm
from meshwright.train.config.imports import import_callable
from meshwright.train.config.load import load_config
from meshwright.train.models import make_build_model
from mlp import build_mlp, make_regression
from resnet import build_resnet

EXAMPLES = Path(__file__).parents[2] / "examples"
TINY = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_length": 16}


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_examples_are_plain_pytorch(path):
    modules = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules.add((node.module or "").partition(".")[0])
    assert modules <= {"__future__", "dataclasses", "torch"}
    assert "distributed" not in path.read_text()


@pytest.mark.parametrize("kv_heads", [None, 2, 1])
@pytest.mark.parametrize("tied", [True, False])
def test_gpt_is_causal_and_ties_its_embeddings(kv_heads, tied):
    model = build_gpt(**TINY, num_kv_heads=kv_heads, tie_embeddings=tied).double()
    ids = torch.randint(256, (2, 16))
    changed = ids.clone()
    changed[:, 9:] = torch.randint(256, (2, 7))
    logits, other = model(ids), model(changed)
    assert logits.shape == (2, 16, 256)
    torch.testing.assert_close(logits[:, :9], other[:, :9], rtol=0, atol=1e-12)
    assert not torch.allclose(logits[:, 9:], other[:, 9:])
    assert (model.head.weight is model.embedding.weight) == tied
    assert "cos" not in model.state_dict()


def test_gpt_sees_relative_positions():
    # Rotary positions: the same text one place further on gives the same attention, given the same text before it.
    model = build_gpt(**TINY).double()
    same = model(torch.full((1, 16), 7))
    torch.testing.assert_close(same[:, 1:], same[:, :-1], rtol=0, atol=1e-12)
    order = model(torch.tensor([[1, 2, 3, 4]]))[0, -1]
    assert not torch.allclose(order, model(torch.tensor([[2, 1, 3, 4]]))[0, -1])


def test_gpt_starts_near_a_uniform_guess():
    ids = torch.randint(256, (8, 17))
    loss = F.cross_entropy(build_gpt(**TINY)(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    assert 5.4 < loss.item() < 5.8  # ln(256) = 5.545


def test_gpt_refuses_heads_that_do_not_fit():
    with pytest.raises(ValueError, match="hidden_size=30"):
        GPTConfig(hidden_size=30, num_heads=4)
    with pytest.raises(ValueError, match="num_kv_heads=3"):
        GPTConfig(num_heads=4, num_kv_heads=3)


def test_lstm_is_causal_and_ties_its_embeddings():
    for tied in (False, True):
        model = build_lstm(embedding_size=16, hidden_size=24, tie_embeddings=tied)
        ids = torch.randint(256, (2, 10))
        assert model(ids).shape == (2, 10, 256)
        torch.testing.assert_close(model(ids[:, :5]), model(ids)[:, :5])
        assert (model.head.weight is model.embedding.weight) == tied


def test_resnet_group_norm_does_not_see_the_batch():
    images = torch.rand(6, 1, 8, 8)
    model = build_resnet(widths=[8, 16], blocks_per_width=1)
    torch.testing.assert_close(torch.cat([model(images[:2]), model(images[2:])]), model(images))
    batch = build_resnet(widths=[8, 16], blocks_per_width=1, norm="batch")
    assert not torch.allclose(torch.cat([batch(images[:2]), batch(images[2:])]), batch(images))
    assert build_resnet(in_channels=3, num_classes=7)(torch.rand(2, 3, 32, 32)).shape == (2, 7)
    with pytest.raises(ValueError, match="norm="):
        build_resnet(norm="layer")


def test_mlp_is_the_classic_one():
    shapes = [tuple(parameter.shape) for parameter in build_mlp().parameters() if parameter.dim() == 2]
    assert shapes == [(4096, 2048), (2048, 4096), (2048, 2048)]


def test_regression_has_something_to_learn_and_splits_apart():
    train = make_regression("train", 64, input_size=8, output_size=3)
    held_out = make_regression("eval", 64, input_size=8, output_size=3)
    assert (len(train), len(held_out)) == (64, 8)
    found = torch.linalg.lstsq(train.tensors[0], train.tensors[1]).solution
    torch.testing.assert_close(held_out.tensors[0] @ found, held_out.tensors[1], rtol=1e-4, atol=1e-4)
    assert not torch.equal(train.tensors[0][:8], held_out.tensors[0])


@pytest.mark.parametrize(
    ("model", "inputs", "targets"),
    [
        (lambda: build_gpt(**TINY), lambda: torch.randint(256, (4, 8)), lambda: torch.randint(256, (4, 8))),
        (lambda: build_lstm(embedding_size=16, hidden_size=32), lambda: torch.randint(256, (4, 8)), None),
        (lambda: build_resnet(widths=[8, 16]), lambda: torch.rand(16, 1, 8, 8), lambda: torch.randint(10, (16,))),
    ],
    ids=["gpt", "lstm", "resnet"],
)
def test_a_few_steps_on_one_batch_bring_the_loss_down(model, inputs, targets):
    model, x = model(), inputs()
    y = targets() if targets else torch.randint(256, x.shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(20):
        logits = model(x)
        loss = F.cross_entropy(logits.flatten(0, -2), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize("name", ["gpt_python", "resnet_digits", "lstm_python"])
def test_configured_models_are_built(name):
    model = make_build_model(load_config(EXAMPLES / f"{name}.toml"))()
    assert sum(parameter.numel() for parameter in model.parameters()) > 10_000


def test_configured_llama_is_built_and_computes_its_own_loss():
    pytest.importorskip("transformers")
    model = make_build_model(load_config(EXAMPLES / "gpt_hf.toml"))()
    ids = torch.randint(256, (2, 9))
    assert 5.3 < model(input_ids=ids, labels=ids).loss.item() < 5.8
    assert model.config.use_cache is False


def test_callables_are_found_beside_the_configuration(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.path", list(__import__("sys").path))
    (tmp_path / "beside_the_file.py").write_text("def build():\n    return 3\n")
    assert import_callable("beside_the_file:build", [str(tmp_path)])() == 3
