"""Settings that all ranks must have alike, compared before the first step; those that may change are compared again later.

They are all inputs that decide the numbers and are not tensors: options of the optimizer, the loss function, clipping, seeds,
classes and plain attributes of the modules, torch's own switches. Each becomes a row (name, value as text), so that a difference
has a name.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import inspect
import operator
import re
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from meshwright.comm.communicator import Communicator
from meshwright.errors import ApplyError, ConfigError
from meshwright.run.sentinels.code_digest import digest_class, digest_function
from meshwright.run.sentinels.digest import digest_text

__all__: list[str] = []

DEFAULT_EVERY = 100
"""Steps between two sentinels [count]: with those of the benchmark below 1 % of the time of the shortest steps."""
Rows = list[tuple[str, str]]
"""(name of a setting, its value as text), in an order that is the same on every rank."""

_PLAIN = (bool, int, float, complex, bytes, type(None), torch.dtype)
_OF_A_PLACE = re.compile(r"(cpu|cuda|xpu|mps|hpu|npu)(:\d+)?|.*[/\\].*", re.DOTALL)
"""Texts that may differ from rank to rank: a device, a path."""
_UUID = re.compile(
    r"(?<![0-9a-f])([0-9a-f]{8}-[0-9a-f]{4}-[1-8][0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
    r"|[0-9a-f]{12}4[0-9a-f]{3}[89ab][0-9a-f]{15})(?![0-9a-f])",
    re.IGNORECASE,
)
"""Identities that `uuid` makes, other ones in each process: code takes them for keys (fairseq's attention), not for numbers."""
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_CPU = torch.device("cpu")
_FIRST_ADDRESS = 2**32
_DENORMAL = 1e-310
_DEPTH = 4
_MOST = 1000
"""A container with more entries is data, not a setting: its length is compared [count]."""


def text_of(value: Any, depth: int = 0) -> str | None:
    """Return a value as text that is equal on two ranks where the value is; None for a value without such a text."""
    if isinstance(value, str) and _OF_A_PLACE.fullmatch(value):
        return None
    if isinstance(value, enum.Enum):
        return f"{_name(type(value))}.{value.name}"
    if isinstance(value, str):
        return repr(_UUID.sub("(uuid)", value))
    if isinstance(value, _PLAIN):
        return repr(value)
    if depth > _DEPTH:
        return None
    if isinstance(value, (list, tuple, set, frozenset, Mapping)) and len(value) > _MOST:
        return f"{len(value)} entries"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(text_of(item, depth + 1) or '...' for item in value)}]"
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(sorted(text_of(item, depth + 1) or '...' for item in value))}}}"
    if isinstance(value, Mapping):
        pairs = (f"{text_of(key, depth + 1)}: {text_of(item, depth + 1) or '...'}" for key, item in value.items())
        return f"{{{', '.join(pairs)}}}"
    if torch.is_tensor(value):
        return repr(value.item()) if value.numel() == 1 and value.layout == torch.strided else None
    if isinstance(value, type):
        return _name(value)
    return _text_of_callable(value, depth) if callable(value) else None


def _name(value: Any) -> str:
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)}"


def _text_of_callable(value: Any, depth: int) -> str | None:
    if isinstance(value, functools.partial):
        arguments = text_of([*value.args, value.keywords], depth + 1)
        return f"{text_of(value.func, depth + 1)} with {arguments}"
    if isinstance(value, types.MethodType):
        return f"{_name(value.__func__)} of {text_of(value.__self__, depth + 1) or _name(type(value.__self__))}"
    if isinstance(value, types.FunctionType):
        return f"{_name(value)} ({digest_function(value, lambda item: text_of(item, depth + 1))})"
    if inspect.isbuiltin(value) or isinstance(value, nn.Module):
        return _name(value)
    return f"{_name(type(value))} {text_of(_attributes(value), depth + 1)}"


def _attributes(value: Any) -> dict[str, Any]:
    named = {str(key): item for key, item in getattr(value, "__dict__", {}).items()}
    if isinstance(
        value, torch.autocast
    ):  # what it found when it last began is no setting: one rank may have run it alone
        named = {name: item for name, item in named.items() if not name.startswith("prev")}
    return dict(sorted(named.items()))


def of_modules(module: nn.Module) -> Rows:
    """Return the classes of all modules, their code and plain attributes, before an engine has changed any."""
    own = set(vars(nn.Module()))
    rows: Rows = []
    for name, child in module.named_modules():
        shown = f"module '{name}'" if name else "the model itself"
        rows.append((f"the class of {shown}", _name(type(child))))
        for key, value in _attributes(child).items():
            is_torchs = (key in own and key != "training") or _is_address(key, value)
            text = None if is_torchs else text_of(value)
            if text is not None:
                rows.append((f"attribute '{key}' of {shown}", text))
    kinds = dict.fromkeys(type(child) for child in module.modules())
    return rows + [
        (f"the code of class {_name(kind)}", digest_class(kind, lambda item: text_of(item, 1))) for kind in kinds
    ]


def of_modes(module: nn.Module) -> Rows:
    """Return the mode (training or eval) of each module, and the rates of dropout, which schedules change."""
    rows: Rows = []
    for name, child in module.named_modules():
        rows.append((f"whether module '{name}' trains", repr(child.training)))
        if isinstance(child, _DROPOUTS):
            rows.append((f"the rate of dropout '{name}'", repr(child.p)))
    return rows


def _is_address(key: str, value: Any) -> bool:
    """Whether a private attribute looks like an `id`, as torch.compile keeps on the modules it wraps."""
    return key.startswith("_") and type(value) is int and value >= _FIRST_ADDRESS


def of_optimizer(optimizer: torch.optim.Optimizer | None, names: Mapping[int, str]) -> Rows:
    """Return an optimizer's class and options, and which parameters it has.

    Args:
        optimizer: The optimizer, before an engine has given it pieces.
        names: id of a parameter -> its FQN.
    """
    rows: Rows = [("the optimizer's class", "none" if optimizer is None else _name(type(optimizer)))]
    for number, group in enumerate([] if optimizer is None else optimizer.param_groups):
        held = ", ".join(names.get(id(parameter), "?") for parameter in group["params"])
        rows.append((f"the parameters of group {number}", held))
    return rows + of_options(optimizer)


def of_options(optimizer: torch.optim.Optimizer | None, *, on_host: bool = False) -> Rows:
    """Return the options of each of an optimizer's groups, which a schedule may change.

    Args:
        optimizer: The optimizer, or None.
        on_host: Whether to leave out tensors on another device, which would be waited for, and learning rates.
    """
    rows: Rows = []
    for number, group in enumerate([] if optimizer is None else optimizer.param_groups):
        for key in sorted(group.keys() - {"params", "param_names"}):
            shown = "the learning rate" if key == "lr" else f"the optimizer's '{key}'"
            if on_host and (key == "lr" or getattr(group[key], "device", _CPU) != _CPU):
                continue
            text = text_of(group[key])
            if text is not None:
                rows.append((f"{shown} of group {number}", text))
    return rows


def learning_rates(optimizer: torch.optim.Optimizer | None) -> str:
    """Return the learning rates as text; those on another device than the host are left out."""
    groups = [] if optimizer is None else optimizer.param_groups
    rates = [group.get("lr") for group in groups]
    on_host = [r for r in rates if not isinstance(r, torch.Tensor) or r.device.type == "cpu"]
    return repr([float(r) if isinstance(r, torch.Tensor) and r.numel() == 1 else r for r in on_host])


class OptionsDigest:
    """A digest of an optimizer's options but for learning rates, made anew where a value was replaced.

    Args:
        optimizer: The optimizer, or None.
    """

    def __init__(self, optimizer: torch.optim.Optimizer | None) -> None:
        self._optimizer = optimizer
        self._values: list[Any] | None = None
        self._digest = 0

    def value(self) -> int:
        """Return the digest."""
        groups = [] if self._optimizer is None else self._optimizer.param_groups
        values = [
            value for group in groups for key, value in group.items() if key not in ("params", "param_names", "lr")
        ]
        is_known = self._values is not None and len(values) == len(self._values)
        if not is_known or not all(map(operator.is_, values, self._values or ())):
            rows = of_options(self._optimizer, on_host=True)
            self._values, self._digest = values, digest_text(repr(rows))
        return self._digest


def of_trainable(module: nn.Module) -> Rows:
    """Return whether each parameter requires a gradient, which building the optimizer may have changed."""
    return [
        (f"whether '{name}' requires a gradient", repr(parameter.requires_grad))
        for name, parameter in module.named_parameters()
    ]


def of_torch(device: torch.device) -> Rows:
    """Return torch's switches that change numbers."""
    rows = [
        (
            "Python's version",
            f"{sys.version_info.major}.{sys.version_info.minor}",
        ),  # of which the code's digest depends
        ("torch's version", torch.__version__),
        ("torch's default dtype", repr(torch.get_default_dtype())),
        ("torch.get_float32_matmul_precision()", torch.get_float32_matmul_precision()),
        ("torch.are_deterministic_algorithms_enabled()", repr(torch.are_deterministic_algorithms_enabled())),
        ("torch.is_autocast_enabled()", repr(torch.is_autocast_enabled(device.type))),
        ("torch.backends.mkldnn.enabled", repr(torch.backends.mkldnn.enabled)),
        ("torch.set_flush_denormal()", repr((torch.tensor(_DENORMAL, dtype=torch.float64) * 1).item() == 0)),
    ]
    if device.type == "cuda":
        cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
        reduced = (matmul.allow_fp16_reduced_precision_reduction, matmul.allow_bf16_reduced_precision_reduction)
        rows += [
            ("torch.backends.cudnn.allow_tf32", repr(cudnn.allow_tf32)),
            ("torch.backends.cudnn.deterministic", repr(cudnn.deterministic)),
            ("torch.backends.cuda.matmul.allow_tf32", repr(matmul.allow_tf32)),
            ("torch.backends.cuda.matmul's reductions in reduced precision", repr(reduced)),
        ]
    return rows


def of_loss(loss_fn: Callable[[Any, Any], Any] | None) -> Rows:
    """Return the settings of the loss."""
    return [("the loss function", "the model's own loss" if loss_fn is None else text_of(loss_fn) or _name(loss_fn))]


def at_start(
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    loss_fn: Callable[[Any, Any], Any] | None,
    options: Mapping[str, Any],
    device: torch.device,
) -> Rows:
    """Return all that ranks must have alike before the first step; `options` are further ones, by name."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    rows = [(f"{name}=", repr(value)) for name, value in options.items()]
    rows += [*of_loss(loss_fn), *of_modules(module)]
    return [*rows, *of_optimizer(optimizer, names), *of_trainable(module), *of_torch(device)]


def require_equal_settings(group: Communicator, rows: Rows, device: torch.device) -> None:
    """Refuse to continue where ranks have different settings.

    Raises:
        ApplyError: On every rank, naming the first setting that differs, with both values.
    """
    if group.size == 1:
        return
    digest = hashlib.sha256(repr(rows).encode("utf-8", "surrogatepass")).hexdigest()
    if len(set(group.all_gather_json(digest, device=device))) > 1:
        raise_different(group, rows, device)


def raise_different(group: Communicator, rows: Rows, device: torch.device) -> None:
    """Raise ApplyError on every rank where some rank's rows differ from those of the first; every rank calls it."""
    everyone: Sequence[Rows] = [
        [(name, value) for name, value in theirs] for theirs in group.all_gather_json(rows, device=device)
    ]
    for place, theirs in enumerate(everyone):
        difference = _first_difference(everyone[0], theirs)
        if difference is not None:
            name, first, other = difference
            raise ApplyError(
                f"ranks disagree about {name}: it is {first} on rank {group.ranks[0]} and {other} on rank {group.ranks[place]}",
                fix=f"give every rank the same; {name} must not depend on the rank",
            )


def _first_difference(first: Rows, other: Rows) -> tuple[str, str, str] | None:
    mine, theirs = dict(first), dict(other)
    for name in [*mine, *(name for name in theirs if name not in mine)]:
        if mine.get(name) != theirs.get(name):
            return name, _shortened(mine.get(name)), _shortened(theirs.get(name))
    return None


def _shortened(value: str | None) -> str:
    if value is None:
        return "not there"
    return value if len(value) <= 120 else f"{value[:117]}..."


def check_sentinels(every: Any, on_finding: Any) -> None:
    """Raise ConfigError for invalid options."""
    if not isinstance(every, int) or isinstance(every, bool) or every < 0:
        raise ConfigError(
            f"sentinel_every must be a number of steps, or 0, it is {every!r}",
            fix=f"pass sentinel_every={DEFAULT_EVERY}",
        )
    if on_finding not in ("stop", "warn"):
        raise ConfigError(f"on_finding must be 'stop' or 'warn', it is {on_finding!r}", fix="pass on_finding='stop'")
