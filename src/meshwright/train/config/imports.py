"""Callables named in a configuration: found in the source without importing it, and imported in the ranks.

Searching the source instead of importing it keeps the launching process free of torch and of the user's code. A misspelt name is
still reported before any rank starts.

A module that a configuration names is taken from the configuration's folder, if it is there. The folder itself comes last on
`sys.path`: a `numpy.py` in it, or in the directory where the command is typed, must not be run in place of numpy.
"""

from __future__ import annotations

import ast
import importlib
import importlib.machinery
import importlib.util
import os
import pkgutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from meshwright.errors import ConfigError, closest_word, did_you_mean, instead_of
from meshwright.texts import read_bytes

__all__: list[str] = []


def check_callable(
    text: str,
    *,
    key: str,
    roots: Sequence[str],
    positional: int = 0,
    keywords: Mapping[str, Any] | None = None,
    rule: str = "",
) -> None:
    """Check that "package.module:callable" can be found, and takes what it will be called with.

    What cannot be known without running the code (a compiled module, a name made at run time, a decorated function) is
    taken to be right.

    Args:
        text: What the configuration says.
        key: Where it says so, for the message.
        roots: Folders that it is looked for in before what is installed.
        positional: Number of positional arguments of the call [count].
        keywords: The keyword arguments of the call, or None where they are not known.
        rule: Why it is called so, for the message.

    Raises:
        ConfigError: There is no such module, name or argument, or the module has a syntax error.
    """
    module, attribute = _split(text, key)
    spec = _find_module(module, key, roots)
    if spec.origin is None or not spec.origin.endswith(".py"):
        return
    tree = _parse(Path(spec.origin), f"{key} = {text!r}")
    found, dynamic = _top_level(tree)
    name = attribute.partition(".")[0]
    if name not in found:
        if dynamic:
            return
        close = closest_word(name, found)
        fix = f"write '{module}:{close}'" if close else f"define '{name}' there, or name what it has"
        raise ConfigError(f"{key} = {text!r}: {spec.origin} has no '{name}'{did_you_mean(name, found)}", fix=fix)
    definition = found[name]
    if keywords is None or name != attribute:
        return
    where = f"{key} = {text!r}"
    if isinstance(definition, ast.ClassDef):
        if (init := _constructor(definition)) is not None:
            _check_arguments(init, where, positional, keywords, rule, of_class=name)
    elif isinstance(definition, ast.FunctionDef):
        _check_arguments(definition, where, positional, keywords, rule)


def import_callable(text: str, roots: Iterable[str]) -> Callable[..., Any]:
    """Import what "package.module:callable" names: from the folders, else from what is installed.

    Args:
        text: What the configuration says.
        roots: The folders; they become the last ones of `sys.path`.

    Raises:
        ConfigError: The module has no such name, it is not callable, or another module of its name is loaded.
    """
    folders = list(roots)
    add_to_path(folders)
    module, attribute = _split(text, "target")
    _load_local(module.partition(".")[0], folders)
    found: Any = importlib.import_module(module)
    for part in attribute.split("."):
        if not hasattr(found, part):
            hint = did_you_mean(part, dir(found))
            raise ConfigError(
                f"{text!r}: '{module}' has no '{attribute}'{hint}", fix="define it there, or name what it has"
            )
        found = getattr(found, part)
    if not callable(found):
        raise ConfigError(f"{text!r} is not callable but {type(found).__name__}", fix="name a function or a class")
    return found


def add_to_path(roots: Iterable[str]) -> None:
    """Put folders last on `sys.path`, in their order; those that are there stay where they are."""
    sys.path += [root for root in dict.fromkeys(roots) if root not in sys.path]


def _load_local(name: str, roots: Sequence[str]) -> None:
    """Load a module or package that one of the folders has, though `sys.path` may have another of its name further ahead.

    Raises:
        ConfigError: Another module of that name is loaded already.
    """
    spec = _find_local(name, roots)
    if spec is None or spec.origin is None or spec.loader is None:
        return
    known = sys.modules.get(name)
    if known is not None:
        place = getattr(known, "__file__", None)
        if place is None or os.path.realpath(place) != os.path.realpath(spec.origin):
            raise ConfigError(
                f"the module '{name}' of {spec.origin} has the name of one that is loaded already, from {place or 'Python'}",
                fix=f"give {os.path.basename(spec.origin)} another name",
            )
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise


def _find_local(name: str, roots: Sequence[str]) -> importlib.machinery.ModuleSpec | None:
    """Return where one of the folders has a module; one without `__init__.py` counts only where nothing else has the name."""
    spec = importlib.machinery.PathFinder.find_spec(name, list(roots))
    return None if spec is not None and spec.origin is None and _find_installed(name) is not None else spec


def _split(text: str, key: str) -> tuple[str, str]:
    module, colon, attribute = text.partition(":")
    parts = [*module.split("."), *attribute.split(".")]
    if not colon or not all(part.isidentifier() for part in parts):
        raise ConfigError(
            f"{key} = {text!r}: not of the form package.module:callable",
            fix='name a file without its ".py", a colon, and a function in it: "my_file:my_function"',
        )
    return module, attribute


def _find_module(module: str, key: str, roots: Sequence[str]) -> importlib.machinery.ModuleSpec:
    # importlib.util.find_spec("a.b") would import a; this walks down from the first part and imports nothing.
    first, *rest = module.split(".")
    spec = _find_local(first, roots) or _find_installed(first)
    if spec is None:
        local = [found.name for found in pkgutil.iter_modules(roots)]
        raise ConfigError(
            f"{key}: there is no module '{first}'{did_you_mean(first, local)}; looked in {', '.join(roots)} and in "
            "what is installed",
            fix=f"put {first}.py there, or name the folder that has it: PYTHONPATH=FOLDER meshwright ...",
        )
    name = first
    for part in rest:
        places = list(spec.submodule_search_locations or ())
        inner = importlib.machinery.PathFinder.find_spec(part, places) if places else None
        if inner is None:
            near = [found.name for found in pkgutil.iter_modules(places)]
            close = closest_word(part, near)
            fix = f"write '{name}.{close}'" if close else f"name a module of '{name}' that is there"
            raise ConfigError(f"{key}: '{name}' has no module '{part}'{did_you_mean(part, near)}", fix=fix)
        spec, name = inner, f"{name}.{part}"
    return spec


def _find_installed(name: str) -> importlib.machinery.ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except ValueError:  # a module without a spec, such as __main__
        return None


def _parse(path: Path, where: str) -> ast.Module:
    try:
        return ast.parse(read_bytes(path), filename=str(path))
    except SyntaxError as error:
        raise ConfigError(
            f"{where}: syntax error in {path}, line {error.lineno}: {error.msg}", fix="correct that line"
        ) from None
    except (OSError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(f"{where}: {path} cannot be read: {error}", fix="save it anew, as text in UTF-8") from None


def _top_level(tree: ast.Module) -> tuple[dict[str, ast.stmt], bool]:
    """Return the names that a module makes, and whether it may make others at run time."""
    found: dict[str, ast.stmt] = {}
    dynamic = False
    pending = list(tree.body)
    while pending:
        statement = pending.pop(0)
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found[statement.name] = statement
            dynamic |= statement.name == "__getattr__"
        elif isinstance(statement, ast.Import | ast.ImportFrom):
            for alias in statement.names:
                found[(alias.asname or alias.name).partition(".")[0]] = statement
                dynamic |= alias.name == "*"
        else:
            # if, try, with and for bodies run at import too; an assignment's targets are names that are stored.
            for node in ast.walk(statement) if not hasattr(statement, "body") else ():
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    found[node.id] = statement
            for inner in ("body", "orelse", "finalbody"):
                pending += getattr(statement, inner, [])
            for handler in getattr(statement, "handlers", []):
                pending += handler.body
    return found, dynamic


def _constructor(definition: ast.ClassDef) -> ast.FunctionDef | None:
    """Return a class's own `__init__`; None where something else may decide what its call takes."""
    methods = {statement.name: statement for statement in definition.body if isinstance(statement, ast.FunctionDef)}
    if definition.decorator_list or definition.keywords or "__new__" in methods:
        return None
    return methods.get("__init__")


def _check_arguments(
    definition: ast.FunctionDef,
    where: str,
    num_positional: int,
    keywords: Mapping[str, Any],
    rule: str,
    *,
    of_class: str | None = None,
) -> None:
    if definition.decorator_list:
        return
    arguments, name = definition.args, of_class or definition.name
    positional = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    instance = positional[:1] if of_class else []
    positional = positional[len(instance) :]
    by_name = [a.arg for a in (*arguments.args, *arguments.kwonlyargs) if a.arg not in instance]
    if num_positional > len(positional) and arguments.vararg is None:
        raise ConfigError(
            f"{where}: {name}() is called with {num_positional} arguments, it takes {len(positional)}",
            fix=f"define it as {name}({', '.join(['outputs', 'batch'][:num_positional])})",
        )
    for keyword in keywords:
        if keyword not in by_name and arguments.kwarg is None:
            hint, instead = did_you_mean(keyword, by_name), instead_of(keyword, by_name)
            raise ConfigError(
                f"{where}: {name}() takes no argument '{keyword}'{hint}; it takes {', '.join(by_name) or 'none'}"
                + (f" (rule: {rule})" if rule else ""),
                fix=f"give {name}() the argument {keyword}" if rule and keyword == "split" else instead,
            )
    required = positional[num_positional : len(positional) - len(arguments.defaults)]
    required += [
        argument.arg
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        if default is None
    ]
    missing = [argument for argument in required if argument not in keywords]
    if missing:
        kwargs = f"{where.partition('.')[0]}.kwargs"
        raise ConfigError(
            f"{where}: {name}() needs {', '.join(missing)} (rule: give it under kwargs)",
            fix=" ".join(f"--set {kwargs}.{argument}=VALUE" for argument in missing),
        )
