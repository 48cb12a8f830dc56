"""Loss functions of the parity tests, as users write them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import meshwright as mw


def square(outputs: Tensor, batch: Any) -> Tensor:
    return (outputs - batch[1]).square().mean()


def weighted_square(outputs: Tensor, batch: Any) -> Tensor:
    """Like `square`, with entries of very different sizes, so that a clip factor has something to do."""
    return 30 * (outputs - batch[1]).square().mean()


def square_by_key(outputs: Any, batch: dict[str, Tensor]) -> Tensor:
    first = outputs[0] if isinstance(outputs, tuple) else outputs
    return (first - batch["targets"]).square().mean()


def square_of_first(outputs: tuple[Tensor, Tensor], batch: Any) -> Tensor:
    return (outputs[0] - batch[1]).square().mean()


def cross_entropy(outputs: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, -2), batch[1].flatten())


def valid_tokens(outputs: Tensor, batch: Any) -> mw.Loss:
    """Sum over the labels that are not -100, weighted by their number."""
    labels = batch[1].flatten()
    total = F.cross_entropy(outputs.flatten(0, -2), labels, ignore_index=-100, reduction="sum")
    return mw.Loss(total, (labels != -100).sum())


def logits_cross_entropy(outputs: Any, batch: Any) -> Tensor:
    """Cross-entropy of what Hugging Face's models return."""
    return cross_entropy(outputs.logits, batch)


def logits_valid_tokens(outputs: Any, batch: Any) -> mw.Loss:
    return valid_tokens(outputs.logits, batch)


def summed_square(outputs: Tensor, batch: Any) -> mw.Loss:
    """The same as `square`, as a sum and a weight."""
    return mw.Loss((outputs - batch[1]).square().sum(), outputs.numel())


def summed_square_of_first(outputs: tuple[Tensor, Tensor], batch: Any) -> mw.Loss:
    return summed_square(outputs[0], batch)


def nodes(outputs: Tensor, batch: Any) -> mw.Loss:
    return mw.Loss((outputs - batch["targets"]).square().sum(), outputs.shape[0])


def of_container(outputs: Any, batch: Any) -> Tensor:
    """Find the logits in whatever the model returned."""
    if isinstance(outputs, dict) and not hasattr(outputs, "logits"):
        logits = outputs["logits"]
    elif hasattr(outputs, "logits"):
        logits = outputs.logits
    else:
        logits = outputs[1][0][0]
    return (logits - batch[1]).square().mean()


def difference_of_scores(outputs: tuple[Tensor, Tensor], batch: Any) -> Tensor:
    return outputs[0].mean() - outputs[1].mean()


def with_penalty(outputs: Tensor, batch: Any) -> Tensor:
    """A loss that differentiates inside: the graph is used twice before the step's own backward."""
    main = (outputs - batch[1]).square().mean()
    (slope,) = torch.autograd.grad(main * outputs.shape[0], outputs, retain_graph=True, create_graph=True)
    return main + slope.square().mean()


def not_finite_where_marked(outputs: Tensor, batch: Any) -> Tensor:
    """Becomes NaN where a sample's target is marked by 1e9."""
    marked = (batch[1] == 1e9).any(1, keepdim=True)
    factor = torch.where(marked, torch.nan, 1.0).to(outputs.dtype)
    return (outputs * factor - batch[1].clamp(max=10)).square().mean()
