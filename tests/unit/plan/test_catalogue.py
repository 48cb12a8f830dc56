"""Known models: their published parameters, the operators that split them, and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshwright.errors import ConfigError
from meshwright.hardware import load_cluster
from meshwright.plan.catalogue.catalogue import find_model, known_models, read_models
from meshwright.plan.plan_table import read_model
from meshwright.plan.search.ranking import make_plans
from meshwright.spec import ModelSpec, TrainSpec

FAMILIES = ("bert-base", "vit-base", "t5-small", "resnet-18", "resnet-50", "deepseek-v3")


@pytest.mark.parametrize("name", known_models())
def test_known_models_have_their_published_parameters(name: str) -> None:
    row = read_models()["models"][name]
    assert row["source"] in read_models()["sources"]
    published = row["published_params"]
    is_rounded = published % 100_000 == 0
    assert find_model(name).num_params == pytest.approx(published, rel=0.03 if is_rounded else 1e-6)
    if row.get("architecture", "transformer") != "transformer":
        assert find_model(name).num_params == published


@pytest.mark.parametrize("name", FAMILIES)
def test_operators_add_up_to_their_layers(name: str) -> None:
    for layer in find_model(name).layers:
        assert sum(operator.num_params for operator in layer.operators) == layer.num_params
        assert sum(operator.saved_bytes for operator in layer.operators) == layer.activation_bytes
        flops = sum(operator.forward_flops * (2 if operator.causal else 1) for operator in layer.operators)
        assert flops == layer.forward_flops


@pytest.mark.parametrize("name", FAMILIES)
def test_each_column_product_of_a_block_meets_a_row_product(name: str) -> None:
    blocks = find_model(name).layers[1:-1]
    assert all(block.forward_flops > 0 or block.name.endswith("embedding") for block in blocks)
    for block in blocks:
        order = [operator.split for operator in block.operators if operator.split in ("columns", "inner")]
        runs = [split for place, split in enumerate(order) if not place or order[place - 1] != split]
        assert runs in (["columns", "inner"] * (len(runs) // 2), ["inner"])  # the second is an embedding


@pytest.mark.parametrize(
    ("name", "devices"),
    [("bert-large", "8xa100-sxm-80gb"), ("t5-3b", "8xa100-sxm-80gb"), ("resnet-50", "8xa100-sxm-80gb")],
)
def test_they_can_be_planned_for(name: str, devices: str) -> None:
    plans = make_plans(find_model(name), load_cluster(devices), TrainSpec(global_batch_size=256, precision="bf16"))
    assert plans[0].num_devices == 8


def test_the_arithmetic_of_an_image_is_the_published_one() -> None:
    # torchvision's pages: 4.09, 17.56 and 1.81 GFLOPS, where a multiply-add is one.
    for name, billions in (("resnet-50", 4.09), ("vit-base", 17.56), ("resnet-18", 1.81)):
        assert find_model(name).forward_flops / 2e9 == pytest.approx(billions, rel=0.005)


def test_an_unknown_model_is_refused_with_a_likely_one() -> None:
    with pytest.raises(ConfigError, match="llama3-8b"):
        find_model("lama3-8b")


@pytest.mark.parametrize("name", ["vit-base", "resnet-50"])
def test_images_have_no_sequence(name: str) -> None:
    with pytest.raises(ConfigError, match="takes images"):
        find_model(name, sequence=128)


def test_another_sequence_leaves_the_parameters_alone() -> None:
    for name in ("bert-base", "t5-small", "deepseek-v3"):
        other = find_model(name, sequence=256)
        assert other.sequence_length == 256
        assert other.num_params == find_model(name).num_params
        assert other.forward_flops < find_model(name).forward_flops


@pytest.mark.parametrize("change", [{"n_head": "12"}, {"n_embd": 1e400}, {"n_embd": "768"}, {"n_head": [12]}])
def test_sizes_of_a_configuration_that_are_no_numbers_are_named(change: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a whole number, at least 1"):
        read_model(str(gpt2_config(tmp_path, change)))


def test_more_layers_than_anybody_has_are_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="layers=100000000") as caught:
        read_model(str(gpt2_config(tmp_path, {"n_layer": 10**8})))
    assert "rule: at most 10,000" in str(caught.value)
    assert caught.value.fix == "layers=10000"
    with pytest.raises(ConfigError, match="at most 10,000"):
        ModelSpec.transformer(layers=10_001, hidden=8, heads=1, vocab=8, sequence=8)


def gpt2_config(folder: Path, change: dict[str, object]) -> Path:
    sizes = {"n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257, "n_positions": 1024}
    file = folder / "config.json"
    file.write_text(json.dumps({"model_type": "gpt2"} | sizes | change))
    return file


def test_a_basic_blocks_first_convolution_has_the_image_as_its_input() -> None:
    # He et al. 2016, arXiv:1512.03385, table 1: the third stage of ResNet-18 begins with 64 channels of 56 x 56.
    first = next(layer for layer in find_model("resnet-18").layers if layer.output_bytes == 4 * 128 * 28 * 28)
    assert first.operators[0].input_elements == 64 * 56 * 56
