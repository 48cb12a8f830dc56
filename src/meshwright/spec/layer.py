"""Layers of a model as the planner sees them, and the parameters that they share."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Final, Literal

from meshwright.spec.operator import OperatorSpec
from meshwright.values import Problems, Value

__all__: list[str] = []

_NOT_NEGATIVE: Final = (
    "num_params", "params_bytes", "forward_flops", "output_bytes", "output_elements", "activation_bytes",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HostCalls(Value):
    """What the host issues in one forward, as torch's dispatcher sees it: the same for one sample and for many.

    Args:
        operators: Calls that compute something, those on tensors that do not grow with the samples included [count].
        differentiated: Those of them that backward goes through [count].
        views: Calls that give a view [count].
        differentiated_views: Those of them that backward goes through [count].
        modules: Calls of modules [count].
        between: Those of the operators and views that code between the layers issues, after this one [count].

    Raises:
        ConfigError: A number is negative.
    """

    FORMAT: ClassVar[str] = "host_calls"

    operators: int = 0
    differentiated: int = 0
    views: int = 0
    differentiated_views: int = 0
    modules: int = 0
    between: int = 0

    def __post_init__(self) -> None:
        self._check_types()
        problems = Problems("host calls")
        for name, number in self.to_dict().items():
            problems.require(number >= 0, f"{name}={number} (rule: it is not negative)")
        problems.check()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec(Value):
    """One layer: a piece of the model that a pipeline never cuts.

    Args:
        name: The module's name in the user's model.
        num_params: Its parameters, shared ones included [count].
        params_bytes: Their size [bytes].
        forward_flops: Arithmetic of one forward pass of one sample; a multiply-add is 2 [FLOPs].
        output_bytes: What it hands to the next layer for one sample [bytes].
        output_elements: The same in elements, where these are not of the parameters' size; 0 elsewhere [elements].
        activation_bytes: What backward needs of one sample's forward, its input included [bytes].
        operators: What its forward does, in order; empty where only the sums above are known.
        host: What the host issues for it; None where that was not seen, and then it is a call for each operator.

    Raises:
        ConfigError: A number is negative, or the name is empty.
    """

    FORMAT: ClassVar[str] = "layer"

    name: str
    num_params: int = 0
    params_bytes: int = 0
    forward_flops: float = 0.0
    output_bytes: int = 0
    output_elements: int = 0
    activation_bytes: int = 0
    operators: tuple[OperatorSpec, ...] = ()
    host: HostCalls | None = None

    def __post_init__(self) -> None:
        self._check_types()
        problems = Problems(f"layer '{self.name}'")
        problems.require(self.name != "", "the name is empty")
        for name in _NOT_NEGATIVE:
            number = getattr(self, name)
            problems.require(number >= 0, f"{name}={number} (rule: it is not negative)")
        problems.check()

    @property
    def runs(self) -> bool:
        """Whether a forward was seen to run it: it has numbers beside its parameters."""
        return bool(self.operators or self.forward_flops or self.output_bytes or self.activation_bytes)

    def is_split(self, *, alone: bool) -> bool:
        """Tell whether tensor parallelism has a pair of products, or a table, to split here; ``alone``: or a single product."""
        found = {(operator.split, operator.kind == "elementwise") for operator in self.operators}
        is_pair = {("columns", False), ("inner", False)} <= found
        return is_pair or ("inner", True) in found or (alone and bool(found & {("columns", False), ("inner", False)}))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SharedParameter(Value):
    """One parameter that several layers use, such as tied embeddings.

    Args:
        names: Its FQNs; the first is the one that a checkpoint keeps.
        layers: The layers that hold it, each once; each counts it in full.
        num_params: Its elements [count].
        params_bytes: Its size [bytes].

    Raises:
        ConfigError: It has fewer than two names or no layer, or a number is negative.
    """

    FORMAT: ClassVar[str] = "shared"

    names: tuple[str, ...]
    layers: tuple[str, ...]
    num_params: int
    params_bytes: int

    def __post_init__(self) -> None:
        self._check_types()
        problems = Problems(f"shared parameter '{', '.join(self.names)}'")
        problems.require(len(self.names) >= 2, f"{len(self.names)} names (rule: two or more)")
        problems.require(len(self.layers) >= 1, "no layers (rule: one or more)")
        for what, entries in (("names", self.names), ("layers", self.layers)):
            problems.require(len(set(entries)) == len(entries), f"{what} {list(entries)} repeat (rule: each once)")
        for name, number in (("num_params", self.num_params), ("params_bytes", self.params_bytes)):
            problems.require(number >= 0, f"{name}={number} (rule: it is not negative)")
        problems.check()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerBond(Value):
    """Layers that a pipeline leaves on one stage, with all that lie between them.

    Args:
        first: The first of them.
        last: The last of them.
        when: "always"; under "tensor" parallelism, which splits a weight of one layer by columns and one of the other by rows; or
            "around": the same, where the code between the two is that of a module around several layers, which a pipeline runs
            on every stage.

    Raises:
        ConfigError: A name is empty.
    """

    FORMAT: ClassVar[str] = "bond"

    first: str
    last: str
    when: Literal["always", "tensor", "around"]

    def __post_init__(self) -> None:
        self._check_types()
        problems = Problems("bond")
        problems.require(bool(self.first and self.last), "a layer's name is empty")
        problems.check()
