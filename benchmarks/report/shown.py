"""What a report shows, read as plain HTML, and comparisons of it that are counted. Shares no code with the report."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from html.parser import HTMLParser
from typing import Any

UNITS = {
    "ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0,
    "B": 1.0, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "%": 0.01, "": 1.0,
}  # fmt: skip


class Page(HTMLParser):
    """Tables by label, facts, verdicts, drawn boxes and data of a report of one run."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: dict[str, list[list[str]]] = {}
        self.facts: dict[str, str] = {}
        self.verdicts: list[str] = []
        self.boxes: dict[str, list[tuple[str, str, float, float]]] = defaultdict(list)
        self.data: Any = None
        self._label = self._lane = self._picture = self._name = ""
        self._cell: list[str] | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "div" and given.get("role") == "region":
            self._label = given["aria-label"] or ""
        elif tag == "tr":
            self.tables.setdefault(self._label, []).append([])
        elif tag in ("th", "td", "dt", "dd") or (tag == "p" and given.get("class") == "verdict"):
            self._cell = []
        elif tag == "br" and self._cell is not None:
            self._cell.append("\n")
        elif tag == "svg":
            self._picture = given.get("class") or ""
        elif tag == "g":
            self._lane = given.get("data-lane") or ""
        elif tag == "rect" and self._picture == "lanes":
            place = self.boxes[self._label]
            place.append((self._lane, given["class"] or "", float(given["x"] or 0), float(given["width"] or 0)))
        elif tag == "script" and given.get("id") == "data":
            self._cell = []

    def handle_data(self, data: str) -> None:
        if self._cell is not None:
            self._cell.append(data)

    def handle_endtag(self, tag: str) -> None:
        if self._cell is None or tag not in ("th", "td", "dt", "dd", "p", "script"):
            return
        text, self._cell = "".join(self._cell), None
        if tag in ("th", "td"):
            self.tables[self._label][-1].append(text)
        elif tag == "dt":
            self._name = text
        elif tag == "dd":
            self.facts[self._name] = text
        elif tag == "p":
            self.verdicts.append(text)
        else:
            self.data = json.loads(text)


class Check:
    """Counts comparisons, and keeps those that failed."""

    def __init__(self) -> None:
        self.count = 0
        self.wrong: list[str] = []

    def number(self, what: str, shown: str | None, value: float | None) -> None:
        """Hold a shown number to the digits that it shows; "-" stands for none."""
        self.count += 1
        if value is None or shown in (None, "-"):
            if not ((value is None or value == 0) and shown in (None, "-")):
                self.wrong.append(f"{what}: {shown!r} for {value!r}")
            return
        match = re.fullmatch(r"(-?[0-9.,]+(?:e[-+]?\d+)?) ?([A-Za-z%]*)", shown or "")
        if match is None or match[2] not in UNITS:
            self.wrong.append(f"{what}: {shown!r} is not a number")
            return
        digits = match[1].replace(",", "")
        mantissa, _, exponent = digits.partition("e")
        places = len(mantissa.partition(".")[2]) - int(exponent or 0)
        slack = 0.501 * 10**-places * UNITS[match[2]]
        read = float(digits) * UNITS[match[2]]
        # Trailing zeros are not shown, so four digits are the most that a text promises.
        if abs(read - value) > max(
            slack if "." in mantissa or value == 0 else 0.0, 6e-4 * abs(value) if not match[2] else slack
        ):
            self.wrong.append(f"{what}: {shown!r} for {value!r}")

    def same(self, what: str, shown: object, value: object) -> None:
        """Hold equal things equal."""
        self.count += 1
        if shown != value:
            self.wrong.append(f"{what}: {shown!r} for {value!r}")

    def close(self, what: str, shown: float, value: float, slack: float) -> None:
        """Hold two numbers close."""
        self.count += 1
        if not abs(shown - value) <= slack:
            self.wrong.append(f"{what}: {shown!r} for {value!r}")
