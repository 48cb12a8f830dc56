"""A configuration read from TOML, with overrides, and checked. Never imports torch."""

from __future__ import annotations

import datetime
import difflib
import errno
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pydantic
from pydantic import BaseModel

from meshwright.errors import ConfigError, closest_word
from meshwright.spec.plan import Plan
from meshwright.texts import read_text, refuse_surrogates
from meshwright.train.config.checks import check_config, resolve_plan, safe_name
from meshwright.train.config.deepspeed import apply_changes
from meshwright.train.config.types import MOST_COUNT, ParamGroup, TrainConfig

__all__: list[str] = []

_SECTIONS = ("model", "data", "optimizer", "schedule", "train", "checkpoint")
_RESERVED = ("base_directory", "plan", "notes", "plan_rows")
"""Fields of `TrainConfig` that `load_config` fills in."""

_MOST_BYTES: Final = 2**20
_MOST_PARTS: Final = 32
"""Parts of a dotted key; tomllib's time grows with their square [count]."""
_OPAQUE: Final = re.compile(
    r'"""(?:[^\\]|\\.)*?"""|\'\'\'.*?\'\'\'|"(?:[^"\\\n]|\\.)*"|\'[^\'\n]*\'|#[^\n]*', re.DOTALL
)
"""Strings and comments of TOML."""
_LONG_KEY: Final = re.compile(rf"(?:[\w-]+[ \t]*\.[ \t]*){{{_MOST_PARTS}}}")
_MOST_WHOLE: Final = 10**300
"""Beyond what a float holds; written in hexadecimal a number may be longer than Python prints."""
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f]")


def load_config(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    plan: str | None = None,
    devices: int | None = None,
) -> TrainConfig:
    """Read a TOML file and check everything that can be checked without torch.

    Args:
        path: The TOML file.
        overrides: "section.key=value", each replacing what the file says; values as in TOML, or bare text.
        plan: Replaces `train.plan`.
        devices: Replaces `train.devices`.

    Returns:
        The checked configuration.

    Raises:
        ConfigError: Anything is wrong; the message names the file, the key and the rule.
        MissingDependencyError: An optional package is needed; the message has the line that installs it.
    """
    if devices is not None and not 1 <= devices <= MOST_COUNT:
        raise ConfigError(
            f"--devices has {devices.bit_length()} bits (rule: between 1 and {MOST_COUNT})", fix="--devices 2"
        )
    path = Path(path)
    text = _read(path)
    tables = _parse(text, path)
    for override in overrides:
        _set(tables, override)
    _refuse_unwritable(tables, path)
    tables |= {"plan": Plan(), "base_directory": str(path.absolute().parent)}
    train = tables.setdefault("train", {})
    if isinstance(train, dict):
        train.setdefault("name", safe_name(path.stem))
        train |= {"plan": plan} if plan is not None else {}
        train |= {"devices": devices} if devices is not None else {}
        # An explicit plan says itself how many devices it needs; the file's number was meant for the file's plan.
        resolved = resolve_plan(
            tables, plan_from_command_line=plan is not None, devices_from_command_line=devices is not None
        )
        apply_changes(tables, resolved.changes, overrides, train.get("plan", "auto"))
        tables |= {"plan": resolved.plan, "notes": resolved.notes, "plan_rows": resolved.plan_rows}
    config = _validate(tables, text, path, overrides)
    return check_config(config)


def _read(path: Path) -> str:
    try:
        return read_text(path, most_bytes=_MOST_BYTES).removeprefix("\ufeff")
    except FileNotFoundError:
        near = {found.stem: found for found in path.parent.glob("*.toml")}
        close = difflib.get_close_matches(path.stem, near, n=1)
        fix = f"use {near[close[0]]}" if close else "pass the path of a TOML file"
        raise ConfigError(f"there is no configuration file {path}", fix=fix) from None
    except OSError as error:
        fixes = {errno.EISDIR: f"meshwright train {path}/NAME.toml", errno.EACCES: f"chmod u+r {path}"}
        fixes |= {errno.EILSEQ: f"save {path.name} as UTF-8 in an editor, or by iconv"}
        fix = fixes.get(error.errno or 0, "pass the path of a TOML file")
        raise ConfigError(f"the configuration file {path} cannot be read: {error.strerror}", fix=fix) from None


def _parse(text: str, path: Path) -> dict[str, Any]:
    if _LONG_KEY.search(_OPAQUE.sub("_", text)):
        raise ConfigError(
            f"{path} has a key of more than {_MOST_PARTS} parts with dots between them (rule: at most {_MOST_PARTS})",
            fix=f"write the key in tables; the sections are {', '.join(_SECTIONS)}",
        )
    try:
        tables = tomllib.loads(text)
    except RecursionError:
        raise ConfigError(
            f"{path} is nested too deep", fix="write its values with fewer brackets in one another"
        ) from None
    except ValueError as error:  # of TOML, or a number of thousands of digits
        raise ConfigError(
            f"{path} is not valid TOML: {error}",
            fix='write key = value in each line, and text in quotes: plan = "dp=2"',
        ) from None
    for reserved in _RESERVED:
        if reserved in tables:
            fix = 'write it under [train], as plan = "dp=2"' if reserved == "plan" else f"leave out '{reserved}'"
            raise ConfigError(f"{path}: unknown key '{reserved}'; known: {', '.join(_SECTIONS)}", fix=fix)
    return tables


def _set(tables: dict[str, Any], override: str) -> None:
    """Put "a.b=value" into the tables."""
    key, equals, value = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(f"--set {override}: not of the form section.key=value", fix="--set train.steps=100")
    if len(parts) == 1:
        raise ConfigError(
            f"--set {override}: '{parts[0]}' names no section; known: {', '.join(_SECTIONS)}",
            fix=f"--set train.{override}",
        )
    if parts[0] in _RESERVED:
        named = "--plan, or --set train.plan=dp=2,zero=1 for example"
        fix = named if parts[0] == "plan" else f"leave out --set {override}"
        raise ConfigError(f"--set {override}: '{parts[0]}' is not a section; known: {', '.join(_SECTIONS)}", fix=fix)
    if len(parts) > _MOST_PARTS:
        raise ConfigError(
            f"--set {override[:60]}...: {len(parts)} parts with dots (rule: at most {_MOST_PARTS})", fix="leave it out"
        )
    table = tables
    for part in parts[:-1]:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise ConfigError(f"--set {override}: '{part}' is not a table", fix=f"leave out --set {override}")
    table[parts[-1]] = _toml_value(value.strip())


def _toml_value(text: str) -> Any:
    if _LONG_KEY.search(_OPAQUE.sub("_", text)):
        return text
    try:
        # A line break would let the value smuggle in further keys.
        return tomllib.loads(f"value = {text}")["value"] if "\n" not in text else text
    except (ValueError, RecursionError):
        return text


def _refuse_unwritable(tables: Mapping[str, Any], path: Path) -> None:
    """Refuse values that cannot travel to the ranks as JSON, and control characters outside of the user's own arguments.

    Raises:
        ConfigError: There is one.
    """
    pending: list[tuple[str, Any]] = list(tables.items())
    while pending:
        key, value = pending.pop()
        _refuse_surrogates(ascii(key), key, path)
        if isinstance(value, dict):
            pending += [(f"{key}.{name}", entry) for name, entry in value.items()]
        elif isinstance(value, list):
            pending += [(key, entry) for entry in value]
        elif isinstance(value, (datetime.date, datetime.time)):
            raise ConfigError(f"{path}: '{key}' = {value} is a date or a time (rule: text, numbers, lists, tables)",
                              fix=f'write it as text: "{value}"')  # fmt: skip
        elif isinstance(value, int) and abs(value) >= _MOST_WHOLE:
            raise ConfigError(
                f"{path}: '{key}' is a whole number of {value.bit_length()} bits (rule: at most 300 digits)",
                fix="write it as text, in quotes, or with fewer digits",
            )
        elif isinstance(value, str):
            _refuse_unwritable_text(key, value, path)


def _refuse_surrogates(shown: str, value: str, path: Path) -> None:
    try:
        refuse_surrogates(value)
    except ValueError as error:
        raise ConfigError(f"{path}: {shown}: {error}", fix="write it in UTF-8") from None


def _refuse_unwritable_text(key: str, value: str, path: Path) -> None:
    _refuse_surrogates(f"'{key}'", value, path)
    if (match := _CONTROL.search(value)) and "kwargs" not in key.split("."):
        raise ConfigError(
            f"{path}: '{key}' = {value[:100]!r} has the control character {match[0]!r}", fix="leave it out"
        )


def _validate(tables: Mapping[str, Any], text: str, path: Path, overrides: Sequence[str]) -> TrainConfig:
    try:
        return TrainConfig.model_validate(tables)
    except pydantic.ValidationError as error:
        from_command_line = {override.partition("=")[0].strip() for override in overrides}
        problems: dict[str, str] = {}
        for problem in error.errors(include_url=False):
            dotted = ".".join(str(part) for part in problem["loc"])
            where = "--set" if dotted in from_command_line else _place(path, text, problem["loc"])
            message, fix = _explain(dotted, problem)
            problems[f"{where}: {message}"] = fix
        raise ConfigError("\n".join(problems), fix="; ".join(dict.fromkeys(problems.values()))) from None


def _explain(dotted: str, problem: Any) -> tuple[str, str]:
    """Return what is wrong with a key, and what to write."""
    kind, location = problem["type"], problem["loc"]
    if kind == "extra_forbidden":
        known, above = _known_keys(location[:-1]), dotted.rpartition(".")[0]
        elsewhere = [f"{section}.{location[-1]}" for section in _SECTIONS if location[-1] in _known_keys((section,))]
        likely = known if isinstance(problem.get("input"), bool) else _known_keys(location[:-1], switches=False)
        close = closest_word(str(location[-1]), likely)
        there = closest_word(dotted, elsewhere) or (elsewhere[0] if len(elsewhere) == 1 else None)
        if (same := _OF_OTHERS.get(str(location[-1])) or _key_of_all_words(location)) is not None:
            close, there = None, same
        elif close is None and there is None and (option := _as_plan(location, problem.get("input"))) is not None:
            return f"unknown key '{dotted}': it belongs to a plan", f"put '{option}' into train.plan, or into --plan"
        hint = f" (did you mean '{close or there}'?)" if close or there else ""
        meant = f"{above}.{close}".lstrip(".") if close else there
        fix = f"write '{meant}'" if meant else f"leave out '{dotted}'"
        return f"unknown key '{dotted}'{hint}; known: {', '.join(known)}", fix
    if kind == "missing":
        keys = [key for key in _EXAMPLES if key == dotted or key.startswith(f"{dotted}.")]
        example = (
            f"leave out '{dotted.rpartition('.')[0]}'" if isinstance(location[-1], int) else f"add '{location[-1]}'"
        )
        fix = " ".join(f"--set {key}={_EXAMPLES[key]}" for key in keys) or example
        return (f"the section [{dotted}] is missing" if len(location) == 1 else f"'{dotted}' is missing"), fix
    value = problem.get("input")
    got = f"{value!r}" if not isinstance(value, dict | BaseModel) else "a table"
    rule = problem["msg"].removeprefix("Input ").replace("valid tuple", "list")
    return f"'{dotted}' = {got}: {rule}", _value_that_fits(dotted, problem)


_OF_OTHERS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("save_every", "save_steps", "checkpoint_interval"), "checkpoint.every_steps"),
    **dict.fromkeys(("gradient_accumulation_steps", "accumulate_grad_batches"), "train.micro_batches"),
    **dict.fromkeys(("grad_clip", "gradient_clipping", "gradient_clip_val"), "train.max_grad_norm"),
    **dict.fromkeys(("scheduler", "lr_scheduler", "lr_scheduler_type"), "schedule.kind"),
    **dict.fromkeys(("log_every", "logging_steps"), "train.print_every"),
    **dict.fromkeys(("output_dir", "default_root_dir"), "train.directory"),
    "learning_rate": "optimizer.lr",
    "save_total_limit": "checkpoint.keep",
    "max_steps": "train.steps",
    "eval_steps": "train.eval_every",
    "dtype": "train.precision",
}
"""Key of other tools' configurations -> the key that says so here."""


def _as_plan(location: Sequence[Any], value: Any) -> str | None:
    """Return the plan's entry that a key of a configuration was meant for, or None where no plan has it."""
    try:
        return str(Plan.parse(f"{location[-1]}={value}"))
    except ConfigError:
        return None


def _key_of_all_words(location: Sequence[Any]) -> str | None:
    """Return the first key, by section, that has every word of an unknown one where no key beside that one has them.

    ``train.checkpoint_every`` means ``checkpoint.every_steps``, though ``train.print_every`` has more letters of it.
    """
    words = set(str(location[-1]).split("_"))
    if len(location) != 2 or len(words) == 1 or any(words <= set(key.split("_")) for key in _known_keys(location[:-1])):
        return None
    dotted = [f"{section}.{key}" for section in _SECTIONS for key in _known_keys((section,))]
    return next((key for key in dotted if words <= set(re.split(r"[._]", key))), None)


_EXAMPLES: Final[Mapping[str, str]] = {
    "model.target": "package.module:callable",
    "data.source": "python-stdlib",
    "optimizer.lr": "3e-4",
    "train.steps": "100",
    "train.global_batch_size": "32",
}
"""Keys without a default -> a value of each, as on the command line."""


def _value_that_fits(dotted: str, problem: Any) -> str:
    """Return what to write in the place of a value that its key does not take: the first that fits, or nothing."""
    section, *below = problem["loc"]
    if not below:
        return f"write [{dotted}], and its keys below"
    key = f"{section}.{below[0]}"
    candidates = _near_values(problem) if len(below) == 1 else []
    if len(below) == 2 and (words := _words_of(problem)):
        candidates.append(f'["{closest_word(str(problem.get("input")), words) or words[0]}"]')
    field = _section_of(section).model_fields.get(str(below[0]))
    if problem["type"] == "string_type" and field is not None and field.default is None:
        candidates.append(f'"{problem.get("input")}"')
    if key in _EXAMPLES:
        candidates.append(_EXAMPLES[key])
    fitting = next((text for text in candidates if _fits(section, below[0], _toml_value(text))), None)
    if fitting is None:
        return f"leave out '{key}'"
    return f"--set {key}={fitting}" if '"' not in fitting else f"--set '{key}={fitting}'"


def _near_values(problem: Any) -> list[str]:
    """Return values near to the one that was given, as TOML has them; whether its key takes them is to be seen."""
    limits, value = problem.get("ctx", {}), str(problem.get("input"))
    found: list[str] = []
    if (limit := limits.get("ge", limits.get("le"))) is not None:
        found.append(f"{int(limit) if limit == int(limit) else limit}")
    if words := _words_of(problem):
        found.append(closest_word(value, words) or words[0])
    if re.fullmatch(r"[0-9]+\.?[0-9]*(e-?[0-9]+)?", value) and not value.startswith("0"):
        found.append(value)
    return found


def _words_of(problem: Any) -> list[str]:
    return re.findall(r"'([^']+)'", str(problem.get("ctx", {}).get("expected", "")))


def _section_of(section: Any) -> type[BaseModel]:
    kind = TrainConfig.model_fields[section].annotation if section in TrainConfig.model_fields else None
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else BaseModel


def _fits(section: Any, key: Any, value: Any) -> bool:
    """Tell whether a key takes a value; others of its section may be missing."""
    try:
        _section_of(section).model_validate({key: value})
    except pydantic.ValidationError as error:
        return all(problem["loc"][:1] != (key,) for problem in error.errors(include_url=False))
    return True


def _known_keys(location: Iterable[Any], *, switches: bool = True) -> list[str]:
    """Return the keys of a section; without `switches` those that take more than true or false."""
    kind: type[BaseModel] = TrainConfig
    for part in location:
        if isinstance(part, int):
            continue
        if part == "param_groups":
            kind = ParamGroup
            continue
        annotation = kind.model_fields[part].annotation if part in kind.model_fields else None
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        kind = annotation
    if kind is TrainConfig:
        return list(_SECTIONS)
    return [name for name, field in kind.model_fields.items() if switches or field.annotation is not bool]


def _place(path: Path, text: str, location: Sequence[Any]) -> str:
    """Name the file, and the line of a key that is written in it in the usual way."""
    section, key = ".".join(str(part) for part in location[:-1] if isinstance(part, str)), str(location[-1])
    current = ""
    for number, line in enumerate(text.splitlines(), start=1):
        stripped = line.strip()
        if stripped.startswith("["):
            current = stripped.strip("[]# ")
            if len(location) == 1 and current == key:
                return f"{path}:{number}"
        elif current == section and stripped.partition("=")[0].strip() == key:
            return f"{path}:{number}"
    return str(path)
