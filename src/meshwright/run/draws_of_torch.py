"""Models for which torch's generators draw, whatever `rng` says."""

from __future__ import annotations

from torch import nn

from meshwright.apply.randomness.gpu import is_there
from meshwright.apply.state.outside import Outside

__all__: list[str] = []


def why_torch_draws(module: nn.Module, *, num_replicas: int, shares_layers: bool) -> str | None:
    """Return why torch's generators draw for a model, whatever `rng` says; None where numbers go by place.

    Args:
        module: The model.
        num_replicas: Devices of this process that share the batch out [count].
        shares_layers: Whether other ranks have parts of the same layers.
    """
    if num_replicas > 1:
        return "devices of one process (data_parallel) draw from one generator"
    if any(_is_compiled(child) for child in module.modules()):
        return "code that torch.compile has compiled draws by itself"
    if shares_layers and any(hasattr(own, "_torchdynamo_orig_callable") for own in Outside.of(module).functions):
        # Only some ranks run a function in proofs, and compile it there: their calls would be seen, and the others' not.
        return "a function that torch.compile has compiled may draw by itself on some of the ranks that share layers"
    slow = [
        device for device in {p.device for p in module.parameters()} if device.type != "cpu" and not is_there(device)
    ]
    if slow:
        return f"numbers by place have no kernel on {slow[0].type}, and torch operators would make a dropout far slower"
    return None


def _is_compiled(module: nn.Module) -> bool:
    return type(module).__name__ == "OptimizedModule" or vars(module).get("_compiled_call_impl") is not None
