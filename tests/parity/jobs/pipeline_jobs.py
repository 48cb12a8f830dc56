"""Functions that ranks import: what the tests of pipelines run under a plan."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from tests.parity import losses
from tests.parity.harness import refused
from torch import Tensor, nn

import meshwright as mw
from meshwright.apply.pipeline.p2p import other_way
from meshwright.run.exchange import SumExchange

SGD = functools.partial(torch.optim.SGD, lr=0.1)
VOCABULARY = 13


class Chain(nn.Module):
    """Layers in a list with a tied head that calls no module."""

    def __init__(self, width: int = 8, depth: int = 4) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth))
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.norm(x) @ self.wte.weight.t()


def language(num_samples: int, seed: int = 0, length: int = 5) -> Any:
    ids = torch.randint(VOCABULARY, (num_samples, length + 1), generator=torch.Generator().manual_seed(seed))
    return ids[:, :-1], ids[:, 1:]


def build_chain() -> nn.Module:
    return Chain().double()


def apply_chain(plan: mw.Plan | str, **options: Any) -> mw.ParallelModel:
    options.setdefault("optimizer", SGD)
    return mw.apply_plan(build_chain, plan, loss_fn=options.pop("loss_fn", losses.cross_entropy), **options)


def train_on_sizes(plan: str, sizes: list[int]) -> list[float]:
    with apply_chain(plan) as model:
        results = [model.step(mw.split_batch(language(size, seed), model)) for seed, size in enumerate(sizes)]
        return [value for result in results for value in (result.loss, result.grad_norm)]


def train_with_weight_hooks(plan: str) -> list[float]:
    """A hook halves each weight's gradient, and must get one gradient, whole, in each backward of a micro-batch."""

    def build() -> nn.Module:
        chain = build_chain()
        for layer in chain.layers:
            layer[0].weight.register_hook(lambda gradient: gradient * 0.5)
        return chain

    with mw.apply_plan(build, plan, loss_fn=losses.cross_entropy, optimizer=SGD) as model:
        results = [model.step(mw.split_batch(language(6, seed), model)) for seed in range(3)]
        return [value for result in results for value in (result.loss, result.grad_norm)]


class Energy(nn.Module):
    """Gives the slope of a score of its input, as models of forces do: it differentiates inside its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.outer = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        score = self.outer(torch.tanh(self.inner(x))).sum()
        return torch.autograd.grad(score, x, create_graph=True)[0]


def train_with_slopes(plan: str) -> list[float]:
    def build() -> nn.Module:
        chain = build_chain()
        for index in range(len(chain.layers)):
            chain.layers[index] = Energy().double()
        return chain

    with mw.apply_plan(build, plan, loss_fn=losses.cross_entropy, optimizer=SGD) as model:
        results = [model.step(mw.split_batch(language(6, seed), model)) for seed in range(3)]
        return [value for result in results for value in (result.loss, result.grad_norm)]


class Settings:
    """No tensor, no container: an object of the user's own."""

    factor = 0.5


class Keywords(nn.Module):
    """What each block needs comes in by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, 8)
        self.blocks = nn.ModuleList(KeywordBlock() for _ in range(3))

    def forward(
        self, *, ids: Tensor, mask: Tensor | None = None, pos: Tensor, scale: Tensor, cfg: Any = None
    ) -> Tensor:
        x = self.table(ids)
        cfg = cfg or Settings()
        for block in self.blocks:
            x = block(x, mask=mask, pos=pos.reshape(-1), scale=float(scale), cfg=cfg)
        return x


class KeywordBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(8, 8)

    def forward(self, x: Tensor, *, mask: Tensor | None, pos: Tensor, scale: float, cfg: Settings) -> Tensor:
        y = self.line(x) * scale + pos.sum() * cfg.factor
        return x + (y if mask is None else y * mask.unsqueeze(-1))


def train_with_keywords(plan: str, has_mask: bool) -> list[float]:
    def mean(outputs: Tensor, _: Any) -> Tensor:
        return outputs.square().mean()

    with mw.apply_plan(lambda: Keywords().double(), plan, loss_fn=mean, optimizer=SGD) as model:
        found = []
        for seed in range(3):
            ids, _ = language(5, seed)
            batch = {"ids": ids, "pos": torch.tensor(0.25, dtype=torch.float64), "scale": torch.tensor(1.5)}
            if has_mask:
                batch["mask"] = (ids % 3 > 0).double()
            result = model.step(mw.split_batch(batch, model))
            found += [result.loss, result.grad_norm]
        return found


class Mixed(nn.Module):
    """The first layer gives more than a tensor; the last one uses it only where the first id is even."""

    def __init__(self) -> None:
        super().__init__()
        self.first = MixedStart()
        self.last = nn.Linear(8, 5)
        self.other = nn.Linear(8, 5)

    def forward(self, ids: Tensor) -> Tensor:
        hidden, kept, mask, frozen, nothing = self.first(ids)
        assert nothing is None
        assert kept.dtype == torch.int64
        assert mask.dtype == torch.bool
        if int(ids[0, 0]) % 2 == 0:
            return self.last(hidden * frozen) * mask.unsqueeze(-1)
        return self.other(frozen.expand(*ids.shape, 8)) + kept.unsqueeze(-1)


class MixedStart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, 8)
        self.positions = nn.Parameter(torch.linspace(0.1, 0.8, 8), requires_grad=False)

    def forward(self, ids: Tensor) -> Any:
        return self.table(ids), ids + 1, ids > 3, self.positions * 2, None


def train_mixed(plan: str) -> list[float]:
    # A Loss, where micro-batches may decide for themselves: the whole batch would take one branch for all.
    def mean(outputs: Tensor, _: Any) -> mw.Loss:
        return mw.Loss(outputs.square().mean() * len(outputs), len(outputs))

    # One sample in a micro-batch: the branch is each sample's own, whatever the cut.
    micro = plan if plan != "single" else "micro_batches=4"
    with mw.apply_plan(lambda: Mixed().double(), micro, loss_fn=mean, optimizer=SGD) as model:
        results = [model.step(mw.split_batch(language(4, seed), model)) for seed in range(3)]
        return [value for result in results for value in (result.loss, result.grad_norm)]


def evaluate_in_turns(plan: str) -> list[float]:
    with apply_chain(plan) as model:
        found = []
        for seed, size in enumerate((3, 7, 2)):
            found.append(model.evaluate(mw.split_batch(language(size, seed), model))["loss"])
            found.append(model.step(mw.split_batch(language(6, seed), model)).loss)
        found.append(model.evaluate(mw.split_batch(language(5, 9), model))["loss"])
        return found


class TwoOutputs(Chain):
    def forward(self, ids: Tensor) -> Any:
        first = self.wte(ids)
        return {"early": first, "late": super().forward(ids)}


def outputs(plan: str) -> list[Tensor]:
    model = mw.apply_plan(lambda: TwoOutputs().double(), plan, loss_fn=lambda out, _: out["late"].mean())
    with model, torch.no_grad():
        found = model(language(4)[0])
        return [found["early"].detach(), found["late"].detach()]


def _memory_of(parameter: Tensor) -> int:
    """Return the memory behind a parameter, which is not held by this rank or is [bytes]."""
    return parameter.detach().untyped_storage().nbytes()


def what_is_held(plan: str) -> dict[str, Any]:
    optimizer = functools.partial(torch.optim.Adagrad, lr=0.1)  # which makes its state at once, for all it is given
    with apply_chain(plan, optimizer=optimizer) as model:
        whole = [name for name, _ in model.named_parameters()]
        whole_bytes = sum(p.nbytes for p in model.parameters())
        model.step(mw.split_batch(language(4), model))
        assert model.optimizer is not None
        return {
            "all": whole,
            "listed": [name for name, _ in model.named_parameters()],
            "names": [name for name, p in model.named_parameters() if _memory_of(p) >= p.numel() * p.element_size()],
            "listed_bytes": sum(_memory_of(p) for p in model.parameters()),
            "optimizer": len(model.optimizer.state),
            "state": sorted(model.full_state_dict()),
            "bytes": model.held_bytes()["parameters"],
            "whole_bytes": whole_bytes,
        }


def plan_of(plan: str) -> tuple[str, dict[str, int]]:
    with apply_chain(plan) as model:
        model.step(mw.split_batch(language(4), model))
        return " ".join(model.plan.reasons), dict(model.plan.stages)


def stages_given(stages: dict[str, int]) -> dict[str, int]:
    with apply_chain(mw.Plan(pp=2, stages=stages)) as model:
        model.step(language(4))
        return dict(model.plan.stages)


def refusal_of_stages(stages: dict[str, int]) -> tuple[str, str | None]:
    model = apply_chain(mw.Plan(pp=2, stages=stages))
    return refused(model.step, language(4))


class Reads(Chain):
    """Its forward looks at a number that the last layer computes."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids)
        for layer in self.layers:
            x = layer(x)
        if float(x.sum().item()) > 1e9:
            x = x * 2
        return F.linear(x, self.wte.weight)


def refusal_of_reading(plan: str) -> tuple[str, str | None]:
    model = mw.apply_plan(lambda: Reads().double(), plan, loss_fn=losses.cross_entropy, optimizer=SGD)
    return refused(model.step, language(4))


def not_finite(plan: str) -> tuple[str, bool]:
    def loss(outputs: Tensor, batch: Any) -> Tensor:
        return losses.cross_entropy(outputs, batch) * torch.tensor(float("nan"))

    with apply_chain(plan, loss_fn=loss, example_batch=language(4)) as model:
        before = model.full_state_dict()
        kind = ""
        try:
            model.step(language(4))
        except mw.MeshwrightError as error:
            kind = type(error).__name__
        after = model.full_state_dict()
        return kind, all(torch.equal(before[name], after[name]) for name in before)


def train_with_reading_loss(plan: str) -> list[float]:
    def loss(outputs: Tensor, batch: Any) -> Tensor:
        found = losses.cross_entropy(outputs, batch)
        return found * 2 if found.item() > 0 else found

    with apply_chain(plan, loss_fn=loss) as model:
        return [model.step(mw.split_batch(language(6, seed), model)).loss for seed in range(2)]


class LayerDrop(Chain):
    """Leaves layers out at random, and draws inside of them."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)
        self.ways: list[str] = []

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids)
        way = ""
        for layer in self.layers:
            keeps = bool(torch.rand(()) < 0.6) or not self.training
            way += str(int(keeps))
            if keeps:
                x = x + self.dropout(layer(x))
        self.ways.append(way)
        return self.norm(x) @ self.wte.weight.t()


def _build_layer_drop() -> nn.Module:
    return LayerDrop().double()


def train_with_layer_drop(plan: str) -> tuple[list[float], list[str]]:
    # By place all micro-batches of a step would take one way.
    with mw.apply_plan(_build_layer_drop, plan, loss_fn=losses.cross_entropy, optimizer=SGD, rng="torch") as model:
        found = [model.step(mw.split_batch(language(6, seed), model)).loss for seed in range(3)]
        assert isinstance(model.module, LayerDrop)
        ways = [way for way in model.module.ways if len(way) == 4]
        num_stages = mw.Plan.parse(plan).num_stages // mw.Plan.parse(plan).pp
        return found, sorted(ways[-3 * num_stages :])


def fail_for_another_stages_way() -> None:
    """Rank 0 finds that stages took different ways; rank 1 was given another tensor by that, which its layer cannot take."""
    world = mw.current_world()
    assert world is not None
    with mw.apply_plan(lambda: nn.Linear(2, 2), "dp=2", loss_fn=None, optimizer=None) as model:
        mine: Exception = RuntimeError("mat1 and mat2 shapes cannot be multiplied")
        failure = other_way(2, 1, 0, "3 layers", "more") if world.rank == 0 else mine
        SumExchange(model.engine.loss_group, model.engine.device, [], failure=failure).wait()
