"""Selective recompute: what is kept, what is not, and that every other operator is the device's own."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import meshwright as mw
from meshwright._torch_dispatch import KeptBy, run_once
from meshwright.apply.recompute import kept
from meshwright.apply.recompute.foreign_writes import digest


class Block(nn.Module):
    """A block that does something between two layers.

    Args:
        act: Called with the block, its number of forwards so far, and a product; returns what takes the product's place.
    """

    def __init__(self, act: Callable[[Block, int, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.act = act
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        h = self.act(self, self.calls, self.a(x))
        return x + self.b(torch.tanh(h)) * h


def _steps(act: Any, plan: str, dtype: torch.dtype) -> list[Any]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 8), Block(act), Block(act), nn.Linear(8, 3)).to(dtype)
    optimizer = functools.partial(torch.optim.SGD, lr=0.1)
    found: list[Any] = []
    with mw.apply_plan(module, plan, loss_fn=lambda out, _: out.square().mean(), optimizer=optimizer) as model:
        for step in range(3):
            x = torch.linspace(-1, 1 + step, 48, dtype=dtype).reshape(6, 8)
            found += [torch.tensor(model.step((x, x)).loss), *model.full_gradients().values()]
    return found


def _norms(block: Block, _: int, h: Tensor) -> Tensor:
    h = F.gelu(F.layer_norm(h, (8,)))
    return h + F.group_norm(h[..., None], 2)[..., 0] + F.mish(h).softmax(-1)


def _by_data_later(_: Block, calls: int, h: Tensor) -> Tensor:
    if calls > 1:
        _halve(h)
    return h


def _halve(h: Tensor) -> None:
    h.data.mul_(0.5)


def _by_numpy(_: Block, _calls: int, h: Tensor) -> Tensor:
    h.detach().numpy()[:] *= 0.5
    return h


def _by_numpy_later(_: Block, calls: int, h: Tensor) -> Tensor:
    if calls > 1:
        h.detach().numpy()[:] *= 0.5
    return h


def _by_address(_: Block, _calls: int, h: Tensor) -> Tensor:
    getattr(h.detach(), "num" + "py")()[:] *= (
        0.5  # a name that is not looked up, as in a library that is given an address
    )
    return h


def _in_inference(block: Block, _: int, h: Tensor) -> Tensor:
    with torch.inference_mode():
        scale = block.b(h.detach())
    return h * scale.clone()


def _after_a_failure(block: Block, _: int, h: Tensor) -> Tensor:
    try:
        block.b(h.float() if h.dtype != torch.float32 else h.double())
    except RuntimeError:
        h = block.b(h)
    return h


def _forward_mode(block: Block, _: int, h: Tensor) -> Tensor:
    result, tangent = torch.func.jvp(lambda t: torch.tanh(block.b(t)) + t, (h,), (torch.ones_like(h),))
    return result + 0.1 * tangent


def _without_values(_: Block, _calls: int, h: Tensor) -> Tensor:
    return h * len(torch.empty(2, 3, device="meta") + 1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_operators_that_are_not_kept_have_the_same_bits(dtype: torch.dtype) -> None:
    without, found = (_steps(_norms, plan, dtype) for plan in ("single", "recompute=selective"))
    assert [place for place, pair in enumerate(zip(found, without, strict=True)) if not torch.equal(*pair)] == []


@pytest.mark.parametrize(
    "act",
    [
        *(_by_data_later, _by_numpy, _by_numpy_later, _by_address),
        *(_in_inference, _after_a_failure, _forward_mode, _without_values),
    ],
)
def test_a_layer_may(act: Any) -> None:
    without, found = (_steps(act, plan, torch.float64) for plan in ("single", "recompute=selective"))
    assert [place for place, pair in enumerate(zip(found, without, strict=True)) if not torch.equal(*pair)] == []


@pytest.mark.parametrize("sees_all", [True, False])
@pytest.mark.parametrize("stops", [True, False])
def test_a_forward_may_compute_gradients(sees_all: bool, stops: bool) -> None:
    """Torch repeats it then before it is over, and under an inspection to its end: it was refused, or kept what it repeated."""
    weight, other = (torch.linspace(low, 1, 16, dtype=torch.float64).reshape(4, 4).requires_grad_() for low in (-1, 0))

    def run(x: Tensor) -> Tensor:
        y = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(torch.tanh(torch.tanh(y @ weight) @ other).sum(), y, create_graph=True)
        return torch.tanh((x - slope) @ weight) @ other + torch.tanh(slope @ other) @ weight

    x = torch.linspace(-1, 1, 16, dtype=torch.float64).reshape(4, 4)
    expected = torch.autograd.grad(run(x).square().sum(), (weight, other))
    writes = kept.UnseenWrites()
    for _ in range(3):
        contexts = functools.partial(kept.keeping_contexts, writes, sees_all=sees_all)
        with set_checkpoint_early_stop(stops):
            result = checkpoint(run, x, use_reentrant=False, context_fn=contexts)
            found = torch.autograd.grad(result.square().sum(), (weight, other))
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def _gradient_of_a_function(block: Block, _: int, h: Tensor) -> Tensor:
    return torch.func.grad(lambda t: block.b(t).sum())(h)


def _nested(_: Block, _calls: int, h: Tensor) -> Tensor:
    return torch.nested.nested_tensor_from_jagged(h, torch.tensor([0, 2, len(h)])).sin().values()


@pytest.mark.parametrize("kind", ["full", "selective"])
@pytest.mark.parametrize(
    ("act", "message"), [(_gradient_of_a_function, "torch.func"), (_nested, "saves other tensors")]
)
def test_what_torch_cannot_repeat_is_refused_with_a_fix(act: Any, message: str, kind: str) -> None:
    with pytest.raises(mw.ApplyError, match=f"(?s){message}.*fix: use recompute=none"):
        _steps(act, f"recompute={kind}", torch.float64)
    assert _steps(act, "recompute=none", torch.float64)


@pytest.mark.parametrize("device", ["CPU", "CUDA", "Meta"])
def test_only_kept_operators_have_another_kernel(device: str) -> None:
    """Torch puts kernels for all devices (composite) before a fallback: layer_norm ran one, with other bits."""
    kept._hand_over()
    own = {"aten::" + str(each).removeprefix("aten.").removesuffix(".default") for each in kept.DEAR_OPERATORS}
    registered = torch._C._dispatch_get_registrations_for_dispatch_key
    # What chooses its device first arrives at the device, or runs what the device has.
    unlike = set(registered(device)) - own - {"aten::_unsafe_view"} - set(registered("BackendSelect"))
    tables = {name: torch._C._dispatch_dump_table(name).splitlines() for name in unlike}
    places = {name: next(line for line in rows if line.startswith("CustomRNGKeyId:")) for name, rows in tables.items()}
    assert places
    assert [name for name, line in places.items() if "default backend" in line or "math kernel" in line] == []


def test_what_a_kept_kernel_calls_is_not_kept() -> None:
    """Where the kernel's result is given in the repetition, what it calls is not called."""
    kept._hand_over()
    seen: list[str] = []

    def keeper(operator: Any, run: Callable[[], Any], args: Any, kwargs: Any) -> Any:
        seen.append(str(operator))
        torch.mm(args[0], args[1])
        return run()

    with KeptBy(keeper):
        torch.mm(torch.ones(2, 2), torch.ones(2, 2))
        torch.mm(torch.ones(2, 2), torch.ones(2, 2))
    assert seen == ["aten.mm.default"] * 2


def test_threads_that_come_together_run_a_registration_once() -> None:
    # Replicas of data_parallel came to their first recompute together, and torch refused the second registration.
    runs: list[str] = []

    @run_once
    def register() -> None:
        runs.append(threading.current_thread().name)
        if threading.current_thread() is not late:
            late.start()
            late.join(0.2)  # it waits, or has run it a second time

    late = threading.Thread(target=register, name="late")
    register()
    late.join(5)
    assert not late.is_alive()
    assert runs == ["MainThread"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int8, torch.complex128], ids=str)
def test_a_digest_tells_values_and_places(dtype: torch.dtype) -> None:
    tensor = (torch.arange(24).reshape(4, 6) - 7).to(dtype)
    others = [tensor * 2, -tensor, tensor.flip(0), tensor + 1, tensor[:, :5], tensor.roll(1, 1)]
    assert len({digest(each) for each in (tensor, *others)}) == 7
    assert digest(tensor) == digest(tensor.clone()) == digest(tensor.t().contiguous().t())
    column = tensor[
        :, 1
    ]  # of one dim, whose entries do not lie side by side: a layer called with `ids[:, t]` was an error
    assert digest(column) == digest(column.clone())
    assert digest(torch.empty(2, device="meta")) is None
