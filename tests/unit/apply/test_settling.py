"""Settling: what a model's first forward builds once is kept, what each forward changes is put back."""

from __future__ import annotations

import torch
from tests.parity.jobs.never_wrong_pipeline_reads import Installs, Replaces
from torch import Tensor, nn

from meshwright.apply.state.settling import Children, settle

CPU = torch.device("cpu")
ROWS = torch.ones(3, 6)


def run(module: nn.Module) -> Tensor:
    return module(ROWS)


def test_layers_that_the_first_batch_replaces_are_kept_and_counts_are_not() -> None:
    module = Replaces()
    names, before = [name for name, _ in module.named_parameters()], Children(module)
    lines = [block.get_submodule("inner.line") for block in module.blocks]
    assert settle(module, run, CPU)
    assert before.have_changed()
    assert (module.kind, module.calls) == ("fast", 0)
    assert [type(block.inner).__name__ for block in module.blocks] == ["_Fast"] * 4
    assert [block.get_submodule("inner.line") for block in module.blocks] == lines
    assert [name for name, _ in module.named_parameters()] == names
    assert not settle(module, run, CPU)


def test_hooks_are_kept_with_the_flag_that_says_so() -> None:
    module = Installs()
    assert settle(module, run, CPU)
    once = run(module)
    assert len(module.first.inner._forward_hooks) == 1
    torch.testing.assert_close(run(module), once, rtol=0, atol=0)


class _Grows(nn.Module):
    """Makes a layer with parameters in its first forward, keeps its result, and fills a list and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.line, self.log = nn.Linear(6, 6), [0]
        self.last: Tensor | None = None
        self.mean = nn.Buffer(torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "more"):
            self.more = nn.Linear(6, 6)
        self.log.append(1)
        self.mean += 1
        self.last = last = self.more(self.line(x))
        return last


def test_new_parameters_are_not_kept() -> None:
    module = _Grows()
    assert not settle(module, run, CPU)
    assert not hasattr(module, "more")
    assert module.log == [0]
    assert module.last is None
    assert float(module.mean.sum()) == 0
