"""Jobs of replicas in threads, and of layers that run again in backward."""

from __future__ import annotations

import functools
import types
from typing import Any

import torch
from tests.parity.jobs.never_wrong_data_jobs import Sgd, batches, plain, planned, square
from torch import Tensor, nn

import meshwright as mw

# -- replicas in threads -------------------------------------------------------------------------------------------------


class Auxiliary(nn.Module):
    """Keeps what its loss adds up, counts its calls, and scales by what the script sets."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(6, 4)
        self.tau = 1.0
        self.options = {"shift": 0.0}
        self.calls = 0
        self.aux: Any = 0.0
        self.shown: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out = self.lin(x) * self.tau + self.options["shift"] + 0.01 * self.calls
        self.aux = out.square().mean()
        return out


class Outer(nn.Module):
    """A model around it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Auxiliary()

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x))


def build_outer() -> nn.Module:
    return Outer().double()


class WithAuxiliary:
    """A loss that reads an attribute which the forward has left on the module."""

    def __init__(self) -> None:
        self.module: Any = None

    def __call__(self, outputs: Tensor, batch: Any) -> Tensor:
        return square(outputs, batch) + self.module.inner.aux + 0.01 * self.module.inner.calls


def anneal(module: nn.Module, step: int) -> None:
    module.inner.tau = 1.0 / (1 + step)
    module.inner.options["shift"] = 0.1 * step
    module.inner.aux = 0.0
    if step == 2:
        module.inner.register_forward_hook(_double)


def _double(_: nn.Module, __: Any, outputs: Tensor) -> Tensor:
    return 2 * outputs


def annealed(plan: str | None) -> tuple[list[float], dict[str, Tensor], list[Any]]:
    """Return losses, values and what can be read off the module afterwards."""
    loss_fn = WithAuxiliary()
    seen: list[Any] = []

    def change(_: Any, module: nn.Module, __: Any, step: int) -> None:
        loss_fn.module = module
        seen.append(module.inner.calls)
        anneal(module, step)

    run = functools.partial(planned, build_outer, plan) if plan else functools.partial(plain, build_outer)
    losses, state = run(change, loss_fn=loss_fn)
    return losses, state, [*seen, loss_fn.module.inner.calls, hasattr(loss_fn.module.inner, "aux")]


class Schedule:
    """An object of the script's, which the module refers to: a number that is changed between steps, and a counter."""

    def __init__(self) -> None:
        self.beta: Any = 1.0
        self.calls = 0

    def __call__(self) -> float:
        return self.beta

    def value(self) -> float:
        return self.beta

    def counted(self) -> float:
        self.calls += 1
        return self.beta * self.calls


class SlotsSchedule:
    """One without a dict."""

    __slots__ = ("beta",)

    def __init__(self) -> None:
        self.beta = 1.0

    def __call__(self) -> float:
        return self.beta


class Scheduled(nn.Module):
    """Scales by a number that it asks for; `hidden` holds modules that are not its children."""

    def __init__(self, scale: Any, teacher: nn.Module) -> None:
        super().__init__()
        self.lin = nn.Linear(6, 4)
        self.scale = scale
        self.hidden = [teacher]

    def forward(self, x: Tensor) -> Tensor:
        scale = self.scale
        while not callable(scale):
            scale = scale.beta if hasattr(scale, "beta") else scale[0]
            if isinstance(scale, (float, Tensor)):
                return self.lin(x) * scale + self.hidden[0](x)
        return self.lin(x) * scale() + self.hidden[0](x)


SCALES: dict[str, Any] = {
    "bound method": lambda s: s.value,
    "counter": lambda s: s.counted,
    "partial": lambda s: functools.partial(Schedule.value, s),
    "deep": lambda s: [types.SimpleNamespace(beta=[[types.SimpleNamespace(beta=[s])]])],
    "slots": lambda s: s,
    "namespace": lambda s: s,
    "tensor": lambda s: types.SimpleNamespace(beta=s.beta),
}


def scheduled(plan: str | None, kind: str) -> tuple[list[float], dict[str, Tensor], list[int], int]:
    """Return losses, values, what the script's object has counted, and how often its hook was called."""
    makers = {"slots": SlotsSchedule, "namespace": lambda: types.SimpleNamespace(beta=1.0)}
    schedule = makers.get(kind, Schedule)()
    if kind == "tensor":
        schedule.beta = torch.ones((), dtype=torch.float64)
    torch.manual_seed(5)
    teacher, recorder = nn.Linear(6, 4).double(), Recorder()
    seen: list[int] = []

    def build() -> nn.Module:
        module = Scheduled(SCALES[kind](schedule), teacher).double()
        module.lin.register_forward_hook(recorder.scaled)
        return module

    def change(_: Any, __: nn.Module, ___: Any, step: int) -> None:
        seen.append(getattr(schedule, "calls", 0))
        recorder.factor = 1.0 + step
        teacher.weight.data.mul_(0.5)
        if isinstance(schedule.beta, Tensor):
            schedule.beta.data.mul_(0.5)
        else:
            schedule.beta = 1.0 / (1 + step)

    run = functools.partial(planned, build, plan) if plan else functools.partial(plain, build)
    return *run(change), seen, recorder.calls > 0


class Recorder:
    """Whose bound method is a hook from the start."""

    def __init__(self) -> None:
        self.factor = 1.0
        self.calls = 0

    def scaled(self, _: nn.Module, __: Any, outputs: Tensor) -> Tensor:
        self.calls += 1
        return outputs * self.factor


# -- recompute -----------------------------------------------------------------------------------------------------------


class Normed(nn.Module):
    """A block with running statistics, a power iteration and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))
        self.norm = nn.BatchNorm1d(6)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + torch.tanh(self.norm(self.lin(x))) * (1 + 0.1 * self.calls)


def build_normed() -> nn.Module:
    return nn.Sequential(*(Normed() for _ in range(4)), nn.Linear(6, 4)).double()


def normed(plan: str) -> list[Any]:
    """Return losses, values, buffers and counters of this rank's own part."""
    with mw.apply_plan(build_normed, plan, loss_fn=square, optimizer=Sgd) as model:
        losses = [model.step(mw.split_batch(batch, model)).loss for batch in batches(3, 8)]
        calls = [block.calls for block in model.module if isinstance(block, Normed)]
        return [losses, calls, list(model.full_state_dict().values())]
