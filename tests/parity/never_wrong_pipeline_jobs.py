"""Models and training scripts of the tests of what pipelines never get wrong; functions that ranks import."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshwright as mw

WIDTH = 6
MICRO_BATCHES = 2


def tanh_block(width: int = WIDTH) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.Tanh())


def rows(seed: int, num: int = 6, width: int = WIDTH) -> Tensor:
    return torch.randn(num, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def square(outputs: Any, _: Any) -> Tensor:
    return outputs.square().mean()


def plain_batch(seed: int) -> Any:
    return rows(seed), rows(seed + 100)


@dataclasses.dataclass(frozen=True)
class Script:
    """A model and what is done with it; `before` and `evaluates` run in front of each step."""

    build: Callable[[], nn.Module]
    batch: Callable[[int], Any] = plain_batch
    loss: Callable[[Any, Any], Any] | None = square
    before: Callable[[int, nn.Module], None] = lambda step, module: None
    evaluates: tuple[int, ...] = ()
    steps: int = 3
    attributes: tuple[str, ...] = ()
    dtype: torch.dtype = torch.float64


@dataclasses.dataclass
class Record:
    """What a run gave, by step."""

    losses: list[float]
    evaluations: list[float]
    gradients: list[dict[str, Tensor | None]]
    state: dict[str, Tensor]
    attributes: list[Any]


def build_of(script: Script) -> nn.Module:
    module = script.build()
    return module if any(p.is_complex() for p in module.parameters()) else module.to(script.dtype)


def run_planned(name: str, plan: str) -> Record:
    """Train under a plan, on every rank."""
    script = SCRIPTS[name]
    model = mw.apply_plan(
        lambda: build_of(script),
        f"{plan},micro_batches={MICRO_BATCHES}",
        loss_fn=script.loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    record = Record([], [], [], {}, [])
    with model:
        for step in range(script.steps):
            script.before(step, model.module)
            if step in script.evaluates:
                record.evaluations.append(model.evaluate(mw.split_batch(script.batch(50 + step), model))["loss"])
            record.losses.append(model.step(mw.split_batch(script.batch(step), model)).loss)
            record.gradients.append(
                {name: None if g is None else g.detach().clone() for name, g in model.full_gradients().items()}
            )
        record.state = {name: value.clone() for name, value in model.full_state_dict().items()}
        record.attributes = [_attribute(model.module, path) for path in script.attributes]
    return record


def _attribute(module: Any, path: str) -> Any:
    for name in path.split("."):
        module = getattr(module, name)
    return module


def run_plain(name: str, num_shares: int = 1) -> Record:
    """Train in a plain loop on the same micro-batches."""
    script = SCRIPTS[name]
    torch.manual_seed(0)
    module = build_of(script)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    record = Record([], [], [], {}, [])
    for step in range(script.steps):
        script.before(step, module)
        if step in script.evaluates:
            module.eval()
            with torch.no_grad():
                record.evaluations.append(_losses(script, module, script.batch(50 + step), num_shares, trains=False))
            module.train()
        optimizer.zero_grad(set_to_none=True)
        record.losses.append(_losses(script, module, script.batch(step), num_shares, trains=True))
        record.gradients.append(
            {name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}
        )
        optimizer.step()
    record.state = {name: value.clone() for name, value in module.state_dict().items()}
    record.attributes = [_attribute(module, path) for path in script.attributes]
    return record


def _losses(script: Script, module: nn.Module, batch: Any, num_shares: int, *, trains: bool) -> float:
    count = _num_samples(batch)
    total = 0.0
    for piece in _cut(batch, count, MICRO_BATCHES * num_shares):
        outputs = _call(module, piece)
        loss = outputs.loss if script.loss is None else script.loss(outputs, piece)
        share = loss * (_num_samples(piece) / count)
        if trains and share.requires_grad:
            share.backward()
        total += float(share.detach())
    return total


def _num_samples(batch: Any) -> int:
    first = next(iter(batch.values())) if isinstance(batch, dict) else batch[0]
    return len(first[0] if isinstance(first, tuple) else first)


def _cut(batch: Any, count: int, parts: int) -> Sequence[Any]:
    sizes = [count // parts + (index < count % parts) for index in range(parts)]
    pieces = []
    start = 0
    for size in sizes:
        part = slice(start, start + size)
        start += size
        if isinstance(batch, dict):
            pieces.append({key: value[part] for key, value in batch.items()})
        else:
            inputs = tuple(t[part] for t in batch[0]) if isinstance(batch[0], tuple) else batch[0][part]
            pieces.append((inputs, batch[1][part]))
    return [piece for piece in pieces if _num_samples(piece)]


def _call(module: nn.Module, batch: Any) -> Any:
    if isinstance(batch, dict):
        return module(**batch)
    return module(*batch[0]) if isinstance(batch[0], tuple) else module(batch[0])


# -- shapes of the code between layers that values decide -----------------------------------------------------------


class Unpadded(nn.Module):
    """Keeps the rows that a mask names, and the columns that lengths leave."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(tanh_block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        h = x.unsqueeze(-1) * torch.ones(WIDTH, dtype=x.dtype)
        for block in self.blocks[:2]:
            h = block(h)
        h = h[:, : lengths.max()]
        h = h[torch.arange(h.shape[1])[None] < lengths[:, None]]
        for block in self.blocks[2:]:
            h = block(h)
        return self.head(h)


def lengths_batch(seed: int) -> Any:
    lengths = torch.randint(1, WIDTH, (6,), generator=torch.Generator().manual_seed(seed))
    return (rows(seed), lengths), rows(seed + 100)


def sum_over_samples(outputs: Tensor, batch: Any) -> Any:
    return mw.Loss(outputs.square().sum(), len(batch[1]))


def mean_over_samples(outputs: Tensor, batch: Any) -> Tensor:
    return outputs.square().sum() / len(batch[1])


# -- requires_grad switched between steps -------------------------------------------------------------------------------


class Stack(nn.Module):
    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(tanh_block() for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def freeze(names: Sequence[int], module: nn.Module, *, trains: bool) -> None:
    blocks: Any = module.get_submodule("blocks")
    for place in names:
        for parameter in blocks[place].parameters():
            parameter.requires_grad_(trains)


def gradual(step: int, module: nn.Module) -> None:
    """Freeze the first stage for a step, then let it train again."""
    if step == 0:
        freeze((0, 1), module, trains=False)
    if step == 1:
        freeze((1,), module, trains=True)
    if step == 2:
        freeze((0,), module, trains=True)


def switch_everywhere(step: int, module: nn.Module) -> None:
    if step == 1:
        freeze((0, 3), module, trains=False)
    if step == 2:
        freeze((0, 1), module, trains=False)
        freeze((3,), module, trains=True)


def freeze_last(step: int, module: nn.Module) -> None:
    if step == 1:
        freeze((2, 3), module, trains=False)


def freeze_own_weights(step: int, module: nn.Module) -> None:
    """Reach the weights by name, which works on ranks that do not hold them, too."""
    for place in (0, 3):
        module.blocks[place][0].weight.requires_grad_(step == 1)  # pyright: ignore


# -- tensors that layers leave beside their results -------------------------------------------------------------------


class Leaves(nn.Module):
    """A block that keeps what it has seen, for the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(WIDTH, WIDTH)
        self.aux: Any = None
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.line(x))
        self.calls += 1
        self.aux = (y.mean(0) ** 2).sum()
        self.seen = {"mean": y.detach().mean(), "list": [y]}
        return x + y


class Auxiliary(nn.Module):
    """Adds up in its forward what its blocks have left."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Leaves() for _ in range(4))

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        aux = sum(block.aux for block in self.blocks) + self.blocks[0].seen["list"][0].mean()  # pyright: ignore
        return {"x": x, "aux": aux}


def with_aux(outputs: Any, _: Any) -> Tensor:
    return outputs["x"].square().mean() + 0.1 * outputs["aux"]


class Collects(nn.Module):
    """Its blocks append to a list that the model gives them, and write into a state."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Appends() for _ in range(4))

    def forward(self, x: Tensor) -> Any:
        state: dict[str, Any] = {"x": x, "aux": [], "steps": 0}
        for block in self.blocks:
            block(state)
        return {"x": state["x"] * state["steps"], "aux": torch.stack(state["aux"]).sum()}


class Appends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(WIDTH, WIDTH)

    def forward(self, state: dict[str, Any]) -> None:
        state["x"] = torch.tanh(self.line(state["x"]))
        state["aux"].append(state["x"].square().mean())
        state["steps"] += 1


class Holder:
    """A state of the user's own, no container that torch knows."""

    def __init__(self, x: Tensor) -> None:
        self.x = x
        self.parts: list[Tensor] = []


class HandsOn(nn.Module):
    """A state object goes through the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(WritesState() for _ in range(4))

    def forward(self, x: Tensor) -> Any:
        state = Holder(x)
        for block in self.blocks:
            state = block(state)
        return {"x": state.x, "aux": sum(state.parts)}


class WritesState(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(WIDTH, WIDTH)

    def forward(self, state: Holder) -> Holder:
        state.x = torch.tanh(self.line(state.x))
        state.parts.append(state.x.mean())
        return state


class Memory(nn.Module):
    """Keeps a hidden state for the next batch, in the model and in a block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(tanh_block() for _ in range(4))
        self.mem: Any = None

    def forward(self, x: Tensor) -> Tensor:
        for place, block in enumerate(self.blocks):
            x = block(x)
            if place == 1:
                x = x if self.mem is None else x + self.mem
                self.mem = x.detach().mean(0)
        return x


# -- code in place --------------------------------------------------------------------------------------------------


class InPlaceCnn(nn.Module):
    def __init__(self, norm: str) -> None:
        super().__init__()

        def normed(width: int) -> nn.Module:
            return nn.GroupNorm(2, width) if norm == "group" else nn.BatchNorm2d(width)

        self.stem = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = normed(4)
        self.act = nn.ReLU(inplace=True)
        self.layer1 = nn.Sequential(Residual(4, normed), Residual(4, normed))
        self.layer2 = nn.Sequential(Residual(4, normed), Residual(4, normed))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.reshape(len(x), 1, 2, 3)
        x = self.act(self.norm(self.stem(x)))
        return self.fc(torch.flatten(self.pool(self.layer2(self.layer1(x))), 1))


class Residual(nn.Module):
    def __init__(self, width: int, normed: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn1 = normed(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = normed(width)

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += x
        return self.relu(out)


class Written(nn.Module):
    """Blocks that write over what they are given, which is used afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(WritesInput() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = x * 1.0
        for block in self.blocks:
            y = block(h)
            h = h * 0.5 + y
        return h


class WritesInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x += 0.25
        x.mul_(1.5)
        return torch.tanh(self.line(x))


class Activations(nn.Module):
    """A plain sequence with activations in place, VGG-like."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for _ in range(4):
            layers += [nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)]
        self.features = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.features(x)


class Skips(nn.Module):
    """Skip connections that are written over after they were sent, and views that are written."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        first = self.blocks[0](x)
        keep = self.blocks[1](first) * 1.0
        second = self.blocks[2](keep * 0.5)
        keep += second * 0.1
        keep[:, 0] = keep[:, 0] * 2
        third = self.blocks[3](second + 0.5)
        third += keep
        third[:, 1:].mul_(0.5)
        return third + first


class SentThenWritten(nn.Module):
    """A tensor is sent, written over where it was made, and used again elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        first = self.blocks[0](x)
        keep = self.blocks[1](first) + 0.0
        second = self.blocks[2](keep + 0.0)
        third = second + keep
        keep.mul_(0.5)
        return self.blocks[3](third) + keep


class StaleView(nn.Module):
    """A part of a tensor was taken before the whole is written over by a later stage."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        keep = self.blocks[1](self.blocks[0](x)) + 0.0
        part = keep[:, 0]
        last = self.blocks[3](self.blocks[2](keep + 0.0))
        keep += last.detach()
        return last * part[:, None] + keep


class Identity(nn.Module):
    """Layers that return what they are given: a dropout that drops nothing, a tuple with the mask."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Passes() for _ in range(4))
        self.drop = nn.Dropout(0.0)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        first = x
        for block in self.blocks:
            y, mask, kept = block(x, mask)
            x = self.drop(y + kept * 0.5 + x * mask)
        return x + first * mask


class Passes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Any:
        return torch.tanh(self.line(x)) * mask, mask, x


def masked_batch(seed: int) -> Any:
    return (rows(seed), (rows(seed + 7)[:, :1] > 0).double()), rows(seed + 100)


# -- state of the model's own forward --------------------------------------------------------------------------------


class OwnState(nn.Module):
    """Buffers and counters that the code between layers moves."""

    def __init__(self, *, reads_later: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Counts() for _ in range(4))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("ema", torch.zeros(WIDTH))
        self.register_buffer("fresh", torch.zeros(WIDTH))
        self.calls = 0
        self.reads_later = reads_later

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.mean.mul_(0.5).add_(0.5 * x.detach().mean(0))
        x = x + self.mean + 0.1 / self.calls
        for place, block in enumerate(self.blocks):
            x = block(x)
            if place == 0:
                self.ema.mul_(0.5).add_(x.detach().mean(0))
                self.fresh = 0.5 * self.fresh + x.detach().mean(0)
            if place == 2 and self.reads_later:
                x = x + self.ema + self.fresh
        return x + self.ema


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(WIDTH, WIDTH)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return torch.tanh(self.line(x)) * (1 + 1 / self.calls)


# -- chance -------------------------------------------------------------------------------------------------------------


class PythonChance(nn.Module):
    """Leaves layers out by Python's own random numbers, seeded by the test."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(tanh_block() for _ in range(4))
        self.way = ""

    def forward(self, x: Tensor) -> Tensor:
        self.way = ""
        for block in self.blocks:
            keeps = not self.training or random.random() < 0.6
            self.way += str(int(keeps))
            if keeps:
                x = x + block(x)
        return x


class LateDrop(nn.Module):
    """Draws between its layers in training alone."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.training and torch.rand(()) < 0.5:
                continue
            x = x + block(x)
        return x


def apply_script(build: Callable[[], nn.Module], loss: Callable[[Any, Any], Any] = square, plan: str = "pp=2") -> Any:
    """Apply a plan to a model in float64."""
    return mw.apply_plan(
        lambda: build().double(),
        f"{plan},micro_batches={MICRO_BATCHES}",
        loss_fn=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )


def own_rank() -> int:
    world = mw.current_world()
    return 0 if world is None else world.rank


def run_chance(plan: str, kind: str) -> list[float]:
    """Return the losses of steps in which layers are left out."""
    model = apply_script(PythonChance if kind == "python" else LateDrop, plan=plan)
    with model:
        random.seed(own_rank())
        return [model.step(plain_batch(step)).loss for step in range(4)]


def run_late_chance(plan: str) -> list[float]:
    with apply_script(LateDrop, plan=plan) as model:
        found = [model.evaluate(plain_batch(9))["loss"]]
        return found + [model.step(plain_batch(step)).loss for step in range(4)]


# -- ranks that are not alike -------------------------------------------------------------------------------------


def step_with_an_empty_share(empty_rank: int) -> float:
    with apply_script(Stack) as model:
        model.step(plain_batch(0))
        return model.step(None if own_rank() == empty_rank else plain_batch(1)).loss


class Parting(Stack):
    """Its way follows a number that the ranks have differently."""

    more = False

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
            if self.more:
                x = x + block(x)
        return x


def step_in_different_ways() -> float:
    with apply_script(Parting) as model:
        model.step(plain_batch(0))
        model.module.more = own_rank() == 0
        return model.step(plain_batch(1)).loss


def step_after_an_error() -> list[Any]:
    calls = [0]

    def loss(outputs: Tensor, _: Any) -> Tensor:
        calls[0] += 1
        if calls[0] == 2:
            raise ValueError("boom")
        return outputs.square().mean()

    found: list[Any] = []
    with apply_script(Stack, loss) as model:
        model.stepper.prepare(plain_batch(0))
        calls[0] = 0
        for step in range(3):
            try:
                found.append(model.step(plain_batch(step)).loss)
            except ValueError as error:
                found.append(f"ValueError: {error}")
            except mw.ApplyError as error:
                found.append(error.message)
    return found


def step_with_a_hook_on_one_rank() -> tuple[list[float], int]:
    with apply_script(Stack) as model:
        log: list[float] = []
        if own_rank() == 0:
            for block in model.module.blocks:
                block.register_forward_hook(lambda _m, given, out: log.append(float((out - given[0]).detach().norm())))
        return [model.step(plain_batch(step)).loss for step in range(2)], len(log)


def inspect_with_a_fault() -> tuple[list[str | None], list[str]]:
    """Return the parts that were inspected, and those in which something was found once an input was wrong."""
    with apply_script(Stack) as model:
        model.step(plain_batch(0))
        engine = model.engine
        post = engine._post
        receive = post.receive

        def wrong(*args: Any, **kwargs: Any) -> Tensor:
            tensor = receive(*args, **kwargs)
            if not kwargs["is_gradient"] and kwargs["micro_batch"] == 0:
                tensor[0, 0] += 1e-9
            return tensor

        parts, findings = [], []
        for number in range(2):
            parts.append(engine.begin_inspection(number))
            model.step(plain_batch(1))
            if engine.end_inspection():
                raise AssertionError("nothing was wrong")
        engine.begin_inspection(parts.index("boundary of stage 1"))
        post.receive = wrong
        model.step(plain_batch(2))
        findings = [finding.part for finding in engine.end_inspection()]
        return parts, findings


def step_with_an_early_average() -> float:
    with apply_script(Stack) as model:
        average = torch.optim.swa_utils.AveragedModel(model.module)
        model.step(plain_batch(0))
        average.update_parameters(model.module)
        return model.step(plain_batch(1)).loss


# -- other ways -----------------------------------------------------------------------------------------------------------


class OtherWays(nn.Module):
    """Its depth, the calls of a shared block, and the form of its inputs follow the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(tanh_block() for _ in range(4))
        self.shared = tanh_block()

    def forward(self, x: Tensor, depth: Tensor, mask: Tensor) -> Tensor:
        number = int(depth[0])
        if number % 2:
            mask = mask[..., None].squeeze(-1)
        x = x * mask
        for place, block in enumerate(self.blocks[:number]):
            x = x + block(x)
            for _ in range(number - place):
                x = self.shared(x)
            if number == 3 and place == 1:
                with torch.no_grad():
                    x = x + self.blocks[0](x)
        return x


def ways_batch(seed: int) -> Any:
    number = (4, 1, 3, 4, 2)[seed % 5]
    return (rows(seed), torch.full((6,), number), (rows(seed + 7)[:, :1] > 0).double()), rows(seed + 100)


class AsksDtype(nn.Module):
    """Asks layers for their parameters between them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(tanh_block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x.to(next(block.parameters()).dtype))
        return x.to(next(self.blocks[0][0].parameters()).dtype)  # pyright: ignore


class Detached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(tanh_block() for _ in range(4))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        with torch.no_grad():
            target = self.blocks[3](self.blocks[1](self.blocks[0](x)))
        h = self.blocks[1](self.blocks[0](x))
        y = self.blocks[2](h.detach()) + self.blocks[3](h) * (h.detach() > 0)
        return {"y": y - target, "h": h}


def reads_inside(outputs: dict[str, Tensor], batch: Any) -> Tensor:
    return outputs["y"].square().mean() + F.mse_loss(outputs["h"], batch[1])


class Patched(nn.Module):
    """A library has set other forwards on instances of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Counts() for _ in range(4))
        for block in self.blocks:
            block.forward = _doubled(block.forward)

    forward = Stack.forward


def _doubled(forward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x: forward(x) * 2


class Hooked(nn.Module):
    """A hook on each block reads a number; another one changes the result."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(tanh_block() for _ in range(4))
        self.log: list[float] = []
        for block in self.blocks:
            block.register_forward_pre_hook(lambda _, args: self.log.append(args[0].mean().item()))
            block.register_forward_hook(lambda _m, _i, out: self.log.append(out.abs().max().item()))
            block.register_forward_hook(lambda _m, _i, out: out * 1.5)

    forward = Stack.forward


class Conjugated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(tanh_block().double() for _ in range(4))
        self.phase = nn.Parameter(
            torch.view_as_complex(torch.linspace(0.1, 0.9, 2 * WIDTH).double().view(WIDTH, 2)).conj()
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return (x * self.phase).abs()


class Penalty(nn.Module):
    """A gradient penalty: a backward through all layers, inside of the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(tanh_block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        h = x
        for block in self.blocks:
            h = block(h)
        (slope,) = torch.autograd.grad(h.sum(), x, create_graph=True)
        return h + slope


class InnerStep(nn.Module):
    """An inner step of training (MAML), after which the layers run with other weights."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*[tanh_block() for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        weights = {name: p * 0.9 for name, p in self.net.named_parameters()}
        return torch.func.functional_call(self.net, weights, (x,))


class LateMean(nn.Module):
    """Its first layer takes what the last one gave in the micro-batch before."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(tanh_block() for _ in range(4))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mean
        for block in self.blocks:
            x = block(x)
        self.mean.mul_(0.5).add_(x.detach().mean(0))
        return x


class Leaks(nn.Module):
    """A layer hands a tensor to another one by an object that no module holds."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Leaves() for _ in range(4))
        found: list[Tensor] = []
        self.last = lambda: found[-1]
        self.blocks[1].line.register_forward_hook(lambda _m, _i, out: found.append(out))  # pyright: ignore

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x + self.last()


def compiled_block() -> nn.Module:
    model = Stack()
    model.blocks[1] = torch.compile(model.blocks[1], backend="eager")  # pyright: ignore
    return model


REFUSED = {
    "stale_view": "writes over a tensor in place",
    "other_ways": "a pipeline runs forward only",
    "penalty": "gradient penalty",
    "inner_step": "other parameters than its own",
    "late_mean": "a pipeline runs forward only",
    "leaks": "has made inside",
    "compiled": "is compiled",
}
"""Scripts that a pipeline cannot run, and words of the message."""

SCRIPTS: dict[str, Script] = {
    "unpadded": Script(Unpadded, lengths_batch, mean_over_samples, steps=4),
    "gradual": Script(Stack, before=gradual, evaluates=(1,), steps=4),
    "switched": Script(Stack, before=switch_everywhere, steps=4),
    "frozen_stage": Script(Stack, before=freeze_last),
    "switched_by_name": Script(Stack, before=freeze_own_weights),
    "auxiliary": Script(Auxiliary, loss=with_aux, evaluates=(1,)),
    "collects": Script(Collects, loss=with_aux, evaluates=(1,)),
    "hands_on": Script(HandsOn, loss=with_aux, evaluates=(1,)),
    "memory": Script(Memory, steps=4),
    "resnet_group": Script(lambda: InPlaceCnn("group"), evaluates=(1,)),
    "resnet_batch": Script(lambda: InPlaceCnn("batch"), evaluates=(1,)),
    "activations": Script(Activations),
    "written": Script(Written),
    "skips": Script(Skips),
    "sent_then_written": Script(SentThenWritten),
    "stale_view": Script(StaleView),
    "identity": Script(Identity, masked_batch, evaluates=(1,)),
    "own_state": Script(lambda: OwnState(reads_later=False), evaluates=(1,), attributes=("calls",)),
    "own_state_read_later": Script(lambda: OwnState(reads_later=True), evaluates=(1,), attributes=("calls",)),
    "other_ways": Script(OtherWays, ways_batch, steps=5),
    "asks_dtype": Script(AsksDtype),
    "detached": Script(Detached, loss=reads_inside),
    "patched": Script(Patched),
    "hooked": Script(Hooked, evaluates=(1,)),
    "conjugated": Script(Conjugated),
    "penalty": Script(Penalty),
    "inner_step": Script(InnerStep),
    "late_mean": Script(LateMean),
    "leaks": Script(Leaks),
    "compiled": Script(compiled_block),
}
