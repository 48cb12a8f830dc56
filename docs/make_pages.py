"""Puts files, and what scripts and commands print, into the pages that show them.

    python docs/make_pages.py            runs every script that a page shows, and writes the pages
    python docs/make_pages.py --still    runs nothing, and puts in files alone
    python docs/make_pages.py --check    runs them, writes nothing; exit status 1 where a page shows something else

Names of pages after these leave the others out: `python docs/make_pages.py zero quickstart`.

A page marks each block of code by a comment above it:

    <!-- file: examples/tutorials/zero.py -->        the file itself
    <!-- diff: BEFORE.py AFTER.py -->                what changes from one file to the other
    <!-- output: examples/tutorials/zero.py -->      what the script prints
    <!-- command: FOLDER: meshwright verify ... -->  what the command prints in a copy of the folder
    <!-- output: SCRIPT; masked -->                  times, rates and memory are shown as "#"
    <!-- output: SCRIPT; first 6 lines -->           the rest is left out

`tests/docs/test_pages_run.py` compares files and output in `make test`, in one process.
`make docs-check` starts each as a reader does.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_S = 240
BLOCK = re.compile(r"^<!-- (file|diff|output|command): (.+?) -->\n```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[+-]?\d+)?")
VARYING = re.compile(
    r"\d+:\d\d(?= left)|(?<![\w.])[\d.,]+(?:e-?\d+)?(?= ?(?:ms|us|s|GiB|MiB|KiB|MB|kB|samples/s|tokens/s|%)(?![\w]))"
)
UNIT = re.compile(r"# ?(?:[mu]?s|[GMKk]i?B)\b")  # a busy machine takes seconds where another takes milliseconds
TOLERANCE = 2e-3  # of a number that is not masked: float32 on another processor


@dataclasses.dataclass(frozen=True)
class Block:
    """One marked block of a page.

    Args:
        page: The page.
        kind: "file", "diff", "output" or "command".
        what: The path of a file or script from the repository's root, two of them, or the command.
        folder: Of a command: the folder whose files it finds, from the repository's root.
        option: "masked", "first N lines" or nothing.
        shown: What the page shows.
    """

    page: Path
    kind: str
    what: str
    folder: str
    option: str
    shown: str

    def wanted(self, printed: str) -> str:
        """Return what the page should show where that was printed."""
        if self.option.startswith("first "):
            printed = "".join(printed.splitlines(keepends=True)[: int(self.option.split()[1])])
        elif self.option == "masked":
            printed = mask(printed)
        return f"$ {self.what}\n{printed}" if self.kind == "command" else printed


def mask(text: str) -> str:
    """Replace numbers that differ from machine to machine."""
    return VARYING.sub("#", text)


def blocks_of(page: Path) -> Iterator[Block]:
    """Yield a page's marked blocks."""
    for kind, words, _, shown in BLOCK.findall(page.read_text()):
        what, _, option = words.partition("; ")
        folder, colon, command = what.partition(": ")
        if kind == "command" and not colon:
            raise ValueError(f"{page}: a command is 'FOLDER: meshwright ...', not {what!r}")
        yield Block(page, kind, command if kind == "command" else what, folder, option, shown)


def pages() -> list[Path]:
    """Return the pages that have marked blocks."""
    return [page for page in sorted((ROOT / "docs").rglob("*.md")) if BLOCK.search(page.read_text())]


def difference(shown: str, printed: str) -> str:
    """Return how two outputs differ, or nothing: text exactly, numbers within a tolerance, "#" is any number."""
    ours, theirs = printed.splitlines(), shown.splitlines()
    if len(ours) == len(theirs) and all(map(_alike, theirs, ours)):
        return ""
    return "\n".join(difflib.unified_diff(theirs, ours, "shown", "printed", lineterm="", n=1))


def _alike(shown: str, printed: str) -> bool:
    def words(line: str) -> list[str]:
        return NUMBER.sub(" # ", UNIT.sub("#", line)).split()

    if words(shown) != words(printed):
        return False
    masked = "#" in shown
    pairs = zip(NUMBER.findall(shown), NUMBER.findall(printed), strict=False)
    return masked or all(math.isclose(float(a), float(b), rel_tol=TOLERANCE, abs_tol=1e-12) for a, b in pairs)


def run(block: Block) -> str:
    """Return what a block's script or command prints, started as a reader starts it."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MESHWRIGHT_CLUSTER": "none"}
    with tempfile.TemporaryDirectory() as place:
        if block.kind == "output":
            command = [sys.executable, str(ROOT / block.what)]
        else:
            shutil.copytree(ROOT / block.folder, place, dirs_exist_ok=True)
            program, *words = shlex.split(block.what)
            command = [sys.executable, "-m", program, *words]
        done = subprocess.run(
            command, cwd=place, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    if done.returncode:
        raise RuntimeError(f"{block.page.name}: {block.what} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def content_of(block: Block) -> str:
    """Return what a block should show."""
    if block.kind in ("output", "command"):
        return block.wanted(run(block))
    return still_of(block)


def still_of(block: Block) -> str:
    """Return what a block of files should show, which is found without running anything."""
    texts = [(ROOT / path).read_text().splitlines(keepends=True) for path in block.what.split()]
    if block.kind == "file":
        return "".join(texts[0])
    return "".join(line for line in difflib.ndiff(*texts) if not line.startswith("?"))


def main(words: list[str]) -> int:
    """Write the pages, or check them."""
    wrong = 0
    names = [word for word in words if not word.startswith("--")]
    for page in pages():
        if names and page.stem not in names:
            continue
        text = page.read_text()
        for block, found in zip(blocks_of(page), list(BLOCK.finditer(text)), strict=True):
            if "--still" in words and block.kind in ("output", "command"):
                continue
            content = content_of(block)
            is_printed = block.kind in ("output", "command")
            problem = difference(block.shown, content) if is_printed else "changed" * (block.shown != content)
            if problem:
                wrong += 1
                sys.stdout.write(f"{page.relative_to(ROOT)}: {block.kind} {block.what}\n{problem}\n")
                kind, words, language, _ = found.groups()
                text = text.replace(found[0], f"<!-- {kind}: {words} -->\n```{language}\n{content}```", 1)
        if "--check" not in words:
            page.write_text(text)
    return int(bool(wrong) and "--check" in words)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
