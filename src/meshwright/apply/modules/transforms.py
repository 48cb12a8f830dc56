"""Transforms of torch.func (grad, vjp, jacrev, jvp, vmap) around layers: what a plan cannot do there is refused by name."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Generator

from torch import nn

from meshwright._torch_dispatch import carries_tangents, is_transformed
from meshwright._torch_texts import says_no_saved_hooks
from meshwright.errors import ApplyError

__all__: list[str] = []

BESIDE_ZERO_3 = "beside ZeRO-3's hooks on what backward needs", "use zero=2"
"""Where `derivatives_refused` refuses under ZeRO-3, and its fix."""


@contextlib.contextmanager
def derivatives_refused(where: str, fix: str) -> Generator[None]:
    """Raise ApplyError where code in the context takes derivatives by torch.func, beside hooks on what backward needs.

    Args:
        where: In which torch does not allow them, for the error.
        fix: A plan that allows them.
    """
    try:
        yield
    except RuntimeError as error:
        if not says_no_saved_hooks(error):
            raise
        raise refusal(where, fix) from error


def refusal(where: str, fix: str) -> ApplyError:
    """Return the error that `derivatives_refused` raises."""
    return ApplyError(
        f"the forward computes derivatives with torch.func (grad, vjp, jacrev, jvp), which does not go {where}",
        fix=f"{fix}; or torch.autograd.grad with create_graph=True",
    )


def refuse_foreign_call(name: str, layer: nn.Module, known: Collection[int]) -> None:
    """Raise ApplyError where a layer runs with other parameters than its own, or inside of a transform of torch.func.

    Args:
        name: The layer.
        layer: The layer itself, about to run.
        known: Ids of the model's parameters.
    """
    if any(id(parameter) not in known for parameter in layer.parameters()):
        raise ApplyError(
            f"layer '{name}' runs with other parameters than its own (functional_call, or an inner step of training), "
            "and a pipeline stage holds only its own layers' parameters",
            fix="use pp=1 (dp, zero and tp allow it)",
        )
    if is_transformed() or carries_tangents():
        raise ApplyError(
            f"layer '{name}' runs inside of a transform of torch.func (vmap, jvp) or of torch.autograd.forward_ad, which the "
            "code between the layers calls: what these keep beside a tensor cannot be sent to another stage",
            fix="use pp=1 (dp and zero=2 allow it); or call the transform inside of one layer",
        )
