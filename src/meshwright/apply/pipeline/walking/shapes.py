"""Output shapes of layers that run on other stages, inferred with fake tensors and cached per call signature."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.apply.modules.copies import copy_module
from meshwright.apply.pipeline.tracing.scene import DEEP, Path, Scene, substitute_call
from meshwright.apply.pipeline.walking.layer_settings import LayerSettings
from meshwright.apply.pipeline.walking.layer_state import absent_listed, laid_out, own_buffers, put_back
from meshwright.apply.pipeline.walking.other_answers import Answers, Place, other_answers
from meshwright.apply.pipeline.walking.remembered import Encoder, Known
from meshwright.apply.pipeline.walking.stand_ins import (
    Meta,
    describe,
    describe_tensor,
    make_fake,
    replace_tensors,
    tensors_of,
    value_of,
)
from meshwright.apply.pipeline.walking.user_hooks import computes_weights
from meshwright.apply.pipeline.walking.without_numbers import (
    TRIED,
    NeedsNumbersError,
    find_of_function,
    run_fake,
    run_on_made_up,
    run_plain,
    uncached_casts,
    zeros_like_meta,
)
from meshwright.apply.state.hook_tables import hooks_put_back
from meshwright.apply.state.outside import Outside
from meshwright.describe.function_caches import no_cached_tensors
from meshwright.errors import ApplyError
from meshwright.python_state import PythonState
from meshwright.trees import LEAVES

__all__: list[str] = []

_MOST_KINDS = 4096
"""Kinds of calls that are remembered; batches of ever new lengths must not fill the memory [count]."""


class Shapes:
    """Descriptions of the results of calls, without values.

    A call whose code needs values runs on zeros in place of other stages' tensors, or on other values where it raises on zeros;
    masks and lengths that come from the inputs alone keep theirs. These can decide shapes, so they are part of the call's
    signature.

    Args:
        twins: Unit's name -> a copy without values that runs in its place: the unit itself may be cut, and exchange.
        around: (name, module) whose attributes a call may write, beside the unit's own.
        drawing: Units that may draw from Python's or NumPy's global generator: each of their calls runs, for its draws.
        own_tables: (module, attribute) of what a layer writes for itself alone.
    """

    def __init__(
        self,
        twins: Mapping[str, nn.Module],
        around: Sequence[tuple[str, nn.Module]],
        drawing: Collection[str],
        own_tables: Collection[tuple[str, str]] = (),
    ) -> None:
        self._twins = twins
        self._own_tables = own_tables
        self._drawing = frozenset(drawing)
        self._around = around
        self._known: dict[Any, Known] = {}
        self._needs_numbers: set[Any] = set()

    def forget(self, trainable: Mapping[str, bool]) -> None:
        """Drop all cached results: `requires_grad` of parameters has changed to these values, by FQN."""
        self._known.clear()
        for name, twin in self._twins.items():
            for own, parameter in twin.named_parameters():
                fqn = f"{name}.{own}" if name else own
                parameter.requires_grad_(trainable.get(fqn, parameter.requires_grad))

    def follow(self, settings: LayerSettings) -> None:
        """Drop all cached results where a script has changed settings of layers since the last forward."""
        if settings.set_since(self._twins):
            self._known.clear()

    def of_unit(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Known | None:
        """Return the cached results of such a call of a unit, or None, without running anything."""
        return None if name in self._drawing else self._look_up(self._key(name, module.training, args, kwargs))

    def find_of_unit(
        self, name: str, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Known:
        """Run a unit's call on fake tensors, or on made-up values where its code needs some, and cache the result."""
        key = self._key(name, module.training, args, kwargs)
        scene, module, run = self._prepare(name, module, forward, args, kwargs)
        generators = PythonState()
        try:
            if name not in self._needs_numbers:
                try:
                    return self._remember(key, _run_watched(scene, run, (args, kwargs), module, make_fake))
                except NeedsNumbersError:
                    generators.restore()
                    self._needs_numbers.add(name)
                    key = self._key(name, module.training, args, kwargs)

            def on_values(make: Callable[[Meta], Tensor]) -> Known:
                generators.restore()
                return _run_watched(scene, run, (args, kwargs), module, make)

            return self._remember(key, run_on_made_up(on_values))
        finally:
            if name not in self._drawing:
                generators.restore()

    def guesses(
        self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[Known], set[tuple[Path, Any]], dict[Any, str]]:
        """Run a unit's call on several values in place of its parameters and of other units' tensors.

        Returns:
            What it gives for each, and where its code reads other numbers of them; the attributes without tensors that it
            changes for any, as (place, key); and the state outside of modules that it changes for any, as `Elsewhere.changed`.
        """
        scene, module, run = self._prepare(name, module, type(module).forward, args, kwargs)
        generators, found, changed = PythonState(), list[Known](), set[tuple[Path, Any]]()
        read: dict[Place, None] = {}
        outside = Outside.of(module).take(with_attributes=False)
        changed_outside: dict[Any, str] = {}

        def guess(make: Callable[[Meta], Tensor], answers: Answers) -> bool:
            try:
                found.append(_run_watched(scene, run, (args, kwargs), module, make, changed=changed, answers=answers))
            except Exception:  # noqa: BLE001 - code may raise anything on values that do not fit it
                return False
            finally:
                generators.restore()
                changed_outside.update(outside.changed(by_value=True))
                outside.restore()
            return True

        fits = zeros_like_meta
        for make in reversed(TRIED):
            answers = Answers()
            if guess(make, answers):
                fits = make
            read.update(answers.read)
        for answers in other_answers(read):
            guess(fits, answers)
        return found, changed, changed_outside

    def _prepare(
        self, name: str, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Scene, nn.Module, Callable[..., Any]]:
        """Return what a call of a unit may change, the module that runs in its place, and its forward."""
        twin = self._twins.get(name)
        scope = [(f"{name}.{own}" if own and name else own or name, child) for own, child in module.named_modules()]
        if twin is None:
            scope += self._around
        else:
            for own, child in module.named_modules():
                twin.get_submodule(own).training = child.training
            module, forward = twin, _forward_of_twin
            scope = [(full, twin.get_submodule(full.removeprefix(name).removeprefix("."))) for full, _ in scope]
        scene = Scene(args, kwargs, scope, depth=DEEP, passed_over=self._own_tables)
        return scene, module, functools.partial(forward, module)

    def _key(self, what: Any, is_training: bool | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        parts, integers = describe_call(args, kwargs)
        numbers = numbers_of(integers, most=_SMALL if what in self._needs_numbers else 1) if integers else ()
        return None if numbers is None else (what, is_training, torch.is_grad_enabled(), *parts, numbers)

    def of_function(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], home: int | None
    ) -> Known:
        """Return the results of a torch function."""
        key = self._key(func, None, args, kwargs)
        known = self._look_up(key)
        if known is not None:
            return known
        results, needs_numbers = find_of_function(func, args, kwargs, home)
        if needs_numbers and func not in self._needs_numbers:
            self._needs_numbers.add(func)
            key = self._key(func, None, args, kwargs)
        return self._remember(key, Known(replace_tensors(results, Meta.of)))

    def _look_up(self, key: Any) -> Known | None:
        try:
            return self._known.get(key) if key is not None else None
        except TypeError:  # an argument that cannot be hashed
            return None

    def _remember(self, key: Any, known: Known) -> Known:
        if key is not None:
            if len(self._known) >= _MOST_KINDS:
                self._known.clear()
            with contextlib.suppress(TypeError):
                self._known[key] = known
        return known


def make_twins(module: nn.Module, units: Iterable[str]) -> dict[str, nn.Module]:
    """Return a copy of each unit whose parameters are zeros without memory of their own."""

    def empty(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter):
            return tensor.clone()
        return torch.zeros((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)

    twin = copy_module(module, empty)
    return {name: twin.get_submodule(name) for name in units}


def _forward_of_twin(twin: nn.Module, *args: Any, **kwargs: Any) -> Any:
    # The unit's own hooks have already run on these arguments; what they compute from parameters is on the unit alone.
    for hook in twin._forward_pre_hooks.values():
        if computes_weights(hook):
            hook(twin, args)
    if "forward" not in vars(twin):
        return type(twin).forward(twin, *args, **kwargs)
    try:  # a forward that is set on the object runs the object's parameters, of which another stage has none
        return type(twin).forward(twin, *args, **kwargs)
    except (TypeError, AttributeError) as error:
        raise ApplyError(
            f"a layer ({type(twin).__name__}) has a forward of its own, set on the object; with tp and pp its results' shapes "
            f"are found by its class's forward, which raised {type(error).__name__}: {error}",
            fix="give its class that forward (a subclass), or use tp or pp alone",
        ) from error


def _run_watched(
    scene: Scene,
    run: Callable[..., Any],
    call: tuple[tuple[Any, ...], dict[str, Any]],
    module: nn.Module,
    make: Callable[[Meta], Tensor],
    *,
    changed: set[tuple[Path, Any]] | None = None,
    answers: Answers | None = None,
) -> Known:
    """Run a call with `make` applied to other stages' tensors, and restore everything it changed.

    Args:
        scene: What it may change.
        run: The call.
        call: Its arguments.
        module: Whose call it is.
        make: Makes a tensor from a description.
        changed: Is extended by attributes without tensors that it changed, as (place, key).
        answers: Follows the tensors that are made up.
    """
    made: dict[int, Tensor] = {}
    unknown: set[int] = set()

    def stand_in(tensor: Tensor) -> Tensor:
        value = value_of(tensor)
        if value is None and isinstance(tensor, nn.Parameter):
            return tensor
        if id(tensor) not in made:
            if value is not None:
                unknown.add(id(tensor))
            if value is not None or make is make_fake:
                made[id(tensor)] = make(Meta.of(tensor if value is None else value.any))
            else:
                made[id(tensor)] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        return made[id(tensor)]

    try:
        scene.replace(stand_in)
        new_args, new_kwargs = substitute_call(*call, stand_in)
        given = [stand_in(tensor) for tensor in scene.given]
        versions = [tensor._version for tensor in given]
        memory = contextlib.nullcontext() if make is make_fake else laid_out(module, make)
        hooks = hooks_put_back(module.modules())
        if answers is not None:
            answers.made_up([*module.parameters(), *(made[key] for key in unknown)])
        following = contextlib.nullcontext() if answers is None else answers
        assigned = put_back(module, is_fake=make is make_fake)
        with (
            no_cached_tensors(module),
            own_buffers(module),
            hooks,
            absent_listed(module),
            memory,
            assigned,
            following,
            uncached_casts(),
        ):
            results = (run_fake if make is make_fake else run_plain)(run, new_args, new_kwargs)
        encoder = Encoder({id(tensor): place for place, tensor in enumerate(given)}, scene.own)
        writes = [
            (place, Meta.of(tensor))
            for place, (tensor, version) in enumerate(zip(given, versions, strict=True))
            if tensor._version != version
        ]
        if changed is not None:
            changed.update(scene.plain_changes())
        return Known(encoder.results(results), tuple(scene.effects(encoder.written)), tuple(writes))
    finally:
        scene.restore()


_SMALL = 4096
"""Integers that are compared to tell whether two calls are alike [count]."""


def describe_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], list[Tensor]]:
    """Return `describe` of each argument, and the integer tensors among them that every stage has, such as lengths and
    offsets.
    """
    parts: list[Any] = []
    integers: list[Tensor] = []
    for item in args:
        parts.append(_describe_argument(item, integers))
    for key, item in kwargs.items():
        parts.append(("=", key, _describe_argument(item, integers)))
    return parts, integers


def _describe_argument(item: Any, integers: list[Tensor]) -> Any:
    if isinstance(item, Tensor):
        value = value_of(item)
        if value is None and _is_exact(item.dtype):
            integers.append(item)
        return describe_tensor(item, value)
    kind = type(item)
    if kind in LEAVES:
        return (kind, item)
    integers += [t for t in tensors_of(item) if value_of(t) is None and _is_exact(t.dtype)]
    return describe(item)


def _is_exact(dtype: torch.dtype) -> bool:
    return not dtype.is_floating_point and not dtype.is_complex


def numbers_of(found: Sequence[Tensor], most: int) -> tuple[Any, ...] | None:
    """Return the values of integer tensors; None where they are too many.

    Args:
        found: The tensors.
        most: Largest number of elements a tensor may have; at 1, larger ones are left out: only a single number decides a size.
    """
    if most == 1:
        return tuple([_numbers_in(tensor) for tensor in found if tensor.numel() == 1])
    if sum(tensor.numel() for tensor in found) > most:
        return None
    return tuple([_numbers_in(tensor) for tensor in found])


def _numbers_in(tensor: Tensor) -> Any:
    """Return the numbers in a tensor whose shape and dtype are known."""
    if tensor.dim() < 2:
        numbers = tensor.tolist()
        return tuple(numbers) if isinstance(numbers, list) else numbers
    return tuple(tensor.flatten().tolist()) if tensor.layout == torch.strided else str(tensor.tolist())
