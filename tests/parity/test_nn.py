"""The building blocks of tensor parallelism against torch's own modules, in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tests.parity.jobs import nn_jobs, nn_model_jobs
from tests.parity.jobs.nn_jobs import Entropy, Pair, numbers
from tests.tolerances import CROSS_ENTROPY, FLOAT64
from torch import nn

import meshwright as mw
from meshwright import testing
from meshwright.comm.communicator import Communicator
from meshwright.comm.ledger import Ledger
from meshwright.layout import ShardLayout, check_coverage, even_sizes

RANKS = [2, 3, 4]


def _alone() -> Communicator:
    return Communicator(None, ranks=[0], rank=0, ledger=Ledger(), timeout_s=1.0)


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize(
    "pair",
    [
        Pair(),
        Pair(bias=False),
        Pair(hidden=12),
        Pair(hidden=2),  # fewer features than ranks
        Pair(shape=(5,)),
        Pair(shape=(2, 2, 3)),
        Pair(gathered=True),
        Pair(sequence_parallel=True),
        Pair(sequence_parallel=True, bias=False, shape=(12,)),
        Pair(sequence_parallel=True, hidden=2, shape=(2, 3)),  # fewer tokens than ranks
        Pair(sequence_parallel=True, gathered=True),
    ],
    ids=str,
)
def test_column_and_row_are_two_linear_layers(pair: Pair, num_ranks: int) -> None:
    expected = pair.reference()
    for found, _, _ in testing.run_ranks(nn_jobs.run_pair, num_ranks, pair):
        testing.assert_parity(found, expected, FLOAT64)
        # The first values are not close to those of one device, they are those.
        parameters = [name for name in expected if name.startswith("parameter")]
        assert all(torch.equal(found[name], expected[name]) for name in parameters)


@pytest.mark.parametrize("num_ranks", RANKS)
def test_a_pair_exchanges_its_activations_once_each_way(num_ranks: int) -> None:
    for _, forward, backward in testing.run_ranks(nn_jobs.run_pair, num_ranks, Pair(shape=(2, 6))):
        assert forward == {"all_reduce": (1, 2 * 6 * 3 * 8)}  # the output
        assert backward == {"all_reduce": (1, 2 * 6 * 6 * 8)}  # the input's gradient


@pytest.mark.parametrize("num_ranks", RANKS)
def test_sequence_parallel_pairs_gather_and_scatter(num_ranks: int) -> None:
    length = 6
    padded = -(-length // num_ranks) * num_ranks  # uneven slices are padded to the largest, and that is what crosses
    pair = Pair(sequence_parallel=True, shape=(2, length))
    for _, forward, backward in testing.run_ranks(nn_jobs.run_pair, num_ranks, pair):
        input_bytes, output_bytes = 2 * padded * 6 * 8, 2 * padded * 3 * 8
        assert forward == {"all_gather": (1, input_bytes), "reduce_scatter": (1, output_bytes)}
        # The bias' gradient is complete without an exchange of its own.
        assert backward == {"all_gather": (1, output_bytes), "reduce_scatter": (1, input_bytes)}


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("groups", "units"), [((4, 4), None), ((12, 6, 6), (4, 2, 2)), ((5, 3, 2), None), ((7,), None), ((6,), (3,))]
)
def test_fused_layers_are_cut_group_by_group(groups, units, transposed: bool, num_ranks: int) -> None:
    torch.manual_seed(5)
    linear = nn.Linear(4, sum(groups)).double()
    input, weights = numbers(2, 3, 4, seed=1).requires_grad_(), numbers(2, 3, sum(groups), seed=2)
    output = linear(input)
    (output * weights).sum().backward()
    weight = linear.weight.grad.t() if transposed else linear.weight.grad
    expected = {"output": output.detach(), "input": input.grad, "weight": weight, "bias": linear.bias.grad}
    per_rank = testing.run_ranks(nn_jobs.run_fused, num_ranks, groups, units, transposed)
    for part, (found, (own, layouts)) in enumerate(per_rank):
        testing.assert_parity(found, expected, FLOAT64)
        features = ShardLayout.cut(output.shape, 2, groups, num_ranks, part, units=units)
        testing.assert_parity({"own": own}, {"own": mw.nn.take_shard(output, features)}, FLOAT64)
        assert layouts["bias"].ranges == features.ranges
        assert layouts["weight"].shape == tuple(weight.shape)


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize(("num_tokens", "padding_idx"), [(8, None), (7, 2), (7, -1), (3, None), (3, 0)])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_embedding(num_tokens: int, padding_idx: int | None, sequence_parallel: bool, num_ranks: int) -> None:
    ids = torch.randint(num_tokens, (2, 5), generator=torch.Generator().manual_seed(1))
    torch.manual_seed(7)
    plain = nn.Embedding(num_tokens, 3, padding_idx, dtype=torch.float64)
    output = plain(ids)
    (output * numbers(2, 5, 3, seed=2)).sum().backward()
    expected = {"output": output.detach(), "weight": plain.weight.detach(), "gradient": plain.weight.grad}
    arguments = (num_tokens, padding_idx, sequence_parallel, ids)
    for found, counts in testing.run_ranks(nn_jobs.run_embedding, num_ranks, *arguments):
        testing.assert_parity(found, expected, FLOAT64)
        assert torch.equal(found["output"], expected["output"])  # a vector and zeros: nothing is rounded
        names = {"reduce_scatter", "all_gather"} if sequence_parallel else {"all_reduce"}
        assert {name: calls for name, (calls, _) in counts.items()} == dict.fromkeys(names, 1)


def _entropies() -> dict[str, Entropy]:
    cases = {
        f"{reduction} {smoothing} {ignored} {weighted}": Entropy(
            reduction=reduction, label_smoothing=smoothing, ignored=ignored, weighted=weighted
        )
        for reduction in ("mean", "sum", "none")
        for smoothing in (0.0, 0.1, 1.0)
        for ignored in (0, 2)
        for weighted in (False, True)
    }
    return cases | {
        "batch of sequences": Entropy(shape=(2, 3), reduction="none", ignored=1),
        "one row": Entropy(shape=(), label_smoothing=0.3),
        "even": Entropy(vocab_size=12),
        "empty shards": Entropy(vocab_size=2, label_smoothing=0.1, ignored=1),
        "one class": Entropy(vocab_size=1),
        "masked classes": Entropy(masked=True),
        "masked classes, smoothed sum": Entropy(masked=True, label_smoothing=0.1, reduction="none"),
        "large logits": Entropy(scale=1e3),
        "tiny logits": Entropy(scale=1e-3, label_smoothing=0.1),
        "a class is ignored": Entropy(ignore_index=0, ignored=3),
        "nothing counts": Entropy(ignored=6),
        "nothing counts in a sum": Entropy(ignored=6, reduction="sum"),
        "no rows": Entropy(shape=(0,)),
        "no rows in a sum": Entropy(shape=(0, 3), reduction="sum"),
    }


@pytest.mark.parametrize("num_ranks", RANKS)
def test_cross_entropy(num_ranks: int) -> None:
    cases = _entropies()
    uneven = {2: (1, 10), 3: (0, 4, 7), 4: (5, 0, 0, 6)}[num_ranks]
    cases["other sizes"] = Entropy(sizes=uneven, label_smoothing=0.2, weighted=True)
    expected = {name: case.reference() for name, case in cases.items()}
    for found in testing.run_ranks(nn_jobs.run_entropies, num_ranks, cases):
        for name, (tensors, counts) in found.items():
            _assert_same(name, tensors, expected[name])
            num_rows, case = cases[name].tensors[1].numel(), cases[name]
            # The largest logits, then two or three sums a row, and nothing in backward.
            num_numbers = num_rows * (4 if case.label_smoothing else 3)
            assert counts == ({"all_reduce": (2, 8 * num_numbers)} if num_rows else {})


def test_cross_entropy_of_half_precision_is_computed_in_float32() -> None:
    cases = {
        reduction: Entropy(dtype=torch.bfloat16, reduction=reduction, label_smoothing=0.1, weighted=True, ignored=1)
        for reduction in ("mean", "none")
    }
    for found in testing.run_ranks(nn_jobs.run_entropies, 2, cases):
        for name, case in cases.items():
            logits, targets, weight = case.tensors
            logits = logits.float().requires_grad_()
            losses = F.cross_entropy(logits, targets, weight.float(), **case.options)
            expected = case.gradients(losses, logits)
            for key, tensor in found[name][0].items():
                assert tensor.dtype == torch.bfloat16
                one_rounding = 2.0**-8 * expected[key].abs().max()
                assert (tensor.float() - expected[key]).abs().max() <= one_rounding, f"{name} {key}"


def test_mixed_precision_gives_the_dtypes_of_the_plain_modules() -> None:
    for dtypes in testing.run_ranks(nn_jobs.run_autocast, 2):
        assert len(dtypes) == 8
        assert all(found == expected for found, expected in dtypes), dtypes


def _assert_same(name: str, found: nn_jobs.Tensors, expected: nn_jobs.Tensors) -> None:
    finite = {}
    for key, tensor in expected.items():
        assert torch.equal(found[key].isnan(), tensor.isnan()), f"{name}: {key}"
        assert torch.equal(found[key].isinf(), tensor.isinf()), f"{name}: {key}"
        finite[key] = tensor.isfinite()
    testing.assert_parity(
        {f"{name}: {key}": found[key].where(mask, 0) for key, mask in finite.items()},
        {f"{name}: {key}": expected[key].where(mask, 0) for key, mask in finite.items()},
        CROSS_ENTROPY,
    )


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize(("shape", "dim"), [((12,), 0), ((12, 3), 0), ((2, 12), 1), ((2, 12, 3), -2), ((2, 2, 12), -1)])
def test_operations(shape: tuple[int, ...], dim: int, num_ranks: int) -> None:
    for sizes in (even_sizes(12, num_ranks), (7, *even_sizes(5, num_ranks - 1)), (*even_sizes(12, num_ranks - 1), 0)):
        assert sum(sizes) == 12
        testing.run_ranks(nn_jobs.run_functional, num_ranks, shape, dim, sizes)


@pytest.mark.parametrize("num_ranks", RANKS)
def test_modules_are_made_from_plain_ones(num_ranks: int) -> None:
    expected = nn_model_jobs.plain_conversions()
    for found in testing.run_ranks(nn_model_jobs.run_conversions, num_ranks):
        assert found.keys() == expected.keys()
        for name, tensors in expected.items():
            testing.assert_parity(found[name], tensors, FLOAT64)
            assert all(torch.equal(found[name][key], tensors[key]) for key in tensors if key != "output")


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_decoder_trains_as_on_one_device(sequence_parallel: bool, num_ranks: int) -> None:
    expected = nn_model_jobs.plain_decoder()
    per_rank = testing.run_ranks(nn_model_jobs.run_decoder, num_ranks, sequence_parallel)
    for found, _ in per_rank:
        testing.assert_parity(found, expected, FLOAT64)
        assert all(torch.equal(found[name], per_rank[0][0][name]) for name in found)
    if num_ranks == 4:  # three keys and values for four ranks
        assert any(0 in shape for shape in per_rank[3][1])


@pytest.mark.parametrize("num_ranks", RANKS)
def test_layouts_cover_what_is_cut(num_ranks: int) -> None:
    per_rank = testing.run_ranks(nn_model_jobs.run_layouts, num_ranks)
    for module, shapes in {
        "column": {"weight": (5, 4), "bias": (5,)},
        "row": {"weight": (4, 5)},
        "no bias": {"weight": (4, 5)},
        "embedding": {"weight": (5, 4)},
    }.items():
        for name, shape in shapes.items():
            layouts = [layouts[module][name] for layouts in per_rank]
            check_coverage(layouts)
            assert {layout.shape for layout in layouts} == {shape}
    assert all(layouts["row"]["bias"].is_whole for layouts in per_rank)
    assert all(layouts["no bias"].keys() == {"weight"} for layouts in per_rank)


def test_mistakes_are_refused_before_anything_is_exchanged() -> None:
    messages = {
        "token": r"token id 5 is out of range (rule: 0 <= token id < 5)",
        "target": "target 5 is out of range (rule: 0 <= target < 5)",
        "logits": "logits of shape [2, {own}] and targets of [2]",
        "targets": "targets are torch.float32 (rule: classes, whole numbers",
        "smoothing": "label_smoothing=2.0 (rule: 0 <= label_smoothing <= 1)",
        "reduction": "reduction='maen' is unknown (did you mean 'mean'?)",
        "class sizes": "sizes=[3, 3] for 2 ranks and 5 classes",
        "class weight": "weight has shape [4] (rule: [5])",
        "sizes": "1 sizes for a group of 2 ranks",
        "slice": "holds 2 entries along dim 0, by sizes=[3, 3] it would be 3",
        "full": "the tensor has 2 entries along dim 0, by sizes=[2, 1] it would be 3",
        "dim": "dim=2 of a tensor with 2 dims (rule: -2 <= dim < 2)",
        "sequence": "holds 4 entries along dim -2",
        "groups": "groups [3, 2] add up to 5, dim 0 has 6",
        "unit": "a group of 6 in units of 4",
        "features": "ColumnParallelLinear: in_features=0 (rule: in_features is at least 1)",
        "padding": "padding_idx=5 of 5 tokens",
        "max_norm": "max_norm=1.0 cannot be cut",
        "conv1d": "Conv1d is not a Conv1D",
        "state": "'bias' is missing",
    }
    for rank, found in enumerate(testing.run_ranks(nn_model_jobs.run_mistakes, 2)):
        assert found.keys() == messages.keys()
        for name, message in messages.items():
            assert message.format(own=3 - rank) in found[name], name


def test_one_rank_is_the_plain_module_to_the_bit() -> None:
    group, input = _alone(), numbers(2, 3, 4)
    torch.manual_seed(1)
    plain = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 4)).double()
    torch.manual_seed(1)
    column = mw.nn.ColumnParallelLinear(4, 5, group=group, sequence_parallel=True, gather_output=True, groups=(3, 2))
    row = mw.nn.RowParallelLinear(5, 4, group=group, sequence_parallel=True, input_is_parallel=False)
    module = nn.Sequential(column, row).double()
    assert torch.equal(module(input), plain(input))
    ids = torch.tensor([[1, 0, 2]])
    torch.manual_seed(1)
    embedding = nn.Embedding(3, 4, padding_idx=0)
    torch.manual_seed(1)
    assert torch.equal(mw.nn.VocabParallelEmbedding(3, 4, 0, group=group)(ids), embedding(ids))
    for reduction in ("mean", "none"):
        losses = mw.nn.vocab_parallel_cross_entropy(input, ids.repeat(2, 1), group, vocab_size=4, reduction=reduction)
        expected = F.cross_entropy(input.flatten(0, 1), ids.repeat(2, 1).flatten(), reduction=reduction)
        assert torch.equal(losses.flatten(), expected.flatten())
    assert not group.ledger.entries


def test_parameters_stand_in_the_order_of_the_plain_module() -> None:
    module = mw.nn.ColumnParallelLinear(4, 5, group=_alone())
    assert [name for name, _ in module.named_parameters()] == ["weight", "bias"]
    assert list(module.state_dict()) == list(nn.Linear(4, 5).state_dict())
    assert "in_features=4, out_features=5, bias=True, rank 0 of 1" in repr(module)


def test_modules_on_the_meta_device_get_their_values_later() -> None:
    module = mw.nn.RowParallelLinear(4, 5, group=_alone(), device="meta")
    assert module.weight.is_meta
    module.to_empty(device="cpu")
    torch.manual_seed(1)
    module.reset_parameters()
    torch.manual_seed(1)
    assert torch.equal(module.weight, nn.Linear(4, 5).weight)


@pytest.mark.slow
def test_the_linear_layer_of_gpt2_is_taken_as_it_is_stored() -> None:
    from transformers.pytorch_utils import Conv1D

    plain, input = Conv1D(6, 4), torch.randn(2, 4)
    for kind in (mw.nn.ColumnParallelLinear, mw.nn.RowParallelLinear):
        module = kind.from_conv1d(plain, group=_alone())
        assert module.layouts()["weight"].shape == (4, 6)
        torch.testing.assert_close(module(input), plain(input))
