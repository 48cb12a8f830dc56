"""Training settings of a DeepSpeed configuration: precision, clipping, optimizer, learning rate and printing."""

from __future__ import annotations

import math
from typing import Any

from meshwright.errors import did_you_mean
from meshwright.plan.deepspeed.check import fragment, show
from meshwright.plan.deepspeed.draft import NOTHING, Draft

__all__: list[str] = []


def take_precision(draft: Draft) -> None:
    """Put the precision of compute and of gradients into the plan."""
    fp16, bf16, autocast = "fp16.enabled", "bf16.enabled", "torch_autocast.enabled"
    precision = draft.settings.precision or "fp32"
    if draft.get(fp16):
        draft.problems.add(
            '"fp16.enabled" is true, which cannot be honoured: there is no loss scaling; bf16 needs none (rule: fp32 or bf16)',
            fix=f"{fragment(fp16, False)}, {fragment(bf16, True)}",
        )
    if draft.has(fp16):
        draft.row(fp16, NOTHING, "as it is here: off")
    given = [key for key in (bf16, autocast) if draft.get(key) is not None]
    if given:
        precision = "bf16" if any(draft.get(key) for key in given) else "fp32"
    if draft.has(bf16):
        why = draft.source(bf16, "train.precision of the configuration" if draft.settings.precision else None)
        how = (
            "; forward in bfloat16, parameters, gradients and the optimizer in full precision"
            if precision == "bf16"
            else ""
        )
        draft.row(bf16, f"precision={precision}", f"{why}{how}")
    _take_autocast(draft, precision)
    draft.plan["precision"] = precision
    if draft.settings.precision is not None:
        draft.change("train", precision=precision)
    _take_dtypes(draft)


def _take_autocast(draft: Draft, precision: str) -> None:
    enabled, dtype = "torch_autocast.enabled", "torch_autocast.dtype"
    word = str(draft.get(dtype) or "").removeprefix("torch.")
    if draft.get(enabled) and word not in ("bf16", "bfloat16"):
        draft.problems.add(
            f'"{dtype}" is {show(draft.get(dtype))}, which cannot be honoured: autocast runs in bfloat16',
            fix=fragment(dtype, "bfloat16"),
        )
    if draft.has(enabled):
        draft.row(enabled, f"precision={precision}", draft.source(enabled))
    if draft.has(dtype):
        draft.row(dtype, NOTHING, "given" if draft.get(enabled) else "autocast is off")


def _take_dtypes(draft: Draft) -> None:
    sent, summed = "communication_data_type", "data_types.grad_accum_dtype"
    names = {"fp32": "none", "float32": "none", "bf16": "bf16", "bfloat16": "bf16"}
    if draft.has(sent):
        word = str(draft.get(sent) or "fp32").lower()
        if word not in names:
            draft.problems.add(
                f'"{sent}" is {show(draft.get(sent))}, which cannot be honoured: gradients are sent as fp32 or bf16',
                fix=fragment(sent, "bf16"),
            )
        draft.plan["compress"] = names.get(word, "none")
        draft.row(sent, f"compress={names.get(word, 'none')}", "gradients are sent in this dtype")
    if draft.has(summed):
        word = str(draft.get(summed) or "fp32")
        known = ("fp32", "float32", "bf16", "bfloat16", "fp16", "float16")
        if word not in known:
            draft.problems.add(f'"{summed}" is "{word}"{did_you_mean(word, known)}', fix=fragment(summed, "fp32"))
        exact = word in ("fp32", "float32")
        draft.row(summed, NOTHING, "gradients are added up in the parameters' own dtype", warns=not exact)


def take_loop(draft: Draft) -> None:
    """Put clipping, printing, the seed and the last batch into the configuration."""
    clipping = "gradient_clipping"
    norm, setting = draft.get(clipping), draft.settings.max_grad_norm
    why = draft.source(clipping, "train.max_grad_norm of the configuration" if setting is not None else None)
    if norm is None:
        norm = 1.0 if setting is None else setting
    draft.change("train", max_grad_norm=float(norm) if norm else None)
    draft.row(clipping, f"train.max_grad_norm={float(norm):g}" if norm else "no clipping", why)
    if draft.has("steps_per_print"):
        _take_printing(draft)
    if draft.has("seed"):
        if draft.get("seed") is not None:
            draft.change("train", seed=draft.get("seed"))
        draft.row(
            "seed",
            f"train.seed={draft.get('seed') or 0}",
            "DeepSpeed ignores this key, and its meaning is clear",
            warns=True,
        )
    if draft.has("dataloader_drop_last"):
        drops = bool(draft.get("dataloader_drop_last"))
        draft.change("data", drop_last=drops)
        draft.row("dataloader_drop_last", f"data.drop_last={show(drops)}", draft.source("dataloader_drop_last"))


def _is_whole(value: Any) -> bool:
    """Tell whether a value is a whole number of at least 1; files write 1e3 too."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return is_number and value >= 1 and value == int(value)


def _take_printing(draft: Draft) -> None:
    key = "steps_per_print"
    steps: Any = draft.values[key]
    if draft.is_auto(key):
        draft.row(key, NOTHING, "auto: as without DeepSpeed")
        return
    if steps is None or (isinstance(steps, float) and math.isinf(steps)):  # accelerate writes inf
        draft.change("train", print_every=0)
        draft.row(key, "train.print_every=0", "given: never")
        return
    if not _is_whole(steps):
        draft.problems.add(
            f'"{key}" is {show(steps)} (rule: a whole number, at least 1, or null for never)', fix=fragment(key, 10)
        )
        return
    draft.change("train", print_every=int(steps))
    draft.row(key, f"train.print_every={int(steps)}", "given: a line every so many steps")


# -- the optimizer ------------------------------------------------------------------------------------------------------

_TORCH_OPTIMIZERS = ("Adadelta", "Adagrad", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop")
_ADAM_SWITCHES = ("torch_adam", "foreach", "fused", "set_grad_none", "fp32_optimizer_states")
"""Arguments of Adam that choose between equal implementations."""


def take_optimizer(draft: Draft) -> None:
    """Replace the configuration's section by the `optimizer` block, if there is one."""
    if not draft.has("optimizer.type"):
        if any(key.startswith("optimizer.params") for key in draft.values):
            draft.problems.add('"optimizer.type" is missing', fix=fragment("optimizer.type", "AdamW"))
        return
    name = str(draft.get("optimizer.type"))
    named = {"adam": "adam", "adamw": "adam", "sgd": "sgd"} | {known.lower(): known for known in _TORCH_OPTIMIZERS}
    kind = named.get(name.lower())
    if kind is None:
        known = ("Adam", "AdamW", "SGD", *_TORCH_OPTIMIZERS)
        draft.problems.add(
            f'"optimizer.type" is "{name}"{did_you_mean(name, known)}, which cannot be honoured; known: {", ".join(known)}',
            fix=fragment("optimizer.type", "AdamW"),
        )
        return
    params = _Params(draft, "optimizer.params")
    section: dict[str, Any] = {"betas": None, "momentum": None, "weight_decay": 0.0, "kwargs": {}}
    section["lr"] = params.number("lr", 1e-3, draft.settings.lr)
    section["weight_decay"] = params.number("weight_decay", 0.0, draft.settings.weight_decay)
    if kind == "adam":
        section["name"] = _take_adam(draft, params, section, name)
    elif kind == "sgd":
        section["name"] = "sgd"
        section["momentum"] = params.number("momentum", 0.0)
        section["kwargs"] = params.rest(("nesterov", "dampening", "maximize"))
    else:
        section["name"] = f"torch.optim:{kind}"
        section["kwargs"] = params.rest()
    draft.change("optimizer", **section)
    if kind != "adam":
        draft.row("optimizer.type", f"optimizer.name={section['name']}", "given; torch's own")


def _take_adam(draft: Draft, params: _Params, section: dict[str, Any], name: str) -> str:
    """Read Adam's arguments: DeepSpeed's "Adam" is AdamW unless adam_w_mode is false."""
    decoupled = name.lower() == "adamw" or params.switch("adam_w_mode", True, "optimizer.name")
    params.only("bias_correction", True, "torch's Adam always corrects its moments")
    betas = params.take("betas", [0.9, 0.999], list(draft.settings.betas) if draft.settings.betas else None)
    fits = isinstance(betas, list) and len(betas) == 2 and all(isinstance(beta, (int, float)) for beta in betas)
    if not (fits and all(0 <= beta < 1 for beta in betas)):
        draft.problems.add(
            f'"optimizer.params.betas" is {show(betas)} (rule: two numbers, 0 <= beta < 1)',
            fix=fragment("optimizer.params.betas", [0.9, 0.999]),
        )
        betas = [0.9, 0.999]
    pair = (float(betas[0]), float(betas[1]))
    eps = params.number("eps", 1e-8)
    for switch in _ADAM_SWITCHES:
        params.skip(switch, "an implementation, not another number; torch's fused kernels are used")
    kwargs = ({"eps": eps} if eps != 1e-8 else {}) | params.rest(("amsgrad", "maximize"))
    why = "given" if name.lower() == "adamw" else 'given; DeepSpeed\'s "Adam" is AdamW unless adam_w_mode is false'
    if decoupled:
        section |= {"betas": pair if draft.has("optimizer.params.betas") else None, "kwargs": kwargs}
        draft.row("optimizer.type", "optimizer.name=adamw", why)
        return "adamw"
    section["kwargs"] = {"betas": list(pair), **kwargs}
    draft.row(
        "optimizer.type",
        "optimizer.name=torch.optim:Adam",
        "given; adam_w_mode is false: weight decay is added to the gradient",
    )
    return "torch.optim:Adam"


class _Params:
    """The arguments of an optimizer or a scheduler, each with its row."""

    def __init__(self, draft: Draft, block: str) -> None:
        self._draft = draft
        self._block = block
        self._taken: set[str] = set()

    def take(self, name: str, default: Any, setting: Any = None) -> Any:
        """Return an argument: as given, for "auto" the configuration's, else DeepSpeed's default."""
        key = f"{self._block}.{name}"
        self._taken.add(name)
        value = self._draft.get(key)
        if value is None:
            from_setting = self._draft.is_auto(key) and setting is not None
            value = setting if from_setting else default
            if self._draft.has(key) or name == "lr":
                self._draft.row(
                    key, show(value), self._draft.source(key, "the configuration's" if from_setting else None)
                )
        else:
            self._draft.row(key, show(value), "given")
        return value

    def number(self, name: str, default: float, setting: float | None = None) -> float:
        """Return a number that is at least 0."""
        value = self.take(name, default, setting)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
            key = f"{self._block}.{name}"
            self._draft.problems.add(
                f'"{key}" is {show(value)} (rule: a number, at least 0)', fix=fragment(key, default)
            )
            return default
        return float(value)

    def count(self, name: str, default: int, setting: int | None = None) -> int:
        """Return a whole number that is at least 1."""
        value = self.take(name, default, setting)
        if not _is_whole(value):
            key = f"{self._block}.{name}"
            self._draft.problems.add(
                f'"{key}" is {show(value)} (rule: a whole number, at least 1)', fix=fragment(key, default)
            )
            return default
        return int(value)

    def switch(self, name: str, default: bool, decides: str) -> bool:
        """Return true or false."""
        key = f"{self._block}.{name}"
        self._taken.add(name)
        if self._draft.has(key):
            self._draft.row(key, NOTHING, f"given; decides {decides}")
        value = self._draft.get(key)
        return default if value is None else bool(value)

    def only(self, name: str, default: Any, why: str) -> None:
        """Refuse any value but the default."""
        key = f"{self._block}.{name}"
        self._taken.add(name)
        if self._draft.get(key) not in (None, default):
            self._draft.problems.add(
                f'"{key}" is {show(self._draft.get(key))}, which cannot be honoured: {why}', fix=fragment(key, default)
            )
        if self._draft.has(key):
            self._draft.row(key, NOTHING, f"as it is here: {why}")

    def skip(self, name: str, why: str) -> None:
        """Record an argument that changes no number."""
        self._taken.add(name)
        if self._draft.has(f"{self._block}.{name}"):
            self._draft.row(f"{self._block}.{name}", NOTHING, why)

    def rest(self, known: tuple[str, ...] | None = None) -> dict[str, Any]:
        """Return the arguments not taken, for the optimizer itself.

        Args:
            known: All that it knows; None leaves the judgement to it.
        """
        found: dict[str, Any] = {}
        for key, name in self._untaken():
            if name == "max_grad_norm":
                self._draft.problems.add(
                    f'"{key}" is no argument of an optimizer (rule: "gradient_clipping" clips)',
                    fix=f'leave out "{key}"',
                )
            elif known is not None and name not in known:
                self._add_unknown(key, name, known)
            elif self._draft.is_auto(key):
                self._draft.row(key, NOTHING, "auto: the optimizer's own default")
            else:
                found[name] = self._draft.get(key)
                self._draft.row(key, f"optimizer.kwargs.{name}", "given to the optimizer")
        return found

    def refuse_rest(self, known: tuple[str, ...]) -> None:
        """Refuse the arguments not taken."""
        for key, name in self._untaken():
            self._add_unknown(key, name, known)

    def _untaken(self) -> list[tuple[str, str]]:
        names = [(key, key.removeprefix(f"{self._block}.")) for key in self._draft.values]
        return [(key, name) for key, name in names if name != key and name not in self._taken]

    def _add_unknown(self, key: str, name: str, known: tuple[str, ...]) -> None:
        hint = did_you_mean(name, (*known, *self._taken))
        self._draft.problems.add(f'unknown key "{key}"{hint}', fix=f'leave out "{key}"')


# -- the learning rate --------------------------------------------------------------------------------------------------

_SCHEDULERS = {
    "WarmupLR": ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type"),
    "WarmupDecayLR": ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type", "total_num_steps"),
    "WarmupCosineLR": ("warmup_min_ratio", "warmup_num_steps", "warmup_type", "cos_min_ratio", "total_num_steps"),
}


def take_scheduler(draft: Draft) -> None:
    """Replace the configuration's section by the `scheduler` block, if there is one; call it after `take_optimizer`."""
    if not draft.has("scheduler.type"):
        if any(key.startswith("scheduler.params") for key in draft.values):
            draft.problems.add('"scheduler.type" is missing', fix=fragment("scheduler.type", "WarmupLR"))
        return
    name = str(draft.get("scheduler.type"))
    if name not in _SCHEDULERS:
        draft.problems.add(
            f'"scheduler.type" is "{name}"{did_you_mean(name, _SCHEDULERS)}, which cannot be honoured; '
            f"known: {', '.join(_SCHEDULERS)}",
            fix='leave out "scheduler"',
        )
        return
    draft.row("scheduler.type", f"schedule.kind={name}", "given; DeepSpeed's curve, step by step")
    params, settings = _Params(draft, "scheduler.params"), draft.settings
    section: dict[str, Any] = {"kind": name, "min_lr_fraction": 0.0, "total_steps": None}
    section["warmup_steps"] = max(2, params.count("warmup_num_steps", 1000, settings.warmup_steps or None))
    section["warmup_type"] = _warmup_type(draft, params)
    if name == "WarmupCosineLR":
        section["start_fraction"] = params.number("warmup_min_ratio", 0.0)
        section["min_lr_fraction"] = params.number("cos_min_ratio", 0.0001)
    else:
        section["start_fraction"] = _take_peak(draft, params, name)
    if "total_num_steps" in _SCHEDULERS[name]:
        if not draft.has("scheduler.params.total_num_steps"):
            draft.problems.add(
                f'"scheduler.params.total_num_steps" is missing (rule: {name} decays over it)',
                fix=fragment("scheduler.params.total_num_steps", "auto"),
            )
        section["total_steps"] = params.count("total_num_steps", 1000, settings.steps)
    params.only("last_batch_iteration", -1, "a run starts at its first step")
    params.refuse_rest(_SCHEDULERS[name])
    draft.change("schedule", **section)


def _take_peak(draft: Draft, params: _Params, name: str) -> float:
    """Set the learning rate to the warm-up's end, and return its start as a share of that."""
    lr = draft.changes.get("optimizer", {}).get("lr", draft.settings.lr)
    # Where it is not given WarmupLR takes the optimizer's, and WarmupDecayLR 0.001 whatever that is.
    default = 0.001 if name == "WarmupDecayLR" or lr is None else lr
    peak, start = params.number("warmup_max_lr", default, lr), params.number("warmup_min_lr", 0.0, 0.0)
    if peak <= 0 or start > peak:
        draft.problems.add(
            f'"scheduler.params.warmup_min_lr" is {start:g} and "warmup_max_lr" is {peak:g} (rule: 0 <= min <= max, 0 < max)',
            fix=fragment("scheduler.params.warmup_max_lr", max(start, 1e-3)),
        )
        return 0.0
    draft.change("optimizer", lr=peak)
    return start / peak


def _warmup_type(draft: Draft, params: _Params) -> str:
    kind = params.take("warmup_type", "log")
    if kind not in ("log", "linear"):
        draft.problems.add(
            f'"scheduler.params.warmup_type" is {show(kind)} (rule: "log" or "linear")',
            fix=fragment("scheduler.params.warmup_type", "log"),
        )
        return "log"
    return kind
