"""From a TOML file to a trained model: configuration, data, loader, loop, events, progress."""

__all__: list[str] = []
