"""describe: read a module without running it for real."""

__all__: list[str] = []
