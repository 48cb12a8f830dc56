"""Rules of contractions: over a sharded dim the result is a term of a sum, along a kept one a shard."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from meshwright.apply.tensor.types.lattice import PARTIAL, VARYING, RefusedError, Type, shard
from meshwright.apply.tensor.types.operation import Operation, mixing, words

__all__: list[str] = []

PRODUCTS = words(
    """
    linear matmul rmatmul mm bmm mv dot inner vdot addmm addbmm baddbmm addmv outer ger einsum conv1d conv2d
    conv3d conv_transpose1d conv_transpose2d conv_transpose3d bilinear
    """
)

_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def product(op: Operation) -> list[Type]:
    """Follow a contraction as an einsum, and the addition of a bias."""
    operands, terms, result, added = _as_einsum(op)
    found = _contracted(op, operands, terms, result)
    for tensor in added:
        _check_added(op, tensor, found, len(result))
    return op.all(found)


def _contracted(op: Operation, operands: list[Tensor], terms: list[str], result: str) -> Type:
    types = [op.type(tensor) for tensor in operands]
    if any(kind.kind == "varying" for kind in types):
        return VARYING
    if any(kind.kind == "partial" for kind in types):
        if [kind.kind for kind in types].count("partial") > 1 or any(kind.kind == "shard" for kind in types):
            op.refuse_partial()
        return PARTIAL
    letters = {term[kind.dim] for kind, term in zip(types, terms, strict=True) if kind.dim is not None}
    if not letters:
        return Type("replicated")
    if len(letters) > 1:
        raise RefusedError(f"sums over, or keeps, two sharded dims at once: {op.told()}")
    (letter,) = letters
    for tensor, kind, term in zip(operands, types, terms, strict=True):
        if letter in term and (kind.dim is None or term[kind.dim] != letter) and tensor.shape[term.index(letter)] != 1:
            raise RefusedError(f"pairs the entries of a sharded dim with those of a replicated one: {op.told()}")
    return shard(result.index(letter)) if letter in result else PARTIAL


def _check_added(op: Operation, tensor: Any, found: Type, num_dims: int) -> None:
    """Refuse a bias whose type is not that of the product."""
    if not isinstance(tensor, Tensor):
        return
    own = op.type(tensor)
    if own.is_zero:
        return
    if found.kind == "partial":
        if own.kind != "partial":
            raise RefusedError(mixing(next(value for value in op.inputs if value.tensor is tensor)))
        return
    if own.kind == "partial":
        raise RefusedError(f"adds a term of a sum (partial) to {found}")
    if found.kind == "varying":
        return
    if op.name.startswith("conv"):
        wanted = 0 if found.dim == 1 else None
    else:
        at = None if found.dim is None else found.dim - num_dims + tensor.dim()
        wanted = at if at is not None and at >= 0 and (own.dim == at or tensor.shape[at] != 1) else None
    if own.dim != wanted:
        raise RefusedError(f"adds a bias that is {own} to what is {found}")


def _as_einsum(op: Operation) -> tuple[list[Tensor], list[str], str, list[Any]]:
    """Return (operands, their letters, the result's letters, the bias)."""
    a: Any = op.argument(0, "input", "self")
    b: Any = op.argument(1, "weight", "other", "mat2", "tensor", "vec2")
    if op.name == "einsum":
        return _einsum(op)
    if op.name == "linear":
        lead = _LETTERS[: a.dim() - 1]
        return [a, b], [f"{lead}y", "zy"[-b.dim() :]], f"{lead}z" if b.dim() > 1 else lead, [op.argument(2, "bias")]
    if op.name.startswith("conv"):
        return _convolution(op)
    if op.name in ("addmm", "baddbmm", "addbmm", "addmv"):
        b, c = op.argument(1, "mat1", "batch1"), op.argument(2, "mat2", "batch2", "vec")
        return [b, c], *_matmul(b, c), [a]
    if op.name in ("outer", "ger"):
        return [a, b], ["y", "z"], "yz", []
    if op.name == "inner" and a.dim() > 1 and b.dim() > 1:
        lead, other = _LETTERS[: a.dim() - 1], _LETTERS[a.dim() : a.dim() + b.dim() - 1]
        return [a, b], [f"{lead}y", f"{other}y"], lead + other, []
    if op.name == "bilinear":
        raise RefusedError("no rule for bilinear of tensors that are not replicated")
    first, second = (b, a) if op.name == "rmatmul" else (a, b)
    return [first, second], *_matmul(first, second), []


def _matmul(a: Tensor, b: Tensor) -> tuple[list[str], str]:
    if a.dim() == 1 and b.dim() == 1:
        return ["y", "y"], ""
    if b.dim() == 1:
        lead = _LETTERS[: a.dim() - 1]
        return [f"{lead}y", "y"], lead
    if a.dim() == 1:
        lead = _LETTERS[: b.dim() - 2]
        return ["y", f"{lead}yz"], f"{lead}z"
    lead = _LETTERS[: max(a.dim(), b.dim()) - 2]
    first, second = lead[len(lead) - a.dim() + 2 :], lead[len(lead) - b.dim() + 2 :]
    return [f"{first}xy", f"{second}yz"], f"{lead}xz"


def _einsum(op: Operation) -> tuple[list[Tensor], list[str], str, list[Any]]:
    equation, *rest = op.args
    operands = [tensor for item in rest for tensor in (item if isinstance(item, (list, tuple)) else [item])]
    if not isinstance(equation, str):
        raise RefusedError("no rule for einsum of lists")
    words, arrow, result = equation.replace(" ", "").partition("->")
    terms = words.split(",")
    if not arrow:
        letters = "".join(terms).replace(".", "")
        dots = "..." if "." in words else ""
        result = dots + "".join(letter for letter in sorted(set(letters)) if letters.count(letter) == 1)
    counts = [tensor.dim() - len(term.replace(".", "")) for tensor, term in zip(operands, terms, strict=True)]
    most = "".join(chr(0x391 + place) for place in range(max(counts)))
    spread = [term.replace("...", most[len(most) - count :]) for term, count in zip(terms, counts, strict=True)]
    if any(len(set(term)) != len(term) for term in spread):
        raise RefusedError("no rule for an einsum with a letter twice in one operand")
    return operands, spread, result.replace("...", most), []


def _convolution(op: Operation) -> tuple[list[Tensor], list[str], str, list[Any]]:
    data, weight = op.argument(0, "input"), op.argument(1, "weight")
    is_turned = op.name.startswith("conv_transpose")
    space = _LETTERS[: weight.dim() - 2]
    lead = "n" if data.dim() == weight.dim() else ""
    kernel = space.upper()
    own = op.type(data)
    if own.dim is not None and own.dim > len(lead):
        raise RefusedError(f"reads across the sharded dim {own.dim}")
    bias = [op.argument(2, "bias")]
    groups_at = 6  # in both
    if op.groups(groups_at, "groups")[1] == 1:
        letters = f"yz{kernel}" if is_turned else f"zy{kernel}"
        return [data, weight], [f"{lead}y{space}", letters], f"{lead}z{space}", bias
    # In groups: channels of the data, the weight's first dim and the result's channels are divided together.
    if own.dim == len(lead):
        op.check_groups(groups_at, "groups", data, len(lead))
    return [data, weight], [f"{lead}z{space}", f"zy{kernel}"], f"{lead}z{space}", bias


def attention(op: Operation) -> list[Type]:
    """Follow scaled_dot_product_attention: heads, samples and dims that are not summed over may be sharded."""
    query, key, value = op.args[0], op.argument(1, "key"), op.argument(2, "value")
    mask = op.argument(3, "attn_mask")
    op.refuse_partial()
    types = [op.type(tensor) for tensor in (query, key, value)]
    # Counted from the right, as the mask is.
    places = {kind.dim - query.dim() for kind in types if kind.dim is not None}
    if len(places) != 1:
        raise RefusedError(f"takes parts along different dims: {op.told()}")
    (place,) = places
    if place == -1 and types[0].dim is None and types[1].dim is None:
        return op.all(types[2])
    if place == -2 and types[1].dim is None and types[2].dim is None and not op.argument(5, "is_causal", default=False):
        _check_mask(op, mask, -2)
        return op.all(types[0])
    if place >= -2:
        raise RefusedError(f"sums over the sharded dim {place}: {op.told()}")
    for tensor, kind in zip((query, key, value), types, strict=True):
        if kind.dim is None and tensor.dim() >= -place and tensor.shape[place] != 1:
            raise RefusedError(f"pairs heads in parts with replicated ones: {op.told()}")
    _check_mask(op, mask, place)
    return op.all(shard(place + op.outputs[0].dim()))


def _check_mask(op: Operation, mask: Any, place: int) -> None:
    if not isinstance(mask, Tensor):
        return
    own = op.type(mask)
    at = mask.dim() + place
    if own.kind == "replicated" and at >= 0 and mask.shape[at] != 1:
        raise RefusedError("takes a replicated mask with an entry for each of what is in parts")
    if own.dim is not None and own.dim != at:
        raise RefusedError(f"takes a mask that is {own}")
