"""Known architectures by name, and Hugging Face configurations, as a ModelSpec. Free of torch.

catalogue      names, and the sizes behind them, read from `models.toml`
encoders       BERT, ViT and T5 from their sizes
resnets        residual networks
latent_experts decoders with latent attention and many experts: DeepSeek
hugging_face   a `config.json` of transformers

To add a model, add a table to `models.toml`, with its source and its number of parameters; to add an architecture, a function
that makes a ModelSpec of sizes, and its name in `catalogue._MODULES`.
"""

__all__: list[str] = []
