"""run: one correct step, whatever the plan."""

__all__: list[str] = []
