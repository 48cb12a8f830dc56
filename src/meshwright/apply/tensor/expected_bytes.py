"""Expected bytes of tensor parallelism in a step, for layouts of plain regions on one stream."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from meshwright.apply.forecast import Forecast, SeenStep
from meshwright.apply.state.undisturbed import is_trying
from meshwright.apply.tensor.cutting import find_tensor, is_inside
from meshwright.apply.tensor.inspection import is_inspecting
from meshwright.apply.tensor.tensor_layout import Region, TensorLayout
from meshwright.describe.batches import model_inputs
from meshwright.traffic import TensorExchange, tensor_bytes

__all__: list[str] = []

_PLAIN_ROLES = {"column", "row", "vocabulary", "head"}


class TokenWatch:
    """Counts the output tokens of each Linear and embedding until it is closed: a layer may run twice, or on pooled tokens.

    Args:
        module: The module, cut or to be cut; copies made of it meanwhile are not counted.
    """

    def __init__(self, module: nn.Module) -> None:
        self.tokens: dict[int, int] = {}
        watched = [child for child in module.modules() if isinstance(child, nn.Linear | nn.Embedding)]
        own, tokens = {id(child) for child in watched}, self.tokens

        def note(child: nn.Module, _: Any, outputs: Any) -> None:
            if id(child) in own and not (is_trying() or is_inspecting()):
                tokens[id(child)] = tokens.get(id(child), 0) + math.prod(outputs.shape[:-1])

        self._hooks = [child.register_forward_hook(note) for child in watched]

    def close(self) -> None:
        """Stop counting."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def fits(self, module: nn.Module, layout: TensorLayout, num_tokens: int, num_ranks: int) -> bool:
        """Tell whether each region ran once, on this number of tokens, as `exchange_of` assumes."""
        on_slices = [name for chain in layout.chains for name in chain.layers]
        for region in layout.regions:
            for name, role in region.roles.items():
                is_slice = role == "row" and any(is_inside(region.scope, layer) for layer in on_slices)
                expected = num_tokens / num_ranks if is_slice else num_tokens
                if role != "column" and self.tokens.get(id(module.get_submodule(name))) != expected:
                    return False
        return True


class TensorForecast(Forecast):
    """Layers shared by ranks: what their regions exchange, and what the engine inside sends.

    Args:
        module: The module, cut or to be cut.
        num_ranks: Ranks that share each layer [count].
        inside: Gives the layout and the forecast of the engine inside, once the module is cut.
    """

    def __init__(
        self, module: nn.Module, num_ranks: int, inside: Callable[[], tuple[TensorLayout | None, Forecast]]
    ) -> None:
        self._module = module
        self._num_ranks = num_ranks
        self._inside = inside
        self._watch = TokenWatch(module)
        self._inner = Forecast()
        self._over_tp: float | None = None

    def end_watching(self) -> None:
        self._watch.close()

    def learn(self, step: SeenStep) -> None:
        layout, self._inner = self._inside()
        self._inner.learn(step)
        self._over_tp = None if layout is None else self._exchanged(step, layout)

    def _exchanged(self, step: SeenStep, layout: TensorLayout) -> float | None:
        """Return what this rank sends over tp; None where the layout, or the step, has more than the formula knows [bytes]."""
        plan, num_ranks = step.plan, self._num_ranks
        if not step.is_cross_entropy or (plan.cp, plan.precision, plan.recompute) != (1, "fp32", "none"):
            return None
        args, kwargs = model_inputs(step.batch)
        inputs = [*args, *kwargs.values()]
        if len(inputs) != 1 or not _is_ids(inputs[0]) or inputs[0].shape[1] % num_ranks:
            return None
        if not self._watch.fits(self._module, layout, inputs[0].numel(), num_ranks):
            return None
        tokens = inputs[0].shape[1] * step.num_samples / plan.num_shares
        exchange = exchange_of(self._module, layout, round(tokens), num_ranks)
        return None if exchange is None else exchange.sent_bytes(num_ranks)

    def sent_bytes(self) -> float | None:
        inner = self._inner.sent_bytes()
        return None if self._over_tp is None or inner is None else self._over_tp + inner


def exchange_of(module: nn.Module, layout: TensorLayout, num_tokens: int, num_ranks: int) -> TensorExchange | None:
    """Return the exchanges of a layout's regions, or None where one is not plain.

    Plain regions are Linears of one width, an embedding and a head, with everything trained in one dtype. The caller must know
    that each runs once on all tokens (`TokenWatch`), and that the loss is cross-entropy.

    Args:
        module: The cut module.
        layout: The layout.
        num_tokens: Tokens of a rank in a step, over all micro-batches [count].
        num_ranks: Ranks that share each layer [count].
    """
    parameters = list(module.parameters())
    dtypes = {parameter.dtype for parameter in parameters}
    widths = [_width(module, region) for region in layout.regions]
    if None in widths or len(set(widths)) != 1 or len(dtypes) != 1 or not all(p.requires_grad for p in parameters):
        return None
    if any(chain.whole_inputs for chain in layout.chains) or num_ranks < 2:
        return None
    roles = [role for region in layout.regions for role in region.roles.values()]
    in_chains = {name for chain in layout.chains for name in chain.layers}
    rows = [region for region in layout.regions if "row" in region.roles.values()]
    on_slices = sum(any(is_inside(region.scope, name) for name in in_chains) for region in rows)
    # One more entry for each says whether a rank has a gradient for it.
    found = [find_tensor(module, name) for name in layout.partial]
    partial = {id(tensor): tensor.nbytes + tensor.itemsize for tensor in found}
    return tensor_bytes(
        num_tokens,
        widths[0] or 0,
        next(iter(dtypes)).itemsize,
        regions=len(rows) - on_slices,
        regions_on_slices=on_slices,
        chains=len(layout.chains),
        embeddings=roles.count("vocabulary"),
        heads=roles.count("head"),
        partial_bytes=sum(partial.values()),
    )


def _is_ids(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 2 and not value.is_floating_point()


def _width(module: nn.Module, region: Region) -> int | None:
    """Return the input and output width of a region; None where it is not plain or the two differ."""
    roles = list(region.roles.values())
    if not set(roles) <= _PLAIN_ROLES or region.shared or region.inputs or region.results:
        return None
    if region.partial or region.once or roles.count("row") != int("column" in roles):
        return None
    widths: set[int] = set()
    for name, role in region.roles.items():
        child = module.get_submodule(name)
        if role == "vocabulary" and isinstance(child, nn.Embedding) and not child.sparse:
            widths.add(child.embedding_dim)
        elif role != "vocabulary" and isinstance(child, nn.Linear):
            widths.add(child.weight.shape[0] if role == "row" else child.weight.shape[1])
        else:
            return None
    return widths.pop() if len(widths) == 1 else None
