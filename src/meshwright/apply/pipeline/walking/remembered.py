"""Record of a call that another stage runs: its results and writes, with descriptions in place of tensors."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from meshwright.apply.pipeline.tracing.scene import VARS, Effect, Path, fields_of, resolve, write
from meshwright.apply.pipeline.walking.stand_ins import Meta
from meshwright.trees import LEAVES, map_tensors

__all__: list[str] = []

_DEPTH = 8


@dataclasses.dataclass(frozen=True, slots=True)
class _Old:
    """Stands for a tensor argument: its position in the order of `tensors_of_call`."""

    place: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Given:
    """Stands for a container or an object among the arguments."""

    path: Path


@dataclasses.dataclass(frozen=True, slots=True)
class _Made:
    """Stands for an object that the call made."""

    shell: Any
    attributes: dict[str, Any]


class Encoder:
    """Encodes values of a call without their tensors.

    Args:
        olds: id of a tensor argument -> its position among them.
        places: id of a container, or of an object's attribute dict, among the arguments -> its path.
    """

    def __init__(self, olds: Mapping[int, int], places: Mapping[int, Path]) -> None:
        self._olds = olds
        self._places = places
        self._metas: dict[int, Meta] = {}

    def results(self, tree: Any) -> Any:
        """Encode a call's results; an argument among them becomes a tensor of its own."""
        return self._encode(tree, _DEPTH, knows_olds=False)

    def written(self, tree: Any) -> Any:
        """Encode a value that the call wrote somewhere; an argument stays that very tensor."""
        return self._encode(tree, _DEPTH, knows_olds=True)

    def _encode(self, tree: Any, depth: int, *, knows_olds: bool) -> Any:
        if isinstance(tree, Tensor):
            if knows_olds and id(tree) in self._olds:
                return _Old(self._olds[id(tree)])
            return self._metas.setdefault(id(tree), Meta.of(tree))
        if type(tree) in LEAVES or not depth:
            return tree
        attributes = None if isinstance(tree, (list, tuple, dict)) else fields_of(tree)
        path = self._places.get(id(tree if attributes is None else attributes))
        if path is not None:
            return _Given(path)

        def inner(item: Any) -> Any:
            return self._encode(item, depth - 1, knows_olds=knows_olds)

        if isinstance(tree, PackedSequence):
            return map_tensors(tree, inner)  # its sizes are no tensor of the forward
        if isinstance(tree, dict):
            values = {key: inner(item) for key, item in tree.items()}
            return values if type(tree) is dict else _of_mapping(tree, values)
        if isinstance(tree, (list, tuple)):
            items = [inner(item) for item in tree]
            return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
        if attributes is not None:
            encoded = {key: inner(item) for key, item in attributes.items()}
            if any(encoded[key] is not item for key, item in attributes.items()):
                with contextlib.suppress(Exception):
                    return _Made(_shell_of(tree), encoded)
            return tree
        return map_tensors(tree, inner)


def _shell_of(item: Any) -> Any:
    """Return an object of the same kind without attributes."""
    shell = copy.copy(item)
    if vars(shell) is not vars(item):
        vars(shell).clear()
    return shell


def _of_mapping(example: dict[Any, Any], values: dict[Any, Any]) -> Any:
    return type(example)(**values) if dataclasses.is_dataclass(example) else type(example)(values)


class Known:
    """Results and writes of a call, with a description in place of each tensor.

    Args:
        results: Its results.
        effects: Its writes into places.
        writes: (position of a tensor argument, its new description) of those written in place.
    """

    __slots__ = ("effects", "results", "writes")

    def __init__(
        self, results: Any, effects: tuple[Effect, ...] = (), writes: tuple[tuple[int, Meta], ...] = ()
    ) -> None:
        self.results = results
        self.effects = effects
        self.writes = writes

    @property
    def is_plain(self) -> bool:
        """Whether the call returned one tensor and wrote nothing."""
        return type(self.results) is Meta and not self.effects and not self.writes

    def repeat(
        self,
        tensor_of: Callable[[Meta], Tensor],
        given: Sequence[Tensor],
        call: tuple[tuple[Any, ...], dict[str, Any]],
        module_of: Callable[[str], nn.Module],
    ) -> Any:
        """Repeat the call's writes and return its results.

        Args:
            tensor_of: Makes a tensor from a description.
            given: The tensor arguments.
            call: All arguments.
            module_of: Name -> module.
        """
        if self.is_plain:
            return tensor_of(self.results)

        def place_at(path: Path) -> Any:
            return resolve(path, *call, module_of)

        decoder = _Decoder(tensor_of, given, place_at)
        for effect in self.effects:
            write(effect, place_at(effect.path), decoder.decode(effect.tree))
        return decoder.decode(self.results)


def encode_results(results: Any, places: Sequence[tuple[Path, Any]] = ()) -> Known:
    """Return the record of a call that wrote nothing, with these results.

    Args:
        results: What it returned.
        places: Containers among its arguments, by path: one that it gives back is named; else its contents stand there.
    """
    return Known(Encoder({}, {id(place): path for path, place in places}).results(results))


class _Decoder:
    def __init__(
        self, tensor_of: Callable[[Meta], Tensor], given: Sequence[Tensor], place_at: Callable[[Path], Any]
    ) -> None:
        self._tensor_of = tensor_of
        self._given = given
        self._place_at = place_at
        self._made: dict[int, Tensor] = {}

    def decode(self, tree: Any) -> Any:
        """Decode a value, with tensors."""
        if isinstance(tree, Meta):
            found = self._made.get(id(tree))
            if found is None:
                found = self._made[id(tree)] = self._tensor_of(tree)
            return found
        if type(tree) in LEAVES:
            return tree
        if isinstance(tree, dict):
            values = {key: self.decode(item) for key, item in tree.items()}
            return values if type(tree) is dict else _of_mapping(tree, values)
        if isinstance(tree, (list, tuple)):
            items = [self.decode(item) for item in tree]
            return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
        return self._decode_object(tree)

    def _decode_object(self, tree: Any) -> Any:
        if isinstance(tree, _Old):
            return self._given[tree.place]
        if isinstance(tree, _Given):
            return self._place_at(
                tree.path[:-1] if tree.path[-1] == VARS else tree.path
            )  # of an attribute dict its object
        if isinstance(tree, _Made):
            made = copy.copy(tree.shell)
            vars(made).update({key: self.decode(item) for key, item in tree.attributes.items()})
            return made
        if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
            names = [field.name for field in dataclasses.fields(tree) if field.init]
            return dataclasses.replace(tree, **{name: self.decode(getattr(tree, name)) for name in names})
        return tree
