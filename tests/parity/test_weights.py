"""How samples, tokens and empty shares are weighted; with the mistakes that other tools make as controls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.parity import cases, losses
from tests.parity.harness import Setting, assert_ranks_agree, cut, reference, split_sizes
from tests.parity.models import small_models as models
from tests.tolerances import FLOAT64
from torch import Tensor

import meshwright as mw
from meshwright import testing


def _tokens(valid: list[int]) -> Any:
    ids, labels = cases.language(len(valid), seed=3)
    labels = labels.clone()
    for row, count in zip(labels, valid, strict=True):
        row[count:] = -100
    return ids, labels


def _steps_with_shares(batch: Any, sizes: list[int], micro_batches: int) -> list[testing.StepRecord]:
    plan = mw.Plan.parse(f"dp={len(sizes)},micro_batches={micro_batches}")
    world = mw.current_world()
    shares = [cut(batch, sizes)[world.rank]]
    return testing.plan_steps(models.build_untied_gpt, plan, [batch], losses.valid_tokens, shares=shares)


@pytest.mark.parametrize(
    ("valid", "sizes", "micro_batches"),
    [
        ([5, 1], [1, 1], 1),  # E002: 5 valid tokens against 1
        ([5, 1, 2, 7], [3, 1], 2),
        ([5, 3, 0, 0], [2, 2], 1),  # a rank without a valid token
        ([5, 3, 0, 0], [2, 2], 2),
        ([1, 2, 7, 3], [4, 0], 4),  # E001, and a rank without a sample
        ([1, 2, 7, 3], [0, 4], 2),
        ([1, 2, 7, 3], [0, 3, 1], 3),
    ],
)
def test_tokens_count_alike_wherever_they_are(valid: list[int], sizes: list[int], micro_batches: int) -> None:
    batch = _tokens(valid)
    per_rank = testing.run_ranks(_steps_with_shares, len(sizes), batch, sizes, micro_batches)
    expected = testing.oracle_steps(models.build_untied_gpt, [batch], losses.valid_tokens)
    testing.assert_parity(per_rank[0], expected, FLOAT64)
    assert_ranks_agree(per_rank)


def _mean_of_means(outputs: Any, batch: Any) -> torch.Tensor:
    loss = losses.valid_tokens(outputs, batch)
    return loss.sum / loss.weight


def test_a_mean_of_means_is_told_apart() -> None:
    # The control: what most tools do with 5 tokens here and 1 there is far outside the tolerance.
    batch = _tokens([5, 1])
    wrong = testing.oracle_steps(
        models.build_untied_gpt, [batch], _mean_of_means, shares=lambda batch: [[p] for p in cut(batch, [1, 1])]
    )
    expected = testing.oracle_steps(models.build_untied_gpt, [batch], losses.valid_tokens)
    with pytest.raises(AssertionError, match="step 0 loss"):
        testing.assert_parity(wrong, expected, 1e-3)


def test_a_lost_reduction_is_told_apart() -> None:
    # The control: gradients of one rank's share alone are not those of the batch.
    case = cases.find("mlp")
    batch = case.batch(6, 0)
    wrong = testing.oracle_steps(case.build, [cut(batch, [3, 3])[0]], case.loss_fn)
    with pytest.raises(AssertionError, match="differ by more than"):
        testing.assert_parity(wrong, testing.oracle_steps(case.build, [batch], case.loss_fn), 1e-3)


def _results(batch: Any, sizes: list[int], build: Any, loss_fn: Any) -> list[tuple[Any, ...]]:
    model = mw.apply_plan(build, mw.Plan.parse(f"dp={len(sizes)}"), loss_fn=loss_fn, optimizer=_sgd)
    try:
        share = cut(batch, sizes)[mw.current_world().rank]
        result = model.step(share)
        evaluated = model.evaluate(share)
        return [
            (result.loss, result.grad_norm, result.num_samples, result.num_tokens, result.skipped),
            tuple(sorted(evaluated.items())),
        ]
    finally:
        model.close()


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def test_every_rank_returns_the_same_result() -> None:
    batch = _tokens([5, 1, 2, 7, 3])
    first, *others = testing.run_ranks(_results, 3, batch, [4, 0, 1], models.build_untied_gpt, losses.valid_tokens)
    for other in others:
        assert other == first
    (loss, norm, num_samples, _, skipped), evaluated = first
    expected = testing.oracle_steps(models.build_untied_gpt, [batch], losses.valid_tokens)[0]
    assert loss == pytest.approx(expected.loss, rel=FLOAT64)
    assert norm == pytest.approx(expected.grad_norm, rel=FLOAT64)
    assert (num_samples, skipped) == (5, False)
    after = testing.oracle_steps(models.build_untied_gpt, [batch], losses.valid_tokens, num_steps=2)[1]
    assert dict(evaluated)["loss"] == pytest.approx(after.loss, rel=FLOAT64)
    assert dict(evaluated)["num_samples"] == 5


def _ignored_samples(line: str, devices: Any = None) -> tuple[float, int]:
    ids, labels = cases.language(4, 0, vocabulary=11)
    labels = labels.clone()
    labels[2:] = -100
    batch = {"input_ids": ids, "labels": labels}
    case = cases.CASES["own_loss"]
    with mw.apply_plan(case.build, mw.Plan.parse(line), optimizer=_sgd, devices=devices) as model:
        result = model.step(mw.split_batch(batch, model))
        return result.loss, result.num_samples


def test_samples_whose_labels_are_all_ignored_are_samples() -> None:
    # The second rank's labels are all ignored: its mean would be 0 / 0, its samples were still trained on.
    results = [
        _ignored_samples("single"),
        *testing.run_ranks(_ignored_samples, 2, "dp=2,micro_batches=2"),
        _ignored_samples("mode=data_parallel,dp=2", ["cpu", "cpu"]),
    ]
    for loss, num_samples in results:
        assert loss == pytest.approx(results[0][0], rel=FLOAT64)
        assert num_samples == 4


class Graphs(dict[str, Tensor]):
    """A union of graphs: `x` and `targets` have a row for each node, `edge_index` a column for each edge."""

    @property
    def num_samples(self) -> int:
        return int(self["graph_id"].max()) + 1

    @classmethod
    def union(cls, graphs: Sequence[dict[str, Tensor]]) -> Graphs:
        offsets = torch.tensor([0, *(g["x"].shape[0] for g in graphs)]).cumsum(0)
        return cls(
            x=torch.cat([g["x"] for g in graphs]),
            edge_index=torch.cat([g["edge_index"] + o for g, o in zip(graphs, offsets, strict=False)], dim=1),
            targets=torch.cat([g["targets"] for g in graphs]),
            graph_id=torch.cat([torch.full(g["x"].shape[:1], i) for i, g in enumerate(graphs)]),
        )

    def graph(self, index: int) -> dict[str, Tensor]:
        nodes = (self["graph_id"] == index).nonzero().squeeze(1)
        edges = self["edge_index"][:, torch.isin(self["edge_index"][0], nodes)] - nodes[0]
        return {"x": self["x"][nodes], "edge_index": edges, "targets": self["targets"][nodes]}


def _split_graphs(graphs: Graphs, num_parts: int) -> list[Graphs]:
    parts, start = [], 0
    for size in split_sizes(graphs.num_samples, num_parts):
        if size:
            parts.append(Graphs.union([graphs.graph(i) for i in range(start, start + size)]))
        start += size
    return parts


def _graph_steps(batch: Graphs, line: str, split: Any) -> list[testing.StepRecord]:
    return testing.plan_steps(_build_graph_network, mw.Plan.parse(line), [batch], losses.nodes, split=split)


def _build_graph_network() -> torch.nn.Module:
    return models.GraphNetwork().double()


def _graphs() -> Graphs:
    graphs = []
    for seed, num_nodes in enumerate([3, 5, 1, 9]):
        x, targets = cases.regression(num_nodes, seed)
        edges = torch.randint(num_nodes, (2, 2 * num_nodes), generator=torch.Generator().manual_seed(seed))
        graphs.append({"x": x, "edge_index": edges, "targets": targets})
    return Graphs.union(graphs)


@pytest.mark.parametrize("line", ["dp=2", "dp=2,micro_batches=2", "dp=3"])
def test_graphs_are_weighted_by_nodes(line: str) -> None:
    # E105: graphs of 3, 5, 1 and 9 nodes, and no input has the sample as dim 0: the user's splitter cuts.
    per_rank = testing.run_ranks(_graph_steps, mw.Plan.parse(line).num_ranks, _graphs(), line, _split_graphs)
    expected = testing.oracle_steps(_build_graph_network, [_graphs()], losses.nodes)
    testing.assert_parity(per_rank[0], expected, FLOAT64)
    assert_ranks_agree(per_rank)


def test_graphs_are_not_cut_without_a_splitter() -> None:
    for outcome in testing.run_outcomes(_graph_steps, 2, _graphs(), "dp=2", None):
        assert isinstance(outcome.error, mw.ApplyError), outcome.result
        assert "split=" in str(outcome.error)


def _own_loop(share_counts: list[int]) -> list[testing.StepRecord]:
    """Ranks with 5 and 3 batches: the one that has run out passes None until both are done."""
    case = cases.find("mlp")
    rank = mw.current_world().rank
    mine = [case.batch(2, 10 * rank + i) for i in range(share_counts[rank])]
    shares = mine + [None] * (max(share_counts) - len(mine))
    return testing.plan_steps(case.build, mw.Plan.parse("dp=2"), [None] * len(shares), case.loss_fn, shares=shares)


def test_ranks_with_different_numbers_of_batches() -> None:
    # E004: every batch counts, and none of the ranks waits for ever.
    case = cases.find("mlp")
    per_rank = testing.run_ranks(_own_loop, 2, [5, 3])
    batches = []
    for step in range(5):
        parts = [case.batch(2, step)] + ([case.batch(2, 10 + step)] if step < 3 else [])
        batches.append(tuple(torch.cat(tensors) for tensors in zip(*parts, strict=True)))
    testing.assert_parity(per_rank[0], testing.oracle_steps(case.build, batches, case.loss_fn), FLOAT64)
    assert_ranks_agree(per_rank)


def test_a_tied_weight_counts_once_in_the_norm() -> None:
    # E035, with its control: a norm that counts the tied weight once for each name is another number.
    expected = reference("tied", Setting(num_steps=1))[0]
    square = sum(float(g.square().sum()) for g in expected.gradients.values() if g is not None)
    tied = expected.gradients["embedding.weight"]
    assert tied is not None
    assert expected.grad_norm == pytest.approx(square**0.5, rel=1e-12)
    assert expected.grad_norm != pytest.approx((square + float(tied.square().sum())) ** 0.5, rel=1e-3)
