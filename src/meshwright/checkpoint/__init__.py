"""Checkpoints: which part of a tensor a rank holds, and how parts become full tensors and files."""

from __future__ import annotations

__all__: list[str] = []
