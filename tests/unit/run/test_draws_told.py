"""Draws of which the first batch does not show how they hold the samples, or that draw by no place: proven, or told."""

from __future__ import annotations

import functools
import random
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.tolerances import FLOAT64
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import meshwright as mw
from meshwright.apply.randomness.forward_draws import ForwardDraws
from meshwright.apply.randomness.sites import begin_again, in_forward
from meshwright.run.draw_parts import are_alike, are_parts
from meshwright.run.draws_of_torch import why_torch_draws

SAMPLES, LENGTH, WIDTH = 7, 5, 4


class Base(nn.Module):
    """A layer on sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Scaled(Base):
    """Noise for flattened sequences, the samples innermost, that a buffer of zeros scales at first."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.randn(LENGTH * len(x), WIDTH, dtype=x.dtype).view(LENGTH, len(x), WIDTH).transpose(0, 1)
        return self.layer(x + self.weight * noise)


class Pooled(Base):
    """Pools by torch's attention, as vision towers do whose pooled output the loss leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.frames = nn.MultiheadAttention(WIDTH, 2, dropout=0.5, batch_first=True), 1

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        rows = x if self.frames == 1 else x.repeat_interleave(self.frames, 0)
        probe = rows.new_ones(len(rows), 1, WIDTH)
        return self.layer(x), self.attention(probe, rows, rows)[0].view(len(x), -1) * 0


class OfFrames(Pooled):
    """The same of several frames a sample, which may lie in two orders."""

    def __init__(self) -> None:
        super().__init__()
        self.frames = 2


class OwnGenerator(Base):
    """Keeps a generator of Python's."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = random.Random(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * (1 + self.generator.random())


class InThread(Base):
    """Draws in another thread."""

    def forward(self, x: Tensor) -> Tensor:
        drawn: list[Tensor] = []
        thread = threading.Thread(target=lambda: drawn.append(torch.rand(x.shape, dtype=x.dtype)))
        thread.start()
        thread.join()
        return self.layer(x) + drawn[0]


class InBackward(Base):
    """Adds noise to a gradient, and draws nothing in its forward."""

    def forward(self, x: Tensor) -> Tensor:
        result = self.layer(x)
        if result.requires_grad:
            result.register_hook(lambda gradient: gradient + torch.randn_like(gradient))
        return result


class Loose(Base):
    """Repeats its dropout in backward without the generator's state of its forward."""

    def forward(self, x: Tensor) -> Tensor:
        def run(x: Tensor) -> Tensor:
            return F.dropout(self.layer(x), 0.5)

        result: Any = checkpoint(run, x, use_reentrant=False, preserve_rng_state=False)
        return result


class OwnNoise(Base):
    """Adds noise of a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.noise = torch.Generator().manual_seed(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + torch.randn(x.shape, dtype=x.dtype, generator=self.noise)


class InTurn(Base):
    """Draws two times for each sample in a loop: an order of its sequence, and noise for its entries that are not zero."""

    def forward(self, x: Tensor) -> Tensor:
        found: list[Tensor] = []
        for one in x:
            order = torch.multinomial(torch.ones(LENGTH), LENGTH)
            noise = torch.rand(int((one != 0).sum()), dtype=x.dtype)
            found.append(self.layer(one[order]) * (1 + noise.mean()))
        return torch.stack(found)


class TimeFirst(Base):
    """Draws for each entry of the sequences, and inside of that for each sample."""

    def forward(self, x: Tensor) -> Tensor:
        noise = [torch.stack([torch.rand(WIDTH, dtype=x.dtype) for _ in x]) for _ in range(LENGTH)]
        return self.layer(x * torch.stack(noise, 1))


class Reversed(Base):
    """Draws for each sample, the last one first; a buffer of zeros scales the numbers at first."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        noise = [torch.rand(WIDTH, dtype=x.dtype) for _ in reversed(range(len(x)))][::-1]
        return self.layer(x + self.weight * torch.stack(noise).unsqueeze(1))


class ByValue(Base):
    """Draws for each sample, in the order of their first entries."""

    def forward(self, x: Tensor) -> Tensor:
        noise = x.new_zeros(len(x), 1, WIDTH)
        for index in x[:, 0, 0].argsort().tolist():
            noise[index] = torch.rand(WIDTH, dtype=x.dtype)
        return self.layer(x + noise)


class Sorted(Base):
    """Drops entries of its samples in the order of their first entries, as code for packed recurrences does by lengths."""

    def forward(self, x: Tensor) -> Tensor:
        order = x[:, 0, 0].argsort()
        return F.dropout(self.layer(x[order]), 0.5)[order.argsort()]


class ForSome(Base):
    """Draws for each sample whose first entry is not zero."""

    def forward(self, x: Tensor) -> Tensor:
        noise = [torch.rand(WIDTH, dtype=x.dtype) if float(one[0, 0]) else one.new_zeros(WIDTH) for one in x]
        return self.layer(x) + torch.stack(noise).unsqueeze(1)


class Permuted(Base):
    """Adds to each sample another one, by chance."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x + x[torch.randperm(len(x))])


class Antithetic(Base):
    """Draws for one sample more than half of them, and takes the opposite for the others: two samples do not show it."""

    def forward(self, x: Tensor) -> Tensor:
        drawn = torch.randint(0, 100, (len(x) // 2 + 1,))
        return self.layer(x) * (1 + torch.cat([drawn, 99 - drawn])[: len(x), None, None])


class Grouped(Base):
    """Normalises groups of one value, which torch refuses of one sample alone, between dropouts."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        pooled = F.dropout(self.norm(self.layer(x).mean(1)), 0.5)
        return F.dropout(self.layer(x), 0.5) + pooled[:, None]


class Flattened(Base):
    """Gives flattened sequences beside one row for each sample."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        found = self.layer(x)
        return found.flatten(0, 1), found.mean(1)


def _build(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind().double()


def _mean(outputs: Tensor, _: Any) -> Tensor:
    return outputs.square().sum((1, 2)).mean()


def _dropped(outputs: Tensor, _: Any) -> Tensor:
    """Drop entries of flattened sequences, the samples innermost."""
    flat = outputs.transpose(0, 1).flatten(0, 1)
    return F.dropout(flat, 0.5).view(LENGTH, len(outputs), WIDTH).square().sum((0, 2)).mean()


def _train(
    kind: type[nn.Module], line: str, loss: Any = _mean, *, batches: Sequence[Tensor] | None = None, seed: int = 3
) -> tuple[list[float], tuple[str, ...]]:
    batch = torch.randn(SAMPLES, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    model = mw.apply_plan(functools.partial(_build, kind), line, loss_fn=loss, optimizer=sgd, seed=seed)
    losses = [model.step((inputs, None)).loss for inputs in batches or [batch, batch]]
    model.close()
    return losses, model.plan.reasons


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Scaled, "does not show in what order draw 0 of the model itself holds the samples"),
        (Reversed, "does not show in what order draw 0 of the model itself holds the samples"),
        (OwnGenerator, "a generator that the model's code keeps"),
        (InThread, "where it cannot be seen"),
        (InBackward, "code that runs in backward draws"),
        (Loose, "preserve_rng_state=False) repeats draw 0 of the model itself in backward with other numbers"),
    ],
)
def test_what_may_depend_on_the_layout_is_told(kind: type[nn.Module], words: str) -> None:
    assert any(words in reason for reason in _train(kind, "micro_batches=3")[1])


@pytest.mark.parametrize("line", ["micro_batches=3", "micro_batches=2,recompute=full"])
def test_draws_of_a_loop_over_samples_are_known_by_the_sample(line: str) -> None:
    """An order of patches for each sample (ViLT): its second micro-batch had drawn what the first one's samples had."""
    batches = [torch.randn(SAMPLES, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)]
    batches[0][1, 2:] = batches[0][5, 4:] = 0  # the shape of a sample's draw is its own
    expected, _ = _train(InTurn, "single", batches=batches * 2)
    losses, reasons = _train(InTurn, line, batches=batches * 2)
    assert losses == pytest.approx(expected, rel=FLOAT64)
    assert not [reason for reason in reasons if "rng" in reason]


def test_draws_of_a_loop_around_one_over_samples_are_known_by_the_sample() -> None:
    batch = torch.randn(SAMPLES, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected, _ = _train(TimeFirst, "single", batches=[batch, batch[:5]])
    losses, reasons = _train(TimeFirst, "micro_batches=3", batches=[batch, batch[:5]])
    assert losses == pytest.approx(expected, rel=FLOAT64)
    assert not [reason for reason in reasons if "rng" in reason]


@pytest.mark.parametrize(("kind", "is_told"), [(Pooled, False), (OfFrames, True)])
def test_the_order_of_samples_in_torchs_attention_is_known(kind: type[nn.Module], is_told: bool) -> None:
    reasons = _train(kind, "micro_batches=3", lambda outputs, _: outputs[0].square().mean())[1]
    assert any("does not show in what order" in reason for reason in reasons) is is_told


def test_a_norm_that_refuses_one_sample_is_tried_all_the_same() -> None:
    expected, _ = _train(Grouped, "single")
    losses, reasons = _train(Grouped, "micro_batches=3")  # of 3, 2 and 2 samples; parts are tried of 3, 2, 2 and of 1
    assert losses == pytest.approx(expected, rel=FLOAT64)
    assert not [reason for reason in reasons if "rng" in reason]


@pytest.mark.parametrize("kind", [ByValue, Sorted])
def test_an_order_of_values_is_told_where_the_first_batch_is_in_that_order(kind: type[nn.Module]) -> None:
    first = torch.randn(SAMPLES, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    first[:, 0, 0] = torch.arange(SAMPLES)
    reasons = _train(kind, "micro_batches=3", batches=[first])[1]
    assert any("did not give the outputs of the whole" in reason for reason in reasons)


@pytest.mark.parametrize("kind", [Permuted, Antithetic])
def test_draws_that_two_samples_show_by_chance_alone_are_told(kind: type[nn.Module]) -> None:
    # A permutation of two is none half of the time.
    for seed in range(3):
        first = torch.randn(6, LENGTH, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        reasons = _train(kind, "micro_batches=3", batches=[first], seed=seed)[1]
        assert any("did not give the outputs of the whole" in reason for reason in reasons)


def test_a_loop_that_leaves_samples_out_later_is_told() -> None:
    first = torch.randn(SAMPLES, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    later = first.clone()
    later[2, 0, 0] = 0
    assert not [reason for reason in _train(ForSome, "micro_batches=3", batches=[first, first])[1] if "rng" in reason]
    reasons = _train(ForSome, "micro_batches=3", batches=[first, later])[1]
    assert any("has not drawn 1 times for each sample" in reason for reason in reasons)


def test_a_model_that_draws_from_its_own_generator_is_refused_by_the_generators_place() -> None:
    with pytest.raises(mw.ApplyError, match=r"a generator of its own, 'OwnNoise\.noise'"):
        _train(OwnNoise, "micro_batches=3")


@pytest.mark.parametrize("is_minor", [False, True])
def test_flattened_outputs_beside_others_are_taken_in_parts(is_minor: bool) -> None:
    """Labels of the last micro-batches had been looked at beside flattened outputs of others."""

    def loss(outputs: tuple[Tensor, Tensor], batch: Any) -> Tensor:
        flat, pooled = outputs
        turned = flat.view(-1, LENGTH, WIDTH).transpose(0, 1).flatten(0, 1) if is_minor else flat
        labels = batch[0][..., 0].T.flatten() if is_minor else batch[0][..., 0].flatten()
        return F.mse_loss(turned[:, 0], labels) + pooled.square().mean()

    assert _train(Flattened, "micro_batches=3", loss)[0] == pytest.approx(
        _train(Flattened, "single", loss)[0], rel=FLOAT64
    )


def test_the_order_of_samples_in_a_loss_is_found() -> None:
    assert _train(Base, "micro_batches=3", _dropped)[0] == pytest.approx(
        _train(Base, "single", _dropped)[0], rel=FLOAT64
    )


@pytest.mark.parametrize("is_minor", [False, True])
def test_flattened_outputs_are_compared_too(is_minor: bool) -> None:
    rows = torch.arange(12.0).view(4, 3) + 1  # samples, entries of each

    def flat(part: Tensor) -> Tensor:
        return (part.T if is_minor else part).flatten()

    def trial(part: Tensor, flattened: Tensor) -> Any:
        return SimpleNamespace(num_samples=len(part), outputs=[flattened, part[:, 0]])

    pieces: Any = [trial(rows[:1], flat(rows[:1])), trial(rows[1:], flat(rows[1:]))]
    assert are_parts(trial(rows, flat(rows)), pieces)
    assert not are_parts(trial(rows, flat(rows).flip(0)), pieces)


@pytest.mark.parametrize("values", [[True, False], [1, 2], [1.0, -torch.inf], [1 + 1j, 1 - 1j]])
def test_masks_counts_and_infinities_of_two_runs_are_compared(values: list[Any]) -> None:
    """A mask that a model drew and returned had ended in an error of torch; infinities of masked scores were told apart."""
    one = torch.tensor(values)
    assert are_alike([one], [one.clone()])
    assert not are_alike([one], [one.flip(0)])


def test_a_compiled_function_draws_by_itself_where_ranks_share_layers() -> None:
    module = Base()

    def compiled(x: Tensor) -> Tensor:
        return F.dropout(x)

    vars(compiled)["_torchdynamo_orig_callable"] = compiled  # as torch.compile marks its functions
    vars(module)["function"] = compiled
    assert why_torch_draws(module, num_replicas=1, shares_layers=False) is None
    assert "torch.compile" in (why_torch_draws(module, num_replicas=1, shares_layers=True) or "")


def test_another_stage_of_a_rank_numbers_its_draws_from_the_start() -> None:
    forward = ForwardDraws(0, 2)
    with in_forward(forward):
        assert [forward.next_call("layer") for _ in range(2)] == [("layer", 0), ("layer", 1)]
        begin_again()
    assert forward.next_call("layer") == ("layer", 0)
