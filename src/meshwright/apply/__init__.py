"""apply: a plain module and a plan become a module that computes the same on many devices."""

__all__: list[str] = []
