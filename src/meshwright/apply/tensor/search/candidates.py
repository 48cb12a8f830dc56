"""Candidates: the ways to cut a pair of products, and the order in which they are tried."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Generator, Iterator

from torch import Tensor

from meshwright.apply.tensor.proof.shards_against_whole import Difference, Disproof
from meshwright.apply.tensor.search.pairs import Pair
from meshwright.apply.tensor.search.trace import Product, Trace
from meshwright.apply.tensor.search.tried import Tried
from meshwright.apply.tensor.tensor_layout import Cut, Region, Role, is_inside
from meshwright.layout import even_ranges
from meshwright.trees import tensors_in

__all__: list[str] = []

_MAX_COMBINATIONS = 12
_SUMS = {"add", "radd", "iadd", "linear", "addmm", "baddbmm", "conv1d", "conv2d", "conv3d"}
_MAX_CHANGES = 3
"""Things that are changed at once [count]."""


class Options:
    """The ways to cut a pair, likelier ones first."""

    def __init__(self, pair: Pair, trace: Trace, num_tp_ranks: int) -> None:
        self.pair = pair
        self.trace = trace
        self.num_tp_ranks = num_tp_ranks
        self.scope = pair.scope(trace)
        self._row_size = self._shape(pair.row)[pair.row.in_dim]
        self._keys = {column.parameter for column in pair.columns}

    def _shape(self, product: Product) -> tuple[int, ...]:
        return tuple(self.trace.parameters[product.parameter].shape)

    def _width(self, product: Product) -> int:
        return self._shape(product)[product.out_dim]

    # -- groups and units ---------------------------------------------------------------------------------------

    def _groups_of(self, column: Product) -> list[tuple[int, ...]]:
        width, seen = self._width(column), self.trace.sizes.get(column.parameter, set())
        found: list[tuple[int, ...]] = sorted(
            s for s in self.trace.splits.get(column.parameter, ()) if sum(s) == width and len(s) > 1
        )
        bounds = [0, *sorted(self.trace.slices.get(column.key, {}).get(width, ())), width]
        if len(bounds) > 2:
            found.append(tuple(end - start for start, end in itertools.pairwise(bounds)))
        if width > self._row_size and width % self._row_size == 0:
            found.append((self._row_size,) * (width // self._row_size))
        found.append((width,))
        if len(self.pair.columns) == 1:
            found += [(width // parts,) * parts for parts in (3, 2) if parts in seen and width % parts == 0]
        return list(dict.fromkeys(found))

    def _groups_of_row(self) -> list[tuple[int, ...]]:
        """Return the groups of the rows' inputs: what was put together of several columns' results keeps its parts."""
        joins = [self.trace.joins.get(column.key, set()) for column in self.pair.columns]
        found = sorted(s for s in set().union(*joins) if sum(s) == self._row_size and len(s) > 1)
        return [*found, (self._row_size,)]

    def _unit_counts(self, groups: list[tuple[int, ...]]) -> list[int]:
        seen = set().union(*(self.trace.sizes.get(key, set()) for key in self._keys)) | {self._row_size}
        seen |= {value for _, _, value in self._integers()}
        sizes = [size for group in groups for size in group]
        fitting = [num for num in seen if num > 1 and all(size % num == 0 for size in sizes)]
        # Cuts that leave a rank empty come last.
        return sorted(fitting, key=lambda num: (num < self.num_tp_ranks, -num))

    def regions(self) -> Iterator[tuple[Region, list[Region]]]:
        """Yield (region, the same region with one more change)."""
        per_column = [self._groups_of(column) for column in self.pair.columns]
        combined = itertools.product(*(range(len(groups)) for groups in per_column))

        def unlikeness(places: tuple[int, ...]) -> tuple[int, int]:
            """Columns of one row are hardly ever some in groups and some not."""
            return len({len(own[place]) for own, place in zip(per_column, places, strict=True)}), sum(places)

        for places in sorted(itertools.islice(combined, 256), key=unlikeness)[:_MAX_COMBINATIONS]:
            groups = tuple(own[place] for own, place in zip(per_column, places, strict=True))
            for of_row in self._groups_of_row():
                for num_units in self._unit_counts([of_row, *groups]):
                    region = self._region(groups, num_units, of_row=of_row)
                    yield region, self._changes(region)
        yield from self._grouped()

    def _region(
        self,
        groups: tuple[tuple[int, ...], ...],
        num_units: int,
        shared: dict[str, int] | None = None,
        of_row: tuple[int, ...] = (),
    ) -> Region:
        shared, of_row = shared or {}, of_row or (self._row_size,)
        cuts: dict[str, Cut] = {}
        roles: dict[str, Role] = {}
        pair, trace = self.pair, self.trace
        is_layers = all(trace.is_layer(product) for product in (*pair.columns, *pair.rows))
        for column, own in zip(pair.columns, groups, strict=True):
            if trace.owner(column) in shared:
                continue
            cut = Cut(dim=column.out_dim, groups=own)
            cuts |= dict.fromkeys(trace.names[column.parameter], cut)
            cuts |= self._vectors(column, own, of_row)
            if is_layers:
                roles |= {name.rpartition(".")[0]: "column" for name in trace.names[column.parameter]}
        for row in pair.rows:
            cuts |= dict.fromkeys(trace.names[row.parameter], Cut(dim=row.in_dim, groups=of_row, kind="row"))
            if is_layers:
                roles |= {name.rpartition(".")[0]: "row" for name in trace.names[row.parameter]}
        if not is_layers:
            roles[self.scope] = "sum"
        return Region(
            scope=self.scope,
            num_units=num_units,
            cuts=cuts,
            roles=roles,
            shared=shared,
            integers=self._own_integers(cuts, num_units),
            once=() if is_layers else self._after_row(),
            drops=bool(self._keys & self.trace.drops),
        )

    def _vectors(self, column: Product, groups: tuple[int, ...], of_row: tuple[int, ...]) -> dict[str, Cut]:
        """Return the cuts of biases, scales and running statistics with one entry for each of the column's."""
        width = sum(groups)
        found: dict[str, Cut] = {}
        for key in self.trace.met.get(column.key, ()):
            for name in self.trace.names[key]:
                found |= _along(name, self.trace.parameters[key], width, groups, of_row)
                path = name.rpartition(".")[0]
                if name in found:
                    for buffer_name, buffer in self.trace.module.get_submodule(path).named_buffers(path, recurse=False):
                        found |= _along(buffer_name, buffer, width, groups, of_row)
        return found

    def _after_row(self) -> tuple[str, ...]:
        """Return the parameters of the scope that are added to the row's result: a bias."""
        width = self._width(self.pair.row)
        found = []
        for key in self.trace.met.get(self.pair.row.key, ()):
            uses = {use.strip("_") for use in self.trace.other_uses.get(key, ())}
            if uses <= _SUMS and self.trace.parameters[key].shape[-1:] == (width,):  # a scalar has no dim
                found += [name for name in self.trace.names[key] if is_inside(name, self.scope)]
        return tuple(found)

    # -- further changes ----------------------------------------------------------------------------------------

    def _integers(self) -> list[tuple[str, str, int]]:
        """Return (module, attribute, value) of the integers that modules of the scope keep."""
        found = []
        own = self._keys | self._met() | {row.parameter for row in self.pair.rows}
        for name, child in self.trace.module.get_submodule(self.scope).named_modules():
            path = ".".join(part for part in (self.scope, name) if part)
            parameters = {id(parameter) for parameter in child.parameters()}
            is_another = parameters and not parameters & own and not any(True for _ in child.children())
            if path in self.trace.calls and not is_another:
                found += [(path, key, value) for key, value in vars(child).items() if type(value) is int and value > 1]
        return found

    def _layers(self) -> set[str]:
        """Return the names of the modules that are a product or a norm and nothing else."""
        found = {name.rpartition(".")[0] for key in self._met() for name in self.trace.names[key]}
        products = [product for product in (*self.pair.columns, *self.pair.rows) if self.trace.is_layer(product)]
        found |= {name.rpartition(".")[0] for product in products for name in self.trace.names[product.parameter]}
        return {name for name in found if not any(True for _ in self.trace.module.get_submodule(name).children())}

    def _met(self) -> set[int]:
        return set().union(*(self.trace.met.get(key, set()) for key in self._keys))

    def _own_integers(self, cuts: dict[str, Cut], num_units: int) -> tuple[tuple[str, str], ...]:
        """Return the integers that hold a cut tensor's size, at the layer that owns it: `nf`, `num_groups`."""
        owners = ({name.rpartition(".")[0] for name in cuts} & self._layers()) - set(
            map(self.trace.owner, self.pair.rows)
        )
        sizes = {size for cut in cuts.values() for size in (sum(cut.groups), *cut.groups)} | {num_units}
        counts = Region(scope="", num_units=num_units, cuts={}, roles={})
        return tuple(
            (path, name)
            for path, name, value in self._integers()
            if path in owners
            and counts.shares(value, self.num_tp_ranks) is not None
            and (value in sizes or "groups" in name)
            and not name.startswith("in_")
        )

    def _changes(self, region: Region) -> list[Region]:
        """Return the region with single things changed; changes may be combined (`search._merge`)."""
        layers = self._layers()
        changes = [
            region.replace(integers=(*region.integers, (path, name)))
            for path, name, value in self._integers()
            if path not in layers
            and (region.shares(value, self.num_tp_ranks) is not None or self._is_ratio(value, region))
        ]
        side_cuts = {
            name: Cut(dim=product.out_dim, groups=(self._width(product),))
            for product in self.pair.sides
            for name in self.trace.names[product.parameter]
            if name.startswith(f"{self.scope}.") and self._width(product) % region.num_units == 0
        }
        if side_cuts:
            changes.append(region.replace(cuts={**region.cuts, **side_cuts}))
        changes += [region.replace(inputs=inputs) for inputs in self._sliced_inputs(region)]
        vectors = {name for name in region.cuts if not self._is_product(name) and not name.endswith("bias")}
        if vectors:
            changes.append(region.replace(cuts={name: cut for name, cut in region.cuts.items() if name not in vectors}))
        changes += self._inner(region, {name.rpartition(".")[0] for name in vectors} - set(region.roles))
        per_unit = self._per_unit(region)
        if per_unit:
            changes.append(region.replace(cuts={**region.cuts, **per_unit}))
        if self.scope not in region.roles and not region.shared:
            changes.append(region.replace(roles={self.scope: "sum"}, once=self._after_row()))
        return changes

    def _inner(self, region: Region, norms: set[str]) -> Iterator[Region]:
        """Yield the region with norms that see all entries of the cut tensor."""
        norms = {name for name in norms if all(map(self._is_vector, self._cut_in(region, name)))}
        if norms and all(name in self.trace.calls and name != self.scope for name in norms):
            cuts = {name: cut for name, cut in region.cuts.items() if name.rpartition(".")[0] not in norms}
            ways: tuple[Role, ...] = ("inner", "channels")
            for way in ways:
                yield region.replace(cuts=cuts, roles={**region.roles, **dict.fromkeys(sorted(norms), way)})

    def _cut_in(self, region: Region, path: str) -> list[Tensor]:
        """Return the cut parameters of a module. Those of a convolution in groups are no vectors: each group stays by itself."""
        own = dict(self.trace.module.get_submodule(path).named_parameters(path, recurse=False))
        return [tensor for name, tensor in own.items() if name in region.cuts]

    @staticmethod
    def _is_vector(tensor: Tensor) -> bool:
        return sum(size > 1 for size in tensor.shape) <= 1

    def _per_unit(self, region: Region) -> dict[str, Cut]:
        """Return cuts of tensors with an entry for each unit (slopes, sinks, temperatures of heads), or a row (biases)."""
        scope = self.trace.module.get_submodule(self.scope)
        tensors = [
            (name, tensor)
            for name, tensor in scope.named_parameters(self.scope)
            if id(tensor) in self.trace.other_uses and id(tensor) not in self.trace.products
        ]
        tensors += [(name, tensor) for name, tensor in scope.named_buffers(self.scope) if tensor is not None]
        return {
            name: Cut(dim=list(tensor.shape).index(region.num_units), groups=(region.num_units,))
            for name, tensor in tensors
            if name not in region.cuts and region.num_units > 1 and self._has_units(tensor, region.num_units)
        }

    def _has_units(self, tensor: Tensor, num_units: int) -> bool:
        """Tell whether a tensor has an entry for each unit, or a row: not a table with a column for each, say."""
        if tensor.numel() == num_units:
            return num_units in tensor.shape
        return tensor.dim() > 0 and tensor.shape[0] == num_units and tensor.numel() == self._row_size

    def _is_product(self, name: str) -> bool:
        keys = [*self._keys, *(row.parameter for row in self.pair.rows)]
        return any(name in self.trace.names[key] for key in keys)

    def _is_ratio(self, value: int, region: Region) -> bool:
        return bool(region.shared) and value * min(region.shared.values()) == region.num_units

    def _sliced_inputs(self, region: Region) -> list[tuple[tuple[int, int], ...]]:
        call = self.trace.calls[self.scope]
        tensors = list(tensors_in((call.args, call.kwargs)))
        columns = {column.data for column in self.pair.columns}
        found = []
        for dim, is_multiple in ((1, False), (0, False), (2, False), (0, True)):
            matching = tuple(
                (index, dim)
                for index, tensor in enumerate(tensors)
                if tensor.dim() > 2
                and id(tensor) not in columns
                and (
                    tensor.shape[dim] > region.num_units and tensor.shape[dim] % region.num_units == 0
                    if is_multiple
                    else tensor.shape[dim] == region.num_units
                )
            )
            if matching:
                found.append(matching)
        return found

    # -- fewer keys than ranks ----------------------------------------------------------------------------------

    def _grouped(self) -> Iterator[tuple[Region, list[Region]]]:
        """Yield regions cut by query heads, where several of them share a key head and there are too few key heads to cut."""
        widths = [self._width(column) for column in self.pair.columns]
        if len(set(widths)) < 2:
            return
        groups = tuple((width,) for width in widths)
        counts = set().union(*(self.trace.sizes.get(key, set()) for key in self._keys))
        for num_units in sorted(counts, reverse=True):
            if num_units < 2 or self._row_size % num_units or max(widths) % num_units:
                continue
            unit = max(widths) // num_units
            shared = {
                self.trace.owner(column): width // unit
                for column, width in zip(self.pair.columns, widths, strict=True)
                if width < max(widths) and width % unit == 0
            }
            if shared and all(self._shares_evenly(num_units, full) for full in shared.values()):
                region = self._region(groups, num_units, shared)
                yield region, self._changes(region)

    def _shares_evenly(self, num_units: int, full: int) -> bool:
        if not full or num_units % full:
            return False
        ratio = num_units // full
        for first, last in even_ranges(num_units, self.num_tp_ranks):
            counts = [sum(unit // ratio == key for unit in range(first, last)) for key in range(full)]
            if len({count for count in counts if count}) > 1:
                return False
        return True


def _along(name: str, tensor: Tensor, width: int, groups: tuple[int, ...], of_row: tuple[int, ...]) -> dict[str, Cut]:
    """Return the cut of a tensor with one entry for each of a column's (or a row's) along some dim."""
    for size, own in ((width, groups), (sum(of_row), of_row)):
        for dim, have in enumerate(tensor.shape):
            if have == size:
                return {name: Cut(dim=dim, groups=own)}
    return {}


# -- the order in which they are tried ----------------------------------------------------------------------------


def candidates(options: Options) -> Generator[Region, Difference, None]:
    """Yield regions and take the reason why each failed: as they stand, with changes, last with sizes translated at run time.

    A change that does not alter the reason does not address it, so nothing is built on that change.
    """
    tried = Tried(options.num_tp_ranks)
    found = list(options.regions())
    for resizes in (False, True):
        level: list[tuple[Region, Region, Difference, list[Region]]] = []  # base, candidate, its reason, changes
        for base, changes in found:
            region = base.replace(resizes=resizes)
            reason = tried.known(region) or (yield from tried.run(region))
            level.append((region, region, reason, [change.replace(resizes=resizes) for change in changes]))
        for _ in range(_MAX_CHANGES):
            following: list[tuple[Region, Region, Difference, list[Region]]] = []
            for base, region, before, changes in level:
                for change in changes:
                    merged = _merge(base, region, change)
                    if not _may_help(before, base, change):
                        continue
                    reason = tried.known(merged) or (yield from tried.run(merged))
                    if reason != before:
                        following.append((base, merged, reason, changes))
            level = following


def _may_help(reason: Difference, base: Region, change: Region) -> bool:
    """Tell whether a change may do something about the reason why a region failed, which is its base with changes so far.

    A sum in its scope changes gradients alone, a norm results. An integer may have to be the shard's without which nothing
    raises: `x.view(..., n_head, x.size(-1) // n_head)` and `x.unflatten(-1, (n_head, -1))` fit any size.
    """
    if change.roles == base.roles:
        return reason.kind.is_raised or change.integers == base.integers or reason.kind is Disproof.RESULT_VALUES
    if not {"inner", "channels"}.isdisjoint(change.roles.values()):
        return not reason.kind.is_gradient
    return reason.kind is Disproof.GRADIENT_VALUES


def _merge(base: Region, into: Region, change: Region) -> Region:
    """Return a region with a change's differences from its base."""
    fields = {
        field.name: getattr(change, field.name)
        for field in dataclasses.fields(base)
        if getattr(change, field.name) != getattr(base, field.name)
    }
    if "integers" in fields:
        fields["integers"] = tuple(dict.fromkeys((*into.integers, *change.integers)))
    if "cuts" in fields:
        dropped = base.cuts.keys() - change.cuts.keys()
        fields["cuts"] = {name: cut for name, cut in {**into.cuts, **change.cuts}.items() if name not in dropped}
    if "roles" in fields and len(change.roles) > len(base.roles):
        fields["roles"] = {**into.roles, **change.roles}
    return into.replace(**fields)
