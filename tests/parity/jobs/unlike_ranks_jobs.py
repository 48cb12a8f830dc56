"""Pipelines whose ranks are not alike, or whose model is called, hooked or changed beside its steps; ranks import them."""

from __future__ import annotations

from typing import Any

import torch
from tests.parity.jobs.never_wrong_pipeline_jobs import apply_script, own_rank
from tests.parity.jobs.never_wrong_pipeline_states import Stack, plain_batch, square
from tests.parity.jobs.textbook_loop import losses_of
from torch import Tensor, nn

import meshwright as mw


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
            except mw.UserCodeError as error:
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

        def wrong(meta: Any, route: Any) -> Tensor:
            tensor = receive(meta, route)
            if route.micro_batch == 0:
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


def replace_before_the_first_batch(plan: str, starts: str, *, on_one_rank: bool) -> None:
    """Replace a layer of an applied model, then start in one of the ways there are."""
    with apply_script(Stack, plan=plan) as model:
        if own_rank() == 0 or not on_one_rank:
            model.module.blocks[1][0] = nn.Linear(6, 6).double()
        if starts == "forward":
            model(plain_batch(0)[0])
        elif starts == "evaluate":
            model.evaluate(plain_batch(0))
        else:
            model.step(plain_batch(0))


def run_plain_losses(steps: int) -> list[float]:
    batches = [plain_batch(step) for step in range(steps)]
    torch.manual_seed(0)
    return losses_of(Stack().double(), batches, square)


def step_after_a_forward(plan: str) -> list[float]:
    with apply_script(Stack, plan=plan) as model:
        model(plain_batch(0)[0])
        return [model.step(plain_batch(step)).loss for step in range(2)]


def step_with_a_backward_hook(plan: str, inside: bool) -> float:
    """Hook the gradients of a layer, or of a module inside of one; its gradients are doubled there."""
    with apply_script(Stack, plan=plan) as model:
        hooked = model.module.blocks[1][0] if inside else model.module
        hooked.register_full_backward_hook(lambda _m, given, _o: tuple(2 * gradient for gradient in given))
        return model.step(plain_batch(0)).grad_norm


def plain_norm_with_a_backward_hook() -> float:
    torch.manual_seed(0)
    module = Stack().double()
    module.blocks[1][0].register_full_backward_hook(lambda _m, given, _o: tuple(2 * gradient for gradient in given))
    square(module(plain_batch(0)[0]), None).backward()
    return float(torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None]).norm())


def step_with_an_early_average() -> float:
    with apply_script(Stack) as model:
        average = torch.optim.swa_utils.AveragedModel(model.module)
        model.step(plain_batch(0))
        average.update_parameters(model.module)
        return model.step(plain_batch(1)).loss
