"""Models that begin to mix samples, or to scale them otherwise, after the first batch; for ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from tests.parity.jobs.late_jobs import BLOCKS, Block, batch, build, mean, sgd
from torch import Tensor, nn
from torch.distributed import is_initialized

import meshwright as mw


class Mixing(Block):
    """A block that centres its input over the batch once it is told to."""

    mixes: Any = False

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(0, keepdim=True) if self.mixes else x)


class Scaling(Block):
    """A block that scales its input by a number that a script may set."""

    factor = 1.0

    def scale(self) -> Any:
        """Return what the input is multiplied by."""
        return self.factor


class Counting(Mixing):
    """A block that counts its calls, and centres its input from the twenty-first on."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0

    @property
    def mixes(self) -> bool:
        """Whether it does so."""
        return self.num_calls > 20

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        return super().forward(x)


class MixingInEvaluation(Block):
    """A block that centres its input over the batch where it does not train."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if self.training else x - x.mean(0, keepdim=True))


BLOCKS.update({kind.__name__: kind for kind in (Mixing, MixingInEvaluation, Scaling, Counting)})


def centre(_module: nn.Module, _inputs: Any, outputs: Tensor) -> Tensor:
    return outputs - outputs.mean(0, keepdim=True)


def mixed_later(plan: str, how: str = "attribute") -> None:
    """Have blocks mix samples from the second step on: told by an attribute, by a mode, or by a hook on a block or on a layer."""
    module = build("MixingInEvaluation" if how == "mode" else "Mixing")
    model = mw.apply_plan(module, plan, loss_fn=mean, optimizer=sgd)
    model.step(mw.split_batch(batch(0), model))
    for block in module.blocks:
        if how == "attribute":
            vars(block)["mixes"] = True
        elif how == "mode":
            block.eval()
        else:
            layer = block if how == "hook" else next(child for child in block.modules() if isinstance(child, nn.Linear))
            layer.register_forward_hook(centre)
    model.step(mw.split_batch(batch(1), model))


class WithMask(nn.Module):
    """Outputs are centred over the batch where a mask is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3).double()

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = self.layer(x).tanh()
        return y if mask is None else y - (y * mask).mean(0, keepdim=True)


def mixed_where_masked(plan: str) -> None:
    """Give a mask from the second step on."""
    model = mw.apply_plan(WithMask(), plan, loss_fn=lambda outputs, _: outputs.square().mean(), optimizer=sgd)
    data = {"x": torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))}
    model.step(mw.split_batch(data, model))
    data["mask"] = torch.ones(6, 1, dtype=torch.float64)
    model.step(mw.split_batch(data, model))


class Reducing(Block):
    """A block that centres its input over the batches of all processes, as code does that knows of several."""

    asks = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.asks or is_initialized():
            mean_of_all = x.detach().mean(0)
            dist.all_reduce(mean_of_all)
            x = x - mean_of_all / dist.get_world_size()
        return super().forward(x)


class Asking(Reducing):
    """The like, where there are several."""

    asks = True


class Choosing(Reducing):
    """A block that chooses so when it is built."""

    def __init__(self) -> None:
        super().__init__()
        self.reduces = dist.is_available() and is_initialized()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.reduces else Block.forward(self, x)


BLOCKS.update({kind.__name__: kind for kind in (Reducing, Asking, Choosing)})


def reduced(plan: str, kind: str = "Reducing") -> list[float]:
    """Return the losses of steps with a model whose code calls a collective, after a script has called one."""
    model = mw.apply_plan(lambda: build(kind), plan, loss_fn=mean, optimizer=sgd)
    dist.all_reduce(torch.ones(1))
    losses = [model.step(mw.split_batch(batch(step), model)).loss for step in range(3)]
    assert dist.is_initialized()
    return losses


def scaled_later(plan: str) -> list[float]:
    """Have blocks scale their input by another number in each step."""
    module = build("Scaling")
    model = mw.apply_plan(module, plan, loss_fn=mean, optimizer=sgd)
    losses: list[float] = []
    for step in range(4):
        for block in module.blocks:
            vars(block)["factor"] = 1.0 + step
        losses.append(model.step(mw.split_batch(batch(step), model)).loss)
    return losses


def counted_up(plan: str) -> int:
    """Return the step at which a model is refused that counts its calls."""
    model = mw.apply_plan(build("Counting"), plan, loss_fn=mean, optimizer=sgd)
    for step in range(40):
        try:
            model.step(mw.split_batch(batch(step), model))
        except mw.ApplyError as error:
            assert "mixes the samples of a batch" in error.message  # noqa: PT017 - the step is asked for
            return step
    return 40


class OwnLoss(nn.Module):
    """A loss of the model's own that is a mean over samples with the first batch alone."""

    num_steps: Tensor

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.strength = how, 0.0
        # Under tp a part that may drop begins numbers of each rank's own, which is no draw of the model's in eval mode.
        self.layer = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 3)).double()
        self.register_buffer("num_steps", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor, labels: Tensor, mask: Tensor) -> dict[str, Tensor]:
        outputs = self.layer(x)
        losses = nn.functional.cross_entropy(outputs, labels, reduction="none")
        if self.how == "mask":
            return {"loss": (losses * mask).sum() / mask.sum()}
        if self.how == "classes":
            weights = torch.tensor([1.0, 3.0, 0.2], dtype=torch.float64)[labels]
            return {"loss": (losses * weights).sum() / weights.sum()}
        if self.how == "training":
            spread = outputs.var(0, unbiased=False).sum()
            return {"loss": losses.mean() + self.training * self.strength * spread, "outputs": outputs}
        if self.training:
            self.num_steps += 1
        spread = outputs.var(0, unbiased=False).sum() * (self.num_steps - 2).clamp(0, 1)
        return {"loss": losses.mean() + spread}


def own_loss_until_refused(plan: str, how: str, late: int = 1) -> tuple[int, str]:
    """Return the step at which a model's own loss is refused, and why.

    At a step masks and classes begin to differ, and a script begins with a term of training alone.
    """
    model = mw.apply_plan(lambda: OwnLoss(how), plan, optimizer=sgd)
    for step in range(10):
        made = torch.Generator().manual_seed(step)
        labels = torch.randint(3, (8,), generator=made) if step >= late else torch.ones(8, dtype=torch.long)
        mask = torch.ones(8, dtype=torch.float64)
        if step >= late:
            mask[::3] = 0.0
        vars(model.module)["strength"] = float(step >= late)
        given = {"x": torch.randn(8, 3, generator=made, dtype=torch.float64), "labels": labels, "mask": mask}
        try:
            model.step(mw.split_batch(given, model))
        except mw.ApplyError as error:
            return step, error.message
    return 10, ""
