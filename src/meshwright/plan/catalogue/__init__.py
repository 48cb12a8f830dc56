"""Known architectures by name, and Hugging Face configurations, as a ModelSpec. Free of torch.

catalogue    names, and the sizes behind them, read from `models.toml`
hugging_face a `config.json` of transformers

To add an architecture, add a table to `models.toml`, with its source and its number of parameters.
"""

__all__: list[str] = []
