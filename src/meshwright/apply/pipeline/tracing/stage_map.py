"""Map of stages: the stage that runs each call, and the stages that hold each parameter."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from torch import nn

from meshwright.apply.pipeline.tracing.call_trace import Flow, call_costs
from meshwright.apply.pipeline.tracing.may_look import units_that_may_look
from meshwright.apply.tensor.tensor_layout import is_inside
from meshwright.describe.layers import find_layers
from meshwright.errors import ApplyError, did_you_mean
from meshwright.schedule.balance import balance_over_ranks

__all__: list[str] = []


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageMap:
    """A forward whose calls are assigned to stages.

    Args:
        num_stages: Stages [count].
        calls: Unit's name -> the stage of its first, second, ... call; a unit without calls goes to the first
            stage that uses a parameter of it, else to its neighbour's.
        holders: FQN -> the stages that use the parameter, ascending; more than one where it is tied over stages.
        shares: Share of the step's counted work that each stage has.
        flow: The calls as they were traced.
        parts: Units whose results may lie in shards on the stage that runs them: those around and between layers that tensor
            parallelism cuts together.
        may_look: Units whose code looks at values, or names what does.
    """

    num_stages: int
    calls: Mapping[str, tuple[int, ...]]
    holders: Mapping[str, tuple[int, ...]]
    shares: tuple[float, ...]
    flow: Flow
    parts: frozenset[str] = frozenset()
    may_look: frozenset[str] = frozenset()

    @functools.cached_property
    def numbers(self) -> dict[str, int]:
        """Unit's name -> its number, equal on all ranks."""
        return {name: number for number, name in enumerate(self.calls)}

    def place_of_call(self, unit: str, before: int, module: nn.Module, homes: Iterable[int | None]) -> int:
        """Return the stage that runs a unit's call; every stage, and the forecast of bytes, asks here.

        Args:
            unit: Its name.
            before: Calls of it that came before; one more than was seen runs with the last [count].
            module: The unit.
            homes: The stages that compute the tensors which it takes.

        Raises:
            ApplyError: It would have to run on an earlier stage than one of its tensors.
        """
        stages = self.calls[unit]
        stage, latest = stages[before] if before < len(stages) else stages[-1], latest_of(homes)
        if latest is None or (latest <= stage and not self.flow.draws):
            return stage  # as below, for most calls of most models
        place = _place_of(stage, latest, module, draws=self.flow.draws)
        if latest <= place:
            return place
        if latest in stages and not any(True for _ in module.buffers()):
            return latest  # it lies there for another of its calls; this batch makes others than the first one did
        raise ApplyError(
            f"'{unit}' is on stage {stage} and takes a tensor that stage {latest} computes (rule: a layer's inputs come from "
            "its own stage or from an earlier one)",
            fix="leave out stages=, or assign the layers to stages in the order in which they run; pass an example_batch= to "
            "apply_plan with which every layer runs as often as it ever will",
        )

    def runs_on(self, name: str, own: Collection[int]) -> bool:
        """Tell whether a module runs on one of these stages: it lies in a unit with a call there, or between the units."""
        around = (stages for unit, stages in self.calls.items() if is_inside(name, unit))
        return all(set(stages) & set(own) for stages in around)

    @property
    def stages(self) -> dict[str, int]:
        """Unit's name -> stage of its first call, as written in a plan."""
        return {name: stages[0] for name, stages in self.calls.items()}


def latest_of(homes: Iterable[int | None]) -> int | None:
    """Return where what is computed of tensors with these homes takes place: on the latest; None where every stage has them."""
    latest: int | None = None
    for home in homes:  # asked at every call of a layer, and a generator takes three times as long
        if home is not None and (latest is None or home > latest):
            latest = home
    return latest


def _place_of(stage: int, latest: int | None, module: nn.Module, *, draws: bool) -> int:
    """Return the stage of a call that is dealt to `stage`, and takes tensors of no later one than `latest`.

    A layer without parameters and buffers may serve several others, of which chance may have left some out: it runs where its
    tensors are.
    """
    moves = latest is not None and (latest > stage or draws)
    return latest if latest is not None and moves and not _holds_tensors(module) else stage


def _holds_tensors(module: nn.Module) -> bool:
    """Tell whether a module has parameters, here or on another stage, or buffers."""
    return any(
        child._parameters or child._buffers or any(isinstance(item, nn.Parameter) for item in vars(child).values())
        for child in module.modules()
    )


def _fix_for(num_pieces: int, rank_of_stage: Sequence[int]) -> str:
    """Return the fix for fewer pieces than stages; a schedule may want several stages a rank."""
    num_ranks = len(set(rank_of_stage))
    virtual = len(rank_of_stage) // num_ranks
    if num_pieces < 2:
        return "use pp=1: the model is one piece"
    if num_pieces // virtual > 1:
        return f"use pp={num_pieces // virtual}"
    return f"use pp={min(num_pieces, num_ranks)},schedule=1f1b, which has one stage a rank"


def cut(
    module: nn.Module,
    flow: Flow,
    rank_of_stage: Sequence[int],
    given: Mapping[str, int],
    together: Sequence[set[str]] = (),
) -> StageMap:
    """Assign the calls to stages such that the busiest rank has as little work as possible.

    Args:
        module: The plain model.
        flow: Its calls.
        rank_of_stage: The rank of each stage.
        given: Module name -> stage, from the plan; a name stands for all units inside of it.
        together: Sets of units whose calls lie on one stage.

    Raises:
        ApplyError: There are fewer calls than stages; the given stages are unknown or run backwards.
    """
    calls, num_stages = flow.calls, len(rank_of_stage)
    if len(calls) < num_stages:
        names = ", ".join(call.unit or "(the model itself)" for call in calls)
        raise ApplyError(
            f"{num_stages} stages need at least as many layers, and this model's forward calls {len(calls)}: {names}",
            fix=_fix_for(len(calls), rank_of_stage),
        )
    costs = call_costs(module, flow)
    _refuse_unknown(flow, given)
    blocks = _blocks(module, flow, [*together, *map(set, flow.bonds.values())])
    if len(blocks) < num_stages and flow.firsts:
        raise ApplyError(
            f"the forward reads values between its layers: {'; '.join([*flow.firsts][:3])}; the layers up to those belong to the "
            f"first stage, which tells the others, and that leaves {len(blocks)} of {num_stages} stages",
            fix=f"let the inputs alone decide, or move the code into a layer; or {_fix_for(len(blocks), rank_of_stage)}",
        )
    if len(blocks) < num_stages:
        raise ApplyError(
            f"{len(calls)} calls of layers make {len(blocks)} pieces for {num_stages} stages (rule: a layer with buffers or "
            "counts that is called several times stays on one stage with all calls in between, and so do layers that tensor "
            f"parallelism cuts together){_texts_of(flow.bonds)}",
            fix=_fix_for(len(blocks), rank_of_stage),
        )
    wishes = [next((w for p in block if (w := _wish(calls[p].unit, given)) is not None), None) for block in blocks]
    dealt = balance_over_ranks([sum(costs[place] for place in block) for block in blocks], rank_of_stage, wishes)
    stages = [stage for stage, block in zip(dealt, blocks, strict=True) for _ in block]
    by_unit: dict[str, list[int]] = {}
    holders: dict[str, set[int]] = {name: set() for name, _ in module.named_parameters()}
    places: list[int] = []
    for call, stage in zip(calls, stages, strict=True):
        by_unit.setdefault(call.unit, []).append(stage)
        # What the code after a call looks up is used where that call takes place.
        unit = module.get_submodule(call.unit)
        latest = latest_of(places[taken] for taken in call.takes)
        places.append(_place_of(stage, latest, unit, draws=flow.draws))
        for name in call.parameters:
            holders[name].add(places[-1])
    before = 0
    for unit in flow.units:
        if unit in by_unit:
            before = by_unit[unit][-1]
            continue
        # Code between the layers may use its parameters without calling it, by a method for example: it lies there, too.
        used = set[int]().union(*(holders[name] for name in flow.idle[unit]))
        by_unit[unit] = [min(used, default=before)]
        for name in flow.idle[unit]:
            holders[name].update(by_unit[unit])
    loads: Counter[int] = Counter()
    for stage, cost in zip(stages, costs, strict=True):
        loads[stage] += cost  # pyright: ignore[reportArgumentType] - a Counter of floats
    return StageMap(
        num_stages=num_stages,
        calls={name: tuple(found) for name, found in by_unit.items()},
        holders={name: tuple(sorted(found)) or (0,) for name, found in holders.items()},
        shares=tuple(loads[stage] / sum(costs) for stage in range(num_stages)),
        flow=flow,
        may_look=frozenset({*flow.looks, *units_that_may_look(module, flow.units)}),
        parts=frozenset(unit for unit in flow.units if any(is_inside(unit, _scope_of(found)) for found in together)),
    )


def _scope_of(units: Iterable[str]) -> str:
    """Return the innermost module around some units."""
    columns = zip(*(unit.split(".") for unit in units), strict=False)
    return ".".join(column[0] for column in itertools.takewhile(lambda column: len(set(column)) == 1, columns))


def _blocks(module: nn.Module, flow: Flow, together: Sequence[set[str]]) -> list[list[int]]:
    """Group the calls, by position, into runs that stay on one stage."""
    last_call = {call.unit: place for place, call in enumerate(flow.calls)}
    blocks: list[list[int]] = []
    end = -1
    for place, call in enumerate(flow.calls):
        if place > end:
            blocks.append([])
        blocks[-1].append(place)
        if place == 0:
            end = max(end, flow.num_first - 1)
        if call.unit in flow.counts or any(True for _ in module.get_submodule(call.unit).buffers()):
            end = max(end, last_call[call.unit])
        for members in together:
            if call.unit in members:
                end = max(end, *(last_call[unit] for unit in members if unit in last_call))
    return blocks


def _texts_of(bonds: Mapping[str, tuple[str, ...]]) -> str:
    return f", and those where one changes what another uses: {'; '.join([*bonds][:3])}" if bonds else ""


def _wish(unit: str, given: Mapping[str, int]) -> int | None:
    fitting = [name for name in given if unit == name or unit.startswith(f"{name}.")]
    return given[max(fitting, key=len)] if fitting else None


def _refuse_unknown(flow: Flow, given: Mapping[str, int]) -> None:
    for name in given:
        if not any(unit == name or unit.startswith(f"{name}.") for unit in flow.units):
            raise ApplyError(
                f"the plan assigns '{name}' to a stage, and it is not a layer at which this model can be cut"
                f"{did_you_mean(name, flow.units)}",
                fix=f"use names among {', '.join(flow.units[:8])}",
            )


def with_one_opened(
    module: nn.Module, flow: Flow, units: Sequence[str], num_stages: int, closed: Collection[str]
) -> list[str] | None:
    """Return the units with one more of them opened: the heaviest one, while it is too heavy for one stage among several."""
    costs: Counter[str] = Counter()
    for call, cost in zip(flow.calls, call_costs(module, flow), strict=True):
        costs[call.unit] += cost  # pyright: ignore[reportArgumentType] - a Counter of floats
    calls_of = Counter(call.unit for call in flow.calls)
    total = sum(costs.values())
    for name, cost in costs.most_common():
        is_heavy = cost / calls_of[name] > total / num_stages or len(flow.calls) < num_stages
        inner = [child for child, _ in find_layers(module.get_submodule(name))]
        if is_heavy and len(inner) > 1 and name not in closed:
            found: list[str] = []
            for unit in units:
                found += [f"{name}.{child}" if name else child for child in inner] if unit == name else [unit]
            return found
    return None
