"""docs/api.md is what the docstrings say, has every public name, and each docstring on it keeps the page's rule."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
import sys
import textwrap
from pathlib import Path

import pytest

import meshwright

ROOT = Path(__file__).resolve().parents[2]


def load_maker():
    spec = importlib.util.spec_from_file_location("make_api", ROOT / "docs" / "make_api.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


make_api = load_maker()
CHAPTERS = make_api.public_entries()
ENTRIES = [entry for found in CHAPTERS.values() for entry in found]

UNIT = re.compile(r"\[(?:[a-zA-Z]+(?:/\w+)?(?:; .*?)?)\]")
WITHOUT_UNIT = re.compile(
    r"\b(rank|ranks|index|degree|seeds?|norm|2-norm|loss|losses|share|ratio|0 to 1|version|stage|step|micro-batch|dims?|shape|"
    r"intervals?|sizes|token|status|ids?|spaces|place|number (?:among|on)|as (?:in|for)|mfu|tolerance|relative difference|"
    r"weights?|processes)\b|\b0 \.\. \w",
    re.IGNORECASE,
)
NUMBER = re.compile(r"(?<!Literal)\b(int|float)\b")
SHAPE = re.compile(r"\[[^\]]*\]|\b(scalar|shape|shapes|layout|full CPU tensors|whole)\b")
NOTHING = ("None", "Iterator[None]", "contextlib.AbstractContextManager[None]")  # the latter are for `with`
RESULT = re.compile(r"\b(return|returns|whether|yield|yields|read|build|have)\b", re.IGNORECASE)


def rule_breaks(entry) -> list[str]:
    """Return what an entry's docstring leaves out, in words."""
    if not entry.text:
        return ["has no docstring"]
    breaks = []
    sentence = entry.text.split("\n\n")[0].strip()
    if not sentence.endswith((".", ":", "]")):
        breaks.append("its first sentence has no end")
    if entry.is_made_by_others:
        return breaks
    parts = make_api.sections(entry.text)
    signature = entry.signature()
    if signature is None:
        return breaks + number_breaks("the property", annotation_of(entry.source), entry.text)
    if entry.kind == "call" or "__init__" in vars(entry.source):  # else the base's arguments, which stand there
        breaks += argument_breaks(entry, signature, make_api.entries(parts.get("Args", [])) | entry.fields)
    annotation = str(signature.return_annotation)
    if entry.kind == "call" and annotation not in (*NOTHING, str(inspect.Signature.empty)):
        told = "\n".join(parts.get("Returns", parts.get("Yields", []))) or (sentence if RESULT.search(sentence) else "")
        if not told:
            breaks.append(f"says nothing of what it returns, {annotation}")
        elif "Tensor" in annotation and not SHAPE.search(entry.text):
            breaks.append(f"says no shape of what it returns, {annotation}")
        else:
            breaks += number_breaks("what it returns", annotation, told + sentence)
    raised = errors_raised(entry)
    untold = sorted(raised - set(make_api.entries(parts.get("Raises", []))))
    return breaks + [f"raises {name} and does not say so" for name in untold]


def annotation_of(source) -> str:
    return str(inspect.signature(source).return_annotation)


def argument_breaks(entry, signature, told) -> list[str]:
    wanted = {
        ("*" if parameter.kind is inspect.Parameter.VAR_POSITIONAL else "") + name: str(parameter.annotation)
        for name, parameter in signature.parameters.items()
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD and not name.startswith("_")
    }
    if not told and len(wanted) <= 1:
        return []
    names = {name.lstrip("*") for name in told}
    breaks = [f"does not say what '{name}' is" for name in wanted if name.lstrip("*") not in names]
    known = {name.lstrip("*") for name in signature.parameters} | set(entry.fields)
    breaks += [f"describes '{name}', which is no argument" for name in names if name not in known]
    for name, text in told.items():
        annotation = wanted.get(name, wanted.get(f"*{name}", ""))
        if "Callable" in annotation:
            continue
        breaks += number_breaks(f"'{name}'", annotation, text)
        if "Tensor" in annotation and not SHAPE.search(text):
            breaks.append(f"says no shape of '{name}', {annotation}")
    return breaks


def number_breaks(what: str, annotation: str, text: str) -> list[str]:
    if not NUMBER.search(annotation) or UNIT.search(text) or WITHOUT_UNIT.search(text):
        return []
    return [f"says no unit of {what}, {annotation}"]


def errors_raised(entry) -> set[str]:
    """Return our errors that an entry's own code raises, by name."""
    code = entry.source
    if isinstance(code, type):
        code = vars(code).get("__post_init__", vars(code).get("__init__"))
    if code is None or not inspect.isfunction(code) or code.__qualname__ == "__create_fn__":
        return set()
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
    except OSError:  # made by dataclasses
        return set()
    raised = (node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise))
    names = {node.func.id for node in raised if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    return {name for name in names if name in meshwright.__all__}


def test_the_page_is_what_the_docstrings_say() -> None:
    assert make_api.main(["--check"]) == 0, "run python docs/make_api.py"


def test_the_page_has_every_public_name() -> None:
    listed = {entry.path for entry in ENTRIES}
    assert set(meshwright.__all__) <= listed
    for module in ("nn", "testing"):
        assert {f"{module}.{name}" for name in getattr(meshwright, module).__all__} <= listed


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.path)
def test_a_docstring_keeps_the_rule(entry) -> None:
    assert rule_breaks(entry) == []


def _good(size: int, scale: float) -> int:
    """Return a thing.

    Args:
        size: How large [count].
        scale: As a share of 1, 0 to 1.

    Returns:
        How many [count].

    Raises:
        ConfigError: The size is negative.
    """
    if size < 0:
        raise meshwright.ConfigError("negative")
    return int(size * scale)


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("Return a thing.", "Return a thing", "its first sentence has no end"),
        ("        size: How large [count].\n", "", "does not say what 'size' is"),
        ("How large [count].", "How large.", "says no unit of 'size', int"),
        ("size: How", "width: How", "describes 'width', which is no argument"),
        ("Return a thing.", "Do it.", ""),
        ("        How many [count].", "        How many.", "says no unit of what it returns, int"),
    ],
)
def test_the_rule_can_be_broken(old: str, new: str, complaint: str) -> None:
    text = inspect.cleandoc(_good.__doc__.replace(old, new))
    breaks = rule_breaks(make_api.Entry("good", "call", _good, text))
    assert (complaint in breaks) if complaint else not breaks


def test_an_error_that_is_raised_and_not_told_is_found() -> None:
    def raises(size: int) -> None:
        """Do it."""
        raise ConfigError(size)  # noqa: F821 - never called

    assert rule_breaks(make_api.Entry("raises", "call", raises, "Do it.")) == ["raises ConfigError and does not say so"]
