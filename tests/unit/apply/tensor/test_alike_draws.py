"""Numbers of proofs and inspections: the whole and its shards draw the same, whatever else has drawn in between."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from meshwright._torch_dispatch import draws_untouched
from meshwright.apply.tensor.inspection import compare_runs
from meshwright.apply.tensor.proof.exact import Exact


def test_runs_of_a_proof_draw_the_same_numbers() -> None:
    drawn = []
    for _ in range(2):
        with Exact():
            drawn.append([torch.rand(3, 1), torch.randn(2), torch.rand(3, 1)])
    assert all(map(torch.equal, *drawn))
    assert not torch.equal(drawn[0][0], drawn[0][2])


def test_an_inspection_draws_the_same_on_shards_and_whole() -> None:
    def cut(given: Any) -> Tensor:
        with draws_untouched():
            torch.randint(9, ())  # as ranks do that start to draw apart
        return given + torch.rand(3)

    findings, _ = compare_runs(
        nn.Linear(3, 3), "layer", torch.ones(3), cut=cut, whole=lambda given: given + torch.rand(3)
    )
    assert findings == []
