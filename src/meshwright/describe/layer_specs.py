"""Layers of a ModelSpec, from the record of one forward."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Final

from meshwright.describe.flow import ProductFlow, core_steps
from meshwright.describe.ownership import Ownership
from meshwright.describe.per_sample import Samples
from meshwright.describe.recorder import ForwardRecorder, LayerCall, Step
from meshwright.errors import some_of
from meshwright.spec.layer import HostCalls, LayerBond, LayerSpec, SharedParameter
from meshwright.spec.operator import CONVOLUTION, OperatorSpec, Split
from meshwright.units import format_bytes

__all__: list[str] = []

_MANY_OPERATORS: Final = 256
"""Beyond these, equal operators of a layer are counted together [count]."""


class LayerAssembly:
    """Makes the layers of a ModelSpec.

    Args:
        recorder: The record of a forward.
        layers: All layers, by name, in the order of their registration.
        parameters: The module's parameters.
        samples: The samples of that forward.
        is_cast: Whether it ran under autocast.
    """

    def __init__(
        self,
        recorder: ForwardRecorder,
        layers: Sequence[str],
        parameters: Ownership,
        samples: Samples,
        *,
        is_cast: bool = False,
    ) -> None:
        self.notes: list[str] = []
        self._recorder = recorder
        self._parameters = parameters
        self._samples = samples
        self._is_cast = is_cast
        self._order = list(recorder.calls)
        self._idle = [name for name in layers if name not in recorder.calls and self._holds(name)]
        self._flow = ProductFlow(recorder.steps, recorder.outputs, parameters)
        self._own = self._parameters_by_layer()

    def _holds(self, layer: str) -> bool:
        return any(layer in homes for homes in self._parameters.homes.values())

    def _parameters_by_layer(self) -> dict[str, list[str]]:
        own: dict[str, list[str]] = {name: [] for name in (*self._order, *self._idle)}
        for name, homes in self._parameters.homes.items():
            for layer in homes or (self._first_user(name),):
                own[layer].append(name)
        for step in self._recorder.steps:
            for name in step.weights:
                if name not in own[step.layer] and self._parameters.homes[name]:
                    self._note_outside(name, step)
        return own

    def _first_user(self, name: str) -> str:
        user = next((step.layer for step in self._recorder.steps if name in step.weights), None)
        if user is None:
            self.notes.append(f"'{name}' is used by no operator that was seen; it is counted in '{self._order[0]}'")
        elif self._order != [""]:
            self.notes.append(f"'{name}' belongs to no layer; it is counted in '{user}', which uses it first")
        return user or self._order[0]

    def _note_outside(self, name: str, step: Step) -> None:
        note = f"'{name}' of '{self._parameters.homes[name][0]}' is used outside that layer, after or in '{step.layer}'"
        if note not in self.notes:
            self.notes.append(note)

    def shared(self) -> tuple[SharedParameter, ...]:
        """Return the parameters with several names."""
        return tuple(
            SharedParameter(
                names=names,
                layers=tuple(map(shown_name, self._parameters.homes[first])),
                num_params=self._parameters.numel(first),
                params_bytes=self._parameters.nbytes[first],
            )
            for first, names in self._parameters.names.items()
            if len(names) > 1 and self._parameters.homes[first]
        )

    def bonds(self) -> tuple[LayerBond, ...]:
        """Return the layers that a pipeline leaves on one stage."""
        found = [
            LayerBond(first=shown_name(first), last=shown_name(last), when="around" if is_around else "tensor")
            for first, last, is_around in self._flow.spanning_pairs(self._order)
        ]
        found += [
            LayerBond(first=shown_name(first), last=shown_name(last), when="always")
            for first, last in self._recorder.spans_of(self._parameters.buffered)
        ]
        if self._recorder.reads_between and len(self._order) > 1:
            last = self._recorder.reads_until
            found.append(LayerBond(first=shown_name(self._order[0]), last=shown_name(last), when="always"))
            self.notes.append(
                f"the code between the layers ({self._recorder.reads_between}) reads values that layers compute: a pipeline has "
                f"all layers up to '{shown_name(last)}' on its first stage"
            )
        return tuple(found)

    def layers(self) -> tuple[LayerSpec, ...]:
        """Return the layers in the order in which they ran, then those that did not run."""
        steps = self._recorder.steps
        splits = self._flow.splits(self._recorder.calls)
        core = core_steps(steps)
        by_layer: dict[str, list[tuple[Step, Split, bool]]] = {name: [] for name in self._own}
        for place, step in enumerate(steps):
            by_layer[step.layer].append((step, splits[place], place in core))
        made = [self._layer(name, found) for name, found in by_layer.items()]
        self._note_what_is_fixed(made)
        if self._idle:
            listed = some_of([f"'{name}'" for name in self._idle], 5)
            self.notes.append(f"with this batch {listed} did not run: parameters are counted, work is not")
        if self._flow.num_pairs:
            self.notes.append(
                f"for tensor parallelism, pairs of column and row products are proposed: {self._flow.num_pairs}; only the "
                "proof that apply_plan runs decides each"
            )
        return tuple(made)

    def _layer(self, name: str, found: list[tuple[Step, Split, bool]]) -> LayerSpec:
        own = self._own[name]
        seen: set[str] = set()
        operators: list[OperatorSpec] = []
        flops = 0.0
        saved = 0.0
        for step, split, is_core in found:
            new = [each for each in step.weights if each not in seen]
            seen.update(new)
            num_params = sum(self._parameters.numel(each) for each in new)
            operators += self._operators(name, step, split, is_core=is_core, num_params=num_params)
            saved += self._samples.of_bytes(step.saved_bytes)
            flops += self._flops(step)
        call = self._recorder.calls.get(name, LayerCall())
        return LayerSpec(
            name=shown_name(name),
            num_params=sum(self._parameters.numel(each) for each in own),
            params_bytes=sum(self._parameters.nbytes[each] for each in own),
            forward_flops=float(flops),
            output_bytes=round(self._samples.of_bytes(call.output_bytes)),
            output_elements=round(self._samples.of_bytes(call.output_sizes)) if self._is_cast else 0,
            activation_bytes=round(saved),
            operators=tuple(_counted_together(operators)),
            host=self._host_calls(name),
        )

    def _host_calls(self, layer: str) -> HostCalls:
        """Return what the host issues for a layer; what comes before all layers is issued for the first one."""
        issued = [self._recorder.issued[layer]]
        if layer and layer == self._order[0]:
            issued.append(self._recorder.issued[""])
        return HostCalls(**sum(issued, Counter[str]()))

    def _flops(self, step: Step) -> float:
        shares = [self._samples.of_product(each, weight_factor=step.weight_factor) for each in step.products]
        self._samples.fixed_flops += sum(
            each.flops for each, share in zip(step.products, shares, strict=True) if share is None
        )
        return sum(share.flops / self._samples.count for share in shares if share is not None)

    def _operators(self, layer: str, step: Step, split: Split, *, is_core: bool, num_params: int) -> list[OperatorSpec]:
        made = self._uncast_operators(layer, step, split, is_core=is_core, num_params=num_params)
        if made and (step.casts or step.saved_casts):  # of an operator's products the first has its weights
            made[0] = dataclasses.replace(
                made[0],
                num_casts=len(step.casts),
                cast_params=sum(step.casts),
                cast_saved_bytes=sum(step.saved_casts),
            )
        return made

    def _uncast_operators(
        self, layer: str, step: Step, split: Split, *, is_core: bool, num_params: int
    ) -> list[OperatorSpec]:
        name = name_inside(step.module, layer)
        saved = self._samples.of_bytes(step.saved_bytes)
        self._samples.fixed_bytes += self._samples.fixed_of(step.saved_bytes)
        made: list[OperatorSpec] = []
        for product in step.products:
            share = self._samples.of_product(product, weight_factor=step.weight_factor)
            if share is None:
                continue
            made.append(
                OperatorSpec(
                    kind="matmul" if step.weight_factor is not None else share.kind,
                    name=name,
                    function=CONVOLUTION if step.function == CONVOLUTION else "",
                    rows=share.rows,
                    inner=share.inner,
                    columns=share.columns,
                    count=share.count,
                    input_size=share.input_size if share.input_size != share.rows * share.inner * share.count else 0,
                    causal=share.causal,
                    saved_bytes=0 if made else round(saved),
                    num_params=0 if made else num_params,
                    split=split,
                    is_core=is_core,
                    dtype=step.dtype,
                )
            )
        if step.products:
            return made
        traffic = self._samples.of_bytes((*step.read_bytes, *step.written_bytes))
        if not round(traffic) and not round(saved) and not num_params and not step.casts:
            return []
        if split == "inner" and not num_params:
            split = "whole"  # a second look-up in a table that is counted already
        rows, columns = self._samples.shape_of(step.shape)
        return [
            OperatorSpec(
                kind="elementwise",
                name=name or step.function,
                function=step.function,
                rows=rows,
                columns=columns,
                traffic_bytes=round(traffic),
                num_runs=round(self._samples.of_bytes((step.num_runs,))),
                saved_bytes=round(saved),
                num_params=num_params,
                split=split,
                is_core=is_core,
                dtype=step.dtype,
            )
        ]

    def _note_what_is_fixed(self, layers: Sequence[LayerSpec]) -> None:
        if self._samples.fixed_bytes:
            kept = sum(layer.activation_bytes for layer in layers)
            self.notes.append(
                f"{format_bytes(self._samples.fixed_bytes)} that backward needs do not grow with the samples (tables, masks), "
                f"beside {format_bytes(kept)} for each sample; they are not counted"
            )
        if self._samples.grows_faster:
            self.notes.append(
                "some sizes grow with the square of the samples, as where samples are compared with samples; they are those of "
                f"{self._samples.own} samples"
            )
        if self._samples.fixed_flops:
            self.notes.append(
                f"{self._samples.fixed_flops:.3g} FLOPs of a forward do not grow with the samples; they are not counted"
            )


def shown_name(layer: str) -> str:
    """Return a layer's name in a ModelSpec; the module itself has none of its own."""
    return layer or "model"


def name_inside(module: str, layer: str) -> str:
    """Return a module's name below a layer; that of a module outside of it stays."""
    if module == layer:
        return ""
    return module.removeprefix(f"{layer}.") if layer else module


def _counted_together(operators: list[OperatorSpec]) -> list[OperatorSpec]:
    """Return the operators; of very many, equal products and each module's elementwise ones as one: calls of a recurrent cell."""
    if len(operators) <= _MANY_OPERATORS:
        return operators
    found: dict[tuple[object, ...], OperatorSpec] = {}
    for operator in operators:
        is_product = operator.kind != "elementwise"
        sizes = (operator.rows, operator.inner, operator.columns) if is_product else ()
        key = (
            operator.kind,
            operator.name,
            operator.function,
            operator.split,
            operator.is_core,
            operator.causal,
            operator.dtype,
            *sizes,
        )
        first = found.get(key)
        found[key] = operator if first is None else _joined(first, operator)
    return list(found.values())


def _joined(first: OperatorSpec, second: OperatorSpec) -> OperatorSpec:
    is_product = first.kind != "elementwise"
    return dataclasses.replace(
        first,
        count=first.count + second.count if is_product else first.count,
        input_size=first.input_size + second.input_size,
        rows=first.rows if is_product else first.rows + second.rows,
        traffic_bytes=first.traffic_bytes + second.traffic_bytes,
        num_runs=first.num_runs + second.num_runs,
        saved_bytes=first.saved_bytes + second.saved_bytes,
        num_params=first.num_params + second.num_params,
        num_casts=first.num_casts + second.num_casts,
        cast_params=first.cast_params + second.cast_params,
        cast_saved_bytes=first.cast_saved_bytes + second.cast_saved_bytes,
    )
