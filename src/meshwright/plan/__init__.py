"""From what is wanted to a `Plan`. Never imports torch; meets `apply` only in `spec.Plan`."""

__all__: list[str] = []
