"""Scripts of `unseen_calls.py` and `unseen_tensors.py`, run by ranks and by one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.parity.jobs.unseen_calls import (
    SIZES,
    VOCABULARY,
    Autocast,
    Block,
    Counting,
    Flagged,
    FunctionMode,
    Gradients,
    HookOfAll,
    Inference,
    Lengths,
    Net,
    Script,
    entropy,
)
from tests.parity.jobs.unseen_tensors import (
    BackwardHooks,
    HookInLoss,
    InnerCalls,
    Kept,
    LateHooks,
    NewBuffer,
    OddBuffer,
    OwnCalls,
    Reentrant,
    Skipped,
    SkippedViews,
    WritesData,
    WrittenBuffer,
)
from torch import Tensor, nn

import meshwright as mw
from meshwright.apply.tensor.guards import part_guard
from meshwright.apply.tensor.proof.proof import Experiment

SCRIPTS: dict[str, Callable[[], Script]] = {
    **{f"sizes {choose.__name__}": (lambda choose=choose: Lengths(choose)) for choose in SIZES},
    "autocast": Autocast,
    "gradients": Gradients,
    "hook of all modules": HookOfAll,
    "function mode": FunctionMode,
    "inference": Inference,
    "counting buffer": Counting,
    "flag in an attribute": Flagged,
    "hook in the loss": HookInLoss,
    "late hooks": LateHooks,
    "kept gradients": Kept,
    "backward hooks": BackwardHooks,
    "skipped layers": Skipped,
    "skipped layers that give views": SkippedViews,
    "data written early": lambda: WritesData(late=False),
    "data written late": lambda: WritesData(late=True),
    "new buffer": NewBuffer,
    "odd buffer": OddBuffer,
    "written buffer": WrittenBuffer,
    "reentrant checkpoints": Reentrant,
    "inner calls": InnerCalls,
    "own calls": OwnCalls,
}

Seen = list[tuple[float, dict[str, Tensor | None]]]


def _cloned(tensors: Any) -> dict[str, Tensor | None]:
    return {name: None if tensor is None else tensor.detach().clone() for name, tensor in tensors}


def run_plan(name: str, plan: str) -> tuple[Seen, list[str]]:
    """Return losses and gradients of each step, and values at the end; and what the plan says."""
    script = SCRIPTS[name]()
    sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.1)  # noqa: E731
    model = mw.apply_plan(script.made, plan, loss_fn=script.loss, optimizer=sgd)
    seen: Seen = []
    try:
        for step in range(script.num_steps):
            script.before(step, model.module)
            batch = mw.split_batch(script.batch(step), model)
            with script.around(step):
                result = model.step(batch)
            seen.append((result.loss, _cloned(model.full_gradients().items())))
            if step in script.evaluates:
                seen.append((model.evaluate(batch)["loss"], {}))
        seen.append((0.0, _cloned(model.full_state_dict().items())))
        return seen, list(model.plan.reasons)
    finally:
        model.close()


def run_plain(name: str) -> Seen:
    """Return the same of one plain process."""
    script = SCRIPTS[name]()
    module = script.made()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    seen: Seen = []
    for step in range(script.num_steps):
        script.before(step, module)
        batch = script.batch(step)
        with script.around(step):
            loss = script.loss(module(batch[0]), batch)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
        gradients = _cloned((key, parameter.grad) for key, parameter in module.named_parameters())
        optimizer.step()
        seen.append((float(loss.detach()), gradients))
        if step in script.evaluates:
            module.eval()
            with torch.no_grad():
                seen.append((float(script.loss(module(batch[0]), batch)), {}))
            module.train()
    seen.append((0.0, _cloned(module.state_dict().items())))
    return seen


# -- how often is proven ------------------------------------------------------------------------------------------


class _Alternating(Net):
    """Lengths, modes and arguments that alternate; the layers ask for all of them."""

    def forward(self, ids: Tensor, last: bool = False) -> Tensor:
        x = self.emb(ids)
        for layer in self.layers:
            x = layer(x, last)
        return self.head(x)


class _Asking(Block):
    def forward(self, x: Tensor, last: bool = False) -> Tensor:
        h = self.up(self.ln(x))
        h = F.relu(h) if 1.0 / x.shape[1] < 0.2 else F.gelu(h)
        h = h if self.training else F.silu(h)
        return x + self.down(h * 2 if last else h)


def count_own_proofs(*, are_alike: bool) -> tuple[int, int]:
    """Return the proofs that were made while the model ran, and those of them that this rank has run itself.

    Args:
        are_alike: Whether structures and calls have one digest on all ranks; otherwise each rank's is its own.
    """
    own: list[Any] = []
    world = mw.current_world()
    rank = 0 if world is None else world.rank

    class Counted(Experiment):
        def __init__(self, *args: Any, **options: Any) -> None:
            own.append(args)
            super().__init__(*args, **options)

    def build() -> nn.Module:
        torch.manual_seed(0)
        return _Alternating(_Asking(), _Asking()).double()

    model = mw.apply_plan(build, "tp=2", loss_fn=entropy, optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1))
    with pytest.MonkeyPatch.context() as patch, model:
        for length in (3, 6):
            ids = torch.randint(VOCABULARY, (4, length + 1), generator=torch.Generator().manual_seed(length))
            model.step(({"ids": ids[:, :-1]}, ids[:, 1:]))
            patch.setattr(part_guard, "Experiment", Counted)  # from the second step on: another size
            if not are_alike:
                patch.setattr(part_guard, "digest", lambda _: f"{rank:x}00")
        engine: Any = model.engine
        return sum(part.guard.num_proofs for part in engine.cutting.parts), len(own)


def count_proofs(num_rounds: int) -> list[int]:
    """Return the proofs that were made while the model ran, after each round of all combinations."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        return _Alternating(_Asking(), _Asking()).double()

    model = mw.apply_plan(build, "tp=2", loss_fn=entropy, optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1))
    counts: list[int] = []
    try:
        for _ in range(num_rounds):
            for length, last in ((3, False), (6, True), (3, True), (6, False)):
                ids = torch.randint(VOCABULARY, (4, length + 1), generator=torch.Generator().manual_seed(length))
                batch = {"ids": ids[:, :-1], "last": last}, ids[:, 1:]
                model.step(batch)
                model.evaluate(batch)
            engine: Any = model.engine
            parts = engine.cutting.parts
            counts.append(sum(part.guard.num_proofs for part in parts))
        return counts
    finally:
        model.close()
