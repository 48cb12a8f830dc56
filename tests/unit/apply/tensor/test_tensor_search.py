"""The search for tensor layouts, on models written in many ways: what it cuts, and what it leaves with a reason."""

from __future__ import annotations

import functools
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.parity import cases

from meshwright.apply.recompute.checkpointing import Recompute
from meshwright.apply.tensor.proof.shards_against_whole import Disproof, DisprovedError
from meshwright.apply.tensor.search import deadline, regions, search
from meshwright.apply.tensor.search.candidates import candidates
from meshwright.apply.tensor.search.search import Search
from meshwright.apply.tensor.tensor_layout import Cut, Region, TensorLayout
from meshwright.describe.batches import call_model
from meshwright.errors import ApplyError


@functools.cache
def layout_of(name: str, num_parts: int) -> tuple[dict[str, int], TensorLayout]:
    """Return (sizes of the parameters in blocks, the layout that is found)."""
    case = cases.find(f"style_{name}")
    torch.manual_seed(0)
    model = case.build()
    batch = case.batch(2, 0)

    def run(copy: torch.nn.Module) -> Any:
        outputs = call_model(copy, batch)
        assert case.loss_fn is not None
        case.loss_fn(outputs, batch)
        return outputs

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        layout = Search(model, num_parts, run).layout()
    # Of what has an index in its name: it is part of a block.
    sizes = {name: p.numel() for name, p in model.named_parameters() if any(w.isdigit() for w in name.split("."))}
    return sizes, layout


def share_of(name: str, num_parts: int) -> float:
    sizes, layout = layout_of(name, num_parts)
    return sum(size for key, size in sizes.items() if key in layout.cuts) / sum(sizes.values())


# What is left is norms, and biases after sums.
SHARES = {
    "split_fused": 0.95,
    "split_masked": 0.95,
    "separate": 0.95,
    "head_major": 0.96,
    "unbind": 0.96,
    "qk_norm": 0.94,
    "sliced": 0.95,
    "einsum": 0.95,
    "linear_einsum": 0.95,
    "multihead": 0.95,
    "whole_norm": 0.93,
    "sloped": 0.95,
    "packed": 0.95,
    "dict": 0.89,
    "mixer": 0.88,
    "vit": 0.93,
    "vgg": 0.98,
    "depthwise": 0.98,
    "bottleneck": 0.95,
    "unet": 0.98,
    "translator": 0.95,
}


@pytest.mark.parametrize("name", SHARES)
def test_nearly_all_of_the_blocks_is_cut(name: str) -> None:
    assert share_of(name, 2) >= SHARES[name]


@pytest.mark.parametrize("name", ["split_fused", "head_major", "einsum", "depthwise", "sloped"])
def test_three_ranks_share_unevenly(name: str) -> None:
    assert share_of(name, 3) >= SHARES[name]


@pytest.mark.parametrize("name", ["split_fused", "unbind", "sliced", "einsum", "vit", "translator"])
def test_what_stands_between_runs_on_slices_of_the_sequence(name: str) -> None:
    _, layout = layout_of(name, 2)
    assert [len(chain.layers) for chain in layout.chains][-1:] == [2]


def test_tokens_that_are_mixed_keep_the_sequence_whole() -> None:
    assert not layout_of("mixer", 2)[1].chains


def test_a_bias_after_a_sum_is_one_ranks() -> None:
    regions = [region for region in layout_of("sliced", 2)[1].regions if region.once]
    assert [region.once for region in regions] == [(f"blocks.{i}.mlp.down.bias",) for i in range(2)]
    assert all(name in region.partial for region in regions for name in region.once)


def test_heads_take_their_vectors_and_their_columns_of_tables_along() -> None:
    _, layout = layout_of("sloped", 2)
    cuts = {name: cut.dim for name, (_, cut) in layout.cuts.items() if name.startswith("blocks.0.attn.")}
    assert cuts["blocks.0.attn.temperature"] == cuts["blocks.0.attn.slopes"] == 0
    assert cuts["blocks.0.attn.table"] == 1


def test_widths_of_a_fused_layer_follow_from_slices() -> None:
    _, layout = layout_of("packed", 2)
    _, cut = layout.cuts["blocks.0.attn.qkv_proj.weight"]
    assert cut.groups == (24, 12, 12)


@pytest.mark.parametrize("num_parts", [3, 4])
def test_fused_keys_are_cut_by_key_heads_also_over_more_ranks(num_parts: int) -> None:
    # The batch of the trial has as many samples as there are key heads.
    _, layout = layout_of("packed", num_parts)
    region, _ = layout.cuts["blocks.0.attn.qkv_proj.weight"]
    # Some ranks have no heads. torch 2.11 divides by their number, so there the layer's 48 rows are cut by themselves.
    assert region.num_units == (48 if torch.__version__ < "2.12" else 2)


def test_depthwise_convolutions_go_with_their_channels() -> None:
    _, layout = layout_of("depthwise", 2)
    region, _ = layout.cuts["1.depthwise.0.weight"]
    assert ("1.depthwise.0", "groups") in region.integers


def test_norms_over_all_heads_see_all_heads() -> None:
    _, layout = layout_of("whole_norm", 2)
    region, _ = layout.cuts["blocks.0.attn.q_proj.weight"]
    assert region.roles["blocks.0.attn.q_norm"] == region.roles["blocks.0.attn.k_norm"] == "inner"
    assert "blocks.0.attn.q_norm.weight" in region.partial


@pytest.mark.parametrize(("style", "num_parts"), [("latent", 2), ("latent", 3), ("latent_written", 2)])
def test_a_latent_that_all_heads_share_is_whole_and_its_gradients_add_up(style: str, num_parts: int) -> None:
    _, layout = layout_of(style, num_parts)
    region, _ = layout.cuts["blocks.0.attn.up.weight"]
    assert region.roles == {"blocks.0.attn": "sum"}
    assert "blocks.0.attn.query.weight" in region.cuts
    # Cut by itself it would take gradients as whole that are terms here.
    assert "blocks.0.attn.down.weight" in region.partial
    assert "every rank computes" in layout.whole["blocks.0.attn.down.weight"]


def test_a_count_that_fits_any_size_is_changed_where_another_integer_was() -> None:
    _, layout = layout_of("part_sized", 2)
    region, _ = layout.cuts["blocks.0.attn.c_attn.weight"]
    assert {key for path, key in region.integers if path == "blocks.0.attn"} == {"split_size", "n_head"}


def test_rows_of_biases_for_heads_and_channels_before_a_norm_are_cut() -> None:
    _, layout = layout_of("conformer", 2)
    assert layout.cuts["blocks.0.attn.bias_u"][1] == Cut(dim=0, groups=(4,))
    assert "blocks.0.attn.relative_k_proj.weight" in layout.cuts
    region, _ = layout.cuts["blocks.0.mlp.depthwise_conv.weight"]
    assert region.roles["blocks.0.mlp.norm"] == "inner"


def test_norms_over_channels_of_an_image_see_all_channels() -> None:
    _, layout = layout_of("neck", 2)
    region, _ = layout.cuts["blocks.0.0.weight"]
    assert region.roles["blocks.0.1"] == "channels"


def test_a_skip_beside_what_comes_up_leaves_a_reason() -> None:
    _, layout = layout_of("unet", 2)
    assert "up.weight" in layout.cuts or layout.whole["up.weight"]


def test_gradients_that_are_zero_but_for_rounding_are_added_up_too() -> None:
    # A bias of keys before a softmax: each rank's rounding is its own, and under Adam the copies would drift apart.
    _, layout = layout_of("qk_norm", 2)
    assert {
        f"blocks.{i}.attn.{n}_norm.{p}" for i in range(2) for n in "qk" for p in ("weight", "bias")
    } <= layout.partial


@pytest.mark.parametrize("kind", ["selective", "full"])
def test_layers_that_are_recomputed_by_themselves_are_cut_as_any_others(kind: str) -> None:
    # A row's bias is hidden while it runs; where the layer ran again in backward it was there, and the proof refused the row.
    batch = torch.ones(1, 7, dtype=torch.float64)
    plain, recomputed = cases.find("mlp").build(), cases.find("mlp").build()
    Recompute(recomputed, kind)
    expected = Search(plain, 8, lambda copy: copy(batch)).layout()
    assert {name: cut.kind for name, (_, cut) in expected.cuts.items()}["2.weight"] == "row"
    assert Search(recomputed, 8, lambda copy: copy(batch)).layout() == expected


def _layout_of_an_mlp() -> TensorLayout:
    case = cases.find("mlp")
    batch = case.batch(2, 0)
    return Search(case.build(), 2, lambda module: call_model(module, batch)).layout()


def test_a_search_that_has_made_its_trials_leaves_the_rest_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regions, "MAX_ALL_TRIALS", 0)
    layout = _layout_of_an_mlp()
    assert not layout.regions
    assert any("before this was proven" in reason for reason in layout.whole.values())


_BASE = Region(scope="block", num_units=4, cuts={"block.up": Cut(dim=0, groups=(8,))}, roles={"block.up": "column"})
_CHANGES = {
    "inputs": _BASE.replace(inputs=((0, 1),)),
    "sum": _BASE.replace(roles={"block": "sum"}),
    "inner": _BASE.replace(roles={**_BASE.roles, "block.norm": "inner"}),
    "channels": _BASE.replace(roles={**_BASE.roles, "block.norm": "channels"}),
}


@pytest.mark.parametrize("text", ["it is wrong", "on shards: RuntimeError", "the gradient of x differs by 1.0 of 2.0"])
@pytest.mark.parametrize(
    ("kind", "helpful"),
    [
        (Disproof.UNFIT_SIZES, {"inputs", "inner", "channels"}),
        (Disproof.RAISED, {"inputs", "inner", "channels"}),
        (Disproof.GRADIENT_VALUES, {"inputs", "sum"}),
        (Disproof.GRADIENT, {"inputs"}),
        (Disproof.RESULT_VALUES, {"inputs", "inner", "channels"}),
        (Disproof.OTHER, {"inputs", "inner", "channels"}),
    ],
)
def test_what_may_help_follows_from_the_kind_of_a_disproof_and_never_from_its_words(
    kind: Disproof, helpful: set[str], text: str
) -> None:
    options: Any = SimpleNamespace(num_tp_ranks=2, regions=lambda: [(_BASE, list(_CHANGES.values()))])
    source = candidates(options)
    tried = [next(source)]
    for _ in range(len(helpful)):
        tried.append(source.send(DisprovedError(text, kind).difference))
    assert tried == [_BASE, *(_CHANGES[name] for name in _CHANGES if name in helpful)]


def test_a_search_that_takes_too_long_is_refused_and_finds_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    # What it had found by then would depend on how busy the machine is.
    monkeypatch.setattr(deadline, "_SHARE", -0.01)
    with pytest.raises(ApplyError, match=r"took more than -3 s.*other ranks wait for 300 s"):
        _layout_of_an_mlp()


def test_a_search_is_refused_in_its_chains_too(monkeypatch: pytest.MonkeyPatch) -> None:
    # The longest part of a search: the ranks that wait would be taken for hung.
    found = search.find_chains

    def late(*arguments: Any) -> Any:
        monkeypatch.setattr(deadline, "time", SimpleNamespace(monotonic=lambda: float("inf")))
        return found(*arguments)

    monkeypatch.setattr(search, "find_chains", late)
    with pytest.raises(ApplyError, match="took more than 279 s"):
        _layout_of_an_mlp()


def test_a_norm_that_a_block_holds_under_two_names_is_cut_with_its_statistics() -> None:
    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.norm, self.down = torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 8)
            self.again = self.norm

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(self.again(self.norm(self.up(x))).relu())

    layout = Search(torch.nn.Sequential(Block(), torch.nn.Tanh()), 2, lambda copy: copy(torch.randn(6, 8))).layout()
    assert layout.cuts.keys() >= {"0.up.weight", "0.norm.running_mean", "0.again.running_mean", "0.down.weight"}


def test_a_weight_that_code_outside_of_the_forward_compares_stays_whole() -> None:
    def run(copy: torch.nn.Module) -> Any:
        outputs = copy(torch.randn(6, 8))
        return outputs if torch.allclose(copy.get_parameter("0.weight"), torch.zeros(())) else outputs * 2.0

    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
    assert "allclose" in Search(model, 2, run).layout().whole["0.weight"]
