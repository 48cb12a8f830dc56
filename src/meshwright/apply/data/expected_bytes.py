"""Expected bytes of data parallelism in a step: gradients, compressed or not, and ZeRO's gathered values."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from meshwright.apply.data.base import DataParallelEngine, names_with_sparse_gradients
from meshwright.apply.data.sharded import ShardedEngine
from meshwright.apply.engine import Engine
from meshwright.comm.compression.reducer import GradientSpec, Reducer
from meshwright.spec.plan import Plan
from meshwright.traffic import ring_gradient_bytes, sharded_bytes

__all__: list[str] = []


def data_formula_bytes(module: nn.Module, engine: Engine | None, plan: Plan) -> float | None:
    """Return the bytes that one rank sends over dp in a step.

    Args:
        module: This rank's part of the model; its parameters may be without values.
        engine: The engine that sums its gradients; None for one that sums them uncompressed.
        plan: The plan.

    Returns:
        The bytes [bytes]; None where the engine is not the plan's.
    """
    if plan.dp == 1:
        return 0.0
    dense = dense_gradients(module)
    as_they_are = sum(parameter.nbytes for parameter in dense.values())
    reducer = engine.reducer if isinstance(engine, DataParallelEngine) else None
    payload = as_they_are if reducer is None else payload_bytes(dense, reducer)
    if plan.zero == 0:
        return ring_gradient_bytes(payload, plan.dp)
    if not isinstance(engine, ShardedEngine) or reducer is None:
        return None
    shares, shards = engine.memory_bytes(), plan.shard_degree
    replicas = plan.dp // shards
    times = 1 if reducer.sends_slices or replicas > 1 else 2  # an all-reduce is twice a reduce-scatter
    return sharded_bytes(
        as_they_are if replicas > 1 else times * payload,
        shares["whole"],
        shares["gathered"],
        zero=plan.zero,
        shards=shards,
        replicas=replicas,
        passes=plan.micro_batches,
        per_step=engine.sharding.per_step,
        replicated_bytes=payload,
    )


def dense_gradients(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return FQN -> parameter of the parameters with dense gradients; a shared one appears once."""
    sparse = names_with_sparse_gradients(module)
    return {name: p for name, p in module.named_parameters() if p.requires_grad and name not in sparse}


def payload_bytes(parameters: Mapping[str, nn.Parameter], reducer: Reducer) -> int:
    """Return the bytes as which the gradients of these parameters are sent [bytes]."""
    return sum(
        reducer.payload_bytes(GradientSpec.of(name, parameter), parameter.dtype.to_real())
        for name, parameter in parameters.items()
    )
