"""Table of rules: function name -> rule. A function without a rule is refused where an argument is not replicated."""

from __future__ import annotations

from meshwright.apply.tensor.types import indexing, pointwise, products, reductions, views
from meshwright.apply.tensor.types.lattice import REPLICATED, VARYING, ZERO, RefusedError, Type, shard
from meshwright.apply.tensor.types.operation import Operation, Rule, words

__all__: list[str] = []

ZEROS = frozenset(["zeros", "zeros_like", "new_zeros"])
CONSTANTS = ZEROS | words(
    """
    ones ones_like full full_like empty empty_like new_ones new_full new_empty
    """
)
"""Every entry is the same, so that this rank's size of it is a part of the whole."""

NUMBERED = frozenset(["arange", "linspace", "logspace", "range", "eye", "tril_indices", "triu_indices", "meshgrid"])

DRAWS = words(
    """
    rand randn randint rand_like randn_like randint_like randperm bernoulli normal uniform exponential
    cauchy poisson random multinomial geometric log_normal gumbel_softmax rrelu
    """
)

_LOSSES = (
    "cross_entropy nll_loss mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy "
    "binary_cross_entropy_with_logits kl_div cosine_embedding_loss margin_ranking_loss ctc_loss poisson_nll_loss "
    "gaussian_nll_loss triplet_margin_loss hinge_embedding_loss soft_margin_loss cosine_similarity pairwise_distance cdist"
)
_PLACES = (
    "max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d "
    "adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d interpolate upsample lp_pool2d "
    "boolean_dispatch"
)


def _table() -> dict[str, Rule]:
    names = pointwise.LINEAR | pointwise.SCALING | pointwise.NONLINEAR | pointwise.DROPOUTS
    rules: dict[str, Rule] = dict.fromkeys(names, pointwise.pointwise)
    rules |= dict.fromkeys(pointwise.FILLS, pointwise.fill) | dict.fromkeys(["to", "type_as"], pointwise.cast)
    rules |= dict.fromkeys(views.VIEWS, views.view) | dict.fromkeys(views.JOINS, views.join)
    rules |= {"roll": views.roll, "pad": views.pad, "tril": views.triangle, "triu": views.triangle}
    rules |= dict.fromkeys(products.PRODUCTS, products.product)
    rules |= {"scaled_dot_product_attention": products.attention}
    rules |= dict.fromkeys(reductions.REDUCTIONS, reductions.reduction)
    rules |= dict.fromkeys(["layer_norm", "rms_norm"], reductions.last_dims)
    rules["weight_norm"] = reductions.weight_norm
    rules |= dict.fromkeys(["group_norm", "batch_norm", "instance_norm"], reductions.channels)
    rules |= dict.fromkeys(_PLACES.split(), reductions.places) | dict.fromkeys(_LOSSES.split(), reductions.loss)
    rules |= {"embedding": indexing.embedding, "getitem": indexing.item}
    rules |= dict.fromkeys(["gather", "take_along_dim", "index_select"], indexing.gather)
    written = "scatter scatter_add index_add index_copy index_fill setitem"
    rules |= dict.fromkeys(written.split(), indexing.put)
    rules["copy"] = indexing.copy
    rules |= dict.fromkeys(indexing.VALUE_SHAPED, indexing.refuse_value_shape)
    return rules


RULES = _table()


def result_types(op: Operation) -> list[Type]:
    """Return the types of a call's results.

    Raises:
        RefusedError: It does not compute what one device computes, or has no rule.
    """
    if op.name in DRAWS:
        return _drawn(op)
    if op.name == "setitem" and op.is_replicated:
        return [REPLICATED]
    if op.is_replicated or op.name.startswith("new_"):
        return _of_replicated(op)
    rule = RULES.get(op.name)
    if rule is None:
        raise RefusedError(f"there is no rule for it, and it takes {op.told()}")
    if op.kwargs.get("out") is not None:
        raise RefusedError("there is no rule for out=")
    found = rule(op)
    for index, (kind, _) in enumerate(zip(found, op.outputs, strict=True) if op.name != "setitem" else ()):
        _check_shape(op, index, kind)
    return found


def _check_shape(op: Operation, index: int, kind: Type) -> None:
    if op.wholes is None or kind.kind == "varying":
        return
    differing = op.differing(index)
    if differing not in ([], [kind.dim]):
        raise RefusedError(
            f"gives shape {list(op.outputs[index].shape)} on shards, {list(op.wholes[index])} of the whole"
        )


def _drawn(op: Operation) -> list[Type]:
    is_same = op.wholes is None or not any(op.differing(index) for index in range(len(op.outputs)))
    if not op.is_replicated or not is_same:
        raise RefusedError("draws random numbers for a part: they are not the whole's, or are the same on every rank")
    return op.all(REPLICATED)


def _of_replicated(op: Operation) -> list[Type]:
    """Follow replicated arguments: the result is replicated, unless it is made in this rank's size."""
    is_zero = op.name in ZEROS or (
        (op.name in views.VIEWS or op.name in ("getitem", "to", "clone", "contiguous", "mul"))
        and any(value.type.is_zero for value in op.inputs)
    )
    found: list[Type] = []
    for index in range(len(op.outputs)):
        dims = op.differing(index) if op.wholes is not None else []
        if not dims:
            found.append(ZERO if is_zero else REPLICATED)
        elif len(dims) == 1 and (op.name in CONSTANTS or op.name in views.EXPANSIONS):
            found.append(shard(dims[0]))
        elif op.name in NUMBERED:
            found.append(VARYING)
        else:
            raise RefusedError(
                f"gives shape {list(op.outputs[index].shape)} on shards, {list((op.wholes or [()])[index])} of the whole, "
                "of tensors that are the same on every rank"
            )
    return found
