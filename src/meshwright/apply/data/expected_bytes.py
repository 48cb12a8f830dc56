"""Expected bytes of data parallelism in a step: gradients, compressed or not, and ZeRO's gathered values."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn

from meshwright.apply.data.sharding import Sharding
from meshwright.apply.data.sparse import names_with_sparse_gradients
from meshwright.apply.forecast import Forecast, SeenStep
from meshwright.comm.communicator import Communicator
from meshwright.comm.compression.choose import make_reducer
from meshwright.comm.compression.reducer import GradientSpec, Reducer
from meshwright.comm.ledger import Ledger
from meshwright.traffic import ring_gradient_bytes, sharded_bytes

__all__: list[str] = []


class CopiesForecast(Forecast):
    """Whole copies: gradients in a ring.

    Args:
        module: What this rank has of the model; its parameters may be without values.
        num_ranks: Ranks that share a global batch [count].
        reducer: What sums the gradients.
    """

    def __init__(self, module: nn.Module, num_ranks: int, reducer: Reducer) -> None:
        self._module = module
        self._num_ranks = num_ranks
        self._reducer = reducer

    def learn(self, step: SeenStep) -> None:
        del step
        payload = payload_bytes(dense_gradients(self._module), self._reducer)
        self.learned_bytes = ring_gradient_bytes(payload, self._num_ranks)


class ShardsForecast(Forecast):
    """Shards: gradients to their owners, and values from them.

    Args:
        module: What this rank has of the model.
        num_ranks: Ranks that share a global batch [count].
        sharding: What is sharded, and over whom.
        reducer: What sums the gradients; where shards have replicas, over these.
        memory_bytes: Gives the bytes of the parameters that are "whole" and trainable, and of those "gathered" when needed.
    """

    def __init__(
        self,
        module: nn.Module,
        num_ranks: int,
        sharding: Sharding,
        reducer: Reducer,
        memory_bytes: Callable[[], dict[str, int]],
    ) -> None:
        self._module = module
        self._num_ranks = num_ranks
        self._sharding = sharding
        self._reducer = reducer
        self._memory_bytes = memory_bytes

    def learn(self, step: SeenStep) -> None:
        dense, shares = dense_gradients(self._module), self._memory_bytes()
        payload = payload_bytes(dense, self._reducer)
        as_they_are = sum(parameter.nbytes for parameter in dense.values())
        shards = self._sharding.shard_group.size
        replicas = self._num_ranks // shards
        # An all-reduce is twice a reduce-scatter.
        times = 1 if self._reducer.sends_slices or replicas > 1 else 2
        self.learned_bytes = sharded_bytes(
            as_they_are if replicas > 1 else times * payload,
            shares["whole"],
            shares["gathered"],
            zero=self._sharding.zero,
            shards=shards,
            replicas=replicas,
            passes=step.plan.micro_batches,
            per_step=self._sharding.per_step,
            replicated_bytes=payload,
        )


def foresee_gradients(module: nn.Module, num_ranks: int, compress: str) -> float:
    """Return what a rank sends of a model's gradients in a step of data parallelism, before there are ranks [bytes].

    Args:
        module: The model; its parameters may be without values.
        num_ranks: Ranks that share a global batch [count].
        compress: A plan's `compress`.
    """
    # A payload does not depend on the number of ranks.
    alone = Communicator(None, ranks=[0], rank=0, ledger=Ledger(), timeout_s=1.0)
    payload = payload_bytes(dense_gradients(module), make_reducer(compress, alone))
    return ring_gradient_bytes(payload, num_ranks)


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
