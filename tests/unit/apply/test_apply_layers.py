"""model_parallel: how layers are found, described and cut. `meta` stands for a second device: it refuses to mix with the CPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from meshwright.apply.one_process.model_parallel import LayersEngine
from meshwright.apply.one_process.rehearsal import foresee_moves
from meshwright.comm.communicator import Communicator
from meshwright.comm.ledger import Ledger
from meshwright.describe.layers import describe_chain, find_layers
from meshwright.spec import Plan

CPU, META = torch.device("cpu"), torch.device("meta")


def _engine(module: nn.Module, *devices: torch.device) -> LayersEngine:
    group = Communicator(None, ranks=[0], rank=0, ledger=Ledger(), timeout_s=1.0)
    return LayersEngine(module, group, devices)


class _TiedByHand(nn.Module):
    """The head is no layer: forward uses the embedding's weight itself."""

    def __init__(self) -> None:
        super().__init__()
        self.head_first = nn.Identity()  # registered before what runs before it
        self.embedding = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = x + block(x).relu()
        return F.linear(self.head_first(x), self.embedding.weight)


def test_layers_are_blocks_and_what_surrounds_them() -> None:
    names = [name for name, _ in find_layers(_TiedByHand())]
    assert names == ["head_first", "embedding", "blocks.0", "blocks.1", "blocks.2", "blocks.3"]


def test_a_description_has_the_order_of_execution_and_the_flops() -> None:
    chain = describe_chain(_TiedByHand(), (torch.zeros(3, 5, dtype=torch.int64),), {})
    assert [cost.name for cost in chain.layers] == ["embedding", *(f"blocks.{n}" for n in range(4)), "head_first"]
    flops = {cost.name: cost.forward_flops for cost in chain.layers}
    assert flops["blocks.0"] == 2 * 3 * 5 * 8 * 8
    assert flops["embedding"] == flops["head_first"] == 0
    assert {cost.output_bytes for cost in chain.layers} == {3 * 5 * 8 * 4}
    assert chain.outside_uses == (("head_first", "embedding.weight"),)


def test_the_first_inputs_balance_the_layers_by_flops_too() -> None:
    # Few parameters and much work at the end, which parameters alone cannot see.
    model = nn.Sequential(
        nn.Linear(64, 64), nn.Linear(64, 64), nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 64, 3, padding=1)
    )
    engine = _engine(model, CPU, CPU)
    by_parameters = dict(engine.stage_of)
    outputs = model(torch.randn(2, 1, 64, 64))
    assert outputs.shape == (2, 64, 64, 64)
    assert by_parameters == {"0": 0, "1": 1, "2": 1, "3": 1}
    assert engine.stage_of == {"0": 0, "1": 0, "2": 0, "3": 1}


def test_a_parameter_used_outside_its_layer_calls_the_activation_back() -> None:
    model = _TiedByHand()
    with torch.no_grad():
        ids = torch.randint(0, 11, (3, 5))
        reference = model(ids)
        engine = _engine(model, CPU, CPU)
        outputs = model(ids)
    assert torch.equal(outputs, reference)
    assert engine.stage_of["embedding"] == 0
    assert engine.stage_of["blocks.3"] == 1
    # There and back again: two crossings of one activation, forward only.
    assert engine.group.ledger.entries["to", "pp"].tensor_bytes == 2 * 3 * 5 * 8 * 4


def test_every_tensor_is_moved_to_its_layers_device() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 2))
    engine = _engine(model, CPU, META)
    outputs = model(torch.randn(5, 4))  # a tensor left on the CPU would meet weights on the other device and raise
    assert outputs.device == META
    assert [p.device.type for p in model.parameters()].count("meta") == 2 * sum(
        engine.stage_of[name] for name in ("0", "2", "3")
    )
    assert model[0].weight.device == CPU


def test_closing_leaves_a_plain_model() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    engine = _engine(model, CPU, CPU)
    model(torch.randn(2, 4))
    engine.close()
    assert not any(child._forward_hooks or child._forward_pre_hooks for child in model.modules())


def test_describing_leaves_no_trace_in_a_model_that_a_patched_forward_closes_over() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    norm: nn.Module = model[1]
    plain = norm.forward
    seen: list[torch.Size] = []

    def noted(x: torch.Tensor) -> torch.Tensor:
        norm.last = x.shape
        seen.append(x.shape)
        return plain(x)  # runs the norm of the model itself, in a copy too

    norm.forward = noted
    engine = _engine(model, CPU, CPU)
    engine.look_at((torch.randn(3, 4),), {})
    assert int(norm.num_batches_tracked) == 0
    assert not hasattr(norm, "last")
    assert not seen


@pytest.mark.parametrize("num_stages", [2, 3])
def test_a_rehearsal_foresees_what_a_forward_and_backward_move(num_stages: int) -> None:
    batch = (torch.randint(0, 11, (2, 5)), torch.zeros(2))
    line = f"mode=model_parallel,pp={num_stages},micro_batches=3"
    foreseen = foresee_moves(_TiedByHand, Plan.parse(line), batch)
    engine = _engine(_TiedByHand(), *[CPU] * num_stages)
    engine.module(batch[0]).sum().backward()
    assert foreseen == 3 * engine.group.ledger.sent_bytes
    engine.close()
