"""Layout as a value: the regions of a model, found once (`search.py`), sent to every rank and applied by each (`cutting.py`).

A region runs on shards between an exchange where whole tensors enter and one where whole tensors leave. It is cut into
`num_units` that stay together (attention heads, channels, columns of a feed-forward layer). Rank r of n holds the units that
`even_ranges` assigns to it, in every parameter of the region. Free of torch.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import ClassVar, Literal

from meshwright.layout import Interval, ShardLayout, even_ranges
from meshwright.values import FrozenMap, Value

__all__: list[str] = []


def is_inside(name: str, outer: str) -> bool:
    """Tell whether a module's name is equal to, or inside, another's."""
    return not outer or name == outer or name.startswith(f"{outer}.")


def name_below(outer: str, name: str) -> str:
    """Return a name inside a module, relative to that module; the module's own is ""."""
    return name[len(outer) :].removeprefix(".")


def layer_of(name: str) -> str:
    """Return the layer of a parameter: what `torch.nn.utils.parametrize` makes its weight of is the layer's, too."""
    owner = name.rpartition(".")[0]
    layer, found, _ = owner.rpartition(".parametrizations.")
    return layer if found else owner


Role = Literal["column", "gathered", "row", "sum", "vocabulary", "head", "attention", "inner", "channels", "stored"]
"""What a module of a region does at its edge, beside computing with its shards:

column      takes a whole tensor; backward adds the ranks' gradients of it
row         gives a term of a sum: adds it over the ranks, then its bias
gathered    a column whose result is put together again
sum         a column and a row in one module: what enters is whole, what it returns is a term
vocabulary  an embedding of some tokens: zeros for others, added over the ranks
head        a column whose result stays in slices until somebody wants all of it
attention   torch's nn.MultiheadAttention with some of its heads
inner       inside a region, takes all of what lies in slices along the last dim, and gives a slice: a norm over all heads
channels    the same along dim 1: a norm over the channels of an image
stored      computes as on one device, with parameters that are kept in parts and put together for each call
"""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cut(Value):
    """The cut of one tensor: `groups` lie one after the other along `dim`, and each is cut by the region's units."""

    FORMAT: ClassVar[str] = "cut"

    dim: int
    groups: tuple[int, ...]
    kind: Literal["column", "row", "vocabulary", "stored"] = "column"
    """Whether `dim` is that of a layer's results, the one that it sums over, that of tokens, or any of a tensor's."""

    def __post_init__(self) -> None:
        self._check_types()

    def layout(self, shape: tuple[int, ...], num_units: int, num_tp_ranks: int, part: int) -> ShardLayout:
        """Return a rank's part of a full tensor."""
        return _layout_of(self, tuple(shape), num_units, num_tp_ranks, part)


@functools.lru_cache(maxsize=1 << 12)  # a search asks for the same ones again and again
def _layout_of(cut: Cut, shape: tuple[int, ...], num_units: int, num_tp_ranks: int, part: int) -> ShardLayout:
    units = tuple(size // num_units for size in cut.groups)
    return ShardLayout.cut(shape, cut.dim, cut.groups, num_tp_ranks, part, units=units)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Region(Value):
    """One region.

    Args:
        scope: Name of the innermost module that holds all of it.
        num_units: Units that are divided among the ranks [count].
        cuts: FQN of a parameter or buffer -> its cut.
        roles: Name of a module -> its role at the region's edge.
        integers: (module, attribute) of integers that become the shard's count instead of the model's.
        resizes: Whether sizes that the code computes from full ones are translated as it runs (`sizes.py`).
        shared: Modules (grouped keys and values) that are whole and use the part that this rank's units need; FQN -> full units.
        partial: FQNs of parameters that every rank has whole, with the gradient of its own units only.
        once: FQNs of parameters that only rank 0's term of a sum includes: a bias after the row, inside the scope.
        inputs: (i, dim): the scope's i-th tensor argument is sliced along the dim, too.
        results: (i, dim): the i-th tensor that the scope returns is in slices along the dim.
        drops: Whether dropout draws inside.
        entry: In a layer that runs on slices of the sequence, the module at which it is gathered; None is at the columns.
        entered: Index of that tensor among the module's arguments.
    """

    FORMAT: ClassVar[str] = "region"

    scope: str
    num_units: int
    cuts: Mapping[str, Cut]
    roles: Mapping[str, Role]
    integers: tuple[tuple[str, str], ...] = ()
    resizes: bool = False
    shared: Mapping[str, int] = dataclasses.field(default_factory=FrozenMap[int])
    partial: tuple[str, ...] = ()
    once: tuple[str, ...] = ()
    inputs: tuple[tuple[int, int], ...] = ()
    results: tuple[tuple[int, int], ...] = ()
    drops: bool = False
    entry: str | None = None
    entered: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self._check_types()

    @property
    def is_apart(self) -> bool:
        """Whether each of its modules has its own proof: it takes and returns whole tensors, or `Slices`."""
        return set(self.roles.values()) <= {"vocabulary", "head", "gathered"}

    @property
    def is_stored(self) -> bool:
        """Whether its module computes as on one device, for every call: nothing but memory is shared."""
        return set(self.roles.values()) == {"stored"}

    def by_module(self) -> list[tuple[str, Region]]:
        """Return (name, region) for each module with a role, with the cuts of that module's own tensors."""
        return [
            (
                name,
                self.replace(
                    scope=name,
                    roles={name: role},
                    cuts={path: cut for path, cut in self.cuts.items() if layer_of(path) == name},
                ),
            )
            for name, role in self.roles.items()
        ]

    def units(self, num_tp_ranks: int, part: int) -> Interval:
        """Return the units of a rank, (first, one past the last)."""
        return even_ranges(self.num_units, num_tp_ranks)[part]

    def shares(self, full: int, num_tp_ranks: int) -> tuple[int, ...] | None:
        """Return every rank's share of a size that is divided like the units; None where a share is not an integer."""
        counts = [last - first for first, last in even_ranges(self.num_units, num_tp_ranks)]
        if any(full * count % self.num_units for count in counts):
            return None
        return tuple(full * count // self.num_units for count in counts)

    def local_integer(self, full: int, num_tp_ranks: int, part: int) -> int | None:
        """Return a rank's value of one of the model's integers; None where it is not known.

        It counts units, larger or smaller things that are divided with them, or the query heads of each shared key head.
        """
        first, last = self.units(num_tp_ranks, part)
        if self.shared and full * min(self.shared.values()) == self.num_units:
            return (last - first) // len({unit // full for unit in range(first, last)} or {0})
        shares = self.shares(full, num_tp_ranks)
        return None if shares is None else shares[part]

    def below(self, name: str) -> Region:
        """Return the region with names relative to the module of this name, instead of the model."""
        return self._renamed(functools.partial(name_below, name))

    def above(self, name: str) -> Region:
        """Return the region with names relative to the model, where they are relative to the module of this name."""
        return self._renamed(lambda path: ".".join(part for part in (name, path) if part))

    def _renamed(self, rename: Callable[[str], str]) -> Region:
        return self.replace(
            scope=rename(self.scope),
            cuts={rename(path): cut for path, cut in self.cuts.items()},
            roles={rename(path): role for path, role in self.roles.items()},
            integers=tuple((rename(path), attribute) for path, attribute in self.integers),
            shared={rename(path): units for path, units in self.shared.items()},
            partial=tuple(rename(path) for path in self.partial),
            once=tuple(rename(path) for path in self.once),
            entry=None if self.entry is None else rename(self.entry),
        )


def regions_inside(layer: str, regions: Iterable[Region]) -> list[Region]:
    """Return the regions inside a layer, without those of a vocabulary."""
    return [r for r in regions if is_inside(r.scope, layer) and "vocabulary" not in r.roles.values()]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Chain(Value):
    """Consecutive layers whose stream lies in slices of the sequence between regions (Korthikanti et al. 2022).

    Args:
        layers: Their names, in the order in which they run.
        partial: FQNs of parameters that every rank has whole, with the gradient of its own slice only.
        whole_inputs: Names of columns with another input than the stream, such as another model's states.
        drops: Whether dropout draws inside.
        dims: The dims of [batch, sequence, width] along which slices may lie: the first that the ranks divide is taken, else
            the last.
    """

    FORMAT: ClassVar[str] = "chain"

    layers: tuple[str, ...]
    partial: tuple[str, ...] = ()
    whole_inputs: tuple[str, ...] = ()
    drops: bool = False
    dims: tuple[int, ...] = (1,)

    def __post_init__(self) -> None:
        self._check_types()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TensorLayout(Value):
    """All regions of a model, and the parameters left whole."""

    FORMAT: ClassVar[str] = "tensor layout"

    regions: tuple[Region, ...] = ()
    chains: tuple[Chain, ...] = ()
    whole: Mapping[str, str] = dataclasses.field(default_factory=FrozenMap[str])
    """FQN of a parameter that every rank holds whole -> why."""
    alone: Mapping[str, str] = dataclasses.field(default_factory=FrozenMap[str])
    """FQN of a parameter that is cut in its own layer, whose result is put together again -> why not with its neighbours."""
    proven: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=FrozenMap[tuple[str, ...]])
    """Name of a part (`parts_of`) -> digests of the structures and calls with which it was proven."""

    def __post_init__(self) -> None:
        self._check_types()

    def parts(self) -> dict[str, TensorLayout]:
        """Return the parts, each with a proof of its own: name of a module -> its layout, with names relative to it.

        Parts are a layer of a chain with all its regions, the scope of any other region, and each embedding and head of a
        vocabulary.
        """
        layers = [(chain, layer) for chain in self.chains for layer in chain.layers]
        found = {layer: self._of_layer(chain, layer) for chain, layer in layers}
        for region in self.regions:
            if any(is_inside(region.scope, layer) for _, layer in layers) and "vocabulary" not in region.roles.values():
                continue
            for name, own in region.by_module() if region.is_apart else [(region.scope, region)]:
                before = found.get(name, TensorLayout())
                found[name] = before.replace(regions=(*before.regions, own.below(name)))
        return {name: part.replace(proven={"": self.proven.get(name, ())}) for name, part in found.items()}

    def _of_layer(self, chain: Chain, layer: str) -> TensorLayout:
        own = chain.replace(
            layers=("",),
            partial=tuple(name_below(layer, name) for name in chain.partial if is_inside(name, layer)),
            whole_inputs=tuple(name_below(layer, name) for name in chain.whole_inputs if is_inside(name, layer)),
        )
        inside = regions_inside(layer, self.regions)
        return TensorLayout(regions=tuple(region.below(layer) for region in inside), chains=(own,))

    @property
    def cuts(self) -> dict[str, tuple[Region, Cut]]:
        """FQN -> (region, cut) of every cut tensor."""
        return {name: (region, cut) for region in self.regions for name, cut in region.cuts.items()}

    @property
    def is_stored(self) -> bool:
        """Whether nothing but memory is shared, so that it is right for every call."""
        return not self.chains and all(region.is_stored for region in self.regions)

    @property
    def resizes(self) -> bool:
        """Whether a region translates sizes that code gives to shards' (`sizes.py`)."""
        return any(region.resizes for region in self.regions)

    @property
    def partial(self) -> set[str]:
        """FQNs of the parameters that every rank has whole, and whose gradients have to be summed."""
        return {name for part in (*self.regions, *self.chains) for name in part.partial}


def is_readable(name: str, layout: TensorLayout) -> bool:
    """Tell whether a module's output is a copy or in slices on the ranks that share it; by name.

    What experts give is a term of the sum that the module around them returns; and of keys that are whole (grouped, fewer
    heads than ranks) each rank has those that its queries need.
    """
    for region in layout.regions:
        sums = [place for place, role in region.roles.items() if role == "sum"]
        if any(name != place and is_inside(name, place) for place in sums):
            return False
        is_edge = name in (region.scope, *region.roles)
        if region.shared and is_inside(name, region.scope) and not is_edge:
            return False
    return True
