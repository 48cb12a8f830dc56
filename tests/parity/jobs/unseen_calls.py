"""Models that decide by sizes, by what surrounds a call and by numbers, and scripts that change it."""

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


def entropy(outputs: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(outputs.reshape(-1, VOCABULARY), batch[1].reshape(-1))


class Script:
    """A model, and what a training script does with it."""

    num_steps = 3
    lengths = (5,)
    evaluates: tuple[int, ...] = ()

    def build(self) -> nn.Module:
        return Net(Block(), Block())

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return entropy(outputs, batch)

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
