"""No deadline for property tests: on a busy machine it fails what is right."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("unit", deadline=None)
settings.load_profile("unit")
