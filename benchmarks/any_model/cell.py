"""One cell: two steps of an architecture under a plan on every rank, compared there with what the plain loop recorded."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import random
import re
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.any_model import float64

float64.install()

import numpy as np  # noqa: E402
import torch  # noqa: E402
from benchmarks.any_model import recipes, vision  # noqa: E402
from benchmarks.error_rows import describe_error, without_folders  # noqa: E402
from torch import Tensor, nn  # noqa: E402

import meshwright as mw  # noqa: E402
from meshwright.apply.modules.copies import copy_module  # noqa: E402
from meshwright.apply.state.undisturbed import GeneratorStates  # noqa: E402
from meshwright.apply.tensor.search.search import Search  # noqa: E402
from meshwright.measure.plain_draws import PlainDraws  # noqa: E402
from meshwright.measure.recording import GradientRecorder, default_dtype  # noqa: E402

vision.load_if_there()
STEPS, LEARNING_RATE = 2, 0.05
_IN_A_BLOCK = re.compile(r"(^|\.)\d+\.")


class Build:
    """Builds a recipe's model; importable, so that ranks can do it."""

    def __init__(self, recipe: dict[str, Any]) -> None:
        self.recipe = recipe

    def __call__(self) -> nn.Module:
        import transformers

        transformers.logging.set_verbosity_error()
        return recipes.build(self.recipe)


# ---- the plain loop


def sizes_of_parts(num_samples: int, parts: int) -> list[int]:
    """Return the documented sizes of contiguous shares: the first n % parts get one more."""
    return [num_samples // parts + (index < num_samples % parts) for index in range(parts)]


def pieces(batch: dict[str, Tensor], ranks: int, micro_batches: int) -> Iterator[dict[str, Tensor]]:
    """Yield each rank's micro-batches, none of them empty."""
    start = 0
    for size in sizes_of_parts(_count(batch), ranks):
        for part in sizes_of_parts(size, micro_batches):
            if part:
                yield {name: value[start : start + part] for name, value in batch.items()}
            start += part


def train_plainly(
    recipe: dict[str, Any], ranks: int = 1, micro_batches: int = 1, *, turned: bool = False
) -> dict[str, Any]:
    """Train in a plain loop and return losses, gradients and parameters.

    Args:
        recipe: The recipe.
        ranks: The shares in which the batch is taken, for models whose samples see one another (BatchNorm).
        micro_batches: Micro-batches of each share.
        turned: Whether the samples of each of these come in the other order.
    """
    with default_dtype(torch.float64):
        torch.manual_seed(0)
        random.seed(0)  # of which layers may make a choice while they are built, as apply_plan seeds it
        np.random.seed(0)
        model = Build(recipe)()
        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
        losses, gradients = [], []
        draws = PlainDraws(0, None) if draws_numbers(model, recipe) else None
        for step in range(STEPS):
            optimizer.zero_grad()
            total, first = 0.0, 0
            for piece in pieces(recipes.make_batch(recipe, step), ranks, micro_batches):
                piece = {name: value.flip(0) for name, value in piece.items()} if turned else piece
                with contextlib.nullcontext() if draws is None else draws(step, model, piece, first):
                    loss = _loss(model, recipe, piece) * (_count(piece) / recipes.samples_of(recipe))
                    loss.backward()
                first += _count(piece)
                total += float(loss.detach())
            losses.append(total)
            gradients.append({n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()})
            optimizer.step()
        values = {name: p.detach().clone() for name, p in model.named_parameters()}
    return {"losses": losses, "gradients": gradients, "values": values, "draws": draws is not None}


def rounding_of(recipe: dict[str, Any], ranks: int, micro_batches: int) -> float:
    """Return by how much another order of each share's samples changes gradients in the plain loop, as cells measure it."""
    expected, found = (train_plainly(recipe, ranks, micro_batches, turned=turned) for turned in (False, True))
    steps = zip(found["gradients"], expected["gradients"], strict=True)
    return max(_difference(mine, wanted, "")[0] for mine, wanted in steps)


def draws_numbers(model: nn.Module, recipe: dict[str, Any]) -> bool:
    """Tell whether a forward draws random numbers: a mask of patches, positions of noise, dropout where it is on."""
    # Not copy.deepcopy: it refuses weights that a hook computes (weight_norm).
    trial = copy_module(model, lambda tensor: tensor.detach().clone())
    states = GeneratorStates(torch.device("cpu"))
    _loss(trial, recipe, recipes.make_batch(recipe, 0))
    have_moved = states.have_moved()
    states.restore()
    return have_moved


def _count(batch: dict[str, Tensor]) -> int:
    return len(next(iter(batch.values())))


def _loss(model: nn.Module, recipe: dict[str, Any], batch: dict[str, Tensor]) -> Tensor:
    outputs = model(**batch)
    loss_fn = recipes.loss_of(recipe)
    return outputs.loss if loss_fn is None else loss_fn(outputs, batch)


# ---- under a plan


def train_under_plan(recipe: dict[str, Any], line: str, reference: str) -> dict[str, Any]:
    """Train on this rank; return the differences from the plain loop, what was cut, and how long the first step took."""
    found: dict[str, Any] = {"error": None}
    model = None
    begin = time.perf_counter()
    try:
        expected = torch.load(Path(reference), weights_only=True)
        found["draws"] = expected["draws"]
        with default_dtype(torch.float64):
            model = mw.apply_plan(
                Build(recipe),
                mw.Plan.parse(line),
                loss_fn=recipes.loss_of(recipe),
                optimizer=functools.partial(torch.optim.SGD, lr=LEARNING_RATE),
                seed=0,
            )
            _train(model, recipe, expected, found)
    except Exception as error:
        found["error"] = describe_error(error)
        found["traceback"] = without_folders("".join(traceback.format_exception(error)))[-2500:]
    finally:
        if model is not None:
            with contextlib.suppress(Exception):
                model.close()
    found["all_s"] = round(time.perf_counter() - begin, 3)
    return found


def _train(model: Any, recipe: dict[str, Any], expected: dict[str, Any], found: dict[str, Any]) -> None:
    recorder = GradientRecorder(model)
    digest = hashlib.sha1(usedforsecurity=False)
    worst: tuple[float, str] = (0.0, "")
    for step in range(STEPS):
        begin, begin_cpu = time.perf_counter(), time.process_time()
        recorder.gradients = {}
        with _timed_search(found):
            result = model.step(mw.split_batch(recipes.make_batch(recipe, step), model))
        if step == 0:
            found["first_step_s"] = round(time.perf_counter() - begin, 3)
            found["first_step_cpu_s"] = round(time.process_time() - begin_cpu, 3)
            _note_plan(model, found, expected["gradients"][0])
        right = expected["losses"][step]
        worst = max(worst, (_off(torch.tensor(result.loss), torch.tensor(right)), f"loss {step}"))
        worst = max(worst, _difference(recorder.gradients, expected["gradients"][step], f"gradient {step} "))
        for name in sorted(recorder.gradients):
            value = recorder.gradients[name]
            digest.update(b"" if value is None else value.contiguous().numpy().tobytes())
    with model.whole_parameters():
        values = {name: p.detach().cpu() for name, p in model.module.named_parameters()}
        worst = max(worst, _difference(values, expected["values"], "value "))
    found.update(largest=worst[0], where=worst[1], digest=digest.hexdigest())


@contextlib.contextmanager
def _timed_search(found: dict[str, Any]) -> Iterator[None]:
    """Note the processor time of a search for layouts inside the context, which one rank runs for all."""
    layout = Search.layout

    def timed(self: Search, *, on_slices: bool = True) -> Any:
        begin = time.process_time()
        try:
            return layout(self, on_slices=on_slices)
        finally:
            found["search_cpu_s"] = round(time.process_time() - begin, 3)

    Search.layout = timed
    try:
        yield
    finally:
        Search.layout = layout


def _note_plan(model: Any, found: dict[str, Any], gradients: dict[str, Any]) -> None:
    """Note the plan's reasons, and which part of the blocks' parameters that this batch uses is cut."""
    reasons = [str(reason) for reason in model.plan.reasons]
    found["reasons"] = [reason[:400] for reason in reasons][:12]
    layouts = dict(model.plan.layouts)
    if layouts:
        sizes = {name: gradient.numel() for name, gradient in gradients.items() if gradient is not None}
        blocks = {name: size for name, size in sizes.items() if _IN_A_BLOCK.search(name)} or sizes
        found["blocks"] = blocks
        found["cut"] = [name for name in blocks if layouts.get(name, "whole") != "whole"]
        # Of these: put together for each use.
        found["stored"] = [name for name in blocks if layouts.get(name) == "stored"]


def _off(value: Tensor, right: Tensor) -> float:
    scale = max(float(right.abs().max()), 1e-9) if right.numel() else 1.0
    return float((value - right).abs().max()) / scale if right.numel() else 0.0


def _difference(found: dict[str, Any], right: dict[str, Any], what: str) -> tuple[float, str]:
    worst: tuple[float, str] = (0.0, "")
    if set(found) != set(right):
        return float("inf"), f"{what}names: {sorted(set(found) ^ set(right))[:4]}"
    top = max((float(v.abs().max()) for v in right.values() if v is not None and v.numel()), default=1.0)
    for name, value in right.items():
        mine = found[name]
        if value is None and mine is None:
            continue
        zero = torch.zeros_like(value if value is not None else mine)
        mine, wanted = (zero if mine is None else mine), (zero if value is None else value)
        if mine.shape != wanted.shape:
            return float("inf"), f"{what}{name}: shape {tuple(mine.shape)}"
        # A bias before a norm has a gradient of rounding alone, 1e-15 of the largest: another order of samples changes all of it.
        scale = max(float(wanted.abs().max()) if wanted.numel() else 0.0, 1e-6 * top, 1e-12)
        off = float((mine - wanted).abs().max()) / scale if wanted.numel() else 0.0
        worst = max(worst, (off if off == off else float("inf"), what + name))
    return worst
