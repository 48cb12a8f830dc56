"""Bridges and whole models: exported, loaded by others and read back; tied weights stay tied; transformers' own loading."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, load_model, save_file, save_model

import meshwright as mw
from meshwright.checkpoint.bridges.converting import convert
from meshwright.checkpoint.bridges.kinds import kind_of_source
from meshwright.checkpoint.open_checkpoint import OpenCheckpoint
from meshwright.errors import CheckpointError, ConfigError
from unit.checkpoint.made import assert_same, save_tensors, tensors_of


def a_model() -> torch.nn.Module:
    torch.manual_seed(3)
    layers = torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Flatten(), torch.nn.Linear(144, 5)
    return torch.nn.Sequential(*layers).to(memory_format=torch.channels_last)


def test_a_saved_run_is_exported_and_weights_of_others_are_loaded(tmp_path: Path) -> None:
    def loss_fn(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(outputs, batch[1])

    def applied() -> Any:
        return mw.apply_plan(a_model(), mw.Plan.parse("single"), loss_fn=loss_fn, optimizer=torch.optim.AdamW)

    model = applied()
    model.step((torch.randn(6, 3, 8, 8), torch.arange(6) % 5))
    mw.save_checkpoint(model, tmp_path / "run", step=1)
    convert(tmp_path / "run", tmp_path / "a.safetensors")
    expected = model.full_state_dict()
    assert_same(load_file(tmp_path / "a.safetensors"), expected)
    plain = a_model()
    plain.load_state_dict(load_file(tmp_path / "a.safetensors"), strict=True)
    convert(tmp_path / "a.safetensors", tmp_path / "weights", step=20)
    other = applied()
    with pytest.raises(CheckpointError, match="no optimizer's state"):
        mw.load_checkpoint(other, tmp_path / "weights")
    assert mw.load_checkpoint(other, tmp_path / "weights", with_optimizer=False) == 20
    assert_same(other.full_state_dict(), expected)


# -- tied weights ---------------------------------------------------------------------------------------------------------


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(6, 4)
        self.head = torch.nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight


def test_tied_names_stay_tied_through_files_of_others(tmp_path: Path) -> None:
    model = Tied()
    save_tensors(
        tmp_path / "own",
        {"model/embed.weight": model.embed.weight.detach()},
        aliases={"model/head.weight": "model/embed.weight"},
    )
    convert(tmp_path / "own", tmp_path / "a.safetensors")
    assert list(load_file(tmp_path / "a.safetensors")) == ["embed.weight"]
    other = Tied()
    assert load_model(other, tmp_path / "a.safetensors") == (set(), [])
    assert torch.equal(other.head.weight, model.embed.weight)
    convert(tmp_path / "a.safetensors", tmp_path / "back")
    assert torch.equal(tensors_of(tmp_path / "back" / "step-00000000")["model/head.weight"], model.head.weight)
    save_model(model, str(tmp_path / "theirs.safetensors"))
    convert(tmp_path / "theirs.safetensors", tmp_path / "imported")
    assert tensors_of(tmp_path / "imported" / "step-00000000").keys() == {"model/embed.weight", "model/head.weight"}
    convert(tmp_path / "own", tmp_path / "copies.safetensors", copies_of_tied=True)
    model.load_state_dict(load_file(tmp_path / "copies.safetensors"), strict=True)


def test_weights_that_are_tied_and_stored_twice_are_kept_once_on_request(tmp_path: Path) -> None:
    model = Tied()
    save_file({name: value.clone() for name, value in model.state_dict().items()}, tmp_path / "twice.safetensors")
    convert(tmp_path / "twice.safetensors", tmp_path / "own", tied=["head.weight=embed.weight"])
    with OpenCheckpoint(tmp_path / "own" / "step-00000000") as snapshot:
        assert snapshot.manifest.aliases == {"model/head.weight": "model/embed.weight"}
        assert list(snapshot.manifest.tensors) == ["model/embed.weight"]
    for pair in ("head.weight=embed", "head.weight=head.weight", "head.weight"):
        with pytest.raises(ConfigError, match="is no tensor of its own"):
            convert(tmp_path / "twice.safetensors", tmp_path / "other", tied=[pair])
    changed = model.embed.weight.detach().clone()
    changed[5, 3] += 1
    save_file({"embed.weight": model.embed.weight.detach(), "head.weight": changed}, tmp_path / "differ.safetensors")
    with pytest.raises(CheckpointError, match="the two differ"):
        convert(tmp_path / "differ.safetensors", tmp_path / "other", tied=["head.weight=embed.weight"])
    assert not (tmp_path / "other").exists()


def test_ties_that_the_configuration_denies_are_not_left_out(tmp_path: Path) -> None:
    save_tensors(tmp_path / "own", {"model/e": torch.ones(2, 2)}, aliases={"model/h": "model/e"})
    config = tmp_path / "config.json"
    config.write_text('{"tie_word_embeddings": false}')
    with pytest.raises(CheckpointError, match="'h' is tied to 'e'") as caught:
        convert(tmp_path / "own", tmp_path / "hf", config=config)
    assert caught.value.fix == "--copies-of-tied"
    convert(tmp_path / "own", tmp_path / "hf", config=config, copies_of_tied=True)
    assert load_file(tmp_path / "hf" / "model.safetensors").keys() == {"e", "h"}


def llama(tied: bool) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        tie_word_embeddings=tied,
    )
    return transformers.LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_llama_goes_through_a_checkpoint_and_computes_the_same(tmp_path: Path, tied: bool) -> None:
    model = llama(tied)
    model.save_pretrained(tmp_path / "theirs", max_shard_size="8KB")
    assert (tmp_path / "theirs" / "model.safetensors.index.json").exists()
    assert kind_of_source(tmp_path / "theirs") == "hf"
    convert(tmp_path / "theirs", tmp_path / "own")
    convert(tmp_path / "own", tmp_path / "ours", max_shard_size="8KB", config=tmp_path / "theirs")
    assert len(list((tmp_path / "ours").glob("model-0*-of-0*.safetensors"))) > 2
    again = type(model).from_pretrained(tmp_path / "ours").eval()
    tokens = torch.arange(20).reshape(2, 10)
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, model(tokens).logits)


def test_a_tied_llama_of_ours_is_exported_as_transformers_expects(tmp_path: Path) -> None:
    model = llama(tied=True)
    weights = {f"model/{name}": value.detach() for name, value in model.named_parameters()}  # a tied one once
    save_tensors(tmp_path / "own", weights, aliases={"model/lm_head.weight": "model/model.embed_tokens.weight"})
    model.config.save_pretrained(tmp_path)
    convert(tmp_path / "own", tmp_path / "hf", target_kind="hf", config=tmp_path / "config.json", dtype="float32")
    again, said = type(model).from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(said[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert again.lm_head.weight is again.model.embed_tokens.weight
    tokens = torch.arange(20).reshape(2, 10)
    with torch.no_grad():
        assert torch.equal(again.eval()(tokens).logits, model(tokens).logits)
