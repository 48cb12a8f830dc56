"""Parameters whose gradients are sparse: those cannot lie in flat memory."""

from __future__ import annotations

from torch import nn

__all__: list[str] = []


def names_with_sparse_gradients(module: nn.Module) -> set[str]:
    """Return the FQNs of embeddings that produce sparse gradients; these cannot lie in flat memory."""
    sparse_ids = {
        id(child.weight)
        for child in module.modules()
        if isinstance(child, (nn.Embedding, nn.EmbeddingBag)) and child.sparse
    }
    return {name for name, parameter in module.named_parameters() if id(parameter) in sparse_ids}
