"""Expected bytes of tensor parallelism in a step, for layouts of plain regions on one stream."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from meshwright.apply.data.expected_bytes import data_formula_bytes
from meshwright.apply.engine import Engine
from meshwright.apply.state.undisturbed import is_trying
from meshwright.apply.tensor.cutting import find_tensor, is_inside
from meshwright.apply.tensor.engine import TensorEngine
from meshwright.apply.tensor.inspection import is_inspecting
from meshwright.apply.tensor.tensor_layout import Region, TensorLayout
from meshwright.describe.batches import model_inputs
from meshwright.spec.plan import Plan
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


def tensor_formula_bytes(engine: Engine, plan: Plan, batch: Any, num_samples: float, watch: TokenWatch) -> float | None:
    """Return the bytes that one rank of a plan with tp sends in a step, derived from the layout, over tp and dp.

    Args:
        engine: The engine that cuts the model, after a step; it is not closed yet.
        plan: The plan.
        batch: A batch as this rank gets it.
        num_samples: Samples in a step over all ranks, on average [count].
        watch: What counted the step that took this batch.

    Returns:
        The bytes [bytes]; None where the formula does not cover the layout.
    """
    if not isinstance(engine, TensorEngine):
        return None
    over_tp = tensor_part_bytes(engine, plan, batch, num_samples, watch)
    over_dp = data_formula_bytes(engine.module, engine.inner, plan)
    return None if over_tp is None or over_dp is None else over_tp + over_dp


def tensor_part_bytes(
    engine: TensorEngine, plan: Plan, batch: Any, num_samples: float, watch: TokenWatch
) -> float | None:
    """Return the bytes that one rank sends over tp alone in a step; see `tensor_formula_bytes`.

    Args:
        engine: The engine that cuts the model, or one rank's stages of it; it is not closed yet.
        plan: The plan.
        batch: A batch as this rank gets it.
        num_samples: Samples in a step over all ranks, on average [count].
        watch: What counted the step that took this batch.
    """
    if engine.cutting is None or (plan.cp, plan.precision, plan.recompute) != (1, "fp32", "none"):
        return None
    args, kwargs = model_inputs(batch)
    inputs = [*args, *kwargs.values()]
    if len(inputs) != 1 or not _is_ids(inputs[0]) or inputs[0].shape[1] % plan.tp:
        return None
    if not watch.fits(engine.module, engine.cutting.layout, inputs[0].numel(), plan.tp):
        return None
    tokens = inputs[0].shape[1] * num_samples / plan.dp
    exchange = exchange_of(engine.module, engine.cutting.layout, round(tokens), plan.tp)
    return None if exchange is None else exchange.sent_bytes(plan.tp)


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
