"""Settling: what a model's first forward builds once is kept, what each forward changes is put back."""

from __future__ import annotations

import pytest
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


class _Makes(nn.Module):
    """Replaces a layer by one of another class with its parts, and draws while it does, and in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner: nn.Sequential = nn.Sequential(nn.Linear(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        if type(self.inner) is nn.Sequential:
            made = _Other(nn.Linear(6, 6))  # draws parameters of its own
            made[0] = self.inner[0]
            self.inner = made
        return nn.functional.dropout(self.inner(x), 0.5)


class _Other(nn.Sequential):
    pass


def test_a_layer_is_kept_where_making_it_draws_and_forwards_draw() -> None:
    module = _Makes()
    state = torch.get_rng_state()
    assert settle(module, run, CPU)
    assert type(module.inner) is _Other
    assert torch.equal(torch.get_rng_state(), state)


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


class _Calibrates(nn.Module):
    """Keeps a flag with a value of its first forward, in one of several places; the flag alone would be a wrong number."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, self.ready, self.scale = where, False, 1.0
        self.line, self.gain = nn.Linear(6, 6), nn.Parameter(torch.ones(6))
        self.mean, self.table = nn.Buffer(torch.ones(6)), [1.0]
        self.held = _Held()

    def forward(self, x: Tensor) -> Tensor:
        if not self.ready:
            self.ready = True
            self._calibrate(x)
            if self.where == "first only":
                x = 2 * x
        return self.line(x) * self.scale * self.gain * self.mean * sum(self.table) * self.held.value * _OUTSIDE["value"]

    def _calibrate(self, x: Tensor) -> None:
        if self.where == "buffer":
            self.mean.add_(1)
        elif self.where == "parameter":
            self.gain.data.add_(1)
        elif self.where == "tensor":
            self.scale = x.abs().amax() + 1
        elif self.where == "list":
            self.table.append(2.0)
        elif self.where == "object":
            self.held.value = 3.0
        elif self.where == "outside":
            _OUTSIDE["value"] = 3.0
        elif self.where == "plain":
            self.scale = 2.0


class _Held:
    value = 1.0


_OUTSIDE = {"value": 1.0}


@pytest.mark.parametrize("where", ["buffer", "parameter", "tensor", "list", "object", "outside", "first only"])
def test_a_flag_is_not_kept_without_what_it_announces(where: str) -> None:
    module = _Calibrates(where)
    once = run(module).detach()
    module = _as_before(module)
    assert settle(module, run, CPU) is None
    assert not module.ready
    torch.testing.assert_close(run(module).detach(), once, rtol=0, atol=0)
    _OUTSIDE["value"] = 1.0


def _as_before(module: _Calibrates) -> _Calibrates:
    fresh = _Calibrates(module.where)
    fresh.line = module.line
    _OUTSIDE["value"] = 1.0
    return fresh


def test_what_was_kept_has_a_digest_and_is_undone() -> None:
    modules = [_Calibrates("plain") for _ in range(2)]
    kept = [settle(module, run, CPU) for module in modules]
    assert kept[0] is not None
    assert kept[1] is not None
    assert kept[0].digest == kept[1].digest
    assert modules[0].ready
    assert modules[0].scale == 2.0
    kept[0].undo()
    assert not modules[0].ready
    assert modules[0].scale == 1.0


class _Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x


class _PutsIn(nn.Module):
    """Puts a module in that counts: it would have counted the forwards of the look."""

    def __init__(self) -> None:
        super().__init__()
        self.inner: nn.Module = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        if type(self.inner) is nn.Identity:
            self.inner = _Counts()
        return self.inner(x)


def test_a_module_that_counts_from_its_first_forward_on_is_not_kept() -> None:
    module = _PutsIn()
    assert settle(module, run, CPU) is None
    assert type(module.inner) is nn.Identity


class Moded(nn.Module):
    """Keeps the mode of its first forward, and that it has run while it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.is_ready = False
        self.mode: bool | None = None

    def forward(self, inputs: Tensor) -> Tensor:
        if self.mode is None:
            self.mode = self.training
        self.is_ready = True
        return self.layer(inputs) * (2 if self.mode else 1)


@pytest.mark.parametrize("in_eval_mode_too", [False, True])
def test_what_a_first_evaluation_would_keep_otherwise_is_not_kept(in_eval_mode_too: bool) -> None:
    """A first forward of one process that is an evaluation keeps another mode; the look trains."""
    module = Moded()
    settled = settle(module, run, CPU, in_eval_mode_too=in_eval_mode_too)
    assert (settled is None) is in_eval_mode_too
    assert module.training
    assert all(child.training for child in module.modules())
    assert module.mode is (None if in_eval_mode_too else True)


def test_what_a_first_evaluation_keeps_alike_is_kept() -> None:
    module = Moded()
    module.mode = True
    assert settle(module, run, CPU, in_eval_mode_too=True)
    assert module.is_ready
    assert module.training


def test_layers_that_a_first_evaluation_replaces_alike_are_kept() -> None:
    module = Replaces()
    assert settle(module, run, CPU, in_eval_mode_too=True)
    assert [type(block.inner).__name__ for block in module.blocks] == ["_Fast"] * 4


class _Chooses(nn.Module):
    """Keeps a flag, and draws the numbers of two of its layers until they differ."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.is_ready = False

    def forward(self, x: Tensor) -> Tensor:
        self.is_ready = True
        chosen: set[int] = set()
        while len(chosen) < 2:
            chosen.add(int(torch.randint(4, ())))
        while float(torch.rand(())) < 0.9:
            x = x + 1
        return sum((self.layers[place](x) for place in sorted(chosen)), x)


def test_a_loop_that_draws_until_it_likes_the_number_ends_and_what_settles_is_kept() -> None:
    module = _Chooses()
    assert settle(module, run, CPU)
    assert module.is_ready
