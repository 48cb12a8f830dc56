"""Functions that ranks import: what the tests of tensor parallelism run under a plan."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from tests.parity import cases, losses
from tests.parity.harness import nothing_runs_whole, refused
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import gpt
import meshwright as mw
from meshwright import testing
from meshwright.apply.tensor.expected_bytes import TokenWatch, exchange_of
from meshwright.traffic import TensorExchange


def build(num_layers: int = 2, dropout: float = 0.0, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Return a GPT of width 16 with 4 heads."""
    return gpt.build_gpt(
        vocabulary_size=31,
        max_length=8,
        num_layers=num_layers,
        num_heads=4,
        num_kv_heads=2,
        hidden_size=16,
        ffn_size=24,
        dropout=dropout,
        initializer_std=0.3,
    ).to(dtype)


def language(num_samples: int, seed: int = 0) -> Any:
    ids = torch.randint(31, (num_samples, 7), generator=torch.Generator().manual_seed(seed))
    return ids[:, :-1], ids[:, 1:]


SGD = functools.partial(torch.optim.SGD, lr=0.1)


def apply(plan: mw.Plan | str, **options: Any) -> mw.ParallelModel:
    options.setdefault("optimizer", SGD)
    return mw.apply_plan(options.pop("build", build), plan, loss_fn=losses.cross_entropy, **options)


def refusal_of_layouts(layouts: dict[str, str]) -> str:
    return refused(apply, mw.Plan(tp=2, layouts=layouts))[0]


def refusal_of_compiled() -> tuple[str, str | None]:
    compiled: Any = torch.compile(build(), backend="eager")
    return refused(apply, "tp=2", build=compiled)


class Centered(torch.optim.SGD):
    """Takes the mean out of each gradient: no element can be updated by itself."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad -= parameter.grad.mean()
        return super().step(closure)


def refusal_of_whole_matrices(plan: str) -> tuple[str, str | None]:
    return refused(apply, plan, optimizer=functools.partial(Centered, lr=0.1))


def train_with_whole_matrices(plan: str) -> tuple[Any, Any]:
    """Return the state after three steps, of the plan and of one process."""
    make = functools.partial(Centered, lr=0.1)
    batches = [language(4, seed) for seed in range(3)]
    options = testing.StepOptions(optimizer=make)
    records = testing.plan_steps(build, mw.Plan.parse(plan), batches, losses.cross_entropy, options=options)
    return records[-1].parameters, testing.oracle_steps(build, batches, losses.cross_entropy, optimizer=make)[
        -1
    ].parameters


def train_in_float32(plan: str) -> tuple[Any, list[float], Any, list[float]]:
    """Return (gradients, losses) of 10 steps of AdamW, of the plan and of one process."""
    make = functools.partial(torch.optim.AdamW, lr=1e-3)
    batches = [language(4, seed) for seed in range(10)]
    small = functools.partial(build, dtype=torch.float32)
    options = testing.StepOptions(optimizer=make, num_steps=10)
    records = testing.plan_steps(small, mw.Plan.parse(plan), batches, losses.cross_entropy, options=options)
    plain = testing.oracle_steps(small, batches, losses.cross_entropy, optimizer=make, num_steps=10)
    return records[-1].gradients, [r.loss for r in records], plain[-1].gradients, [r.loss for r in plain]


def share_cut(name: str) -> tuple[float, dict[str, str], tuple[str, ...]]:
    """Return which share of the parameters in blocks is cut, every parameter's layout, and the plan's reasons."""
    case = cases.find(name)
    with mw.apply_plan(case.build, "tp=2", loss_fn=case.loss_fn, example_batch=case.batch(2, 0)) as model:
        layouts, reasons = dict(model.plan.layouts), model.plan.reasons
        with model.whole_parameters():
            in_blocks = {
                key: parameter.numel()
                for key, parameter in model.named_parameters()
                if any(part.isdigit() for part in key.split("."))
            }
    cut = sum(size for key, size in in_blocks.items() if layouts.get(key) != "whole")
    return cut / sum(in_blocks.values()), layouts, reasons


class _Watching(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Watched(nn.Module):
    """A GPT whose forward the user's own mode follows: what it would see of shards is not the user's."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = build()

    def forward(self, ids: Tensor) -> Tensor:
        with _Watching():
            return self.inner(ids)


def complaint_of_calls_that_run_whole(expected: str) -> str:
    """Return with what the harness fails where parts that are cut run whole; nothing where it does not."""
    try:
        with nothing_runs_whole(expected), apply("tp=2", build=Watched) as model:
            model.step(language(4))
    except AssertionError as error:
        return str(error)
    return ""


def exchanges(plan: str, num_layers: int) -> dict[str, tuple[int, int]]:
    """Return (calls, tensor bytes) on the tp axis by collective of one step that is not the first."""
    with apply(plan, build=functools.partial(build, num_layers)) as model:
        model.step(language(4))
        with testing.count_collectives(model) as counts:
            model.step(language(4))
        kinds = {kind for kind, axis in counts.entries if axis == "tp"}
        return {kind: (counts.calls(kind, "tp"), counts.tensor_bytes(kind, "tp")) for kind in kinds}


def exchanged_and_predicted(plan: str) -> tuple[int, TensorExchange | None]:
    """Return the tensor bytes that the ledger counts on the tp axis in a step that is not the first, and the formula's."""
    with apply(plan) as model:
        share = mw.split_batch(language(4), model)
        watch = TokenWatch(model.module)
        model.step(share)
        watch.close()
        with testing.count_collectives(model) as counts:
            model.step(share)
        engine: Any = model.engine
        found = (model.module, engine.cutting.layout, share[0].numel(), model.plan.tp)
        predicted = exchange_of(*found) if watch.fits(*found) else None
        watch.tokens[id(model.module.get_submodule("layers.1.ffn.down"))] *= 2  # as if it had run twice
        if watch.fits(*found):
            predicted = None
        return sum(counts.tensor_bytes(kind, axis) for kind, axis in counts.entries if axis == "tp"), predicted


class Dropping(nn.Module):
    """A pair of layers with dropout inside, between its shards, and outside, on copies."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 32)
        self.down = nn.Linear(32, 8)
        self.inside = nn.Dropout(0.5)
        self.outside = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.outside(self.down(self.inside(F.softplus(self.up(x)))))


def dropout_masks(plan: str) -> tuple[Tensor, Tensor]:
    """Return what left the dropout inside and the one outside, of one step."""
    seen: dict[str, Tensor] = {}
    x = torch.randn(6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with mw.apply_plan(lambda: Dropping().double(), plan, loss_fn=losses.square, optimizer=SGD) as model:
        model.step((x, x))
        for name in ("inside", "outside"):
            module = model.module.get_submodule(name)
            module.register_forward_hook(lambda _, __, out, name=name: seen.__setitem__(name, out.detach().clone()))
        model.step((x, x))
    return seen["inside"], seen["outside"]


def train_with_dropout(plan: str) -> dict[str, Tensor]:
    """Return the state after three steps of a GPT with dropout."""
    with apply(plan, build=functools.partial(build, dropout=0.3)) as model:
        for seed in range(3):
            model.step(language(4, seed))
        return model.full_state_dict()


def layouts_with(layouts: dict[str, str]) -> dict[str, str]:
    with apply(mw.Plan(tp=2, layouts=layouts), example_batch=language(2)) as model:
        return dict(model.plan.layouts)


def layouts_of_example(plan: str) -> dict[str, str]:
    with apply(plan, example_batch=language(2)) as model:
        return dict(model.plan.layouts)


def call_first(plan: str) -> tuple[Tensor, Tensor, float, dict[str, Tensor], dict[str, Tensor]]:
    """Return outputs of a model that has not stepped yet and of a plain one, a loss, and both states."""
    ids, _ = language(3)
    torch.manual_seed(0)
    plain = build()
    with apply(plan) as model, torch.no_grad():
        outputs = model(ids)
        loss = model.evaluate(language(3))["loss"]
        return outputs, plain(ids), loss, model.full_state_dict(), dict(plain.state_dict())


def close_model(plan: str) -> tuple[list[Any], list[Any], bool]:
    """Return the shapes of a closed model's parameters, those of a plain one, and whether cut values are NaN."""
    model = apply(plan)
    model.step(language(3))
    model.close()
    plain = [tuple(parameter.shape) for parameter in build().parameters()]
    is_nan = bool(model.module.get_parameter("layers.0.ffn.up.weight").isnan().all())
    return [tuple(parameter.shape) for parameter in model.parameters()], plain, is_nan


def held(plan: str) -> dict[str, int]:
    make = functools.partial(torch.optim.AdamW, lr=1e-3)
    with apply(plan, optimizer=make) as model:
        model.step(mw.split_batch(language(4), model))
        return model.held_bytes()


class Signed(torch.autograd.Function):
    """A function of the user's own, which no trace sees into."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x.abs()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2.0 * x.abs() * gradients[0]


class Custom(nn.Module):
    """A function of the user's own between two layers that might be a pair."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        result: Any = Signed.apply(self.up(x))
        return self.down(result)


def custom_function(plan: str) -> tuple[Any, Any, dict[str, str]]:
    """Return gradients of a model with a function of the user's own, plain ones, and what was cut."""
    x = torch.randn(6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    plain = Custom().double()
    losses.square(plain(x), (x, x.sin())).backward()
    with mw.apply_plan(lambda: Custom().double(), plan, loss_fn=losses.square) as model:
        model.step((x, x.sin()))
        expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
        return model.full_gradients(), expected, dict(model.plan.layouts)


class OneHead(nn.Module):
    """Attention of one head, of which the second rank holds nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(7, 1, batch_first=True)
        self.head = nn.Linear(7, 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attention(x, x, x, need_weights=False)[0])


def one_head(plan: str) -> tuple[Any, Any, dict[str, str]]:
    """Return gradients of attention of one head under a plan, plain ones, and what was cut."""
    x = torch.randn(4, 5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    plain = OneHead().double()
    losses.square(plain(x), (x, x.sin())).backward()
    torch.manual_seed(0)
    with mw.apply_plan(OneHead().double(), plan, loss_fn=losses.square) as model:
        model.step(mw.split_batch((x, x.sin()), model))
        expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
        return model.full_gradients(), expected, dict(model.plan.layouts)


class Counting(nn.Module):
    """Counts its forwards, in Python and in a buffer, and draws."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8)
        self.num_forwards = 0
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.num_forwards += 1
        self.seen += 1
        return self.down(F.dropout(torch.tanh(self.up(x)), 0.3, self.training))


def side_effects(plan: str) -> tuple[int, float, bool, bool]:
    """Return (forwards in Python, in the buffer, whether values are what they were, whether the generator is where it was)."""
    x = torch.randn(6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    module = Counting().double()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    state = torch.get_rng_state()
    with mw.apply_plan(module, plan, loss_fn=losses.square, example_batch=(x, x)) as model:
        same_draws = torch.equal(state, torch.get_rng_state())
        after = model.full_state_dict()
        same_values = all(torch.equal(after[name], value) for name, value in before.items())
        return module.num_forwards, float(module.seen), same_values, same_draws
