"""Guards of model and optimizer: all ranks hold one model and one plan, and neither changes unnoticed afterwards."""

from __future__ import annotations

import hashlib
import itertools
import json
from typing import Any

import torch
from torch import nn

from meshwright._torch_private import num_users
from meshwright.apply.modules.compiled import compiled_error
from meshwright.comm.communicator import Communicator
from meshwright.errors import ApplyError

__all__: list[str] = []


def describe_tensors(module: nn.Module) -> list[list[Any]]:
    """Return [kind, FQN, shape, dtype, requires_grad, FQN of the tensor it shares] for each parameter and buffer."""
    first_name: dict[int, str] = {}
    rows: list[list[Any]] = []
    kinds = (
        ("parameter", module.named_parameters(remove_duplicate=False)),
        ("buffer", module.named_buffers(remove_duplicate=False)),
    )
    for kind, named in kinds:
        for name, tensor in named:
            tied_to = first_name.setdefault(id(tensor), name)
            rows.append(
                [
                    kind,
                    name,
                    list(tensor.shape),
                    str(tensor.dtype),
                    tensor.requires_grad,
                    tied_to if tied_to != name else None,
                ]
            )
    return rows


def require_equal_on_ranks(
    group: Communicator, module: nn.Module, plan_json: str, device: torch.device, *, number: int = 0
) -> int:
    """Refuse to start where ranks hold different plans or models; return the largest of the ranks' numbers.

    Raises:
        ApplyError: On every rank, with the first difference and both sides.
    """
    if group.size == 1:
        return number
    rows = describe_tensors(module)
    digests = group.all_gather_json([_digest(plan_json), _digest(json.dumps(rows)), number], device=device)
    strangers = [rank for rank, found in enumerate(digests) if not (isinstance(found, list) and len(found) == 3)]
    if strangers:
        raise ApplyError(
            f"ranks are in different calls: rank {group.ranks[strangers[0]]} does not apply a plan while others do",
            fix="have every rank run the same calls in the same order: no branch on the rank around apply_plan, a step or a save",
        )
    if len({plan for plan, _, _ in digests}) > 1:
        plans = group.all_gather_json(plan_json, device=device)
        other = next(rank for rank, plan in enumerate(plans) if plan != plans[0])
        raise ApplyError(
            f"ranks hold different plans: rank 0 has {plans[0]}, rank {other} has {plans[other]}",
            fix="give every rank the same plan",
        )
    if len({model for _, model, _ in digests}) > 1:
        everyone = group.all_gather_json(rows, device=device)
        other = next(rank for rank, theirs in enumerate(everyone) if theirs != everyone[0])
        raise ApplyError(
            f"ranks hold different models: {_first_difference(everyone[0], everyone[other], other)}",
            fix="build the model the same way on every rank: no rank-dependent branch, no unordered set of layers",
        )
    return max(number for _, _, number in digests)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _first_difference(mine: list[list[Any]], theirs: list[list[Any]], other: int) -> str:
    for left, right in zip(mine, theirs, strict=False):
        if left != right:
            return f"rank 0 has {_row_text(left)}, rank {other} has {_row_text(right)}"
    longer, rank = (mine, 0) if len(mine) > len(theirs) else (theirs, other)
    extra = longer[min(len(mine), len(theirs))]
    return f"rank 0 has {len(mine)} tensors, rank {other} has {len(theirs)}: only rank {rank} has {_row_text(extra)}"


def _row_text(row: list[Any]) -> str:
    kind, name, shape, dtype, requires_grad, tied_to = row
    tied = f", tied to '{tied_to}'" if tied_to else ""
    return f"{kind} '{name}' of shape {tuple(shape)}, {dtype}, requires_grad={requires_grad}{tied}"


class ModelGuard:
    """Detects changes between steps that a plan cannot follow: replaced, added or reordered modules, moved values.

    It also detects switched `requires_grad`. A check takes about 0.1 microseconds for each module and parameter, once a step.

    Args:
        module: The module as it was when the plan was applied.
        fixes_memory: Whether the values must stay in their memory, since shards or pieces are views of it.
        follows_calls: Whether no module may be compiled, since exchanges stand between their calls.
        cuts_batch: Whether a forward sees a part of the batch, so that no embedding may begin to count or renormalise ids.
    """

    def __init__(
        self, module: nn.Module, *, fixes_memory: bool = False, follows_calls: bool = False, cuts_batch: bool = False
    ) -> None:
        owners = list(module.named_modules())
        self._embeddings = [
            (prefix, own)
            for prefix, own in owners
            if cuts_batch
            and isinstance(own, (nn.Embedding, nn.EmbeddingBag))
            and own.max_norm is None
            and not own.scale_grad_by_freq
        ]
        self._followed = [(vars(own), prefix) for prefix, own in owners] if follows_calls else []
        self._parameters = [
            (own._parameters, name, parameter, f"{prefix}.{name}" if prefix else name)
            for prefix, own in owners
            for name, parameter in own._parameters.items()
        ]
        self._children = [(own._modules, list(own._modules.items()), prefix) for prefix, own in owners]
        self._counts = [(own._parameters, len(own._parameters), prefix) for prefix, own in owners]
        self._dicts = [own._parameters for _, own in owners] + [own._modules for _, own in owners]
        self._ids = self._read_ids()
        self._trainable = [parameter for _, _, parameter, _ in self._parameters if parameter is not None]
        self._names = [fqn for _, _, parameter, fqn in self._parameters if parameter is not None]
        self._requires_grad = self._read_requires_grad()
        self._places = self._read_places() if fixes_memory else None
        self._memory = [parameter.data for parameter in self._trainable] if fixes_memory else []

    def _read_ids(self) -> list[int]:
        # `dict.values` itself, since an engine may watch look-ups in these.
        return list(map(id, itertools.chain.from_iterable(map(dict.values, self._dicts))))

    def _read_requires_grad(self) -> list[bool]:
        return [parameter.requires_grad for parameter in self._trainable]

    def _read_places(self) -> list[int]:
        return [parameter.data_ptr() for parameter in self._trainable]

    def find_change(self) -> ApplyError | None:
        """Return the error that names a changed part of the module, else None; values that lie elsewhere are taken back."""
        now = self.take_back()
        for own, name in self._followed:
            if "_compiled_call_impl" in own and own["_compiled_call_impl"] is not None:
                return compiled_error(name, "this plan exchanges tensors between the calls of its layers")
        if self._read_ids() != self._ids:
            change = self._find_replaced()
            if change is not None:
                return change
        for name, own in self._embeddings:
            if own.max_norm is not None or own.scale_grad_by_freq:
                option = "max_norm" if own.max_norm is not None else "scale_grad_by_freq"
                return ApplyError(
                    f"{option} of embedding '{name}' was set after the plan was applied: it goes by the ids of a batch, and "
                    "each rank or micro-batch sees a part of them",
                    fix="leave it as it was, or use a plan that leaves the batch whole (dp=1, micro_batches=1)",
                )
        if self._places is not None and self._places != now:
            moved = [name for name, new, old in zip(self._names, now, self._places, strict=True) if new != old]
            return ApplyError(
                f"the values of {len(moved)} parameter(s), '{moved[0]}' for example, were put elsewhere after the plan was "
                "applied (by an assignment to .data, vector_to_parameters or module.to); the optimizer updates the earlier "
                "memory, so the new values would be lost",
                fix="change values in place: parameter.data.copy_(...) under torch.no_grad()",
            )
        return None

    def take_back(self) -> list[int]:
        """Copy values that code has put elsewhere (`self.weight.data = self.weight.data.clamp(0)`) to where they belong.

        Memory that anything else holds as well stays refused: what is written there later would not be seen.

        Returns:
            Where the values lie after that; nothing where they may lie anywhere.
        """
        if self._places is None or self._places == (now := self._read_places()):
            return self._places or []
        for parameter, data, new, old in zip(self._trainable, self._memory, now, self._places, strict=True):
            if new == old or data.data_ptr() != old or not all(data.stride()):  # a placeholder of entries
                continue
            is_alike = (data.shape, data.dtype, data.device) == (parameter.shape, parameter.dtype, parameter.device)
            if is_alike and num_users(parameter) == 1:
                data.copy_(parameter.data)
                parameter.data = data
        return self._read_places()

    def _find_replaced(self) -> ApplyError | None:
        for owner, name, parameter, fqn in self._parameters:
            if dict.get(owner, name) is not parameter:
                return ApplyError(
                    f"parameter '{fqn}' was replaced after the plan was applied; the new one would not be trained",
                    fix="change its values in place (parameter.data.copy_(...)), or apply the plan again",
                )
        for (modules, children, prefix), (parameters, num_parameters, _) in zip(
            self._children, self._counts, strict=True
        ):
            if len(modules) != len(children) or len(parameters) != num_parameters:
                return ApplyError(
                    f"module '{prefix or '(the model itself)'}' had {len(children)} children and {num_parameters} "
                    f"parameters when the plan was applied, and has {len(modules)} and {len(parameters)} now",
                    fix="change the model before apply_plan, or apply the plan again",
                )
            for (name, child), (name_now, child_now) in zip(children, modules.items(), strict=True):
                if child is not child_now:
                    fqn = f"{prefix}.{name_now}" if prefix else name_now
                    what = "moved" if any(child_now is other for _, other in children) else "replaced"
                    return ApplyError(
                        f"module '{fqn}' ({type(child).__name__} '{name}' when the plan was applied) was {what}; its "
                        "parameters would be neither equal on the ranks nor trained by this plan",
                        fix="change the model before apply_plan (where a first forward does it: run it there, once), or apply "
                        "the plan again",
                    )
        return None

    @property
    def is_trained(self) -> bool:
        """Whether any parameter is to get a gradient, by the last accepted `requires_grad`."""
        return any(self._requires_grad)

    def find_switched(self) -> str | None:
        """Return the FQN of a parameter with another `requires_grad` than at the last `accept_trainable`, or None."""
        now = self._read_requires_grad()
        if now == self._requires_grad:
            return None
        return next(name for name, new, old in zip(self._names, now, self._requires_grad, strict=True) if new != old)

    def accept_trainable(self) -> list[bool]:
        """Accept the present `requires_grad` of each parameter, and return it."""
        self._requires_grad = self._read_requires_grad()
        return self._requires_grad


def _hooks_of(optimizer: Any) -> list[Any]:
    """Return the user's functions that run before and after the optimizer's step, without torch's and ours."""
    kinds = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    hooks = [hook for kind in kinds for hook in getattr(optimizer, kind, {}).values()]
    return [
        hook
        for hook in hooks
        if (getattr(hook, "__module__", None) or type(hook).__module__).partition(".")[0] not in ("torch", "meshwright")
    ]


class OptimizerGuard:
    """Detects groups with other parameters than the engine has given the optimizer, and hooks that would see parts.

    Args:
        optimizer: The optimizer, after the engine has adopted it; None has no groups.
        engine: The engine: `accept_groups` corrects changed groups, or returns the error that says why not.
    """

    def __init__(self, optimizer: torch.optim.Optimizer | None, engine: Any) -> None:
        self._optimizer = optimizer
        self._engine = engine
        self._ids = self._read_ids()

    def _has_parts(self) -> bool:
        """Tell whether the optimizer updates parts of parameters, or only some of the model's parameters."""
        whole = {id(parameter) for parameter in self._engine.module.parameters()}
        return self._engine.holds_parts or not whole.issuperset(self._ids)

    def _read_ids(self) -> list[int]:
        groups = () if self._optimizer is None else self._optimizer.param_groups
        return [id(parameter) for group in groups for parameter in group["params"]]

    def find_change(self) -> ApplyError | None:
        """Return why this rank's groups cannot be trained, or None."""
        if self._optimizer is None:
            return None
        hooks = _hooks_of(self._optimizer)
        if hooks and self._has_parts():
            name = getattr(hooks[0], "__qualname__", type(hooks[0]).__qualname__)
            return ApplyError(
                f"'{name}' was registered to run around {type(self._optimizer).__name__}.step(), where each rank holds only "
                "parts of the parameters and gradients under this plan: a norm, a mean or a clip would be of those parts",
                fix="pass max_grad_norm= to clip; read model.full_gradients() after the step, and change values between steps "
                "inside `with model.whole_parameters():`; or use zero=0, tp=1 and pp=1",
            )
        if self._read_ids() == self._ids:
            return None
        error = self._engine.accept_groups(self._optimizer)
        if error is None:
            self._ids = self._read_ids()
        return error


def refuse_unfinished(module: nn.Module, plan: str) -> None:
    """Raise ApplyError where a module is compiled by torch.jit, or has parameters whose shape the first forward decides."""
    for name, child in module.named_modules():
        if isinstance(child, torch.jit.ScriptModule):
            raise ApplyError(
                f"'{name or 'the model itself'}' is compiled by torch.jit: its hooks and its parameters cannot be watched, "
                f"as the plan '{plan}' requires",
                fix="pass the model before torch.jit.script or trace",
            )
        tensors = [*child._parameters.items(), *child._buffers.items()]
        lazy = next((key for key, tensor in tensors if nn.parameter.is_lazy(tensor)), None)
        if lazy is not None:
            raise ApplyError(
                f"'{f'{name}.{lazy}' if name else lazy}' has no shape before the first forward (a {type(child).__name__})",
                fix="run the model once on a sample inside of build_model, before it is returned",
            )


def refuse_shared_memory(module: nn.Module, plan: str, *, ties_too: bool) -> None:
    """Raise ApplyError where a parameter of a module and a buffer, or two parameters, share memory that the plan would separate.

    Args:
        module: The module.
        plan: The plan, for the message.
        ties_too: Whether two parameters are refused.
    """
    spans: dict[torch.device, list[tuple[int, int, str, bool]]] = {}
    held = [(name, tensor, True) for name, tensor in module.named_parameters()]
    held += [(name, tensor, False) for name, tensor in module.named_buffers()]
    for name, tensor, is_parameter in held:
        if tensor.layout == torch.strided and tensor.numel() and not tensor.is_meta:
            extent = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            begin = tensor.data_ptr()
            end = begin + (extent + 1) * tensor.element_size()
            spans.setdefault(tensor.device, []).append((begin, end, name, is_parameter))
    for found in spans.values():
        found.sort()
        for (_, end, name, is_parameter), (begin, _, other, is_other) in itertools.pairwise(found):
            if begin >= end or not (is_parameter or is_other) or (is_parameter and is_other and not ties_too):
                continue
            if is_parameter and is_other:
                raise ApplyError(
                    f"parameters '{name}' and '{other}' share their memory (one was made of the other's .data), and are two "
                    f"parameters with two gradients; the plan '{plan}' would give each its own memory",
                    fix="tie them as one parameter (head.weight = embedding.weight), or give one a copy (.data.clone())",
                )
            parameter, buffer = (name, other) if is_parameter else (other, name)
            raise ApplyError(
                f"buffer '{buffer}' is the memory of parameter '{parameter}'; the plan '{plan}' would give each its own",
                fix="read the parameter itself in forward, or give the buffer a copy (.detach().clone())",
            )
