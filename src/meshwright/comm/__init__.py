"""Ranks and what passes between them: starting, watching, joining, collectives, and a ledger of every byte sent."""

from __future__ import annotations

__all__: list[str] = []
