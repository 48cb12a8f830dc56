"""run/: what a mean counts, how samples are counted, and trials that leave nothing behind."""

from __future__ import annotations

import random
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from meshwright.apply.state.undisturbed import GeneratorStates, undisturbed
from meshwright.describe.batches import BatchSplitter
from meshwright.errors import ApplyError
from meshwright.run.losses.loss import Loss, LossRule
from meshwright.run.losses.trial_parts import second_sample
from meshwright.run.losses.weights import (
    Counted,
    find_uneven_labels,
    label_paths,
    replace_at,
    tensor_at,
    tensors_by_path,
)
from meshwright.trees import move_to

LABELS = torch.tensor([[5, -100, 7], [1, 2, 3], [-100, -100, 4]])


@pytest.mark.parametrize(
    ("counted", "weight"),
    [
        (Counted(), 3.0),
        (Counted(("labels",)), 6.0),
        (Counted(("labels",), shifted=True), 4.0),
        (Counted(("labels",), ignored=7), 8.0),
        (Counted(("missing",)), 3.0),
    ],
)
def test_weights(counted: Counted, weight: float) -> None:
    assert counted.weigh({"labels": LABELS}, BatchSplitter()) == weight


def test_labels_are_found_by_name_or_place() -> None:
    ids, mask = torch.zeros(3, 3, dtype=torch.int64), torch.ones(3, 3, dtype=torch.bool)
    assert label_paths({"input_ids": ids, "labels": LABELS, "label_mask": mask}, 3) == [("labels",)]
    assert label_paths((ids, LABELS), 3) == [(1,)]
    assert label_paths(({"x": ids}, {"a": LABELS, "b": LABELS.double()}), 3) == [(1, "a")]
    assert label_paths((ids, LABELS), 4) == []


def test_labels_of_a_translation_are_found_by_their_names() -> None:
    batch = {
        "src": torch.ones(2, 3, dtype=torch.int64),
        "trg": torch.ones(2, 3, dtype=torch.int64),
        "tgt_mask": torch.ones(2),
    }
    assert label_paths(batch, 2) == [("trg",)]


def test_a_tensor_that_is_in_a_batch_twice_is_replaced_once() -> None:
    ids = torch.zeros(3, 2)
    batch = {"input_ids": ids, "labels": ids, "more": [ids, (ids,)]}
    changed = replace_at(batch, ("more", 1, 0), ids + 1)
    assert [path for path, tensor in tensors_by_path(changed) if tensor is not ids] == [("more", 1, 0)]
    assert tensor_at(changed, ("more", 1, 0)) is changed["more"][1][0]
    assert tensor_at(changed, ("more", 5)) is None


def test_labels_whose_number_changed_are_refused() -> None:
    guards = [(("labels",), -100, 1.0)]
    fine = {"labels": torch.tensor([[1, -100], [-100, 2]])}
    assert find_uneven_labels(guards, [fine], BatchSplitter()) is None
    error = find_uneven_labels(guards, [fine, {"labels": torch.tensor([[1, 2], [-100, 2]])}], BatchSplitter())
    assert error is not None
    assert "1 entries of batch['labels'] in a micro-batch of 2 samples are -100" in error.message


@pytest.mark.parametrize("weight", [-1.0, float("nan"), torch.tensor(-1), torch.tensor([float("nan")])])
def test_a_weight_that_is_no_count_becomes_nan(weight: Any) -> None:
    rule = LossRule(lambda outputs, batch: Loss(outputs.sum(), weight), nn.Linear(1, 1), BatchSplitter())
    assert np.isnan(float(rule.term(torch.ones(2), None, 1.0).weight))


def test_a_weight_that_is_a_count_stays() -> None:
    for weight in (3, 0.0, torch.tensor(3), torch.tensor([3.0])):
        rule = LossRule(lambda outputs, batch, w=weight: Loss(outputs.sum(), w), nn.Linear(1, 1), BatchSplitter())
        assert float(rule.term(torch.ones(2), None, 1.0).weight) == float(weight)


class Busy(nn.Module):
    """Leaves traces everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.log, self.names, self.table = 0, [1], {"a"}, OrderedDict(a=1)
        self.register_buffer("mean", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.log.append(self.calls)
        self.names.add("b")
        self.table["b"] = 2
        self.last = x
        self.mean += x.mean(0)
        self.register_forward_hook(lambda *_: None)
        return x + torch.rand(()) + np.random.rand() + random.random()


def test_trials_leave_a_module_and_generators_as_they_were() -> None:
    module = Busy()
    log, device = module.log, torch.device("cpu")
    states = GeneratorStates(device)
    with undisturbed(module, device):
        module.eval()
        assert not module(torch.ones(2, 2)).requires_grad
        assert states.have_moved()
    assert not states.have_moved()
    assert (module.calls, module.log, module.names, dict(module.table)) == (0, [1], {"a"}, {"a": 1})
    assert module.log is log
    assert not hasattr(module, "last")
    assert module.training
    assert not module._forward_hooks
    assert module.mean.tolist() == [0.0, 0.0]


def test_a_second_sample_has_the_first_ones_values() -> None:
    sample = {"ids": torch.tensor([[1, 2, 3]]), "flag": torch.tensor([4])}
    other = second_sample(sample)
    assert (other["ids"].tolist(), other["flag"].tolist()) == ([[3, 1, 2]], [4])


# -- counting samples -----------------------------------------------------------------------------------------------------


def halve(batch: Any, num_parts: int) -> list[Any]:
    return [batch] * num_parts


class Sized(dict):
    pass


def test_samples_are_counted_where_dim_0_is_no_sample() -> None:
    x, edges, targets = torch.zeros(7, 2), torch.zeros(2, 9), torch.zeros(3)
    splitter = BatchSplitter(halve)
    assert splitter.count(({"x": x, "edges": edges}, targets)) == 3
    assert splitter.count({"x": x, "edges": edges, "labels": targets}) == 3
    assert splitter.count({"x": x, "y": targets}) == 3
    assert splitter.count({"x": x}) == 7
    with pytest.raises(ApplyError, match="number of samples") as caught:
        splitter.count({"x": x, "edges": edges})
    assert "num_samples" in (caught.value.fix or "")

    def counted(batch: Any, num_parts: int) -> list[Any]:
        return [batch]

    counted.count = lambda batch: 5  # type: ignore[attr-defined]
    assert BatchSplitter(counted).count({"x": x, "edges": edges}) == 5  # the two fixes
    batch = Sized(x=x, edges=edges)
    batch.num_samples = 4  # type: ignore[attr-defined]
    assert splitter.count(batch) == 4
    assert splitter.count(move_to(batch, torch.device("meta"))) == 4
    with pytest.raises(ApplyError, match="pass split="):
        BatchSplitter().count({"x": x, "edges": edges})


def test_a_split_that_repeats_samples_is_refused() -> None:
    with pytest.raises(ApplyError, match="cut a batch of 3 samples into 2 parts"):
        BatchSplitter(halve).cut({"x": torch.zeros(3, 2)}, 2)
