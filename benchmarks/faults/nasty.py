"""Nasty values, and mutations of texts and trees with them, for `fuzz_inputs`."""

from __future__ import annotations

import copy
import json
import os
import random
from pathlib import Path
from typing import Any

NUMBERS: list[Any] = [
    *(0, -1, 1, 2, 3, 7, 64, 100_000, 2**31, 2**53 + 1, 2**63, 2**64, 10**18, 10**26, -(10**30)),
    *(1e308, 1.7976931348623157e308, -1e308, 5e-324, 1e300, 0.1, -0.0, 1.5, float("nan"), float("inf"), float("-inf")),
]
DIGITS = [
    "9" * 5000,
    "1" + "0" * 400,
    "9" * 4300,
    "-" + "8" * 4301,
    "1e400",
    "0x" + "f" * 5000,
    "1_000",
    "0b1",
    "٣",
    "²",
    "1e5",
    "+1",
]
TEXTS = [
    *(
        "",
        " ",
        "\0",
        "a\0b",
        "\x1b[31mred",
        "\x1b]0;title\x07",
        "\x07\x08\r",
        "\ud800",
        "a\udfffb",
        "\u202ereversed",
        "\ufeff",
        "é" * 100,
    ),
    *(
        "x" * 300,
        "x" * 5000,
        "a" + ".a" * 20_000,
        "." * 20_000,
        "../" * 400,
        "/dev/zero",
        "/dev/full",
        "/dev/stdin",
        "/proc/self/mem",
    ),
    *(
        "~",
        "~root/x",
        "-",
        "--",
        "-x",
        "%s%n",
        "{}",
        "${HOME}",
        "a;b",
        "a\nb",
        "a\tb",
        "NaN",
        "Infinity",
        "null",
        "true",
        "[]",
    ),
    *(
        "n[1-3000][1-3000]",
        "n[1-99999][1-99999][1-99999]",
        "n[",
        "n]1[",
        "n[1-]",
        "n[9-1]",
        "n[,]",
        ",",
        "a,,b",
        "n[1-2,4]x[01-03]",
    ),
    *(
        "single",
        "dp=2",
        "tp=2000",
        "tp=100000",
        "pp=999999999999999999",
        "dp=0",
        "dp=-1",
        "zero3",
        "hybrid",
        "auto",
        "data_parallel",
    ),
    *(
        "dp=2,dp=2",
        "dp=2,",
        ",",
        "=",
        "dp==2",
        "dp=2;tp=2",
        "micro_batches=1000000000",
        "pp=2,schedule=zbv,virtual=2",
        "bucket_bytes=1e999GB",
    ),
    *(
        "8xh100-sxm",
        "999999x999999xh100-sxm",
        "0xh100-sxm",
        "2x8xa100-80g + 4x8xh100-sxm",
        "+",
        "8xh100-sxm@",
        "x" * 50,
        "1x" * 500,
    ),
    *(
        "gpt2",
        "llama3-8b",
        "gpt3-175b",
        "hf:",
        "hf:/dev/zero",
        "os:system",
        "a:b",
        ":",
        "a.b.c:d",
        "json:dumps",
        "é:é",
        "0xfffff",
        "1" * 30,
    ),
]
DEEP = [
    "[" * 500 + "]" * 500,
    '{"a":' * 500 + "1" + "}" * 500,
    "{a=" * 500 + "1" + "}" * 500,
    "[" * 100_000,
    "(" * 5000,
]


def number_text(rng: random.Random) -> str:
    """Return a number, as a text that may not be one."""
    return rng.choice(DIGITS) if rng.random() < 0.4 else repr(rng.choice(NUMBERS))


def text(rng: random.Random) -> str:
    """Return a text."""
    kind = rng.random()
    if kind < 0.6:
        return rng.choice(TEXTS)
    if kind < 0.75:
        return number_text(rng)
    if kind < 0.85:
        return rng.choice(DEEP)
    if kind < 0.93:
        return rng.choice(TEXTS) + rng.choice(TEXTS)
    return "".join(chr(rng.choice((rng.randrange(128), rng.randrange(0x3000)))) for _ in range(rng.randrange(1, 40)))


def argument(rng: random.Random) -> str:
    """Return a text that a process can be given as an argument."""
    return text(rng).replace("\0", "\x01")[:100_000]


def value(rng: random.Random, depth: int = 0) -> Any:
    """Return a value of JSON or TOML, or nearly one."""
    kind = rng.random()
    if kind < 0.35:
        return rng.choice(NUMBERS)
    if kind < 0.65:
        return text(rng)
    if kind < 0.75:
        return rng.choice([None, True, False, [], {}])
    if kind < 0.85 and depth < 3:
        return [value(rng, depth + 1) for _ in range(rng.randrange(4))]
    if kind < 0.92 and depth < 3:
        return {text(rng): value(rng, depth + 1) for _ in range(rng.randrange(3))}
    nested: Any = 1
    for _ in range(rng.choice((3, 99, 101, 300))):
        nested = [nested] if rng.random() < 0.5 else {"a": nested}
    return nested


def mutated_tree(rng: random.Random, tree: Any) -> Any:
    """Return a tree with one to three of its entries replaced, removed or added."""
    tree = copy.deepcopy(tree)
    for _ in range(rng.randrange(1, 4)):
        places = list(_places(tree))
        if not places:
            return value(rng)
        holder, key = rng.choice(places)
        kind = rng.random()
        if kind < 0.7:
            holder[key] = value(rng)
        elif kind < 0.8:
            del holder[key]
        elif isinstance(holder, dict):
            holder[rng.choice([text(rng), f"{key}x", str(key).upper()])] = value(rng)
        else:
            holder.append(value(rng))
    return tree


def _places(tree: Any) -> Any:
    entries = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, entry in entries:
        yield tree, key
        yield from _places(entry)


def mutated_text(rng: random.Random, plain: str) -> str:
    """Return a text with one to three pieces replaced, removed, repeated or cut off."""
    for _ in range(rng.randrange(1, 4)):
        start = rng.randrange(len(plain) + 1)
        end = min(len(plain), start + rng.choice((0, 1, 1, 3, 10)))
        kind = rng.random()
        if kind < 0.6:
            plain = plain[:start] + rng.choice((text, number_text))(rng) + plain[end:]
        elif kind < 0.75:
            plain = plain[:start] + plain[end:]
        elif kind < 0.9:
            plain = plain[:start] + plain[start:end] * rng.choice((2, 50)) + plain[end:]
        else:
            plain = plain[:start]
    return plain


def as_json(rng: random.Random, tree: Any) -> str:
    """Return a tree as JSON; now and then with a number of any length in it."""
    written = json.dumps(tree, indent=rng.choice((None, 1)))
    return written.replace("1", rng.choice(DIGITS), 1) if rng.random() < 0.15 else written


def as_toml(tree: Any) -> str:
    """Return a tree as TOML, inline below its sections; what TOML has no notation for stays as Python writes it."""
    if not isinstance(tree, dict):
        return repr(tree)
    try:
        return _sections(tree)
    except RecursionError:
        return f"a = {DEEP[0]}"


def _sections(tree: dict[Any, Any]) -> str:
    return "".join(f"{_key(key)} = {_inline(entry)}\n" for key, entry in tree.items())


def _key(key: Any) -> str:
    return str(key) if str(key).isidentifier() else json.dumps(str(key))


def _inline(entry: Any) -> str:
    if isinstance(entry, dict):
        return "{" + ", ".join(f"{_key(key)} = {_inline(value)}" for key, value in entry.items()) + "}"
    if isinstance(entry, list):
        return "[" + ", ".join(_inline(each) for each in entry) + "]"
    return json.dumps(entry) if isinstance(entry, (str, bool)) else repr(entry)


def odd_files(folder: Path) -> list[Path]:
    """Make what stands in a file's place now and then, and return it with devices."""
    folder.mkdir()
    (folder / "directory.json").mkdir()
    (folder / "directory.toml").mkdir()
    (folder / "empty.json").write_text("")
    (folder / "binary.json").write_bytes(bytes(range(256)))
    (folder / "wide.json").write_text('{"a": 1}', encoding="utf-16")
    os.mkfifo(folder / "pipe.json")
    os.mkfifo(folder / "pipe.toml")
    (folder / "loop.json").symlink_to("loop.json")
    (folder / "broken.json").symlink_to("nowhere")
    (folder / "zero.json").symlink_to("/dev/zero")
    (folder / "zero.toml").symlink_to("/dev/zero")
    with (folder / "sparse.json").open("wb") as file:
        file.truncate(2**40)
    (folder / "locked.json").write_text("{}")
    (folder / "locked.json").chmod(0)
    return [
        *sorted(folder.iterdir()),
        *map(Path, ("/dev/zero", "/dev/full", "/proc/self/mem", "/proc/kmsg", "/sys", "/nowhere")),
    ]
