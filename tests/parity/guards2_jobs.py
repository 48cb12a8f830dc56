"""Models that decide by what guards have to see, and scripts that change it; run by ranks and by one process."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import meshwright as mw

VOCABULARY, WIDTH, HIDDEN = 11, 8, 12


def mixed(h: Tensor) -> Tensor:
    """What is wrong on a part of the hidden entries."""
    return torch.softmax(h, -1)


class Block(nn.Module):
    """A feed-forward layer whose activation `choose` decides by its input."""

    def __init__(self, choose: Callable[[Tensor], bool] | None = None) -> None:
        super().__init__()
        self.ln = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.choose = choose

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(self.ln(x))
        mixes = self.choose is not None and self.choose(x)
        return x + self.down(mixed(h) if mixes else F.gelu(h))


class Net(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.emb = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.emb(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def _entropy(outputs: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(outputs.reshape(-1, VOCABULARY), batch[1].reshape(-1))


class Script:
    """A model, and what a training script does with it."""

    num_steps = 3
    lengths = (5,)
    evaluates: tuple[int, ...] = ()

    def build(self) -> nn.Module:
        return Net(Block(), Block())

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return _entropy(outputs, batch)

    def before(self, step: int, module: nn.Module) -> None:
        """Change something."""

    def around(self, step: int) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def batch(self, step: int) -> Any:
        generator = torch.Generator().manual_seed(step)
        length = self.lengths[step % len(self.lengths)]
        ids = torch.randint(VOCABULARY, (4, length + 1), generator=generator)
        return ids[:, :-1], ids[:, 1:]

    def made(self) -> nn.Module:
        torch.manual_seed(0)
        return self.build().double()


# -- sizes --------------------------------------------------------------------------------------------------------


class Lengths(Script):
    """Batches whose lengths alternate, and a layer that decides by them; from 5 on it mixes its entries."""

    lengths = (3, 6)

    def __init__(self, choose: Callable[[Tensor], bool]) -> None:
        self._choose = choose

    def build(self) -> nn.Module:
        return Net(Block(self._choose), Block(self._choose))


def by_division(x: Tensor) -> bool:
    return 1.0 / x.shape[1] < 0.2


def by_range(x: Tensor) -> bool:
    return any(place > 4 for place in range(x.shape[1]))


def by_table(x: Tensor) -> bool:
    return {3: False, 6: True}[int(x.shape[1])]


def by_key(x: Tensor) -> bool:
    return x.size(1) in {6, 7}


def by_list(x: Tensor) -> bool:
    return [False, False, False, True, True, True][x.shape[1] - 1]


def by_root(x: Tensor) -> bool:
    return math.sqrt(x.size(1)) > 2.2


def by_text(x: Tensor) -> bool:
    return f"{x.shape[1]}" == "6"


def by_positions(x: Tensor) -> bool:
    return bool((torch.arange(x.shape[1]) > 4).any())


def by_padding(x: Tensor) -> bool:
    return F.pad(x, (0, 0, 0, 1)).shape[1] > 6


def by_samples(x: Tensor) -> bool:
    return x.flatten(0, 1).shape[0] > 20


def by_rows(x: Tensor) -> bool:
    return len(x.unbind(1)) > 4


SIZES = [
    by_division,
    by_range,
    by_table,
    by_key,
    by_list,
    by_root,
    by_text,
    by_positions,
    by_padding,
    by_samples,
    by_rows,
]


# -- what surrounds a call ----------------------------------------------------------------------------------------


class _Autocast(Net):
    is_on = False

    def forward(self, ids: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=self.is_on):
            return super().forward(ids)


class Autocast(Script):
    """Autocast is on in the second step, and float64 takes no notice of it but for a branch."""

    def build(self) -> nn.Module:
        return _Autocast(Block(_is_autocast), Block(_is_autocast))

    def before(self, step: int, module: Any) -> None:
        module.is_on = step == 1


def _is_autocast(_: Tensor) -> bool:
    return torch.is_autocast_enabled("cpu")


class Gradients(Lengths):
    """A branch on whether gradients are on, and evaluations."""

    lengths = (5,)
    evaluates = (0, 1)

    def __init__(self) -> None:
        super().__init__(lambda _: not torch.is_grad_enabled())


def _mix_hidden(_: nn.Module, __: Any, outputs: Any) -> Any:
    return mixed(outputs) if outputs.shape[-1] == HIDDEN else None


class HookOfAll(Script):
    """A hook of all modules of the process, in the second step."""

    def around(self, step: int) -> contextlib.AbstractContextManager[Any]:
        stack = contextlib.ExitStack()
        if step == 1:
            stack.callback(register_module_forward_hook(_mix_hidden).remove)
        return stack


class _MixGelu(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (mixed if func is F.gelu else func)(*args, **(kwargs or {}))


class FunctionMode(Script):
    """A mode of the user's that changes what a function does, in the second step."""

    def around(self, step: int) -> contextlib.AbstractContextManager[Any]:
        return _MixGelu() if step == 1 else contextlib.nullcontext()


class _Inference(Net):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.emb(ids)
        with torch.inference_mode():
            scale = float(self.layers[0](x).mean())
        return self.head(self.layers[1](x) + self.layers[0](x) * scale)


class Inference(Script):
    """A layer that is called in inference mode, too."""

    def build(self) -> nn.Module:
        return _Inference(Block(), Block())


# -- numbers ------------------------------------------------------------------------------------------------------


class _Counting(Block):
    def __init__(self) -> None:
        super().__init__()
        self.count: Tensor
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        h = self.up(self.ln(x))
        return x + self.down(mixed(h) if self.count > 3 else F.gelu(h))


class Counting(Script):
    """A buffer that counts, and decides in the fourth step."""

    num_steps = 5

    def build(self) -> nn.Module:
        return Net(_Counting(), _Counting())


class _Flagged(Block):
    def __init__(self) -> None:
        super().__init__()
        self.flag = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(self.ln(x))
        return x + self.down(mixed(h) if self.flag > 0 else F.gelu(h))


class Flagged(Script):
    """A tensor in an attribute that decides, and is written into."""

    def build(self) -> nn.Module:
        return Net(_Flagged(), _Flagged())

    def before(self, step: int, module: Any) -> None:
        for layer in module.layers:
            layer.flag.fill_(float(step % 2))


# -- gradients of tensors in slices -------------------------------------------------------------------------------


def _norm_of(gradient: Tensor) -> Tensor:
    return gradient / gradient.norm()


class HookInLoss(Script):
    """A hook on logits of which cross-entropy took the slices before."""

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        loss = _entropy(outputs, batch)
        if outputs.requires_grad:
            outputs.register_hook(_norm_of)
        return loss


class _LateHooks(Net):
    def forward(self, ids: Tensor) -> Tensor:
        x, states = self.emb(ids), []
        for layer in self.layers:
            x = layer(x)
            states.append(x)
        outputs = self.head(x)
        for state in states:
            state.register_hook(_norm_of)
        return outputs


class LateHooks(Script):
    """Hooks on what layers gave, after the next ones took it."""

    def build(self) -> nn.Module:
        return _LateHooks(Block(), Block(), Block())


class _Kept(Net):
    """The gradient of what a layer gave, kept and taken: both scale the next step's outputs."""

    scale = 1.0
    state: Tensor | None = None

    def forward(self, ids: Tensor) -> Tensor:
        x = self.layers[0](self.emb(ids))
        outputs = self.head(self.layers[1](x))
        x.retain_grad()
        self.state = x
        (gradient,) = torch.autograd.grad(outputs.square().mean(), x, retain_graph=True)
        return outputs * self.scale + gradient.norm()


class Kept(Script):
    def build(self) -> nn.Module:
        return _Kept(Block(), Block(), Block())

    def before(self, step: int, module: Any) -> None:
        if step:
            module.scale = 1.0 + float(module.state.grad.norm())


def _scaled_gradient(_: nn.Module, gradients: Any, __: Any) -> Any:
    return tuple(None if gradient is None else _norm_of(gradient) for gradient in gradients)


class BackwardHooks(Script):
    """Backward hooks on modules inside of a layer, from the second step on."""

    def before(self, step: int, module: Any) -> None:
        if step == 1:
            for layer in module.layers:
                layer.down.register_full_backward_hook(_scaled_gradient)


# -- memory -------------------------------------------------------------------------------------------------------


class _Skipped(Block):
    skip = False

    def forward(self, x: Tensor) -> Tensor:
        return x if self.skip else super().forward(x)


class _SkippedView(_Skipped):
    def forward(self, x: Tensor) -> Tensor:
        return x[:] if self.skip else super().forward(x)


class _WritesOver(Net):
    """Writes over what layers give, and then uses what it gave them."""

    def forward(self, ids: Tensor) -> Tensor:
        x, given = self.emb(ids) * 1.0, []
        for layer in self.layers:
            y = layer(x)
            y = y.mul_(1.5) if layer.skip else y * 1.5
            given.append(x)
            x = y
        return self.head(x + sum(given))


class Skipped(Script):
    """Layers that give what they were given, in the second step."""

    def __init__(self, layer: type[nn.Module] = _Skipped) -> None:
        self._layer = layer

    def build(self) -> nn.Module:
        return _WritesOver(self._layer(), self._layer(), self._layer())

    def before(self, step: int, module: Any) -> None:
        for layer in module.layers:
            layer.skip = step == 1


class SkippedViews(Skipped):
    def __init__(self) -> None:
        super().__init__(_SkippedView)


class _WritesData(Net):
    def __init__(self, *layers: nn.Module, late: bool) -> None:
        super().__init__(*layers)
        self.late = late

    def forward(self, ids: Tensor) -> Tensor:
        x = self.layers[0](self.emb(ids))
        data = x.data
        if not self.late:
            data[:, 0] = 0.0
        y = self.layers[1](x)
        if self.late:
            data[:, 0] = 0.0
        return self.head(x + y)


class WritesData(Script):
    """Writes through .data, before the next layer takes the tensor or after."""

    def __init__(self, *, late: bool) -> None:
        self._late = late

    def build(self) -> nn.Module:
        return _WritesData(Block(), Block(), late=self._late)


class _Scaled(Block):
    def __init__(self) -> None:
        super().__init__()
        self.scale: Tensor
        self.register_buffer("scale", torch.ones(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.ln(x)) * self.scale))


class NewBuffer(Script):
    """A buffer over the hidden entries, for which whole ones are put in."""

    shape = HIDDEN

    def build(self) -> nn.Module:
        return Net(_Scaled(), _Scaled())

    def before(self, step: int, module: Any) -> None:
        for layer in module.layers if step else ():
            layer.scale = torch.arange(1, self.shape + 1).double() * 0.1 * step


class WrittenBuffer(NewBuffer):
    """The same, written into the buffer that is there."""

    def before(self, step: int, module: Any) -> None:
        for layer in module.layers if step else ():
            layer.scale.copy_(torch.arange(1, self.shape + 1).double() * 0.1 * step)


class OddBuffer(NewBuffer):
    shape = HIDDEN + 1


# -- ways to call -------------------------------------------------------------------------------------------------


class _Checkpointed(Net):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.emb(ids)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True)
        return self.head(x)


class Reentrant(Script):
    """Layers in checkpoints of the kind that runs a backward inside of backward."""

    def build(self) -> nn.Module:
        return _Checkpointed(Block(), Block())


class _Inner(Net):
    inner = False

    def forward(self, ids: Tensor) -> Tensor:
        x = self.emb(ids)
        layers: Any = self.layers
        for layer in layers:
            x = x + layer.down(mixed(layer.up(layer.ln(x)))) if self.inner else layer(x)
        return self.head(x)


class InnerCalls(Script):
    """Modules inside of layers that the model calls itself, from the second step on."""

    def build(self) -> nn.Module:
        return _Inner(Block(), Block())

    def before(self, step: int, module: Any) -> None:
        module.inner = step > 0


class OwnCalls(Script):
    """A module inside of a layer that the script calls between steps."""

    def before(self, step: int, module: Any) -> None:
        if step:
            module.layers[0].up(torch.ones(1, 2, WIDTH).double())


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


def count_proofs(num_rounds: int) -> list[int]:
    """Return the proofs that were made while the model ran, after each round of all combinations."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        return _Alternating(_Asking(), _Asking()).double()

    model = mw.apply_plan(build, "tp=2", loss_fn=_entropy, optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1))
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
